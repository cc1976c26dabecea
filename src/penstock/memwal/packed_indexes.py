"""Packed scalar indexes on a table's columns: what is declared, and one file per data file.

    create_index("tenant", "packed_hybrid")  ->  a line in the MemWAL index's configuration
    flush                                    ->  {generation}/_packed/{uid}.v3
    build_indexes                            ->  _penstock/packed/{uid}/{data file}.v3

A data file never changes, so neither does what its packed index says: rows are numbered as they
lie in the file, deleted ones too, and any version of the table that has the data file can use it.
A file that is missing costs time and nothing else: those rows are scanned. So values that a kind
cannot hold keep no row from being flushed, merged or found. And files are written without a
commit, whoever writes one twice writes the same, and clean-up may take them any time.

When a merge adopts a generation's data file, the index goes with it (`carry_over`).

Lance knows nothing of these indexes and does not need to. The declaration is part of a version
like everything in the MemWAL index; each declaration has an id of its own (`uid`), so a name that
is dropped and used again never meets files of its former self.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from penstock.errors import InvalidInput, ObjectNotFound, StorageError, VersionNotFound
from penstock.index.base import SYSTEM_INDEX_PREFIX
from penstock.memwal.base_table import BaseSnapshot, BaseTable
from penstock.memwal.index_details import MemWalIndexDetails
from penstock.memwal.packed_specs import (
    DECLARED,
    DIRECTORY,
    PackedSpec,
    column_file,
    packed_specs,
)
from penstock.memwal.table_commit import commit_details, commit_index

PACKED_KINDS = (
    "packed_hybrid",
    "packed_stlsort",
    "packed_bitmap",
    "packed_marisa",
    "packed_inverted",
    "packed_ngram",
)


# --- declaring -----------------------------------------------------------------------------


def checked_name(column: str, name: str | None) -> str:
    """The name of an index on a column, if it may have that."""
    chosen = f"{column}_idx" if name is None else name
    if not isinstance(chosen, str) or not chosen or chosen.startswith(SYSTEM_INDEX_PREFIX):
        raise InvalidInput(
            f"{chosen!r} cannot name an index; names are not empty, and those that begin with "
            f"{SYSTEM_INDEX_PREFIX!r} are Lance's own"
        )
    return chosen


def name_taken(table: BaseTable, name: str) -> InvalidInput:
    return InvalidInput(
        f"{table.uri} has an index {name!r} of another sort; drop it first, or give another name"
    )


def create(
    table: BaseTable,
    column: str,
    kind: str,
    name: str | None,
    options: Mapping[str, Any],
    run: Run | None = None,
) -> str:
    """Build an index of all data files, then declare it, in place of one of that name.

    `run` builds the files elsewhere. If it cannot be built of what is there, nothing changes.
    """
    spec = _prepared(table, column, kind, checked_name(column, name), options)
    build = run or (lambda plans: [build_packed(table, plan) for plan in plans])
    refused = [one.skipped for one in build(_lacking(table, spec)) if one.skipped is not None]
    if refused:
        table.store.delete_prefix(f"{DIRECTORY}/{spec.uid}")
        raise InvalidInput(refused[0])
    _declare(table, column, spec)
    build(plan_packed(table, [spec.name]))  # of what has come meanwhile
    return spec.name


def _prepared(
    table: BaseTable, column: str, kind: str, name: str, options: Mapping[str, Any]
) -> PackedSpec:
    from penstock.packed import build_index

    base = table.snapshot()
    _check_free(table, base, column, name)
    inner = kind.removeprefix("packed_")
    # An empty one tells whether the kind takes the column's type, and these options.
    build_index(inner, pa.array([], base.shape.schema.field(column).type), **options)
    try:
        json.dumps(dict(options))
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"options of {name!r} must be plain values: {error}") from error
    uid = table.seams.entropy.uuid4().hex
    return PackedSpec(name, base.shape.field_ids[column], inner, uid, dict(options))


def _check_free(table: BaseTable, base: BaseSnapshot, column: str, name: str) -> None:
    if column not in base.shape.schema.names:
        there = ", ".join(base.shape.schema.names)
        raise InvalidInput(f"no column {column!r}; the table has {there}")
    if name in (index.name for index in base.dataset.describe_indices()):
        raise name_taken(table, name)


def _declare(table: BaseTable, column: str, spec: PackedSpec) -> None:
    def change(details: MemWalIndexDetails | None) -> MemWalIndexDetails:
        assert details is not None
        base = table.snapshot()
        _check_free(table, base, _column_of(base, spec) or column, spec.name)
        return _with_defaults(details, {DECLARED + spec.name: spec.to_json()})

    commit_details(table.store, table.storage_options, change, table.seams)


def withdraw(table: BaseTable, name: str) -> int | None:
    """Take a declaration back; returns the version without it, None if there is none."""
    if name not in (spec.name for spec in packed_specs(table.snapshot().details)):
        return None

    def change(details: MemWalIndexDetails | None) -> MemWalIndexDetails | None:
        assert details is not None
        if DECLARED + name not in details.writer_config_defaults:
            return None
        return _with_defaults(details, {DECLARED + name: None})

    return commit_index(table.store, table.storage_options, change, table.seams)[1]


def _with_defaults(
    details: MemWalIndexDetails, changes: Mapping[str, str | None]
) -> MemWalIndexDetails:
    merged = {**details.writer_config_defaults, **changes}
    kept = {key: value for key, value in merged.items() if value is not None}
    return replace(details, writer_config_defaults=kept)


# --- building ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """One file to write: an index of one data file of the base."""

    spec: PackedSpec
    version: int
    fragment_id: int
    data_file: str
    rows: int


@dataclass(frozen=True, slots=True)
class PackedBuild:
    name: str
    uid: str
    rows: int
    size_bytes: int
    skipped: str | None = None
    """Why the kind cannot index what is in the file, which is scanned then."""


Run = Callable[[Sequence[PackedPlan]], Sequence[PackedBuild]]


def plan_packed(table: BaseTable, only: Sequence[str] | None = None) -> list[PackedPlan]:
    """The data files of the newest version that lack an index they should have."""
    declared = packed_specs(table.snapshot().details)
    chosen = [spec for spec in declared if only is None or spec.name in only]
    return [plan for spec in chosen for plan in _lacking(table, spec)]


def _lacking(table: BaseTable, spec: PackedSpec) -> list[PackedPlan]:
    base = table.snapshot()
    if _column_of(base, spec) is None:
        return []
    there = {meta.key for meta in table.store.list(f"{DIRECTORY}/{spec.uid}")}
    plans = []
    for fragment in base.dataset.get_fragments():
        file = column_file(fragment.metadata, spec.field_id)
        if file is not None and spec.key(file) not in there:
            rows = fragment.physical_rows
            plans.append(PackedPlan(spec, base.version, fragment.fragment_id, file, rows))
    return plans


def build_packed(table: BaseTable, plan: PackedPlan) -> PackedBuild:
    """Write one file, which counts from the moment it is there; nothing if its version is gone."""
    try:
        base = table.snapshot(plan.version)
    except VersionNotFound:
        return PackedBuild(plan.spec.name, plan.spec.uid, 0, 0)
    column = _column_of(base, plan.spec)
    fragment = base.dataset.get_fragment(plan.fragment_id)
    if column is None or fragment is None:
        return PackedBuild(plan.spec.name, plan.spec.uid, 0, 0)
    rows = fragment.scanner(
        columns=[column], with_row_id=True, include_deleted_rows=True
    ).to_table()
    if rows.num_rows != plan.rows:
        raise StorageError(
            f"{table.uri}: {plan.data_file} should have {plan.rows} rows and has {rows.num_rows}; "
            "run doctor() to see what is wrong with the table"
        )
    key = plan.spec.key(plan.data_file)
    try:
        size_bytes = plan.spec.write(table.store, key, rows.column(column))
    except InvalidInput as error:
        return PackedBuild(plan.spec.name, plan.spec.uid, 0, 0, skipped=str(error))
    return PackedBuild(plan.spec.name, plan.spec.uid, rows.num_rows, size_bytes)


def carry_over(table: BaseTable, base: BaseSnapshot, generation: str, data_file: str) -> None:
    """Give an adopted data file the indexes that its generation has."""
    for spec in packed_specs(base.details):
        try:
            table.store.copy(spec.generation_key(generation), spec.key(data_file))
        except ObjectNotFound:
            continue  # flushed before the index was declared: built with the others


def _column_of(base: BaseSnapshot, spec: PackedSpec) -> str | None:
    return base.shape.columns_by_id.get(spec.field_id)
