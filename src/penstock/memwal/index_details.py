"""The MemWAL index of a base table: configuration and progress, kept by Lance in its manifest.

The index is one protobuf message in the table manifest's index section; only a snapshot of very
many regions adds a file (`snapshots`). It is read from the manifest of a version, and changed by
committing a replacement; of two concurrent changes one is retried on what the other wrote, so
neither is lost.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import lance
import pyarrow as pa
from lance.bitmap import Bitmap
from lance.dataset import Index as LanceIndex
from lance.dataset import Transaction

from penstock.errors import (
    AmbiguousWrite,
    CommitConflict,
    Corruption,
    InvalidInput,
    NotATable,
    ObjectExists,
    ObjectNotFound,
    StorageError,
)
from penstock.memwal import names, wire
from penstock.memwal.region_spec import RegionField, RegionSpec
from penstock.memwal.row_versions import FIRST_DETACHED, as_version
from penstock.storage.objects import ObjectStore
from penstock.storage.seams import Seams

MOVED_ROWS = "penstock.only_moved_rows"
T = TypeVar("T")
INDEX_NAME = "__lance_mem_wal"
TYPE_URL = "/lance.table.MemWalIndexDetails"
_FOOTER = struct.Struct("<QHH4s")
_LAST_VERSION = 2**64 - 1
_REVERSED_DIGITS = 20


@dataclass(frozen=True, slots=True)
class MemWalIndexDetails:
    snapshot_ts_millis: int = 0
    num_regions: int = 0
    inline_snapshots: bytes | None = None
    region_specs: tuple[RegionSpec, ...] = ()
    maintained_indexes: tuple[str, ...] = ()
    merged_generations: Mapping[uuid.UUID, int] = field(default_factory=dict)
    index_catchup: Mapping[str, Mapping[uuid.UUID, int]] = field(default_factory=dict)
    writer_config_defaults: Mapping[str, str] = field(default_factory=dict)
    maintain_all_indexes: bool = True
    raw: bytes = field(default=b"", compare=False, repr=False)

    @property
    def current_spec(self) -> RegionSpec | None:
        """The spec new rows are routed by: the one with the highest id."""
        return max(self.region_specs, key=lambda spec: spec.spec_id, default=None)

    def with_spec(self, spec: RegionSpec) -> MemWalIndexDetails:
        """The details with one more spec; ids are never used again."""
        if any(known.spec_id >= spec.spec_id for known in self.region_specs):
            raise InvalidInput(f"region spec id {spec.spec_id} was used before")
        buckets = [field.parameters.get("num_buckets") for field in spec.fields]
        planned = int(buckets[0] or 0) if len(buckets) == 1 else 0
        unsharded = [field.transform for field in spec.fields] == ["unsharded"]
        if self.inline_snapshots is not None:
            planned, unsharded = self.num_regions, False  # as many as the snapshot has
        return replace(
            self,
            region_specs=(*self.region_specs, spec),
            num_regions=1 if unsharded else planned,
        )

    def merged(self, region_id: uuid.UUID) -> int:
        """The last generation of a region that is in the base table; 0 if none is."""
        return self.merged_generations.get(region_id, 0)

    def with_merged(self, generations: Mapping[uuid.UUID, int]) -> MemWalIndexDetails:
        """The details with more progress; it never goes back."""
        together = dict(self.merged_generations)
        for region_id, generation in generations.items():
            together[region_id] = max(generation, together.get(region_id, 0))
        return replace(self, merged_generations=together)

    def with_catchup(
        self, name: str, generations: Mapping[uuid.UUID, int] | None
    ) -> MemWalIndexDetails:
        """The details with what an index has caught up with; None takes its entry out."""
        progress = {known: at for known, at in self.index_catchup.items() if known != name}
        if generations is not None:
            progress[name] = dict(generations)
        return replace(self, index_catchup=progress)

    def encode(self) -> bytes:
        message = wire.new("MemWalIndexDetails")
        if self.raw:
            message.ParseFromString(self.raw)
        message.snapshot_ts_millis = self.snapshot_ts_millis
        message.num_regions = self.num_regions
        message.ClearField("inline_snapshots")
        if self.inline_snapshots is not None:
            message.inline_snapshots = self.inline_snapshots
        del message.region_specs[:]
        for spec in self.region_specs:
            added = message.region_specs.add(spec_id=spec.spec_id)
            for region_field in spec.fields:
                stored = added.fields.add(
                    field_id=region_field.field_id, result_type=region_field.result_type
                )
                stored.source_ids.extend(region_field.source_ids)
                if region_field.transform is not None:
                    stored.transform = region_field.transform
                if region_field.expression is not None:
                    stored.expression = region_field.expression
                stored.parameters.update(region_field.parameters)
        message.maintained_indexes[:] = self.maintained_indexes
        del message.merged_generations[:]
        _put_generations(message.merged_generations, self.merged_generations)
        del message.index_catchup[:]
        for name, progress in sorted(self.index_catchup.items()):
            caught_up = message.index_catchup.add(index_name=name)
            _put_generations(caught_up.caught_up_generations, progress)
        message.writer_config_defaults.clear()
        message.writer_config_defaults.update(self.writer_config_defaults)
        message.maintain_all_indexes = self.maintain_all_indexes
        encoded: bytes = message.SerializeToString(deterministic=True)
        return encoded

    @classmethod
    def decode(cls, data: bytes, where: str) -> MemWalIndexDetails:
        message = wire.new("MemWalIndexDetails")
        try:
            message.ParseFromString(data)
            return cls(
                snapshot_ts_millis=message.snapshot_ts_millis,
                num_regions=message.num_regions,
                inline_snapshots=(
                    message.inline_snapshots if message.HasField("inline_snapshots") else None
                ),
                region_specs=tuple(map(_region_spec, message.region_specs)),
                maintained_indexes=tuple(message.maintained_indexes),
                merged_generations=_generations(message.merged_generations),
                index_catchup={
                    progress.index_name: _generations(progress.caught_up_generations)
                    for progress in message.index_catchup
                },
                writer_config_defaults=dict(message.writer_config_defaults),
                # Tables of before this field existed list what they maintain.
                maintain_all_indexes=(
                    message.maintain_all_indexes
                    if message.HasField("maintain_all_indexes")
                    else False
                ),
                raw=data,
            )
        except (wire.DecodeError, ValueError) as error:
            raise Corruption(f"the MemWAL index of {where} cannot be read: {error}") from error


def _region_spec(message: Any) -> RegionSpec:
    return RegionSpec(
        spec_id=message.spec_id,
        fields=tuple(
            RegionField(
                field_id=stored.field_id,
                source_ids=tuple(stored.source_ids),
                transform=stored.transform if stored.HasField("transform") else None,
                expression=stored.expression if stored.HasField("expression") else None,
                result_type=stored.result_type,
                parameters=dict(stored.parameters),
            )
            for stored in message.fields
        ),
    )


def _generations(messages: Any) -> dict[uuid.UUID, int]:
    return {uuid.UUID(bytes=bytes(m.region_id.uuid)): m.generation for m in messages}


def _put_generations(messages: Any, generations: Mapping[uuid.UUID, int]) -> None:
    for region_id, generation in sorted(generations.items()):
        messages.add(generation=generation).region_id.uuid = region_id.bytes


# --- reading -------------------------------------------------------------------------------


def read_details(store: ObjectStore, version: int) -> tuple[MemWalIndexDetails, uuid.UUID] | None:
    """The MemWAL index of a version and its uuid, or None if the table has none."""
    where = f"{store.uri} version {version}"
    index = _mem_wal_index(parse_manifest(_manifest_bytes(store, version), where)[1])
    if index is None:
        return None
    details = MemWalIndexDetails.decode(index.index_details.value, where)
    return details, uuid.UUID(bytes=bytes(index.uuid.uuid))


def last_fragment_id(store: ObjectStore, version: int) -> int:
    """The highest number that a fragment has had up to a version, or -1."""
    manifest, _ = parse_manifest(_manifest_bytes(store, version), f"{store.uri} version {version}")
    return int(manifest.max_fragment_id) if manifest.HasField("max_fragment_id") else -1


def parse_manifest(data: bytes, where: str) -> tuple[Any, Any]:
    """A manifest and its section of indexes, which may have none."""
    section = wire.new("IndexSection")
    try:
        at, _, _, magic = _FOOTER.unpack(data[-_FOOTER.size :])
        if magic != b"LANC":
            raise ValueError(f"its last bytes are {magic!r}")
        manifest = wire.new("TableManifest")
        manifest.ParseFromString(_section(data, at))
        if manifest.HasField("index_section"):
            section.ParseFromString(_section(data, manifest.index_section))
    except (ValueError, struct.error, wire.DecodeError) as error:
        raise Corruption(f"the manifest of {where} cannot be read: {error}") from error
    return manifest, section


def _mem_wal_index(section: Any) -> Any | None:
    return next((index for index in section.indices if index.name == INDEX_NAME), None)


def last_details(store: ObjectStore) -> MemWalIndexDetails | None:
    """The MemWAL index of the newest version that has one."""
    for version in reversed(list_versions(store)):
        found = read_details(store, version)
        if found is not None:
            return found[0]
    return None


def is_latest_version(store: ObjectStore, version: int) -> bool:
    """Whether a version exists and its successor does not.

    Old versions are removed in ascending order, so a version that is still there after its
    successor was found missing is the newest; unless it was kept while its successor went, which
    is written down before and forgotten only when it is gone itself.
    """
    for name, following in zip(_manifest_names(version), _manifest_names(version + 1), strict=True):
        if store.exists(f"_versions/{following}.manifest"):
            return False
        if store.exists(names.gap_key(version)):
            return False
        if store.exists(f"_versions/{name}.manifest"):
            return True
    return False


def version_exists(store: ObjectStore, version: int) -> bool:
    return 0 < version < FIRST_DETACHED and manifest_key(store, version) is not None


def manifest_key(store: ObjectStore, version: int) -> str | None:
    """Where the manifest of a version is, or None if there is none."""
    keys = (f"_versions/{name}.manifest" for name in _manifest_names(version))
    return next((key for key in keys if store.exists(key)), None)


def list_versions(store: ObjectStore) -> list[int]:
    """Every version that has a manifest, ascending."""
    found = (version_of(meta.key) for meta in store.list("_versions"))
    return sorted(version for version in found if version is not None)


def version_of(key: str) -> int | None:
    """The version whose manifest has that key, or None if it is no manifest of a version."""
    name, _, suffix = key.rsplit("/", 1)[-1].rpartition(".")
    if suffix != "manifest" or not name.isdecimal():
        return None
    return _LAST_VERSION - int(name) if len(name) == _REVERSED_DIGITS else int(name)


def _manifest_bytes(store: ObjectStore, version: int) -> bytes:
    for name in _manifest_names(version):
        try:
            return bytes(store.get(f"_versions/{name}.manifest").data)
        except ObjectNotFound:
            continue
    raise NotATable(f"{store.uri} has no manifest of version {version}")


def _manifest_names(version: int) -> tuple[str, str]:
    """What Lance calls the manifest of a version, and what it did before 0.17."""
    return f"{_LAST_VERSION - version:0{_REVERSED_DIGITS}}", str(version)


def _section(data: bytes, at: int) -> bytes:
    if at + 4 > len(data):
        raise ValueError(f"a section at {at} lies past the end")
    (length,) = struct.unpack_from("<I", data, at)
    if at + 4 + length > len(data):
        raise ValueError(f"a section of {length} bytes at {at} runs past the end")
    return data[at + 4 : at + 4 + length]


# --- changing ------------------------------------------------------------------------------


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
    become part of the same new version: all are there or none is. It must have made durable what
    it names.

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
    durable what it names. Lance takes the catch-up progress of every index back whose fragments
    change; that of those in `caught_up` is kept, which must cover the same rows as before.
    """
    options = dict(storage_options) if storage_options else None
    manifest = _commit_detached(store, dataset, [operation], options)
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
    _, section_before = parse_manifest(_manifest_bytes(store, version), where)
    index, before = _mem_wal_index(section), _mem_wal_index(section_before)
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
    index = _mem_wal_index(section)
    assert index is not None
    identity = seams.entropy.uuid4()
    index.index_details.value = _carry_snapshot(store, details, identity).encode()
    index.uuid.uuid = identity.bytes
    at, major, minor, magic = _FOOTER.unpack(data[-_FOOTER.size :])
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
            _FOOTER.pack(at + 4 + len(stored), major, minor, magic),
        ]
    )


def _publish(store: ObjectStore, version: int, data: bytes, seams: Seams) -> None:
    """Make a manifest that of the very next version; raises `ObjectExists` if there is one.

    An ordinary commit would not do. Lance lets a change of an index pass over a merge that landed
    since `version`, and the progress which that merge recorded in the index would be lost.

    A `StorageError` means that nothing was published.
    """
    at = _FOOTER.unpack(data[-_FOOTER.size :])[0]
    message = as_version(_section(data, at), version + 1)
    ours = data[:at] + struct.pack("<I", len(message)) + message + data[-_FOOTER.size :]
    schemes = zip(_manifest_names(version), _manifest_names(version + 1), strict=True)
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
    if newer and written[min(newer)] <= written.get(version, _LAST_VERSION):
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
