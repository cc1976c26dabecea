"""Region values: evaluating a region spec on rows, and naming the region they belong to.

`evaluate` gives one Arrow array per field of the spec, `group` the distinct tuples of values with
the rows of each, in order of first appearance and with rows in their order in the batch, because
within a region the last row of a key wins. `encode_value` is a value as the region manifest stores
it, and `region_id` the region's identity.

Invariants:
- Values depend on the row and the spec alone, so any process routes a key alike.
- A source column that is gone reads as NULL.
- A value's type is the field's `result_type`, whatever its column was promoted to since. One that
  no longer fits is refused, not wrapped.
- The value NULL has no encoding: its entry is left out of the region manifest, which tells it from
  the empty string.

| transform | of NULL | of a value |
|---|---|---|
| `bucket` | 0 | `(hash & 0x7fffffff) % N`, as Lance computes it |
| `multi_bucket` | ignored; NULL when all are | `abs(murmur3_multi(…)) % N`, abs in 64 bits |
| `truncate` | NULL | first W characters; integers cut towards zero |
| `year`, `month`, `day`, `hour` | NULL | `date_part`, in the timestamp's own zone if it has one |
| `identity` | NULL | itself |
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from penstock.errors import Corruption, InvalidInput
from penstock.memwal.murmur import (
    bucket_hash,
    bucket_hashable,
    murmur3_hashable,
    murmur3_multi,
    valid_mask,
)
from penstock.memwal.region_spec import RegionField, RegionSpec, arrow_type

Rows: TypeAlias = "pa.RecordBatch | pa.Table"
Indices = npt.NDArray[np.int64]

_DATE_PARTS = {"year": pc.year, "month": pc.month, "day": pc.day, "hour": pc.hour}
_REGION_ID_DOMAIN = b"penstock.region.1"


def evaluate(spec: RegionSpec, batch: Rows, columns_by_id: Mapping[int, str]) -> list[pa.Array]:
    """The region values of each row: one array per field of the spec."""
    return [_evaluate(part, batch, columns_by_id) for part in spec.fields]


def group(
    spec: RegionSpec, batch: Rows, columns_by_id: Mapping[int, str]
) -> list[tuple[tuple[object, ...], Indices | None]]:
    """The regions of a batch with the rows of each; None for "all rows" when there is one."""
    rows = batch.num_rows
    if not rows:
        return []
    columns = evaluate(spec, batch, columns_by_id)
    if rows == 1:
        return [(tuple(column[0].as_py() for column in columns), None)]
    codes: Indices | None = None
    for column in columns:
        own = _codes(column)
        if own is None:
            continue
        # Both factors are below the number of rows after _compact, so the product fits.
        codes = own if codes is None else _compact(codes) * (int(own.max()) + 1) + own
    if codes is None:
        return [(tuple(column[0].as_py() for column in columns), None)]
    order, starts = _runs(codes)
    if len(starts) == 1:
        return [(tuple(column[0].as_py() for column in columns), None)]
    firsts = order[starts]
    by_appearance = np.argsort(firsts)
    heads = pa.array(firsts[by_appearance])
    values = zip(*(column.take(heads).to_pylist() for column in columns), strict=True)
    ends = np.append(starts[1:], rows)
    return [
        (value, order[starts[run] : ends[run]])
        for value, run in zip(values, by_appearance.tolist(), strict=True)
    ]


def encode_value(value: object, kind: pa.DataType) -> bytes | None:
    """A region value as the manifest stores it: the raw little-endian scalar; None for NULL."""
    scalar = value if isinstance(value, pa.Scalar) else pa.scalar(value, kind)
    if scalar.type != kind:
        scalar = scalar.cast(kind)
    if not scalar.is_valid:
        return None
    if _is_bytes(kind):
        return bytes(scalar.as_buffer())
    if pat.is_boolean(kind):
        return b"\x01" if scalar.as_py() else b"\x00"
    dtype, storage = _storage(kind)
    return np.array(scalar.cast(storage).as_py(), dtype).tobytes()


def decode_value(data: bytes | None, kind: pa.DataType) -> object:
    """The Python value `encode_value` made `data` from."""
    if data is None:
        return None
    try:
        if pat.is_binary(kind):
            return bytes(data)
        if _is_bytes(kind):
            return data.decode()
    except UnicodeDecodeError as error:
        raise Corruption(f"region value {data!r} is not UTF-8: {error}") from error
    if pat.is_boolean(kind):
        if data not in (b"\x00", b"\x01"):
            raise Corruption(f"region value {data!r} is not a boolean")
        return data == b"\x01"
    dtype, storage = _storage(kind)
    if len(data) != dtype.itemsize:
        raise Corruption(
            f"region value has {len(data)} bytes, but {kind} has {dtype.itemsize}: {data!r}"
        )
    stored = int(np.frombuffer(data, dtype)[0])
    value: object = pa.scalar(stored, storage).cast(kind).as_py()
    return value


def region_id(
    table_id: uuid.UUID, spec_id: int, values_encoded: Sequence[bytes | None]
) -> uuid.UUID:
    """The id of the region of these values: the same in every process that meets them."""
    digest = hashlib.sha256(_REGION_ID_DOMAIN)
    digest.update(table_id.bytes)
    digest.update(spec_id.to_bytes(4, "little"))
    digest.update(len(values_encoded).to_bytes(4, "little"))
    for value in values_encoded:
        if value is None:
            digest.update(b"\x00")
        else:
            digest.update(b"\x01" + len(value).to_bytes(8, "little") + value)
    return uuid.UUID(bytes=digest.digest()[:16], version=4)


# --- transforms ----------------------------------------------------------------------------


def _evaluate(part: RegionField, batch: Rows, columns_by_id: Mapping[int, str]) -> pa.Array:
    rows = batch.num_rows
    sources = [_source(batch, columns_by_id.get(source)) for source in part.source_ids]
    result_type = arrow_type(part.result_type)
    if part.expression is not None:
        from penstock.memwal import expressions  # loads DataFusion, which few tables need

        return expressions.evaluate(part.expression, sources, result_type, rows)
    if part.transform == "unsharded":
        return pa.array(np.zeros(rows, np.int32))
    if part.transform == "multi_bucket":
        present = [source for source in sources if source is not None]
        return _multi_bucket(part, present) if present else pa.nulls(rows, pa.int32())
    if len(sources) != 1:
        raise Corruption(
            f"region field {part.field_id!r} ({part.transform}) has {len(sources)} sources, not 1"
        )
    source = sources[0]
    if part.transform == "bucket":
        return _bucket(part, source) if source is not None else pa.array(np.zeros(rows, np.int32))
    if source is None:
        return pa.nulls(rows, result_type)
    if part.transform == "identity":
        return _fitted(part, source, result_type)
    if part.transform == "truncate":
        return _fitted(part, _truncate(source, int(part.parameters["width"])), result_type)
    if part.transform in _DATE_PARTS:
        return _DATE_PARTS[part.transform](source).cast(pa.int32())
    raise InvalidInput(
        f"region field {part.field_id!r} has the transform {part.transform!r}, which this version "
        "does not know; upgrade, or write to the regions by hand"
    )


def _source(batch: Rows, name: str | None) -> pa.Array | None:
    if name is None:
        return None
    index = batch.schema.get_field_index(name)
    if index < 0:
        raise InvalidInput(
            f"the rows lack column {name!r}, which decides their region; "
            f"they have {', '.join(batch.schema.names)}"
        )
    column = batch.column(index)
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column


def _bucket(part: RegionField, source: pa.Array) -> pa.Array:
    if pat.is_string_view(source.type):
        source = source.cast(pa.large_utf8())
    if not bucket_hashable(source.type):
        raise InvalidInput(f"region bucket cannot use a column of type {source.type}")
    hashed = bucket_hash(source) & np.uint32(0x7FFFFFFF)
    buckets = (hashed % np.uint32(part.parameters["num_buckets"])).view(np.int32)
    if source.null_count:
        buckets[~valid_mask(source)] = 0
    return pa.array(buckets)


def _multi_bucket(part: RegionField, sources: Sequence[pa.Array]) -> pa.Array:
    for source in sources:
        if not murmur3_hashable(source.type):
            raise InvalidInput(f"region multi_bucket cannot use a column of type {source.type}")
    hashed, valid = murmur3_multi(sources)
    positive = np.abs(hashed.view(np.int32).astype(np.int64))
    buckets = (positive % int(part.parameters["num_buckets"])).astype(np.int32)
    return pa.array(buckets, mask=None if valid.all() else ~valid)


def _truncate(source: pa.Array, width: int) -> pa.Array:
    if not pat.is_integer(source.type):
        if pat.is_string_view(source.type):
            source = source.cast(pa.utf8())
        return pc.utf8_slice_codeunits(source, 0, width)
    wide = pa.uint64() if pat.is_unsigned_integer(source.type) else pa.int64()
    values = source.cast(wide).fill_null(0).to_numpy()
    cut = values - np.fmod(values, values.dtype.type(width))
    return pa.array(cut, mask=~valid_mask(source) if source.null_count else None)


def _fitted(part: RegionField, values: pa.Array, result_type: pa.DataType) -> pa.Array:
    if values.type == result_type:
        return values
    try:
        return values.cast(result_type)
    except pa.ArrowInvalid as error:
        raise InvalidInput(
            f"a value of region field {part.field_id!r} does not fit its type "
            f"{part.result_type}: {error}. Its column was promoted after the region spec was made; "
            "make a table with a new spec to use the wider values"
        ) from error


# --- grouping ------------------------------------------------------------------------------


def _codes(column: pa.Array) -> Indices | None:
    """A number per row, equal where values are; None when all values are equal."""
    if pat.is_int32(column.type) and not column.null_count:
        values = column.to_numpy()
        low, high = int(values.min()), int(values.max())
        if low == high:
            return None
        if high - low < len(values) + 1024:
            offsets: Indices = values.astype(np.int64) - low
            return offsets
    encoded = column.dictionary_encode(null_encoding="encode")
    if len(encoded.dictionary) == 1:
        return None
    codes: Indices = encoded.indices.to_numpy().astype(np.int64)
    return codes


def _compact(codes: Indices) -> Indices:
    return np.unique(codes, return_inverse=True)[1].astype(np.int64, copy=False)


def _runs(codes: Indices) -> tuple[Indices, Indices]:
    """Rows ordered by code, and where in that order each code begins."""
    if codes.max() <= 0xFFFF:
        order = np.argsort(codes.astype(np.uint16), kind="stable")  # a radix sort
    else:
        order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    return order, starts


# --- encoding ------------------------------------------------------------------------------


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pat.is_string(kind) or pat.is_large_string(kind) or pat.is_binary(kind))


def _storage(kind: pa.DataType) -> tuple[np.dtype[np.generic], pa.DataType]:
    if pat.is_date32(kind):
        return np.dtype("<i4"), pa.int32()
    if pat.is_integer(kind):
        sign = "u" if pat.is_unsigned_integer(kind) else "i"
        return np.dtype(f"<{sign}{kind.bit_width // 8}"), kind
    raise InvalidInput(f"a region value cannot be of type {kind}")
