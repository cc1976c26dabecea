"""New versions of a base table, each the very next one after the version it was made from.

What a version changes (rows, indexes, columns, the MemWAL index, or several of these) is committed
by Lance where nobody sees it, step by step. The manifest that comes of it is published under the
next number if that is free. Of two concurrent changes one is made again from what the other left,
so neither is lost.

    steps --Lance, detached--> manifest --put if absent--> the next version

Invariants
- A version holds the progress of everything before it. Lance's own commit would let a change of an
  index pass over a merge, and forget what that recorded.
- What is published is durable, and so is all that it names.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import lance
import pyarrow as pa
from lance.bitmap import Bitmap
from lance.dataset import Index as LanceIndex
from lance.dataset import Transaction

from penstock.errors import AmbiguousWrite, CommitConflict, ObjectExists, StorageError
from penstock.memwal import names
from penstock.memwal.index_details import INDEX_NAME, TYPE_URL, MemWalIndexDetails
from penstock.memwal.row_versions import as_version
from penstock.memwal.table_versions import (
    FOOTER,
    LAST_VERSION,
    is_latest_version,
    manifest_bytes,
    manifest_names,
    mem_wal_index,
    parse_manifest,
    read_details,
    section_at,
    version_exists,
    version_of,
)
from penstock.storage.objects import ObjectStore
from penstock.storage.seams import Seams

MOVED_ROWS = "penstock.only_moved_rows"
T = TypeVar("T")


def commit_details(
    store: ObjectStore,
    storage_options: Mapping[str, str] | None,
    change: Callable[[MemWalIndexDetails | None], MemWalIndexDetails | None],
    seams: Seams,
) -> MemWalIndexDetails | None:
    """Replace the MemWAL index by what `change` makes of the current one.

    `change` gets None where there is no index yet, and returns None to leave things as they are.
    It may run several times: each conflict with another commit starts from the newest state.
    """
    return commit_index(store, storage_options, change, seams)[0]


def commit_index(
    store: ObjectStore,
    storage_options: Mapping[str, str] | None,
    change: Callable[[MemWalIndexDetails | None], MemWalIndexDetails | None],
    seams: Seams,
    lay_down: Callable[[MemWalIndexDetails, uuid.UUID], MemWalIndexDetails] | None = None,
    operation: Callable[[lance.LanceDataset], Any] | None = None,
) -> tuple[MemWalIndexDetails | None, int]:
    """As `commit_details`; returns the version that holds the index, too.

    `operation` makes a change of the data for the version it is given, or a list of them, which
    become part of the same new version: all are there or none is. A change that depends on what
    the one before it led to is a function of that. It must have made durable what it names.

    `lay_down` gets the changed details and the uuid their index is about to have. It writes what
    belongs under that uuid, durably, and returns the details to commit. Every attempt has a uuid
    of its own; what a lost attempt wrote is named by nobody, and Lance's clean-up removes it.
    """
    options = dict(storage_options) if storage_options else None
    last: Exception | None = None
    failures = 0
    for _ in seams.races():
        dataset = lance.dataset(store.uri, storage_options=options)
        found = read_details(store, dataset.version)
        details = change(found[0] if found else None)
        if details is None:
            return (found[0] if found else None), dataset.version
        identity = seams.entropy.uuid4()
        details = (lay_down or partial(_carry_snapshot, store))(details, identity)
        new = _index(identity, dataset.version, details)
        old = [_index(found[1], dataset.version, found[0])] if found else []
        steps = [lance.LanceOperation.CreateIndex([new], old)]
        if operation is not None:
            # Last, because it is the last step that others find in the new version's transaction,
            # and they have to see which rows it changed.
            try:
                made = operation(dataset)
            except (OSError, RuntimeError, pa.ArrowException) as error:
                if is_latest_version(store, dataset.version):
                    raise
                last = error  # newer versions came, and clean-up took what it was reading
                continue
            steps += made if isinstance(made, list) else [made]
        try:
            manifest = _commit_detached(store, dataset, steps, options)
            _publish(store, dataset.version, manifest, seams)
        except ObjectExists as error:
            last = error
            continue
        except StorageError as error:
            last = error
            failures += 1
            if failures >= seams.backoff.attempts:
                break
            continue
        store.sync("_transactions")
        store.sync("_versions")
        return replace(details, raw=b""), dataset.version + 1
    raise CommitConflict(
        f"the MemWAL index of {store.uri} could not be changed: other commits kept winning "
        f"{seams.backoff.races} times, or the store failed {seams.backoff.attempts} times; try "
        f"again later ({last})"
    )


def commit_next(
    store: ObjectStore,
    storage_options: Mapping[str, str] | None,
    dataset: lance.LanceDataset,
    operation: Any,
    seams: Seams,
    caught_up: Collection[str] = (),
    details: MemWalIndexDetails | None = None,
) -> bool:
    """Change the data of the version given, or nothing if there is a newer one already.

    The MemWAL index becomes what `details` say, or stays as it is. `operation` must have made
    durable what it names; several may be given, as to `commit_index`. Lance takes the catch-up
    progress of every index back whose fragments change; that of those in `caught_up` is kept,
    which must cover the same rows as before.
    """
    options = dict(storage_options) if storage_options else None
    steps = operation if isinstance(operation, list) else [operation]
    manifest = _commit_detached(store, dataset, steps, options)
    if caught_up:
        manifest = _with_catch_up(store, dataset.version, manifest, caught_up, seams)
    if details is not None:
        manifest = _with_details(store, dataset.version, manifest, details, seams)
    last: StorageError | None = None
    for _ in seams.attempts():
        try:
            _publish(store, dataset.version, manifest, seams)
        except ObjectExists:
            return False
        except StorageError as error:
            last = error  # whether it is there is not known: the same bytes again will tell
            continue
        store.sync("_transactions")
        store.sync("_versions")
        return True
    assert last is not None
    raise last


def only_moving_rows(operation: Any) -> Transaction:
    """Says of an operation, for `advance`, that readers see the same rows before and after it."""
    return Transaction(0, operation, transaction_properties={MOVED_ROWS: "true"})


def _carry_snapshot(
    store: ObjectStore, details: MemWalIndexDetails, identity: uuid.UUID
) -> MemWalIndexDetails:
    """Bring the file of a snapshot along to the uuid its index is about to have."""
    from penstock.memwal.snapshots import carried  # which is built on this module

    return carried(store, details, identity)


def _commit_detached(
    store: ObjectStore,
    dataset: lance.LanceDataset,
    steps: Sequence[Any],
    options: dict[str, str] | None,
) -> bytes:
    """The manifest that several steps one after the other lead to; nobody else can see them."""
    data = b""
    passed: list[str] = []
    for step in steps:
        if callable(step):
            step = step(dataset)
        transaction = step if isinstance(step, Transaction) else Transaction(0, step)
        dataset = lance.LanceDataset.commit(
            dataset,
            replace(transaction, read_version=dataset.version),
            storage_options=options,
            detached=True,
        )
        key = f"_versions/d{dataset.version}.manifest"
        data = bytes(store.get(key).data)
        passed.append(key)
    for key in passed:
        store.delete(key)
    return data


@contextmanager
def trial(
    store: ObjectStore,
    storage_options: Mapping[str, str] | None,
    dataset: lance.LanceDataset,
    operation: Any,
) -> Iterator[lance.LanceDataset]:
    """What an operation would lead to, as a dataset that nobody else can see, for a while."""
    made = lance.LanceDataset.commit(
        dataset,
        operation,
        read_version=dataset.version,
        storage_options=dict(storage_options) if storage_options else None,
        detached=True,
    )
    try:
        yield made
    finally:
        store.delete(f"_versions/d{made.version}.manifest")


def _with_catch_up(
    store: ObjectStore, version: int, data: bytes, names: Collection[str], seams: Seams
) -> bytes:
    """A manifest that goes on from a version, with that one's progress of these indexes."""
    where = f"{store.uri} version {version}"
    _, section = parse_manifest(data, where)
    _, section_before = parse_manifest(manifest_bytes(store, version), where)
    index, before = mem_wal_index(section), mem_wal_index(section_before)
    if index is None or before is None:
        return data
    details = MemWalIndexDetails.decode(before.index_details.value, where)
    kept = {name: at for name, at in details.index_catchup.items() if name in names}
    if MemWalIndexDetails.decode(index.index_details.value, where).index_catchup == kept:
        return data
    return _with_details(store, version, data, replace(details, index_catchup=kept), seams)


def _with_details(
    store: ObjectStore, version: int, data: bytes, details: MemWalIndexDetails, seams: Seams
) -> bytes:
    """A manifest that goes on from a version, with another MemWAL index."""
    manifest, section = parse_manifest(data, f"{store.uri} version {version}")
    index = mem_wal_index(section)
    assert index is not None
    identity = seams.entropy.uuid4()
    index.index_details.value = _carry_snapshot(store, details, identity).encode()
    index.uuid.uuid = identity.bytes
    at, major, minor, magic = FOOTER.unpack(data[-FOOTER.size :])
    stored = section.SerializeToString()
    manifest.index_section = at
    message = manifest.SerializeToString()
    return b"".join(
        [
            data[:at],
            struct.pack("<I", len(stored)),
            stored,
            struct.pack("<I", len(message)),
            message,
            FOOTER.pack(at + 4 + len(stored), major, minor, magic),
        ]
    )


def _publish(store: ObjectStore, version: int, data: bytes, seams: Seams) -> None:
    """Make a manifest that of the very next version; raises `ObjectExists` if there is one.

    An ordinary commit would not do. Lance lets a change of an index pass over a merge that landed
    since `version`, and the progress which that merge recorded in the index would be lost.

    A `StorageError` means that nothing was published.
    """
    at = FOOTER.unpack(data[-FOOTER.size :])[0]
    message = as_version(section_at(data, at), version + 1)
    ours = data[:at] + struct.pack("<I", len(message)) + message + data[-FOOTER.size :]
    schemes = zip(manifest_names(version), manifest_names(version + 1), strict=True)
    there = [new for old, new in schemes if store.exists(f"_versions/{old}.manifest")]
    if not there:
        raise StorageError(f"{store.uri}: version {version} was cleaned up; there are newer ones")
    key = f"_versions/{there[0]}.manifest"
    try:
        store.put_if_absent(key, ours)
    except StorageError:
        # The answer may have been lost, or be that of our own repeated request. No two manifests
        # are alike: each names a transaction of its own.
        if not _certain(seams, key, lambda: store.exists(key) and store.get(key).data == ours):
            raise

    def kept() -> bool:
        return not store.exists(names.gap_key(version)) and version_exists(store, version)

    if not _certain(seams, key, kept):
        _certain(seams, key, lambda: _check_newest(store, version + 1))


def _certain(seams: Seams, key: str, ask: Callable[[], T]) -> T:
    """What the store answers in the end; a request that failed must not pass for an answer."""
    last: StorageError | None = None
    for _ in seams.attempts():
        try:
            return ask()
        except StorageError as error:
            last = error
    raise AmbiguousWrite(
        f"{key} may or may not have been written, the store does not say ({last}); look at the "
        "table before you repeat what you did"
    )


def _check_newest(store: ObjectStore, version: int) -> None:
    """Refuse a version whose place clean-up had made free before it was published.

    What it was made from is gone: either since, or else whoever made it slept so long that newer
    versions came and went, and nobody will ever look at this one.
    """
    written = {version_of(meta.key): meta.modified_ms for meta in store.list("_versions")}
    newer = [found for found in written if found is not None and found > version]
    if newer and written[min(newer)] <= written.get(version, LAST_VERSION):
        raise CommitConflict(
            f"{store.uri}: version {version} was published after newer ones, where clean-up had "
            "been; it took longer than old versions are kept, and has to be done again"
        )


def _index(identity: uuid.UUID, version: int, details: MemWalIndexDetails) -> Any:
    return LanceIndex(
        uuid=str(identity),
        name=INDEX_NAME,
        fields=[],
        dataset_version=version,
        fragment_ids=Bitmap(),
        index_version=0,
        index_details=(TYPE_URL, details.encode()),
    )
