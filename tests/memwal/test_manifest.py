"""Region manifests: the codec, finding the latest version, and who wins a claim."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import (
    ClaimContention,
    Corruption,
    Fenced,
    PenstockError,
    RegionSealed,
)
from penstock.memwal import names
from penstock.memwal.claim import RegionIdentity, claim_region
from penstock.memwal.manifest import (
    FlushedGeneration,
    RegionManifest,
    RegionStatus,
    manifest_chain,
)
from penstock.storage.clock import SimulatedClock
from penstock.storage.entropy import SystemEntropy
from penstock.storage.faults import Fault, FaultStore
from penstock.storage.local import LocalStore
from penstock.storage.retry import Backoff
from penstock.storage.seams import Seams

REGION = uuid.UUID("6b1c0e9e-5f7a-4b52-9d2e-0a4e6c1f9d33")
WHOLE = RegionManifest(REGION, version=1, writer_epoch=1)
_OUTSIDE = FlushedGeneration(1, "../elsewhere")
u64 = st.integers(0, 2**64 - 1)
sizes = st.none() | u64
generations = st.lists(
    st.builds(
        FlushedGeneration,
        generation=u64,
        path=st.from_regex(r"[0-9a-f]{8}_gen_[0-9]{1,9}", fullmatch=True),
        in_memory_bytes=sizes,
        physical_rows=sizes,
        primary_key_bytes=sizes,
    ),
    unique_by=lambda flushed: flushed.generation,
    max_size=4,
).map(lambda found: tuple(sorted(found, key=lambda flushed: flushed.generation)))
manifests = st.builds(
    RegionManifest,
    region_id=st.uuids(),
    version=st.integers(1, 2**64 - 2),
    writer_epoch=u64,
    replay_after_wal_entry_position=u64,
    wal_entry_position_last_seen=u64,
    current_generation=st.integers(1, 2**64 - 1),
    flushed_generations=generations,
    region_spec_id=st.integers(0, 2**32 - 1),
    region_values=st.lists(st.tuples(st.text(), st.binary()), max_size=3).map(tuple),
    status=st.sampled_from(RegionStatus),
)


def key(version: int) -> str:
    return names.manifest_key(REGION, version)


# --- codec -----------------------------------------------------------------------------------


@given(manifests)
def test_what_is_encoded_is_decoded(manifest: RegionManifest) -> None:
    where = names.manifest_key(manifest.region_id, manifest.version)
    assert RegionManifest.decode(manifest.encode(), where) == manifest


@given(manifests, st.integers(1, 1 << 20), st.binary(max_size=40))
def test_fields_of_a_newer_lance_survive_our_changes(
    manifest: RegionManifest, number: int, payload: bytes
) -> None:
    # Field 1000 and up, length-delimited: what a later version of the format may add.
    tag = (1000 << 3) | 2
    unknown = bytes([tag & 0x7F | 0x80, tag >> 7, len(payload)]) + payload
    data = manifest.encode() + unknown
    known = RegionManifest.decode(data, "m")
    changed = known.next(writer_epoch=number, flushed_generations=())
    stored = changed.encode()
    assert unknown in stored
    assert RegionManifest.decode(stored, "m") == changed


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (WHOLE.encode()[:-3], "not a region manifest"),
        (b"", "region id of 0 bytes"),
        (WHOLE.next().encode(), "says it is version 2"),
        (replace(WHOLE, flushed_generations=(_OUTSIDE,)).encode(), "points outside"),
    ],
)
def test_a_damaged_manifest_is_refused_with_its_name(data: bytes, says: str) -> None:
    with pytest.raises(Corruption, match=says) as caught:
        RegionManifest.decode(data, key(1))
    assert key(1) in str(caught.value)


# --- the latest version ----------------------------------------------------------------------


def chain_of(path: Path, versions: int) -> LocalStore:
    store = LocalStore(path)
    for epoch in range(1, versions + 1):
        manifest = RegionManifest(REGION, version=epoch, writer_epoch=epoch)
        store.put_if_absent(key(epoch), manifest.encode())
    return store


@pytest.mark.parametrize("hint", [None, 1, 4, 7, 900, -3, "x", b"{not json"])
@pytest.mark.parametrize("cleaned", [0, 3, 6])
def test_latest_is_found_whatever_the_hint_says(tmp_path: Path, hint: object, cleaned: int) -> None:
    store = chain_of(tmp_path, 7)
    for version in range(1, cleaned + 1):
        store.delete(key(version))
    if isinstance(hint, bytes):
        store.put(names.manifest_hint_key(REGION), hint)
    elif hint is not None:
        store.put(names.manifest_hint_key(REGION), json.dumps({"version": hint}).encode())
    chain = manifest_chain(store, REGION, Seams())
    latest = chain.latest()
    assert latest is not None
    assert latest.version == 7
    assert chain.is_latest(7)
    assert not chain.is_latest(6)
    # A chain that has seen 7 goes on from there, also when everything before it is gone.
    for version in range(8, 12):
        manifest = RegionManifest(REGION, version=version, writer_epoch=version)
        store.put_if_absent(key(version), manifest.encode())
    for version in range(1, 11):
        store.delete(key(version))
    latest = chain.latest()
    assert latest is not None
    assert latest.version == 11


def test_a_region_that_never_was_has_no_latest_version(tmp_path: Path) -> None:
    chain = manifest_chain(LocalStore(tmp_path), REGION, Seams())
    assert chain.latest() is None
    assert not chain.is_latest(1)
    with pytest.raises(Fenced, match="gone"):
        chain.update(1, lambda m: m.next(), landed=lambda m: False)


# --- claims ----------------------------------------------------------------------------------


def claim(store: LocalStore) -> int:
    seams = Seams(backoff=Backoff(attempts=200, base_ms=1, max_ms=20))
    return claim_region(store, RegionIdentity(REGION), seams).manifest.writer_epoch


def test_threads_that_claim_at_once_get_epochs_of_their_own(tmp_path: Path) -> None:
    epochs: list[int] = []

    def work() -> None:
        # A claim may find that a later one has fenced it already, but never shares an epoch.
        with suppress(Fenced):
            epochs.append(claim(LocalStore(tmp_path)))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert epochs
    assert len(set(epochs)) == len(epochs)
    latest = manifest_chain(LocalStore(tmp_path), REGION, Seams()).latest()
    assert latest is not None
    assert latest.writer_epoch >= max(epochs)


_CLAIMANT = """
import sys, uuid
from penstock.errors import Fenced
from penstock.memwal.claim import RegionIdentity, claim_region
from penstock.storage.local import LocalStore
from penstock.storage.retry import Backoff
from penstock.storage.seams import Seams
print("ready", flush=True)
sys.stdin.readline()
seams = Seams(backoff=Backoff(attempts=200, base_ms=1, max_ms=20))
for _ in range(8):
    try:
        identity = RegionIdentity(uuid.UUID(sys.argv[2]))
        claimed = claim_region(LocalStore(sys.argv[1]), identity, seams)
        print(claimed.manifest.writer_epoch, flush=True)
    except Fenced:
        pass
"""


def test_processes_that_claim_at_once_get_epochs_of_their_own(tmp_path: Path) -> None:
    claimants = [
        subprocess.Popen(
            [sys.executable, "-c", _CLAIMANT, str(tmp_path), str(REGION)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for claimant in claimants:
        assert claimant.stdout is not None
        assert claimant.stdout.readline() == "ready\n"
    outputs = [claimant.communicate("go\n", timeout=90)[0] for claimant in claimants]
    assert [claimant.returncode for claimant in claimants] == [0, 0, 0]
    epochs = [int(line) for output in outputs for line in output.split()]
    assert len(epochs) >= 3
    assert len(set(epochs)) == len(epochs)


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.FAIL_AFTER, Fault.DUPLICATE])
def test_a_claim_whose_answer_is_lost_takes_another_epoch(tmp_path: Path, fault: Fault) -> None:
    clock, entropy = SimulatedClock(), SystemEntropy()
    store = FaultStore(LocalStore(tmp_path), clock, entropy)
    store.inject(fault, op="put_if_absent", key="*/manifest/*", nth=1)
    claimed = claim_region(store, RegionIdentity(REGION), Seams(clock=clock))
    stored = manifest_chain(store, REGION, Seams()).latest()
    assert stored == claimed.manifest
    if fault is Fault.FAIL_BEFORE:
        assert (claimed.manifest.writer_epoch, claimed.created) == (1, True)
    else:
        # Epoch 1 may be somebody else's who wrote the same bytes: it is skipped, never shared.
        assert (claimed.manifest.writer_epoch, claimed.created) == (2, False)
    store.inject(Fault.FAIL_BEFORE, op="put_if_absent", key="*/manifest/*")
    with pytest.raises(ClaimContention, match=str(REGION)):
        claim_region(store, RegionIdentity(REGION), Seams(clock=clock))


def test_the_owner_changes_the_manifest_the_former_owner_and_a_sealed_region_do_not(
    tmp_path: Path,
) -> None:
    store = LocalStore(tmp_path)
    chain = manifest_chain(store, REGION, Seams())
    first, second = claim(store), claim(store)
    with pytest.raises(Fenced, match="epoch 2 has taken over"):
        chain.update(first, lambda m: m.next(current_generation=9), landed=lambda m: False)
    changed = chain.update(second, lambda m: m.next(current_generation=2), landed=lambda m: False)
    assert changed.current_generation == 2
    # A change that landed is recognised, also after somebody else took over.
    third = claim(store)
    assert third == 3
    found = chain.update(second, lambda m: m.next(), landed=lambda m: m.current_generation == 2)
    assert found == chain.latest()
    assert found.writer_epoch == 3
    chain.update(third, lambda m: m.next(status=RegionStatus.SEALED), landed=lambda m: False)
    with pytest.raises(RegionSealed):
        claim(store)
    with pytest.raises(PenstockError):
        chain.update(first, lambda m: m.next(), landed=lambda m: False)
