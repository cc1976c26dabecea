"""Changing the columns of a live table: adding, renaming and dropping them.

Only the schema changes, in one new version of the base table; no row is touched. What is in the
WAL, in MemTables and in generations was written with the columns of its time, and so was much of
the base. All of it is read by field id: an added column is null in older rows, a renamed one has
its values under the new name, a dropped one is not seen.

    columns of the newest version --change--> columns --commit--> the very next version

Invariants
- A field id is never used again, or the values of a dropped column would come back under the name
  of a new one. Lance reuses ids that no file of the base names; rows in front of the base may still
  have them. So the highest id ever used is kept in the table's config, and ids count on from it.
- A change is checked against the version it is committed on, and is the very next version or is
  checked again (`table_commit`). Merges, compactions and other writes that are under way stay
  valid: their fragments know columns by field id, too.
- Key columns, and those that regions are divided by, stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import lance
import pyarrow as pa
from lance.schema import LanceSchema

from penstock.errors import InvalidInput, NotATable, StorageError
from penstock.index.base import SYSTEM_INDEX_PREFIX
from penstock.index.primary_key import primary_key_columns
from penstock.memwal import wire
from penstock.memwal.base_table import BaseTable
from penstock.memwal.flush import check_field_ids
from penstock.memwal.index_details import MemWalIndexDetails
from penstock.memwal.packed_specs import packed_specs
from penstock.memwal.shape import TableShape, check_column_names
from penstock.memwal.table_commit import commit_index

MAX_FIELD_ID = "penstock.max_field_id"
"""The config key under which a table keeps the highest field id it ever had."""
_NO_PARENT = -1

NewColumns: TypeAlias = "pa.Field | pa.Schema | Mapping[str, pa.DataType | str]"


@dataclass(frozen=True, slots=True)
class _Version:
    """The version of the table that a change starts from."""

    dataset: lance.LanceDataset
    details: MemWalIndexDetails
    shape: TableShape

    def checked(self, name: object) -> str:
        """The name of a column that is there."""
        if not isinstance(name, str) or name not in self.shape.schema.names:
            raise InvalidInput(f"no column {name!r}; the table has {', '.join(self.names)}")
        return name

    @property
    def names(self) -> list[str]:
        return list(self.shape.schema.names)

    def refuse_key(self, name: str, what: str) -> None:
        if name in self.shape.key_columns:
            raise InvalidInput(
                f"column {name!r} belongs to the primary key {list(self.shape.key_columns)} and "
                f"cannot be {what}; copy the rows into a new table with the key you want"
            )

    def refuse_region_source(self, name: str, what: str) -> None:
        spec = self.details.current_spec
        sources = {i for field in spec.fields for i in field.source_ids} if spec else set()
        if self.shape.field_ids[name] in sources:
            raise InvalidInput(
                f"the regions of the table are divided by column {name!r}, which therefore cannot "
                f"be {what}; divide it by another with set_regions(…) first"
            )


class _Fields:
    """The fields of a Lance schema, those inside others too, with their ids."""

    def __init__(self, schema: LanceSchema) -> None:
        # Pickling is how a schema shows its ids, and how one with given ids is made.
        pickled: Any = schema.__reduce__()
        self._make, (self._metadata, *stored) = pickled
        self._fields = [wire.new("SchemaField") for _ in stored]
        for field, data in zip(self._fields, stored, strict=True):
            field.ParseFromString(data)

    @property
    def max_id(self) -> int:
        return max((field.id for field in self._fields), default=-1)

    def column(self, name: str) -> Any:
        return next(f for f in self._fields if f.name == name and f.parent_id == _NO_PARENT)

    def inside(self, name: str) -> set[int]:
        """The ids of a column and of everything in it."""
        ids = {self.column(name).id}
        for field in self._fields:  # children come after their parent
            if field.parent_id in ids:
                ids.add(field.id)
        return ids

    def drop(self, ids: set[int]) -> None:
        self._fields = [field for field in self._fields if field.id not in ids]

    def add(self, others: _Fields, first_id: int) -> None:
        for field in others._fields:
            field.id += first_id
            if field.parent_id != _NO_PARENT:
                field.parent_id += first_id
            self._fields.append(field)

    def schema(self) -> LanceSchema:
        stored = [field.SerializeToString() for field in self._fields]
        made: LanceSchema = self._make(self._metadata, *stored)
        return made


# --- changes -------------------------------------------------------------------------------


def add_columns(table: BaseTable, columns: NewColumns) -> int:
    """Add columns at the end, null in every row there is; returns the version that has them."""
    added = new_fields(columns)

    def change(before: _Version, fields: _Fields, next_id: int) -> None:
        for name in added.names:
            _check_free(before, name)
        try:
            new = LanceSchema.from_pyarrow(added)
        except (ValueError, OSError, NotImplementedError, pa.ArrowException) as error:
            reason = str(error).partition(", /")[0]
            raise InvalidInput(f"columns of these types cannot be stored: {reason}") from error
        fields.add(_Fields(new), next_id)

    return _commit(table, change)


def rename_column(table: BaseTable, old: str, new: str) -> int:
    """Give a column another name; returns the version in which it has it."""
    check_column_names([new])

    def change(before: _Version, fields: _Fields, next_id: int) -> None:
        name = before.checked(old)
        before.refuse_key(name, "renamed")
        _check_free(before, new)
        fields.column(name).name = new

    return _commit(table, change)


def drop_columns(table: BaseTable, names: str | Sequence[str]) -> int:
    """Take columns out of the table; returns the version without them."""
    chosen = [names] if isinstance(names, str) else names
    if not isinstance(chosen, list | tuple) or not chosen:
        raise InvalidInput(f"names must be a column's name or a list of names, not {names!r}")

    def change(before: _Version, fields: _Fields, next_id: int) -> None:
        gone: set[int] = set()
        for name in map(before.checked, chosen):
            before.refuse_key(name, "dropped")
            before.refuse_region_source(name, "dropped")
            ids = fields.inside(name)
            _refuse_indexed(before, name, ids)
            gone |= ids
        if set(before.names) <= set(chosen):
            raise InvalidInput("a table needs at least one column; drop_table removes it entirely")
        fields.drop(gone)

    return _commit(table, change)


def refuse_type_change(table: BaseTable, name: str, data_type: pa.DataType) -> NoReturn:
    """Say why a column keeps its type, and what to do instead."""
    base = table.snapshot()
    before = _Version(base.dataset, base.details, base.shape)
    before.checked(name)
    if not isinstance(data_type, pa.DataType):
        raise InvalidInput(f"the type of {name!r} must be a pyarrow type, not {data_type!r}")
    before.refuse_key(name, "given another type")
    before.refuse_region_source(name, "given another type")
    raise InvalidInput(
        f"column {name!r} is {base.shape.schema.field(name).type} and cannot become {data_type}: "
        "rows in the log and in generations could not be matched to it any more. Add a column of "
        "the new type, fill it, drop this one and rename the new one"
    )


def _check_free(before: _Version, name: str) -> None:
    if name in before.names:
        raise InvalidInput(f"the table has a column {name!r} already: {', '.join(before.names)}")


def _refuse_indexed(before: _Version, name: str, ids: set[int]) -> None:
    indexed = [
        index.name
        for index in before.dataset.describe_indices()
        if not index.name.startswith(SYSTEM_INDEX_PREFIX) and ids & set(index.fields)
    ]
    indexed += [spec.name for spec in packed_specs(before.details) if spec.field_id in ids]
    if indexed:
        raise InvalidInput(
            f"column {name!r} has the index {indexed[0]!r}; drop that before the column, with "
            f'drop_index("{indexed[0]}")'
        )


def computed_columns(table: BaseTable, columns: object) -> tuple[Any, dict[str, str]]:
    """The columns with a type in place of each SQL expression, and the expressions."""
    if not isinstance(columns, Mapping):
        return columns, {}
    computed = {name: sql for name, sql in columns.items() if isinstance(sql, str)}
    if not computed:
        return columns, {}
    # Only here, because loading DataFusion takes longer than many a program runs.
    from penstock.memwal.filters import value_type

    schema = table.snapshot().shape.schema
    types = {
        name: value_type(sql, schema, f"the value of column {name!r}")
        for name, sql in computed.items()
    }
    return {**columns, **types}, computed


def new_fields(columns: NewColumns) -> pa.Schema:
    """The columns to add as a schema, if they can be added at all."""
    if isinstance(columns, pa.Field):
        columns = pa.schema([columns])
    elif isinstance(columns, Mapping):
        for name, kind in columns.items():
            if not isinstance(name, str) or not isinstance(kind, pa.DataType):
                raise InvalidInput(
                    "columns must map names to pyarrow types or SQL expressions, and "
                    f"{name!r} is mapped to {kind!r}"
                )
        columns = pa.schema([pa.field(name, kind) for name, kind in columns.items()])
    if not isinstance(columns, pa.Schema):
        raise InvalidInput(
            "columns must be a pyarrow Field, a Schema, or a dict from names to types or SQL "
            f"expressions, not {type(columns).__name__}"
        )
    if not len(columns):
        raise InvalidInput("name at least one column to add")
    check_column_names(columns.names)
    if primary_key_columns(columns):
        raise InvalidInput(
            f"{list(primary_key_columns(columns))} would become part of the primary key, which a "
            "table is created with; leave the metadata that marks key columns out"
        )
    for field in columns:
        if not field.nullable:
            raise InvalidInput(
                f"column {field.name!r} is not nullable, and the rows that are there have no value "
                "for it; add it as a nullable one"
            )
    return columns.remove_metadata()


# --- commit --------------------------------------------------------------------------------


def _commit(table: BaseTable, change: Callable[[_Version, _Fields, int], None]) -> int:
    """Publish what `change` makes of the fields of the newest version.

    It gets the first id that was never used, may run several times, and refuses what it must
    before anything is written.
    """
    current: list[MemWalIndexDetails] = []

    def keep(details: MemWalIndexDetails | None) -> MemWalIndexDetails:
        assert details is not None, "a table without a MemWAL index cannot be opened"
        current[:] = [details]
        return details

    def operations(dataset: lance.LanceDataset) -> list[Any]:
        before = _Version(dataset, current[0], _shape(dataset.lance_schema))
        fields = _Fields(dataset.lance_schema)
        known = dataset.config().get(MAX_FIELD_ID)
        used = max(fields.max_id, dataset.max_field_id, -1 if known is None else int(known))
        change(before, fields, used + 1)
        schema = fields.schema()
        check_field_ids(_shape(schema).wal_schema)
        highest: dict[str, str | None] = {MAX_FIELD_ID: str(max(used, fields.max_id))}
        return [
            lance.LanceOperation.UpdateConfig(
                config_updates=lance.LanceOperation.UpdateMap(updates=highest)
            ),
            lance.LanceOperation.Project(schema, preserves_nullability=True),
        ]

    _, version = commit_index(
        table.store, table.storage_options, keep, table.seams, operation=operations
    )
    with suppress(StorageError, NotATable):  # so that writers of this process notice at once
        table.snapshot()
    return version


def _shape(schema: LanceSchema) -> TableShape:
    ids = {field.name(): field.id() for field in schema.fields()}
    return TableShape.of(schema.to_pyarrow(), ids)
