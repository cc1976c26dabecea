"""The shape of a table's rows: as users see them, and as the WAL and generations hold them.

WAL rows have every column of the table plus `_tombstone`, last. A delete is a row of nulls that
keeps its key, so columns other than the key are nullable here whatever the table says. Columns
are matched by Lance's field id, so that an entry written before a column was renamed, added or
dropped is still read correctly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from penstock.errors import InvalidInput
from penstock.index.primary_key import primary_key_columns
from penstock.memwal.wal import TOMBSTONE

FIELD_ID = b"lance:field_id"


@dataclass(frozen=True, slots=True)
class TableShape:
    schema: pa.Schema
    field_ids: Mapping[str, int]
    key_columns: tuple[str, ...]
    wal_schema: pa.Schema

    @classmethod
    def of(cls, schema: pa.Schema, field_ids: Mapping[str, int]) -> TableShape:
        key_columns = primary_key_columns(schema)
        fields = []
        for field in schema:
            metadata = dict(field.metadata or {})
            metadata[FIELD_ID] = str(field_ids[field.name]).encode()
            nullable = field.name not in key_columns
            fields.append(pa.field(field.name, field.type, nullable, metadata))
        fields.append(pa.field(TOMBSTONE, pa.bool_(), nullable=False))
        return cls(schema, dict(field_ids), key_columns, pa.schema(fields))

    def is_like(self, other: TableShape) -> bool:
        """Whether rows of one shape can stand beside rows of the other as they are."""
        return self.field_ids == other.field_ids and bool(
            self.schema.equals(other.schema, check_metadata=True)
        )

    @property
    def columns_by_id(self) -> dict[int, str]:
        return {field_id: name for name, field_id in self.field_ids.items()}

    def names_in(self, other: TableShape) -> dict[str, str]:
        """What the columns are called in another shape, those that it has."""
        there = other.columns_by_id
        return {name: there[i] for name, i in self.field_ids.items() if i in there}

    def arrange(self, rows: pa.RecordBatch, given: TableShape) -> pa.RecordBatch:
        """Rows of another shape: their columns, by field id, and null where they have none."""
        names = self.names_in(given)
        columns = [
            rows.column(names[field.name])
            if names.get(field.name) in rows.schema.names
            else pa.nulls(rows.num_rows, field.type)
            for field in self.schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema(list(self.schema)))

    def wal_rows(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of the table, in schema order, as WAL rows."""
        live = _repeated(False, rows.num_rows)
        return pa.RecordBatch.from_arrays([*rows.columns, live], schema=self.wal_schema)

    def tombstones(self, keys: Mapping[str, pa.Array]) -> pa.RecordBatch:
        """WAL rows that delete the given keys."""
        rows = len(next(iter(keys.values())))
        columns = [
            keys[field.name] if field.name in keys else pa.nulls(rows, field.type)
            for field in self.schema
        ]
        dead = _repeated(True, rows)
        return pa.RecordBatch.from_arrays([*columns, dead], schema=self.wal_schema)

    def align(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch read from a WAL entry of any age, in today's shape."""
        schema = batch.schema
        if schema.equals(self.wal_schema, check_metadata=True):
            return batch
        if schema.equals(self.wal_schema) and _ids(schema) == _ids(self.wal_schema):
            return batch
        by_id: dict[bytes, int] = {}
        by_name: dict[str, int] = {}
        for ordinal, field in enumerate(schema):
            field_id = (field.metadata or {}).get(FIELD_ID)
            if field_id is not None:
                by_id[field_id] = ordinal
            else:
                by_name[field.name] = ordinal
        columns = []
        for field in self.wal_schema:
            ordinal_or_none = by_id.get((field.metadata or {}).get(FIELD_ID, b""))
            if ordinal_or_none is None:
                ordinal_or_none = by_name.get(field.name)
            if ordinal_or_none is not None:
                column = batch.column(ordinal_or_none)
                columns.append(column if column.type == field.type else column.cast(field.type))
            elif field.name == TOMBSTONE:
                columns.append(_repeated(False, batch.num_rows))
            else:
                columns.append(pa.nulls(batch.num_rows, field.type))
        return pa.RecordBatch.from_arrays(columns, schema=self.wal_schema)


def check_column_names(names: Sequence[str]) -> None:
    """Refuse names that columns of a live table cannot have."""
    if len(set(names)) != len(names):
        raise InvalidInput(f"a column appears twice among {list(names)}")
    for name in names:
        if not isinstance(name, str) or not name or name[0] == "_" or set(name) & set("\0.`"):
            raise InvalidInput(
                f"{name!r} cannot name a column: no leading '_' ({TOMBSTONE}, _rowid and the like "
                "are taken), no '.', no '`', not empty"
            )


def _ids(schema: pa.Schema) -> list[bytes | None]:
    """Field ids of the columns: a name alone may be that of a column dropped and added again."""
    return [(field.metadata or {}).get(FIELD_ID) for field in schema]


_READY_ROWS = 8192
_READY = {value: pa.repeat(pa.scalar(value), _READY_ROWS) for value in (False, True)}


def _repeated(value: bool, rows: int) -> pa.Array:
    """So many times the same tombstone flag; cut from one array where it is long enough."""
    if rows <= _READY_ROWS:
        return _READY[value].slice(0, rows)
    return pa.repeat(pa.scalar(value), rows)
