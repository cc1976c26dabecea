"""Which rows have which value: the pair of arrays behind the indexes over distinct values.

Values are numbered from 0. `rows[borders[v]:borders[v + 1]]` are the rows of value v, ascending,
and no row belongs to two values; a row that belongs to none is null. What comes from a file is
checked to be just that before it is used, all at once, so that a query can index without care.

Also here, because several indexes share it: reading an entry as an array, the list of null rows,
and the checks of arrays of text.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, AnyStr

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyroaring import BitMap

from penstock.errors import Corruption, InvalidInput
from penstock.packed.entries import EntryReader, EntryWriter
from penstock.packed.indexes.base import MAX_ROWS

NULL_OFFSETS, HAS_NULL = "index_null_offset", "has_null"


@dataclass(frozen=True, slots=True)
class Postings:
    borders: npt.NDArray[np.int64]
    rows: npt.NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.borders) - 1

    @property
    def nbytes(self) -> int:
        return self.borders.nbytes + self.rows.nbytes

    @staticmethod
    def derive(values: npt.NDArray[np.int64], count: int) -> Postings:
        """From the value of every row, negative for null; there are `count` values."""
        valid = values >= 0
        numbers = np.flatnonzero(valid)
        owners = values[numbers]
        # Value and row in one word: sorting words is several times faster than a stable argsort.
        words = (owners.astype(np.uint64) << np.uint64(32)) | numbers.astype(np.uint64)
        words.sort()
        borders = np.zeros(count + 1, np.int64)
        np.cumsum(np.bincount(owners, minlength=count), out=borders[1:])
        return Postings(borders, words.astype(np.uint32))

    @staticmethod
    def read(
        reader: EntryReader, borders_name: str, rows_name: str, count: int, total_rows: int
    ) -> Postings:
        borders = read_array(reader, borders_name, "<u4").astype(np.int64)
        rows = read_array(reader, rows_name, "<u4").astype(np.uint32, copy=False)
        if len(borders) != count + 1:
            raise damaged(borders_name, f"{len(borders)} borders for {count} values")
        if borders[0] or borders[-1] != len(rows) or np.any(np.diff(borders) < 0):
            raise damaged(borders_name, f"its borders do not divide {len(rows)} rows")
        if len(rows) > total_rows or (len(rows) and rows.max() >= total_rows):
            raise damaged(rows_name, f"it names rows past the {total_rows} there are")
        falls = np.flatnonzero(rows[1:] <= rows[:-1]) + 1
        starts = np.zeros(len(rows) + 1, np.bool_)
        starts[borders] = True
        if not starts[falls].all():
            raise damaged(rows_name, "rows of one value are not in ascending order")
        if np.any(np.bincount(rows, minlength=1) > 1):
            raise damaged(rows_name, "a row has two values")
        return Postings(borders, rows)

    def of(self, values: npt.NDArray[np.int64]) -> BitMap:
        """Rows of these values, each given once."""
        if len(values) == 1:
            return self.span(int(values[0]), int(values[0]) + 1)
        starts = self.borders[values]
        counts = self.borders[values + 1] - starts
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        if total == len(self.rows):
            return rows_bitmap(np.sort(self.rows))
        steps = np.arange(total) + np.repeat(starts - (ends - counts), counts)
        return rows_bitmap(np.sort(self.rows[steps]))

    def span(self, first: int, stop: int) -> BitMap:
        """Rows of values `first` up to before `stop`."""
        if stop <= first:
            return BitMap()
        return rows_bitmap(np.sort(self.rows[self.borders[first] : self.borders[stop]]))


def rows_bitmap(rows: npt.NDArray[Any]) -> BitMap:
    """A bitmap of ascending row numbers."""
    # The buffer of an array.array is taken whole; a NumPy array would go number by number.
    return BitMap(array("I", np.ascontiguousarray(rows, np.uint32).tobytes()))


def shared_prefix(first: AnyStr, second: AnyStr) -> AnyStr:
    """The longest text that both begin with."""
    length = next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    return first[:length]


def damaged(entry: str, what: str) -> Corruption:
    return Corruption(f"entry {entry!r} of the index is damaged: {what}; build the index again")


def read_array(reader: EntryReader, name: str, dtype: str) -> npt.NDArray[Any]:
    """The entry as an array of the type; it keeps the entry's memory."""
    if name not in reader.names():
        raise Corruption(f"the index has no entry {name!r}; build it again")
    width = np.dtype(dtype).itemsize
    if reader.size(name) % width:
        raise damaged(name, f"{reader.size(name)} bytes are no array of {width}-byte numbers")
    return np.frombuffer(reader.read(name), dtype)


def write_nulls(writer: EntryWriter, nulls: npt.NDArray[np.uint64]) -> None:
    """The null rows as an entry, if there are any, and in the meta whether there are."""
    if len(nulls):
        writer.write_entry(NULL_OFFSETS, nulls.astype("<u8", copy=False))
    writer.put_meta(HAS_NULL, bool(len(nulls)))


def read_nulls(reader: EntryReader) -> npt.NDArray[np.uint64]:
    said = reader.meta.get(HAS_NULL)
    if not isinstance(said, bool) or said != (NULL_OFFSETS in reader.names()):
        raise damaged("__meta__", f"{HAS_NULL} and the entry {NULL_OFFSETS!r} disagree")
    if not said:
        return np.zeros(0, np.uint64)
    nulls = read_array(reader, NULL_OFFSETS, "<u8").astype(np.uint64, copy=False)
    if np.any(nulls[1:] <= nulls[:-1]) or (len(nulls) and nulls[-1] >= MAX_ROWS):
        raise damaged(NULL_OFFSETS, "null rows are not in ascending order, or are too high")
    return nulls


def text_array(values: pa.Array, kind: str, options: Mapping[str, Any] | None = None) -> pa.Array:
    """The values as an index of text takes them: string or large_string, in one piece."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        raise InvalidInput(
            f"a {kind} index takes string or large_string, not {values.type}; "
            "cast the column or choose another kind"
        )
    if options:
        raise InvalidInput(f"a {kind} index has no option {', '.join(map(repr, options))}")
    if len(values) > MAX_ROWS:
        raise InvalidInput(f"{len(values)} rows; an index holds at most {MAX_ROWS}: split it")
    return values
