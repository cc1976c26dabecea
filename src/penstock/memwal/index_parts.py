"""Segments of an index that several processes build together.

    divide      a segment's fragments as groups of about as many rows each
    build_part  a part of the segment for one group, by any process; nobody names it
    join        one segment of all parts, whose files go

What comes of it is what `build_segment` would have built by itself, and is committed in the same
way. Groups and parts are small values that can be pickled. The parts of a segment need the same
model; where Lance computes some of it from the rows (scalar quantization), there is one group.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lance.dataset import Index as LanceIndex

from penstock.errors import NotATable, PenstockError, VersionNotFound
from penstock.index.base import IndexSpec, create_part, create_segment, is_divisible, join_parts
from penstock.memwal.base_table import BaseTable
from penstock.memwal.table_versions import version_exists

PART_ROWS = 100_000
"""A group has at least so many rows, unless it is the only one."""


@dataclass(frozen=True, slots=True, eq=False)
class SegmentGroup:
    """Fragments of one version that a part of a segment is built for."""

    spec: IndexSpec
    version: int
    fragments: tuple[int, ...]
    rows: int
    alone: bool
    """Whether it is the only one, so that its part is the segment."""


def divide(
    table: BaseTable, spec: IndexSpec, version: int, fragments: Collection[int], most: int
) -> list[SegmentGroup]:
    """Groups of the fragments, not more than `most`.

    Raises `InvalidInput` if the index cannot be built, `VersionNotFound` if the version is gone.
    """
    parts = table.snapshot(version).dataset.get_fragments()
    rows = {f.fragment_id: f.count_rows() for f in parts if f.fragment_id in fragments}
    total = sum(rows.values())
    count = min(most, len(rows), total // PART_ROWS) if is_divisible(spec, table.uri) else 1
    groups: list[list[int]] = [[] for _ in range(max(1, count))]
    held = [0] * len(groups)
    for number in sorted(rows, key=lambda number: (-rows[number], number)):
        least = held.index(min(held))
        groups[least].append(number)
        held[least] += rows[number]
    return [
        SegmentGroup(spec, version, tuple(sorted(group)), size, len(groups) == 1)
        for group, size in zip(groups, held, strict=True)
    ]


def build_part(table: BaseTable, group: SegmentGroup) -> LanceIndex | None:
    """Write the part for a group; None if clean-up took the version it was planned for."""
    try:
        dataset = table.dataset(group.version)
        create = create_segment if group.alone else create_part
        part = create(group.spec, dataset, group.fragments)
    except (PenstockError, OSError, ValueError) as error:
        if not isinstance(error, VersionNotFound | NotATable):
            _raise_unless_gone(table, group.version, error)
        return None
    table.store.sync(f"_indices/{part.uuid}")
    return part


def join(
    table: BaseTable, groups: Sequence[SegmentGroup], parts: Sequence[LanceIndex | None]
) -> LanceIndex | None:
    """The segment that the parts of all groups make; None if there is none to be had."""
    made = [part for part in parts if part is not None]
    first = groups[0]
    if len(made) < len(groups):
        remove(table, made)
        return None
    if first.alone:
        return made[0]
    try:
        segment = join_parts(first.spec, table.dataset(first.version), made)
    except (PenstockError, OSError, ValueError) as error:
        _raise_unless_gone(table, first.version, error)
        return None
    table.store.sync(f"_indices/{segment.uuid}")
    remove(table, made)
    return segment


def remove(table: BaseTable, segments: Sequence[LanceIndex]) -> None:
    """Remove the files of segments that no version has."""
    for segment in segments:
        table.store.delete_prefix(f"_indices/{segment.uuid}")


def _raise_unless_gone(table: BaseTable, version: int, error: Exception) -> None:
    if version_exists(table.store, version):
        raise error
