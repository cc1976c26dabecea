"""Compaction of the base table: small fragments become large ones, deleted rows go away.

    plan_compaction     which adjacent fragments, by Lance's own plan
    compact_piece       their live rows written as new fragments that no version names yet
    commit_compaction   one version in which the new fragments stand for the old (`compact_commit`)

Lance never puts fragments together that an index covers and others that it does not, so an index
covers after a compaction what it covered before. With stable row ids its files stay as they are.

Merges, updates and deletes go on meanwhile. Where rows of the old fragments were deleted since
they were copied, the commit deletes them from the new fragments too, so however often that
happens a piece is copied once. Only what was rewritten otherwise in the meantime is planned again,
a few times with a pause; what is still due then is left for the next compaction, and the report
says so. No conflict reaches a caller.

Pieces and what became of them are small values that can be pickled. A crash leaves at most files
that no version names, for clean-up to find.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import lance
from lance.optimize import Compaction, CompactionTask

from penstock.errors import InvalidInput, NotATable, VersionNotFound
from penstock.memwal.base_table import BaseTable
from penstock.memwal.compact_commit import commit
from penstock.memwal.compact_fit import (
    FRAGMENT_REUSE,
    Compacted,
    CompactionPiece,
    CompactionReport,
)
from penstock.memwal.fragments import sync_data
from penstock.memwal.table_versions import version_exists

TARGET_ROWS = 1 << 20
"""Fragments with fewer rows are small."""
DELETION_SHARE = 0.1
"""A fragment with a larger share of deleted rows is rewritten, even by itself."""
_ROUNDS = 4


def compact_all(
    table: BaseTable,
    *,
    target_rows: int = TARGET_ROWS,
    deletion_share: float = DELETION_SHARE,
    max_bytes: int | None = None,
    defer_index_remap: bool = False,
    gradual: bool = False,
) -> CompactionReport:
    """Compact what is due, piece by piece: each is one version, and lands by itself."""
    _check(target_rows, deletion_share, max_bytes)
    report = CompactionReport()
    for attempt in table.seams.attempts():
        pieces = plan_compaction(
            table,
            target_rows=target_rows,
            deletion_share=deletion_share,
            defer_index_remap=defer_index_remap,
            gradual=gradual,
        )
        left = 0
        for number, piece in enumerate(pieces):
            read_bytes = report.bytes_before + piece.size_bytes
            if max_bytes is not None and report.pieces and read_bytes > max_bytes:
                return report.leaving(left + len(pieces) - number)
            done = compact_one(table, piece)
            left += done.left
            report += done
        report = report.leaving(left)
        if not left or attempt + 1 >= _ROUNDS:
            break
    return report


def compact_one(table: BaseTable, piece: CompactionPiece) -> CompactionReport:
    """Copy and commit; the piece is left if clean-up took the version it was planned on."""
    try:
        return commit_compaction(table, [compact_piece(table, piece)])
    except VersionNotFound:
        return CompactionReport(left=1)


# --- plan ----------------------------------------------------------------------------------


def plan_compaction(
    table: BaseTable,
    *,
    target_rows: int = TARGET_ROWS,
    deletion_share: float = DELETION_SHARE,
    max_bytes: int | None = None,
    defer_index_remap: bool = False,
    gradual: bool = False,
) -> list[CompactionPiece]:
    """What is due, oldest fragments first; nothing if nothing is.

    `max_bytes` bounds what all pieces together read, but one piece is always among them. With
    `gradual`, a fragment waits until those beside it have as many rows: so a large one is not
    copied each time a few rows are added, and there are still few fragments.

    With `defer_index_remap` the indexes of a table without stable row ids are not rewritten, but
    told where the rows went; from then on all compactions of the table do so. With stable row ids
    there is nothing to rewrite.
    """
    _check(target_rows, deletion_share, max_bytes)
    base = table.snapshot()
    dataset = base.dataset
    defers = defers_remap(dataset, defer_index_remap)
    options: Any = {
        "target_rows_per_fragment": target_rows,
        "materialize_deletions": True,
        "materialize_deletions_threshold": deletion_share,
        "defer_index_remap": defers,
        "excluded_fragment_ids": [],
    }
    while True:
        tasks = Compaction.plan(dataset, options).tasks if base.rows else []
        if not gradual:
            break
        waiting = [f for task in tasks for f in _outweighing(task.fragments, deletion_share)]
        if not waiting:
            break
        options["excluded_fragment_ids"] += waiting
    pieces = [_piece(task, defers) for task in tasks]
    if max_bytes is None:
        return pieces
    return list(_within(pieces, max_bytes))


def defers_remap(dataset: lance.LanceDataset, wanted: bool) -> bool:
    if dataset.has_stable_row_ids:
        return False
    # Once it was deferred it must be again: Lance, rewriting an index whose rows have moved
    # before, takes them for deleted.
    known = (index.name for index in dataset.describe_indices())
    return wanted or FRAGMENT_REUSE in known


def _check(target_rows: Any, deletion_share: Any, max_bytes: Any) -> None:
    for name, value in (("target_rows", target_rows), ("max_bytes", max_bytes)):
        if value is None and name == "max_bytes":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidInput(f"{name} must be a whole number from 1 on, not {value!r}")
    number = isinstance(deletion_share, int | float) and not isinstance(deletion_share, bool)
    if not number or not 0.0 <= deletion_share < 1.0:
        raise InvalidInput(
            f"deletion_share must be a number from 0 up to but not 1, not {deletion_share!r}"
        )


def _outweighing(fragments: Sequence[Any], deletion_share: float) -> list[int]:
    """The fragment that has more rows than all others together, unless it is due by itself."""
    if any(f.num_deletions > deletion_share * f.physical_rows for f in fragments):
        return []
    rows = [f.num_rows for f in fragments]
    largest = max(range(len(rows)), key=rows.__getitem__)
    return [fragments[largest].id] if 2 * rows[largest] > sum(rows) else []


def _piece(task: Any, defers: bool) -> CompactionPiece:
    fragments = task.fragments
    return CompactionPiece(
        task=task.json(),
        version=task.read_version,
        fragments=tuple(f.id for f in fragments),
        rows=sum(f.num_rows for f in fragments),
        deleted_rows=sum(f.num_deletions for f in fragments),
        size_bytes=sum(file.file_size_bytes or 0 for f in fragments for file in f.files),
        files=sum(len(f.files) + (f.deletion_file is not None) for f in fragments),
        defers_remap=defers,
    )


def _within(pieces: Sequence[CompactionPiece], max_bytes: int) -> Iterator[CompactionPiece]:
    left_bytes = max_bytes
    for number, piece in enumerate(pieces):
        if number and piece.size_bytes > left_bytes:
            return
        left_bytes -= piece.size_bytes
        yield piece


# --- run -----------------------------------------------------------------------------------


def compact_piece(table: BaseTable, piece: CompactionPiece) -> Compacted:
    """Write the live rows of a piece as new fragments; they are in no version yet."""
    try:
        dataset = table.dataset(piece.version)
        kind: Any = CompactionTask  # Lance's stubs describe another class than the one it has
        result = kind.from_json(piece.task).execute(dataset)
    except (NotATable, OSError, ValueError, RuntimeError) as error:
        if version_exists(table.store, piece.version):
            raise
        raise VersionNotFound(
            f"{table.uri}: version {piece.version}, which a compaction was planned on, was cleaned "
            "up; plan it again"
        ) from error
    sync_data(table.store, result.new_fragments)
    return Compacted(piece, json.dumps(json.loads(result.json()), separators=(",", ":")))


# --- commit --------------------------------------------------------------------------------


def commit_compaction(table: BaseTable, compacted: Sequence[Compacted]) -> CompactionReport:
    """Publish what still fits; the rest is counted as left, and is to be planned again."""
    return commit(table, compacted)
