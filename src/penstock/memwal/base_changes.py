"""Changing many rows of the base table in one version.

Fragment by fragment the rows to change are found, and the fragment is changed in one of two ways:

    columns   the columns that get new values are written anew, for all rows of the fragment; the
              other columns, vectors and texts among them, stay where they are, and so do row ids
              and the indexes on the other columns
    rows      the rows are deleted and written anew, whole, to a new fragment; a delete ends there

Columns are rewritten where at least `COLUMN_SHARE` of the fragment's rows change, unless an index
reads one of them: an index that is extended later would still have the old values under the ids
of rows that kept theirs, and Lance's scalar and text indexes would find them by it. Rows that are
written anew have new ids, for which no index has an older value.

What was found out and written for a fragment is kept while its files are the same. If another
commit comes first, only the fragments it touched are looked at again (`prepare`).

Invariants
- A row that something in front of the base hides is left alone.
- Everything that `prepare` names is durable. What it wrote in vain `discard` removes; after a
  crash it is named by nobody, and clean-up finds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from lance.fragment import FragmentMetadata, LanceFragment, write_fragments

from penstock.index.primary_key import key_array
from penstock.memwal.base_table import BaseTable
from penstock.memwal.fragments import Offsets, contents, data_keys, offsets_of
from penstock.memwal.freshness import Mask
from penstock.memwal.selection import Change, rewritten
from penstock.memwal.sources import ROW_ADDRESS, ROW_ID, chosen_rows
from penstock.memwal.view import View

COLUMN_SHARE = 0.05
"""Columns are rewritten where at least this share of a fragment's rows change."""
COLUMN_BYTES = 256 << 20
"""New values of one fragment that are held in memory; with more, rows are rewritten, streaming."""
PACK_ROWS = 250_000
"""About so many rewritten rows, of whole fragments, are written and kept together."""

_Found = tuple[str, LanceFragment, Offsets]


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """A fragment with new columns."""

    fragment: FragmentMetadata
    fields: tuple[int, ...]
    offsets: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    operation: Any
    """None if no row of the base has to change."""
    rows: int


class BaseChange:
    """One change, prepared on one version after the other until it is committed.

    All of them have the columns in whose names the change is understood.
    """

    def __init__(self, table: BaseTable, asked: Change) -> None:
        self.asked = asked
        self._table = table
        self._selection = asked.selection
        self._values = asked.values
        self._found: dict[str, Offsets] = {}
        self._columns: dict[str, _Columns | None] = {}
        self._lessened: dict[str, FragmentMetadata | None] = {}
        self._packs: dict[tuple[str, ...], list[FragmentMetadata]] = {}
        self._named: set[str] = set()
        self._older: set[str] = set()
        """Files that were there before: those of the fragments that were looked at."""

    def prepare(self, view: View) -> Prepared:
        """The operation that changes the base of this view; it must be committed on no other."""
        if self._values is not None and not self._values.columns:
            return Prepared(None, 0)  # those that were to be set are dropped
        dataset = view.base.dataset
        by_columns = self._values is not None and not (
            _indexed_columns(dataset) & set(self._values.columns)
        )
        # All of them are looked at before anything is written: a value may turn out to be wrong.
        found = [
            (identity, fragment, offsets)
            for fragment in dataset.get_fragments()
            if len(offsets := self._find(view, identity := contents(fragment), fragment))
        ]
        rows = sum(len(offsets) for _, _, offsets in found)
        by_column: list[_Columns] = []
        by_rows: list[_Found] = []
        for one in found:
            columns = None
            if by_columns and len(one[2]) >= COLUMN_SHARE * one[1].physical_rows:
                columns = self._rewrite_columns(dataset, *one)
            if columns is None:
                by_rows.append(one)
            else:
                by_column.append(columns)
        lessened = {one[1].fragment_id: self._without_rows(one) for one in by_rows}
        updated = [fragment for fragment in lessened.values() if fragment is not None]
        removed = [number for number, fragment in lessened.items() if fragment is None]
        if updated:
            self._table.store.sync("_deletions")
        if not rows:
            return Prepared(None, 0)
        new: list[FragmentMetadata] = []
        if self._values is None:
            operation: Any = lance.LanceOperation.Delete(
                updated, removed, self._selection.sql or "true"
            )
        else:
            new = [part for pack in _packs(by_rows) for part in self._rewrite_rows(dataset, pack)]
            operation = lance.LanceOperation.Update(
                removed_fragment_ids=removed,
                updated_fragments=[*updated, *(columns.fragment for columns in by_column)],
                new_fragments=new,
                fields_modified=sorted({field for part in by_column for field in part.fields}),
                # Without a mode where rows are written anew: with "rewrite_rows" Lance takes it
                # that they keep their ids, and that every index covers their new fragments.
                update_mode="rewrite_columns" if by_column else "",
                updated_fragment_offsets={
                    columns.fragment.id: columns.offsets for columns in by_column
                }
                or None,
            )
        self._named = _keys([*new, *updated, *(columns.fragment for columns in by_column)])
        return Prepared(operation, rows)

    def discard(self, *, committed: bool) -> None:
        """Remove what was written and is not part of what was committed."""
        written = [columns.fragment for columns in self._columns.values() if columns is not None]
        written += [part for pack in self._packs.values() for part in pack]
        written += [fragment for fragment in self._lessened.values() if fragment is not None]
        kept = self._named if committed else set()
        for key in sorted(_keys(written) - self._older - kept):
            self._table.store.delete(key)

    # --- one fragment ----------------------------------------------------------------------

    def _find(self, view: View, identity: str, fragment: LanceFragment) -> Offsets:
        """Where the rows are that have to change, all of which can be."""
        self._older |= _keys([fragment.metadata])
        known = self._found.get(identity)
        if known is not None:
            return known
        columns = list(self._selection.columns)
        if self._values is not None:
            columns += [name for name in self._values.reads if name not in columns]
        hiding = bool(view.shape.key_columns and view.sources) and not view.freshness.empty
        if hiding and view.hidden_base_rows is None:
            columns += [name for name in view.shape.key_columns if name not in columns]
        found = [np.empty(0, dtype=np.int64)]
        for batch in self._scan(view.base.dataset, fragment, columns):
            mask = self._selection.further(batch)
            if hiding:
                mask &= _visible(view, batch)
            if self._values is not None and self._values.reads:
                self._values.apply(chosen_rows(batch, mask))
            found.append(offsets_of(batch.column(ROW_ADDRESS).to_numpy())[mask])
        self._found[identity] = offsets = np.sort(np.concatenate(found))
        return offsets

    def _scan(
        self, dataset: lance.LanceDataset, fragment: LanceFragment, columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        scanner = dataset.scanner(
            columns=list(columns),
            filter=self._selection.sql,
            fragments=[fragment],
            with_row_id=True,
            with_row_address=True,
        )
        yield from scanner.to_batches()

    def _chosen(
        self,
        dataset: lance.LanceDataset,
        fragment: LanceFragment,
        offsets: Offsets,
        columns: Sequence[str],
    ) -> Iterator[pa.RecordBatch]:
        """The rows at these offsets."""
        wanted = np.zeros(fragment.physical_rows, dtype=np.bool_)
        wanted[offsets] = True
        for batch in self._scan(dataset, fragment, columns):
            mask = wanted[offsets_of(batch.column(ROW_ADDRESS).to_numpy())]
            if mask.any():
                yield batch if mask.all() else chosen_rows(batch, mask)

    def _without_rows(self, found: _Found) -> FragmentMetadata | None:
        """The fragment with a deletion vector; None if nothing is left of it."""
        identity, fragment, offsets = found
        if identity not in self._lessened:
            self._lessened[identity] = fragment.delete_rows(offsets.tolist())
        return self._lessened[identity]

    def _rewrite_columns(
        self,
        dataset: lance.LanceDataset,
        identity: str,
        fragment: LanceFragment,
        offsets: Offsets,
    ) -> _Columns | None:
        """The fragment with new columns; None if they are too large to be held in memory."""
        if identity not in self._columns:
            self._columns[identity] = self._write_columns(dataset, fragment, offsets)
        return self._columns[identity]

    def _write_columns(
        self, dataset: lance.LanceDataset, fragment: LanceFragment, offsets: Offsets
    ) -> _Columns | None:
        assert self._values is not None
        batches: list[pa.RecordBatch] = []
        held_bytes = 0
        for rows in self._chosen(dataset, fragment, offsets, self._values.reads):
            values = self._values.apply(rows)
            batches.append(pa.RecordBatch.from_pydict({ROW_ID: rows.column(ROW_ID), **values}))
            held_bytes += batches[-1].nbytes
            if held_bytes > COLUMN_BYTES:
                return None
        changed, fields, matched = fragment.update_columns(
            pa.Table.from_batches(batches).to_reader(), with_offsets=True
        )
        self._sync([changed])
        return _Columns(changed, tuple(fields), matched)

    def _rewrite_rows(
        self, dataset: lance.LanceDataset, pack: Sequence[_Found]
    ) -> list[FragmentMetadata]:
        """New fragments with the rows of these, changed."""
        which = tuple(identity for identity, _, _ in pack)
        known = self._packs.get(which)
        if known is None:
            known = self._packs[which] = self._write_rows(dataset, pack)
        return known

    def _write_rows(
        self, dataset: lance.LanceDataset, pack: Sequence[_Found]
    ) -> list[FragmentMetadata]:
        schema, values = dataset.schema, self._values
        assert values is not None

        def rows() -> Iterator[pa.RecordBatch]:
            for _, fragment, offsets in pack:
                for batch in self._chosen(dataset, fragment, offsets, schema.names):
                    columns = [batch.column(name) for name in schema.names]
                    yield rewritten(pa.RecordBatch.from_arrays(columns, schema=schema), values)

        reader = pa.RecordBatchReader.from_batches(schema, rows())
        written: list[FragmentMetadata] = write_fragments(reader, dataset, mode="append")
        self._sync(written)
        return written

    def _sync(self, fragments: Iterable[FragmentMetadata]) -> None:
        for key in sorted(_keys(fragments) - self._older):
            self._table.store.sync(key)


def _packs(
    fragments: Sequence[_Found],
) -> Iterator[list[_Found]]:
    """Neighbours together until they have enough rows, so that no fragment is very small."""
    pack: list[_Found] = []
    rows = 0
    for one in fragments:
        pack.append(one)
        rows += len(one[2])
        if rows >= PACK_ROWS:
            yield pack
            pack, rows = [], 0
    if pack:
        yield pack


def _visible(view: View, rows: pa.RecordBatch) -> Mask:
    """Which rows of the base nothing in front of it hides."""
    hidden = view.hidden_base_rows
    if hidden is not None:
        return ~hidden.contains(rows.column(ROW_ID).to_numpy())
    keys = key_array(rows, view.shape.key_columns)
    older: Mask = np.asarray(pc.is_in(keys, value_set=view.freshness.distinct))
    return ~older


def _keys(fragments: Iterable[FragmentMetadata]) -> set[str]:
    """The objects that fragments consist of, deletion vectors among them."""
    keys: set[str] = set()
    for fragment in fragments:
        keys.update(data_keys([fragment]))
        if fragment.deletion_file is not None:
            keys.add(str(fragment.deletion_file.path(fragment.id)))
    return keys


def _indexed_columns(dataset: lance.LanceDataset) -> set[str]:
    """The columns that some index reads, or reads a member of."""
    owners: dict[int, str] = {}

    def own(field: Any, column: str) -> None:
        owners[field.id()] = column
        for child in field.children():
            own(child, column)

    for field in dataset.lance_schema.fields():
        own(field, field.name())
    used = {number for index in dataset.describe_indices() for number in index.fields}
    return {owners[number] for number in used if number in owners}
