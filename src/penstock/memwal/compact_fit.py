"""Pieces of a compaction, and whether what they copied is still what the table has.

Between the plan and the commit the table goes on. What a piece has copied is compared with the
newest version, fragment by fragment:

    the same files, the same deletions     the piece fits as it is
    the same files, more rows deleted      it fits without these rows
    the fragment is gone                   none of its rows count any more, as if all were deleted
    other files, or rows came back         it is out of date

and so it is if an index covers a part of its fragments only, which a new one can then not say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
from lance.fragment import FragmentMetadata, LanceFragment
from lance.optimize import RewriteResult

from penstock.errors import Corruption, NotATable
from penstock.index.base import SYSTEM_INDEX_PREFIX
from penstock.memwal.base_table import BaseTable
from penstock.memwal.fragments import offsets_of
from penstock.memwal.index_details import INDEX_NAME
from penstock.memwal.sources import ROW_ADDRESS
from penstock.memwal.table_versions import version_exists

Rows = npt.NDArray[np.int64]

FRAGMENT_REUSE = "__lance_frag_reuse"
"""Where Lance keeps which rows moved, for indexes that were not rewritten."""


@dataclass(frozen=True, slots=True)
class CompactionPiece:
    """Adjacent fragments that are to become fewer, or to lose their deleted rows."""

    task: str
    """Lance's own description, as JSON."""
    version: int
    fragments: tuple[int, ...]
    rows: int
    deleted_rows: int
    size_bytes: int
    files: int
    defers_remap: bool = False


@dataclass(frozen=True, slots=True)
class Compacted:
    """A piece and the fragments that were written for it, as Lance describes them."""

    piece: CompactionPiece
    result: str


@dataclass(frozen=True, slots=True)
class CompactionReport:
    """What a compaction did."""

    pieces: int = 0
    """How many groups of fragments were rewritten."""
    fragments_before: int = 0
    fragments_after: int = 0
    rows: int = 0
    """Rows that were copied."""
    rows_dropped: int = 0
    """Deleted rows that are in no file any more."""
    files_before: int = 0
    files_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    left: int = 0
    """Groups that are due and were not rewritten: others changed them, or the limit was reached."""

    def __add__(self, other: CompactionReport) -> CompactionReport:
        return CompactionReport(
            *(getattr(self, name) + getattr(other, name) for name in self.__slots__)
        )

    def leaving(self, left: int) -> CompactionReport:
        return replace(self, left=left)

    def __str__(self) -> str:
        left = f"; {self.left} left for the next time" if self.left else ""
        if not self.pieces:
            return f"nothing was compacted{left}" if left else "nothing to compact"
        return (
            f"{self.fragments_before} fragments became {self.fragments_after}: {self.rows:,} rows "
            f"copied, {self.rows_dropped:,} deleted rows dropped, {self.files_before} files "
            f"({self.bytes_before:,} bytes) became {self.files_after} ({self.bytes_after:,} bytes)"
            f"{left}"
        )


def rewrite_of(compacted: Compacted) -> Any:
    return rewrite_from(compacted.result)


def rewrite_from(stored: str) -> Any:
    # Untyped, because Lance's stubs describe another class than the one it has.
    kind: Any = RewriteResult
    return kind.from_json(stored)


# --- what fits -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """A piece as the newest version has it."""

    compacted: Compacted
    old: tuple[FragmentMetadata, ...]
    """Those of its fragments that are still there."""
    new: tuple[FragmentMetadata, ...]
    gone: Rows
    """Of all rows that were copied, in order, the places of those that do not count any more."""
    untouched: bool


class Coverage:
    """Which fragments the indexes of a version cover, segment by segment."""

    def __init__(self, dataset: lance.LanceDataset) -> None:
        self.stable = bool(dataset.has_stable_row_ids)
        described = dataset.describe_indices()
        self.deferred = any(index.name == FRAGMENT_REUSE for index in described)
        self.indexes = [d for d in described if not d.name.startswith(SYSTEM_INDEX_PREFIX)]
        self.of_mem_wal = any(
            segment.fragment_ids
            for index in described
            if index.name == INDEX_NAME
            for segment in index.segments
        )
        """Whether the MemWAL index is said to cover fragments, which means nothing."""
        self.segments = {
            str(segment.uuid): frozenset(segment.fragment_ids)
            for index in self.indexes
            for segment in index.segments
        }

    def divides(self, numbers: frozenset[int]) -> bool:
        """Whether some index covers a part of these fragments."""
        return any(
            numbers & covered and not numbers <= covered for covered in self.segments.values()
        )

    def needs_lance(self, fit: Fit) -> bool:
        if self.stable:
            return False
        numbers = {fragment.id for fragment in fit.old}
        return self.deferred or any(numbers & covered for covered in self.segments.values())

    def by_name(self) -> dict[str, frozenset[int]]:
        return {
            index.name: frozenset().union(*(segment.fragment_ids for segment in index.segments))
            for index in self.indexes
        }


def fit_of(dataset: lance.LanceDataset, coverage: Coverage, copied: Copied) -> Fit | None:
    now = {part.fragment_id: part.metadata for part in dataset.get_fragments()}
    there = [part for part in copied.old if part.id in now]
    if not there or any(_data(part) != _data(now[part.id]) for part in there):
        return None
    if coverage.divides(frozenset(part.id for part in there)):
        return None
    changed = {
        part.id
        for part in copied.old
        if part.id not in now or _deletions(part) != _deletions(now[part.id])
    }
    gone = copied.gone(dataset, changed)
    if gone is None:
        return None
    old = tuple(now[part.id] for part in there)
    return Fit(copied.compacted, old, copied.new, gone, untouched=not changed)


def _data(fragment: FragmentMetadata) -> Any:
    described = fragment.to_json()
    return described["files"], described.get("overlays"), described["physical_rows"]


def _deletions(fragment: FragmentMetadata) -> Any:
    return fragment.to_json()["deletion_file"]


class Copied:
    """The rows that a piece has copied, fragment by fragment."""

    def __init__(self, table: BaseTable, compacted: Compacted) -> None:
        result = rewrite_of(compacted)
        self.compacted = compacted
        self.old: list[FragmentMetadata] = list(result.original_fragments)
        self.new: tuple[FragmentMetadata, ...] = tuple(result.new_fragments)
        self._table = table
        self._offsets: dict[int, Rows] = {}

    def gone(self, dataset: lance.LanceDataset, changed: set[int]) -> Rows | None:
        """The places of copied rows that are not there any more; None if that cannot be told."""
        if not changed:
            return np.empty(0, dtype=np.int64)
        try:
            self._read()
        except (NotATable, OSError, ValueError, RuntimeError):
            if version_exists(self._table.store, self.compacted.piece.version):
                raise
            return None
        parts = {part.fragment_id: part for part in dataset.get_fragments()}
        first, found = 0, [np.empty(0, dtype=np.int64)]
        for old in self.old:
            offsets = self._offsets[old.id]
            if old.id in changed:
                live = np.zeros(old.physical_rows, dtype=np.bool_)
                if old.id in parts:
                    live[_live_offsets(dataset, parts[old.id])] = True
                gone = ~live[offsets]
                if len(offsets) - np.count_nonzero(gone) < np.count_nonzero(live):
                    return None  # an older version was restored, and rows with it
                found.append(first + np.flatnonzero(gone))
            first += len(offsets)
        return np.concatenate(found)

    def _read(self) -> None:
        if self._offsets:
            return
        dataset = self._table.dataset(self.compacted.piece.version)
        parts = {part.fragment_id: part for part in dataset.get_fragments()}
        offsets = {old.id: _live_offsets(dataset, parts[old.id]) for old in self.old}
        rows = sum(map(len, offsets.values()))
        if rows != sum(part.physical_rows for part in self.new):
            raise Corruption(
                f"{self._table.uri}: a compaction copied {rows} rows of fragments "
                f"{self.compacted.piece.fragments} and wrote another number; nothing was "
                "committed, and the table is as it was"
            )
        self._offsets = offsets


def _live_offsets(dataset: lance.LanceDataset, part: LanceFragment) -> Rows:
    """The offsets of a fragment's live rows, in the order in which they are copied."""
    scanner = dataset.scanner(
        columns=[], with_row_address=True, fragments=[part], scan_in_order=True
    )
    found = [batch.column(ROW_ADDRESS).to_numpy() for batch in scanner.to_batches()]
    addresses = np.concatenate([np.empty(0, dtype=np.uint64), *found])
    return offsets_of(addresses)
