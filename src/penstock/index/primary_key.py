"""Primary keys: how they are declared, compared, encoded and stored beside a generation.

Owns the field metadata that marks key columns, the order-preserving encoding of composite keys,
the choice of the newest row per key, and the `_pk_index/` sidecar of a flushed generation.

A key is one Arrow value: the key column itself when there is one column, else the `Binary` that
`encode_keys` makes of several. Everything above this module passes such *key arrays* around and
never looks at the columns again.

Invariants
- Two rows have equal keys exactly when their key values are equal, and encoded composite keys sort
  as the tuples do.
- Row order is insert order: of several rows with one key the last is the newest.
- The sidecar lists every row of the generation, superseded ones too, sorted by key, then row.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InvalidInput, ObjectNotFound

PRIMARY_KEY_METADATA = b"lance-schema:unenforced-primary-key"
PRIMARY_KEY_POSITION_METADATA = b"lance-schema:unenforced-primary-key:position"

SUPPORTED_KEY_TYPES: tuple[pa.DataType, ...] = (
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.uint8(),
    pa.uint16(),
    pa.uint32(),
    pa.uint64(),
    pa.bool_(),
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.large_binary(),
)

PK_INDEX_DIRECTORY = "_pk_index"
PAGE_ROWS = 8192
_SIDECAR_FILE_VERSION = "2.0"
_CACHED_PAGES = 64
_SMALL_ROWS = 32
"""Below this many rows plain Python beats the fixed cost of a dozen vectorised calls."""

_PAGE_LOOKUP_METADATA = {"batch_size": str(PAGE_ROWS), "range_partitioned": "false"}

Mask = npt.NDArray[np.bool_]


# --- declaration ---------------------------------------------------------------------------


def primary_key_columns(schema: pa.Schema) -> tuple[str, ...]:
    """Names of the key columns, in key order; empty when the table has no primary key.

    Columns with a position come first, by position; columns that carry only the older flag
    follow in schema order.
    """
    found: list[tuple[bool, int, str]] = []
    for ordinal, field in enumerate(schema):
        metadata = field.metadata or {}
        position = int(metadata.get(PRIMARY_KEY_POSITION_METADATA, b"0"))
        flag = metadata.get(PRIMARY_KEY_METADATA, b"").lower() in (b"true", b"1", b"yes")
        if position > 0:
            found.append((False, position, field.name))
        elif flag:
            found.append((True, ordinal, field.name))
    return tuple(name for _, _, name in sorted(found))


def mark_primary_key(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    """The schema with `columns` declared as its primary key, in that order, and not nullable.

    Raises `InvalidInput` for a missing or repeated column, or a type that cannot be a key.
    """
    if isinstance(columns, str):
        raise InvalidInput(f"primary key columns must be a sequence of names, got {columns!r}")
    if len(set(columns)) != len(columns):
        raise InvalidInput(f"primary key {list(columns)} names a column twice")
    for name in columns:
        if schema.names.count(name) != 1:
            raise InvalidInput(
                f"primary key column {name!r} is not one column of the schema {schema.names}"
            )
        check_key_type(name, schema.field(name).type)
    fields = []
    for field in schema:
        metadata = dict(field.metadata or {})
        metadata.pop(PRIMARY_KEY_METADATA, None)
        metadata.pop(PRIMARY_KEY_POSITION_METADATA, None)
        nullable = field.nullable
        if field.name in columns:
            nullable = False
            metadata[PRIMARY_KEY_METADATA] = b"true"
            if len(columns) > 1:
                position = list(columns).index(field.name) + 1
                metadata[PRIMARY_KEY_POSITION_METADATA] = str(position).encode()
        fields.append(pa.field(field.name, field.type, nullable, metadata or None))
    return pa.schema(fields, metadata=schema.metadata)


def check_key_type(name: str, key_type: pa.DataType) -> None:
    """Raise `InvalidInput` unless values of the type can be primary keys."""
    if key_type not in SUPPORTED_KEY_TYPES:
        raise InvalidInput(
            f"column {name!r} of type {key_type} cannot be a primary key; "
            f"use an integer, boolean, string or binary column"
        )


# --- keys of rows --------------------------------------------------------------------------


def key_array(rows: pa.RecordBatch | pa.Table, columns: Sequence[str]) -> pa.Array:
    """One key per row, as a single Arrow array."""
    arrays = [one_chunk(rows.column(name)) for name in columns]
    return arrays[0] if len(arrays) == 1 else encode_keys(arrays)


def key_type(schema: pa.Schema, columns: Sequence[str]) -> pa.DataType:
    """The type of the arrays that `key_array` returns."""
    return schema.field(columns[0]).type if len(columns) == 1 else pa.binary()


def python_keys(keys: pa.Array) -> list[Any]:
    """The keys as hashable Python values, for maps from key to row."""
    return one_chunk(keys).to_pylist()  # type: ignore[no-any-return]  # pyarrow is untyped


def newest_rows(keys: pa.Array) -> Mask:
    """True for each row that is the last one with its key."""
    rows = len(keys)
    newest = np.zeros(rows, dtype=np.bool_)
    if rows <= _SMALL_ROWS:
        last_of = dict(zip(keys.to_pylist(), range(rows), strict=True))
        newest[list(last_of.values())] = True
        return newest
    encoded = keys.dictionary_encode(null_encoding="encode")
    last = np.empty(len(encoded.dictionary), dtype=np.int64)
    last[encoded.indices.to_numpy()] = np.arange(rows)
    newest[last] = True
    return newest


# --- composite encoding --------------------------------------------------------------------


def encode_key(values: Sequence[Any], types: Sequence[pa.DataType]) -> bytes:
    """The encoding of one composite key, given as Python values."""
    parts: list[bytes] = []
    for value, value_type in zip(values, types, strict=True):
        if value is None:
            parts.append(b"\x00")
        elif pa.types.is_boolean(value_type):
            parts.append(b"\x01\x01" if value else b"\x01\x00")
        elif pa.types.is_signed_integer(value_type):
            parts.append(b"\x01" + (int(value) + (1 << 63)).to_bytes(8, "big"))
        elif pa.types.is_unsigned_integer(value_type):
            parts.append(b"\x01" + int(value).to_bytes(8, "big"))
        elif is_variable_width(value_type):
            data = value.encode() if isinstance(value, str) else bytes(value)
            parts.append(b"\x01" + data.replace(b"\x00", b"\x00\xff") + b"\x00\x00")
        else:
            check_key_type("of a composite key", value_type)
    return b"".join(parts)


def encode_keys(columns: Sequence[pa.Array]) -> pa.BinaryArray:
    """The encodings of the composite keys made of the columns' rows.

    Per column `0x00` for null, else `0x01` and then: integers as eight big-endian bytes, the sign
    bit flipped if signed; booleans as one byte; strings and binaries with `0x00` written as
    `0x00 0xff`, ended by `0x00 0x00`.
    """
    arrays = [one_chunk(column) for column in columns]
    rows = len(arrays[0])
    if rows <= _SMALL_ROWS:
        types = [array.type for array in arrays]
        by_row = zip(*(array.to_pylist() for array in arrays), strict=True)
        return pa.array([encode_key(values, types) for values in by_row], pa.binary())
    pieces = [_Piece(array) for array in arrays]
    ends = np.cumsum(sum(piece.lengths for piece in pieces), dtype=np.int64)
    total_bytes = int(ends[-1])
    if total_bytes > np.iinfo(np.int32).max:
        raise InvalidInput(f"{rows} composite keys take {total_bytes} bytes; write fewer at once")
    offsets = np.zeros(rows + 1, dtype=np.int64)
    offsets[1:] = ends
    out = np.zeros(total_bytes, dtype=np.uint8)
    starts = offsets[:-1].copy()
    for piece in pieces:
        piece.write(out, starts)
        starts += piece.lengths
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(out)]
    return pa.BinaryArray.from_buffers(pa.binary(), rows, buffers)


class _Piece:
    """What one column contributes to every encoded key, and where its bytes go."""

    def __init__(self, column: pa.Array) -> None:
        self.valid: Mask = column.is_valid().to_numpy(zero_copy_only=False)
        self._variable = is_variable_width(column.type)
        if self._variable:
            self._data, bounds = bytes_and_bounds(empty_for_null(column))
            self._sizes = np.diff(bounds)
            self._zeros = np.flatnonzero(self._data == 0)
            zeros_before = np.searchsorted(self._zeros, bounds)
            self._escapes_before_row = zeros_before[:-1]
            self.lengths = np.where(self.valid, self._sizes + np.diff(zeros_before) + 3, 1)
        elif pa.types.is_boolean(column.type):
            filled = column.fill_null(False).to_numpy(zero_copy_only=False)
            self._bytes = filled.astype(np.uint8).reshape(-1, 1)
            self.lengths = np.where(self.valid, 2, 1)
        elif pa.types.is_integer(column.type):
            filled = column.fill_null(0).to_numpy(zero_copy_only=False)
            if pa.types.is_signed_integer(column.type):
                words = filled.astype(np.int64).view(np.uint64) ^ np.uint64(1 << 63)
            else:
                words = filled.astype(np.uint64)
            self._bytes = words.astype(">u8").view(np.uint8).reshape(-1, 8)
            self.lengths = np.where(self.valid, 9, 1)
        else:
            check_key_type("of a composite key", column.type)

    def write(self, out: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64]) -> None:
        out[starts] = self.valid
        if not self._variable:
            at = starts[self.valid, None] + np.arange(1, 1 + self._bytes.shape[1])
            out[at] = self._bytes[self.valid]
            return
        row_shift = starts + 1 - (np.cumsum(self._sizes) - self._sizes) - self._escapes_before_row
        at = np.repeat(row_shift, self._sizes)
        at += np.arange(len(self._data))
        if len(self._zeros):
            at += np.searchsorted(self._zeros, np.arange(len(self._data)))
            out[at[self._zeros] + 1] = 0xFF
        out[at] = self._data


def is_variable_width(value_type: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(value_type)
        or pa.types.is_large_string(value_type)
        or pa.types.is_binary(value_type)
        or pa.types.is_large_binary(value_type)
    )


def empty_for_null(column: pa.Array) -> pa.Array:
    """A string or binary column with its nulls, if any, made empty."""
    if not column.null_count:
        return column
    return column.fill_null(pa.scalar(b"", pa.binary()).cast(column.type))


def bytes_and_bounds(column: pa.Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """The bytes of a string or binary column without nulls, and where each value begins in them."""
    large = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    _, offsets_buffer, data_buffer = column.buffers()
    offsets = np.frombuffer(offsets_buffer, dtype=np.int64 if large else np.int32)
    bounds = offsets[column.offset : column.offset + len(column) + 1].astype(np.int64)
    if data_buffer is None:
        data = np.empty(0, dtype=np.uint8)
    else:
        data = np.frombuffer(data_buffer, dtype=np.uint8)[bounds[0] : bounds[-1]]
    return data, bounds - bounds[0]


def one_chunk(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


# --- the sidecar of a flushed generation ---------------------------------------------------


def write_pk_index(
    generation_uri: str, keys: pa.Array, storage_options: Mapping[str, str] | None = None
) -> None:
    """Write `_pk_index/` of the generation whose rows have these keys, in insert order."""
    from lance.file import LanceFileWriter

    keys = one_chunk(keys)
    check_key_type("of the generation", keys.type)
    if keys.null_count:
        raise InvalidInput(f"{keys.null_count} rows for {generation_uri} have a null primary key")
    order = pc.sort_indices(keys)
    values = keys.take(order)
    first = np.arange(0, len(keys), PAGE_ROWS)
    last = np.minimum(first + PAGE_ROWS, len(keys)) - 1
    page_data = pa.record_batch(
        [values, order.cast(pa.uint64())],
        schema=pa.schema(
            [pa.field("values", keys.type), pa.field("ids", pa.uint64(), nullable=False)]
        ),
    )
    page_lookup = pa.record_batch(
        [
            values.take(pa.array(first)),
            values.take(pa.array(last)),
            pa.array(np.zeros(len(first), dtype=np.uint32)),
            pa.array(np.arange(len(first), dtype=np.uint32)),
        ],
        schema=pa.schema(
            [
                pa.field("min", keys.type),
                pa.field("max", keys.type),
                pa.field("null_count", pa.uint32(), nullable=False),
                pa.field("page_idx", pa.uint32(), nullable=False),
            ],
            metadata=_PAGE_LOOKUP_METADATA,
        ),
    )
    options = dict(storage_options) if storage_options else None
    for name, batch in (("page_data", page_data), ("page_lookup", page_lookup)):
        with LanceFileWriter(
            _sidecar(generation_uri, name),
            batch.schema,
            version=_SIDECAR_FILE_VERSION,
            storage_options=options,
        ) as writer:
            writer.write_batch(batch)


class PkIndexReader:
    """Finds the rows of keys in one flushed generation, exactly, through its `_pk_index/`.

    Reads the page directory on opening and data pages when first needed; keeps the pages used
    last, at most `cached_pages` of them. Safe for use by many threads.
    """

    def __init__(
        self,
        generation_uri: str,
        storage_options: Mapping[str, str] | None = None,
        cached_pages: int = _CACHED_PAGES,
    ) -> None:
        from lance.file import LanceFileReader

        options = dict(storage_options) if storage_options else None
        try:
            lookup = LanceFileReader(_sidecar(generation_uri, "page_lookup"), options)
            self._data = LanceFileReader(_sidecar(generation_uri, "page_data"), options)
        except (OSError, ValueError) as error:
            raise ObjectNotFound(
                f"generation {generation_uri} has no readable primary-key index: {error}"
            ) from error
        metadata = lookup.metadata().schema.metadata or {}
        directory = lookup.read_all().to_table()
        self._page_rows = int(metadata.get(b"batch_size", PAGE_ROWS))
        self._min = one_chunk(directory.column("min"))
        self._max = one_chunk(directory.column("max"))
        self._first_keys = python_keys(self._min)
        self.key_type: pa.DataType = self._min.type
        self.num_rows: int = self._data.num_rows()
        self._cached_pages = cached_pages
        self._pages: OrderedDict[int, tuple[pa.Array, npt.NDArray[np.int64]]] = OrderedDict()
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        """Lance's reader begins one read at a time; a second caller would get an error."""

    def lookup(self, key: Any) -> npt.NDArray[np.int64]:
        """Every row with the key, oldest first."""
        keys = self._keys(pa.array([key], self.key_type))
        found = [np.empty(0, dtype=np.int64)]
        page = int(_search(self._max, keys, "left")[0])
        while page < len(self._min):
            values, rows = self._page(page)
            start = int(_search(values, keys, "left")[0])
            stop = int(_search(values, keys, "right")[0])
            found.append(rows[start:stop])
            if stop < len(values):
                break
            page += 1
        return np.concatenate(found)

    def newest_many(self, keys: pa.Array) -> npt.NDArray[np.int64]:
        """For each key the newest row that has it, or -1."""
        keys = self._keys(one_chunk(keys))
        newest = np.full(len(keys), -1, dtype=np.int64)
        if self.num_rows == 0 or len(keys) == 0:
            return newest
        if len(keys) == 1:
            newest[0] = self._newest_one(keys)
            return newest
        page_of_key = _search(self._min, keys, "right") - 1
        for page in np.unique(page_of_key[page_of_key >= 0]).tolist():
            asked = np.flatnonzero(page_of_key == page)
            wanted = keys if len(asked) == len(keys) else keys.take(pa.array(asked))
            values, rows = self._page(page)
            at = _search(values, wanted, "right") - 1
            hit = _equal_at(values, at, wanted)
            newest[asked[hit]] = rows[at[hit]]
        return newest

    def _newest_one(self, keys: pa.Array) -> int:
        """The same for one key, without the fixed cost of a dozen vectorised calls."""
        key = keys[0].as_py()
        page = bisect_right(self._first_keys, key) - 1
        if page < 0:
            return -1
        values, rows = self._page(page)
        at = int(_search(values, keys, "right")[0]) - 1
        return int(rows[at]) if values[at].as_py() == key else -1

    def in_memory(self, keys: pa.Array) -> bool:
        """Whether the keys can be found without reading another page."""
        if len(self._pages) == len(self._first_keys):
            return True
        keys = self._keys(one_chunk(keys))
        pages = np.unique(_search(self._min, keys, "right") - 1).tolist()
        with self._lock:
            return all(page < 0 or page in self._pages for page in pages)

    def keys_by_row(self) -> pa.Array:
        """The key of every row, in row order."""
        with self._reading:
            begun = self._data.read_all(batch_size=self.num_rows or 1)
        everything = begun.to_table()
        keys = one_chunk(everything.column("values"))
        rows = everything.column("ids").to_numpy().astype(np.int64)
        self._keep_pages(keys, rows)
        places = np.empty(len(rows), dtype=np.int64)
        places[rows] = np.arange(len(rows))
        return keys.take(pa.array(places))

    def _keep_pages(self, keys: pa.Array, rows: npt.NDArray[np.int64]) -> None:
        """Everything was read: if all of its pages may be kept, none needs to be read again."""
        if len(self._first_keys) > self._cached_pages:
            return
        with self._lock:
            for page in range(len(self._first_keys)):
                part = slice(page * self._page_rows, (page + 1) * self._page_rows)
                self._pages.setdefault(page, (keys[part], rows[part]))

    def contains_many(self, keys: pa.Array) -> Mask:
        """For each key whether the generation has a row with it."""
        return self.newest_many(keys) >= 0

    def _keys(self, keys: pa.Array) -> pa.Array:
        if keys.null_count:
            raise InvalidInput("a primary key is never null")
        if keys.type == self.key_type:
            return keys
        try:
            return keys.cast(self.key_type)
        except pa.ArrowInvalid as error:
            raise InvalidInput(f"keys of type {keys.type} do not fit {self.key_type}") from error

    def _page(self, page: int) -> tuple[pa.Array, npt.NDArray[np.int64]]:
        with self._lock:
            cached = self._pages.get(page)
            if cached is not None:
                self._pages.move_to_end(page)
                return cached
        start = page * self._page_rows
        count = min(self._page_rows, self.num_rows - start)
        with self._reading:
            begun = self._data.read_range(start, count, batch_size=count)
        table = begun.to_table()
        values = one_chunk(table.column("values"))
        loaded = (values, table.column("ids").to_numpy().astype(np.int64))
        with self._lock:
            self._pages[page] = loaded
            while len(self._pages) > self._cached_pages:
                self._pages.popitem(last=False)
        return loaded


def _search(
    sorted_values: pa.Array, keys: pa.Array, side: Literal["left", "right"]
) -> npt.NDArray[np.int64]:
    if pa.types.is_integer(keys.type):
        found = np.searchsorted(sorted_values.to_numpy(), keys.to_numpy(), side=side)
    else:
        found = pc.search_sorted(sorted_values, keys, side=side).to_numpy()
    positions: npt.NDArray[np.int64] = found.astype(np.int64)
    return positions


def _equal_at(values: pa.Array, at: npt.NDArray[np.int64], keys: pa.Array) -> Mask:
    if pa.types.is_integer(keys.type):
        return values.to_numpy()[at] == keys.to_numpy()  # type: ignore[no-any-return]  # as above
    equal = pc.equal(values.take(pa.array(at)), keys)
    return equal.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]  # as above


def _sidecar(generation_uri: str, name: str) -> str:
    return f"{generation_uri.rstrip('/')}/{PK_INDEX_DIRECTORY}/{name}.lance"
