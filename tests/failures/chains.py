"""What must hold of the manifests and the log of every region, at any time."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from itertools import pairwise

from penstock.memwal import names
from penstock.memwal.manifest import RegionManifest
from penstock.memwal.regions import list_region_ids
from penstock.memwal.wal import Wal
from penstock.storage.objects import ObjectStore
from penstock.storage.seams import Seams


def check_chains(store: ObjectStore) -> None:
    """In each region epochs, positions and generations rise with the versions, never fall."""
    for region_id in list_region_ids(store):
        chain = [*manifests(store, region_id)]
        for before, after in pairwise(chain):
            assert after.writer_epoch >= before.writer_epoch
            assert after.current_generation >= before.current_generation
            covered = before.replay_after_wal_entry_position
            assert after.replay_after_wal_entry_position >= covered
            listed = [flushed.generation for flushed in after.flushed_generations]
            assert listed == list(range(1, after.current_generation))
            claims = after.writer_epoch != before.writer_epoch
            assert claims == (after.current_generation == before.current_generation)
        log = list(Wal(store, region_id, Seams()).tail(0))
        epochs = [entry.writer_epoch for entry in log]
        assert epochs == sorted(epochs)
        assert not log or log[-1].writer_epoch <= chain[-1].writer_epoch


def manifests(store: ObjectStore, region_id: uuid.UUID) -> Iterator[RegionManifest]:
    version = 1
    while store.exists(key := names.manifest_key(region_id, version)):
        yield RegionManifest.decode(store.get(key).data, key)
        version += 1
