"""Which files of a table each of its versions needs, read from the manifests alone.

    _versions/*.manifest --one GET each--> TableVersion --files_of--> keys below the table's root

A manifest names data files, deletion files, row ids that lie outside it, its transaction, and its
indexes by uuid; whatever lies below `_indices/{uuid}/` belongs to the index. Of the MemWAL index
it holds the details, whose snapshot may lie below yet another uuid.

What is read here decides what is deleted, and manifests have no checksum: each is read twice, and
both answers have to be the same. Fragments stay bytes until `files_of`: most of them are the same
in many versions, and are parsed once.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

from pyroaring import BitMap

from penstock.errors import Corruption, ObjectNotFound, StorageError
from penstock.memwal import wire
from penstock.memwal.index_details import INDEX_NAME, MemWalIndexDetails
from penstock.memwal.table_versions import manifest_key, parse_manifest, version_of
from penstock.storage.objects import ObjectMeta, ObjectStore
from penstock.storage.seams import Seams

P = ParamSpec("P")
T = TypeVar("T")
READ_THREADS = 8
_READ_AHEAD = 16
_DELETION_SUFFIXES = ("arrow", "bin")


@dataclass(frozen=True, slots=True)
class IndexSegment:
    """One segment of an index: which, of which index, and which fragments it covers."""

    name: str
    uuid: uuid.UUID
    covered: bytes

    def covers(self) -> BitMap:
        return BitMap.deserialize(self.covered) if self.covered else BitMap()


@dataclass(frozen=True, slots=True)
class TableVersion:
    version: int
    timestamp_ms: int
    """When it was made, by the clock of the machine that made it."""
    fragments: tuple[bytes, ...]
    transaction_file: str
    segments: tuple[IndexSegment, ...]
    details: MemWalIndexDetails | None

    def without_fragments(self) -> TableVersion:
        """What is worth keeping of many versions at a time."""
        return replace(self, fragments=())

    def fragment_ids(self) -> BitMap:
        return BitMap(_fragment(stored).id for stored in self.fragments)

    def uncovered_indexes(self) -> set[str]:
        """The indexes that do not cover every fragment of the version."""
        covered: dict[str, BitMap] = {}
        for segment in self.segments:
            if segment.name != INDEX_NAME:
                known = covered.setdefault(segment.name, BitMap())
                covered[segment.name] = known | segment.covers()
        fragments = self.fragment_ids()
        return {name for name, found in covered.items() if not fragments <= found}


class FileSet:
    """The files that any of some versions needs."""

    def __init__(self) -> None:
        self._fragments: set[bytes] = set()
        self.keys: set[str] = set()
        self.indexes: set[str] = set()
        """Directories below `_indices/`."""

    def add(self, version: TableVersion) -> None:
        for stored in set(version.fragments) - self._fragments:
            self.keys.update(_keys_of(stored))
        self._fragments.update(version.fragments)
        if version.transaction_file:
            self.keys.add(f"_transactions/{version.transaction_file}")
        self.indexes.update(str(segment.uuid) for segment in version.segments)

    def __contains__(self, key: str) -> bool:
        """Whether a file is needed; of an index its directory is, or is not."""
        top, _, rest = key.partition("/")
        if top == "_indices":
            return rest.partition("/")[0] in self.indexes
        if top == "data" and "/" in rest:  # large values lie next to the data file they belong to
            return f"data/{rest.partition('/')[0]}.lance" in self.keys
        return key in self.keys


def read_versions(
    store: ObjectStore,
    manifests: Iterable[ObjectMeta],
    seams: Seams,
    *,
    pass_damaged: bool = False,
) -> Iterator[TableVersion]:
    """The versions whose manifests were listed, in that order; those gone by now are passed."""
    waiting = list(manifests)

    def read(meta: ObjectMeta) -> TableVersion | None:
        try:
            return parse_version(get_twice(store, meta.key, seams), f"{store.uri}/{meta.key}")
        except ObjectNotFound:
            return None
        except Corruption:
            if pass_damaged:
                return None
            raise

    with ThreadPoolExecutor(READ_THREADS, "penstock-versions") as pool:
        # So many at a time, because manifests of large tables are large.
        for first in range(0, len(waiting), _READ_AHEAD):
            for found in pool.map(read, waiting[first : first + _READ_AHEAD]):
                if found is not None:
                    yield found


def parse_version(data: bytes, where: str) -> TableVersion:
    manifest, section = parse_manifest(data, where)
    segments, details = [], None
    for index in section.indices:
        segments.append(
            IndexSegment(index.name, uuid.UUID(bytes=index.uuid.uuid), index.fragment_bitmap)
        )
        if index.name == INDEX_NAME:
            details = MemWalIndexDetails.decode(index.index_details.value, where)
    return TableVersion(
        version=manifest.version,
        timestamp_ms=manifest.timestamp.seconds * 1000 + manifest.timestamp.nanos // 1_000_000,
        fragments=tuple(manifest.fragments),
        transaction_file=manifest.transaction_file,
        segments=tuple(segments),
        details=details,
    )


def _fragment(stored: bytes) -> Any:
    message = wire.new("DataFragment")
    try:
        message.ParseFromString(stored)
    except wire.DecodeError as error:
        raise Corruption(f"a fragment of the table cannot be read: {error}") from error
    return message


def _keys_of(stored: bytes) -> Iterator[str]:
    fragment = _fragment(stored)
    for file in fragment.files:
        yield f"data/{file.path}"
    for overlay in fragment.overlays:
        yield f"data/{overlay.data_file.path}"
    if fragment.HasField("deletion_file"):
        deletions = fragment.deletion_file
        if deletions.file_type >= len(_DELETION_SUFFIXES):
            raise Corruption(f"a deletion file of the unknown kind {deletions.file_type}")
        suffix = _DELETION_SUFFIXES[deletions.file_type]
        yield f"_deletions/{fragment.id}-{deletions.read_version}-{deletions.id}.{suffix}"
    for name in ("row_ids", "last_updated_at_versions", "created_at_versions"):
        if fragment.HasField(f"external_{name}"):
            yield getattr(fragment, f"external_{name}").path


def remove_unnamed(store: ObjectStore, keys: Iterable[str], since: int, seams: Seams) -> None:
    """Remove files that were written after a version and, as it seems, for nothing.

    Those that a version names stay: whoever wrote them may have committed them before, and only
    the answer was lost.
    """
    named = FileSet()
    for version in read_versions(store, newer_manifests(store, since, seams), seams):
        named.add(version)
    for key in keys:
        if key not in named:
            store.delete(key)


# --- names that keep a version -----------------------------------------------------------------


def read_refs(store: ObjectStore, seams: Seams) -> dict[int, str]:
    """The versions that a tag or a branch needs, each with a name of one."""
    found: dict[int, str] = {}
    for meta in patiently(seams, lambda: list(store.list("_refs"))):
        kind, _, name = meta.key.removeprefix("_refs/").removesuffix(".json").partition("/")
        if kind not in ("tags", "branches") or not meta.key.endswith(".json"):
            continue
        fields = ("branch", "version") if kind == "tags" else ("parentBranch", "parentVersion")
        try:
            stored = json.loads(get_twice(store, meta.key, seams))
            if stored.get(fields[0]) is None:
                found[int(stored[fields[1]])] = f"{'tag' if kind == 'tags' else 'branch'} {name}"
        except ObjectNotFound:
            continue
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Corruption(
                f"{store.uri}/{meta.key} cannot be read ({error!r}), so what it keeps is not "
                "known; restore it, or remove it"
            ) from error
    return found


def newer_manifests(
    store: ObjectStore, after: int, seams: Seams, listed: Sequence[ObjectMeta] | None = None
) -> list[ObjectMeta]:
    """The manifests of the versions behind one, in their order, the newest without fail.

    A listing may be older than what follows on it, so behind its last version it is looked further.
    """
    if listed is None:
        listed = patiently(seams, lambda: list(store.list("_versions")))
    found = manifests_of(listed, after)
    newest = version_of(found[-1].key) if found else after
    assert newest is not None
    while True:
        newest += 1
        key = patiently(seams, manifest_key, store, newest)
        if key is None:
            return found
        found.append(patiently(seams, store.head, key))


def manifests_of(listed: Sequence[ObjectMeta], after: int = 0) -> list[ObjectMeta]:
    """The manifests among some files, in the order of their versions."""
    found = [(version_of(meta.key), meta) for meta in listed]
    numbered = [(version, meta) for version, meta in found if version and version > after]
    return [meta for _, meta in sorted(numbered, key=lambda pair: pair[0])]


# --- reading what must be right ----------------------------------------------------------------


def get_twice(store: ObjectStore, key: str, seams: Seams) -> bytes:
    """An object without a checksum, read until two answers agree."""

    def read() -> bytes:
        data = bytes(store.get(key).data)
        if store.get(key).data != data:
            raise StorageError(f"{store.uri}/{key}: two reads of it differ; try again")
        return data

    return patiently(seams, read)


def patiently(seams: Seams, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Repeat what failed for the store's sake, a bounded number of times."""
    last: StorageError | None = None
    for _ in seams.attempts():
        try:
            return work(*args, **kwargs)
        except ObjectNotFound:
            raise
        except StorageError as error:
            last = error
    assert last is not None
    raise last
