"""Which files of a table something leads to, as Lance and the regions' own manifests say."""

from __future__ import annotations

import re
import uuid

import lance

from penstock.memwal import names
from penstock.memwal.manifest import RegionManifest
from penstock.memwal.wal import decode_entry
from penstock.storage.objects import ObjectStore

KEPT_MANIFESTS = 16 + 1
"""So many of a region's are kept, and clean-up may have added one since it counted them."""
_NEWEST = (1 << 64) - 1


def check_files(store: ObjectStore, options: dict[str, str] | None = None) -> None:
    """Every file is one that something leads to, and all that something leads to is there."""
    there = {meta.key for meta in store.list()}
    reached = _base_files(store, options, there) | _region_files(store, there)
    reached.add(f"{names.PRIVATE}/table.json")
    leaked = {key for key in there - reached if not key.startswith("_refs/")}
    assert not leaked, f"nothing leads to {sorted(leaked)}"
    assert not reached - there, f"missing: {sorted(reached - there)}"


def _base_files(store: ObjectStore, options: dict[str, str] | None, there: set[str]) -> set[str]:
    found = {"_versions/latest_version_hint.json"}
    newest = lance.dataset(store.uri, storage_options=options)
    for listed in newest.versions():
        dataset = lance.dataset(store.uri, version=listed["version"], storage_options=options)
        manifest = f"_versions/{_NEWEST - dataset.version}.manifest"
        found.add(manifest)
        for fragment in dataset.get_fragments():
            found |= {f"data/{file.path}" for file in fragment.data_files()}
            deletions = fragment.deletion_file()
            if deletions is not None:
                found.add(deletions)
        for index in dataset.describe_indices():
            for segment in index.segments:
                below = f"_indices/{segment.uuid}/"
                files = {key for key in there if key.startswith(below)}
                assert files or index.name.startswith("__"), f"{index.name} has no {below}"
                found |= files
        # Lance does not give away every kind of transaction, but its file's name is in the clear.
        named = re.search(rb"[0-9]+-[0-9a-f-]{36}\.txn", bytes(store.get(manifest).data))
        assert named is not None
        found.add(f"_transactions/{named.group().decode()}")
    return found


def _region_files(store: ObjectStore, there: set[str]) -> set[str]:
    found: set[str] = set()
    regions = {key.split("/")[1] for key in there if key.startswith(f"{names.MEM_WAL}/")}
    for region in regions:
        region_id = uuid.UUID(region)
        home = names.region_dir(region_id)
        below = {key for key in there if key.startswith(f"{home}/")}
        manifests = _numbered(below, f"{home}/manifest/", ".binpb")
        latest = max(manifests)
        key = manifests[latest]
        manifest = RegionManifest.decode(store.get(key).data, key)
        found.add(names.manifest_hint_key(region_id))
        found |= {k for number, k in manifests.items() if number > latest - KEPT_MANIFESTS}
        for generation in manifest.flushed_generations:
            files = {key for key in below if key.startswith(f"{home}/{generation.path}/")}
            assert files, f"region {region} lists {generation.path}, which has no file"
            found |= files
        covered = manifest.replay_after_wal_entry_position
        for position, key in _numbered(below, f"{home}/wal/", ".arrow").items():
            entry = decode_entry(bytes(store.get(key).data), position, key)
            if position >= covered or entry.is_fence:
                found.add(key)
    return found


def _numbered(keys: set[str], prefix: str, suffix: str) -> dict[int, str]:
    found: dict[int, str] = {}
    for key in keys:
        if key.startswith(prefix) and key.endswith(suffix):
            number = names.from_bitrev(key.removeprefix(prefix).removesuffix(suffix))
            assert number is not None, key
            found[number] = key
    return found
