"""What the base table is made of: fragments, indexes with what they cover, versions.

    version of the table --read_fragments, read_indexes--> parts, from its manifest alone
    store                --read_versions----------------->  every version that is still there

Nothing here opens a data file. Rows that an index does not cover are those of fragments that none
of its segments lists; searches read them without the index.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lance
import numpy as np

from penstock.errors import Corruption
from penstock.index.base import SYSTEM_INDEX_PREFIX
from penstock.memwal import tabular, wire
from penstock.memwal.base_table import BaseSnapshot
from penstock.memwal.table_versions import version_of
from penstock.storage.objects import ObjectStore

_OFFSETS = {"u16": "<u2", "u32": "<u4", "u64": "<u8"}


@dataclass(frozen=True, slots=True)
class DataFilePart:
    path: str
    columns: tuple[str, ...]
    size_bytes: int | None


@dataclass(frozen=True, slots=True)
class FragmentPart:
    fragment_id: int
    physical_rows: int
    deleted_rows: int
    size_bytes: int | None
    """Of its data files; None where Lance did not record it."""
    deletion_kind: str | None
    """How deleted rows are listed: `array` of offsets, or `bitmap`."""
    deletion_file: str | None
    row_ids: tuple[tuple[int, int], ...]
    """First and last of each run of stable row ids; none in a table without them."""
    files: tuple[DataFilePart, ...]

    @property
    def rows(self) -> int:
        return self.physical_rows - self.deleted_rows


@dataclass(frozen=True, slots=True)
class SegmentPart:
    uuid: str
    fragments: str
    """The fragments it covers, as ranges: `0-3,5`."""
    rows: int
    size_bytes: int | None
    created_ms: int | None


@dataclass(frozen=True, slots=True)
class IndexPart:
    name: str
    kind: str
    columns: tuple[str, ...]
    fragments: str
    covered_rows: int
    uncovered_rows: int
    maintained: bool
    """Whether MemTables and generations have it too."""
    caught_up: Mapping[str, int]
    """By region the last generation that it is known to cover in the base."""
    segments: tuple[SegmentPart, ...]

    @property
    def uncovered_share(self) -> float:
        rows = self.covered_rows + self.uncovered_rows
        return self.uncovered_rows / rows if rows else 0.0


@dataclass(frozen=True, slots=True)
class VersionPart:
    version: int
    written_ms: int
    size_bytes: int
    tags: tuple[str, ...]


def read_fragments(base: BaseSnapshot, store: ObjectStore) -> tuple[FragmentPart, ...]:
    names: dict[int, str] = {}
    for column in base.dataset.lance_schema.fields():
        inside = [column]
        while inside:
            field = inside.pop()
            names[field.id()] = column.name()
            inside.extend(field.children())
    return tuple(_fragment(part, names, store) for part in base.dataset.get_fragments())


def _fragment(
    fragment: lance.LanceFragment, names: Mapping[int, str], store: ObjectStore
) -> FragmentPart:
    metadata = fragment.metadata
    files = tuple(
        DataFilePart(
            path=f"data/{file.path}",
            # A column may have several ids, and one that was dropped since has none.
            columns=tuple(dict.fromkeys(names[field] for field in file.fields if field in names)),
            size_bytes=file.file_size_bytes,
        )
        for file in metadata.files
    )
    sizes = [file.size_bytes for file in files]
    deletions = metadata.deletion_file
    kind = None if deletions is None else str(deletions.file_type)
    return FragmentPart(
        fragment_id=metadata.id,
        physical_rows=metadata.physical_rows,
        deleted_rows=0 if deletions is None else deletions.num_deleted_rows or 0,
        size_bytes=None if None in sizes else sum(size or 0 for size in sizes),
        deletion_kind=kind,
        deletion_file=None if deletions is None else deletions.path(metadata.id),
        row_ids=_row_ids(metadata.row_id_meta, store),
        files=files,
    )


def _row_ids(meta: Any, store: ObjectStore) -> tuple[tuple[int, int], ...]:
    """The runs of row ids; one with gaps inside is told by its first and last."""
    if meta is None:
        return ()
    stored = json.loads(meta.json())
    if "Inline" in stored:
        data = bytes(stored["Inline"])
    else:
        place = stored["External"]
        data = bytes(store.get_range(place["path"], place["offset"], place["size"]))
    sequence = wire.new("RowIdSequence")
    try:
        sequence.ParseFromString(data)
    except wire.DecodeError as error:
        raise Corruption(f"{store.uri}: row ids of a fragment cannot be read: {error}") from error
    found: list[tuple[int, int]] = []
    for segment in sequence.segments:
        run = _run(segment)
        if run is None:
            continue
        if found and found[-1][1] + 1 == run[0]:
            run = (found.pop()[0], run[1])
        found.append(run)
    return tuple(found)


def _run(segment: Any) -> tuple[int, int] | None:
    for name in ("range", "range_with_holes", "range_with_bitmap"):
        if segment.HasField(name):
            run = getattr(segment, name)
            return (run.start, run.end - 1) if run.end > run.start else None
    array = segment.sorted_array if segment.HasField("sorted_array") else segment.array
    for name, dtype in _OFFSETS.items():
        if array.HasField(name):
            part = getattr(array, name)
            offsets = np.frombuffer(part.offsets, dtype)
            if len(offsets):
                return part.base + int(offsets.min()), part.base + int(offsets.max())
    return None


def read_indexes(base: BaseSnapshot, fragments: Sequence[FragmentPart]) -> tuple[IndexPart, ...]:
    """Every index but Lance's own, by name."""
    rows = {fragment.fragment_id: fragment.rows for fragment in fragments}
    total = sum(rows.values())
    details = base.details
    found = []
    for index in base.dataset.describe_indices():
        if index.name.startswith(SYSTEM_INDEX_PREFIX):
            continue
        # A segment may list fragments that were removed since.
        lists = [[number for number in s.fragment_ids if number in rows] for s in index.segments]
        covered = {number for listed in lists for number in listed}
        covered_rows = sum(rows[number] for number in covered)
        caught_up = details.index_catchup.get(index.name, {})
        segments = tuple(
            SegmentPart(
                uuid=str(segment.uuid),
                fragments=tabular.ranges(listed),
                rows=sum(rows[number] for number in listed),
                size_bytes=segment.size_bytes,
                created_ms=(
                    None if segment.created_at is None else _millis(segment.created_at.timestamp())
                ),
            )
            for segment, listed in zip(index.segments, lists, strict=True)
        )
        found.append(
            IndexPart(
                name=index.name,
                kind=str(index.index_type),
                columns=tuple(index.field_names),
                fragments=tabular.ranges(covered),
                covered_rows=covered_rows,
                uncovered_rows=total - covered_rows,
                maintained=details.maintain_all_indexes or index.name in details.maintained_indexes,
                caught_up={str(region): caught_up[region] for region in sorted(caught_up)},
                segments=segments,
            )
        )
    return tuple(sorted(found, key=lambda part: part.name))


def read_versions(base: BaseSnapshot, store: ObjectStore) -> tuple[VersionPart, ...]:
    """The versions that are still there, oldest first."""
    tags: dict[int, list[str]] = {}
    for name, tag in base.dataset.tags.list().items():
        tags.setdefault(tag["version"], []).append(name)
    found = []
    for meta in store.list("_versions"):
        version = version_of(meta.key)
        if version is not None:
            known = tuple(sorted(tags.get(version, ())))
            found.append(VersionPart(version, meta.modified_ms, meta.size_bytes, known))
    return tuple(sorted(found, key=lambda part: part.version))


def _millis(seconds: float) -> int:
    return round(seconds * 1000)
