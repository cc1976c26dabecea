"""What every packed index answers, and how a question becomes a Roaring bitmap of rows.

Rows are numbered from 0 in the order of the array that the index was built from. A null row is in
the answer of `is_null` and of no other question, `not_in` included, as in SQL. Floats compare as
tables compare them: NaN is above every number, or below if its sign is set, equal to itself, and
-0.0 equals 0.0.

An index holds what it needs to answer; it takes it from an Arrow array (`build`) or from entries
(`load`), and gives it away as entries (`write`). An index answers the questions its kind is for
and refuses others with `InvalidInput`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import datetime, time, timedelta
from decimal import Decimal
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.types as pat
from pyroaring import BitMap

from penstock.errors import InvalidInput
from penstock.packed.entries import EntryReader, EntryWriter

MAX_ROWS = (1 << 31) - 1
"""Row numbers are int32 in most entries."""

DESCRIPTION = "penstock"
"""Key of the meta under which our files say what they hold: `{"kind": …, "type": …}`."""


_FINER = (
    *(float, np.inexact, Decimal, pa.Scalar),
    *(datetime, time, timedelta, np.datetime64, np.timedelta64),
)
"""Types that hold values between those of some of Arrow's."""


class NotAnswered(InvalidInput):
    """A question that the kind of index is not for."""


class PackedIndex(ABC):
    kind: ClassVar[str]

    def __init__(self, rows: int, value_type: pa.DataType) -> None:
        self.rows = rows
        self.value_type = value_type
        self._nbytes: int | None = None
        """Added up when it is asked for; None again when there is more."""

    # --- entries -----------------------------------------------------------------------------

    @abstractmethod
    def write_entries(self, writer: EntryWriter) -> None:
        """The index as entries and meta, exactly as the format has them."""

    def write(self, writer: EntryWriter, *, described: bool = True) -> None:
        """Write the index; `described` adds one key to the meta that says kind and type.

        Without it the bytes are those of Milvus, and `load_index` must be told the type.
        """
        self.write_entries(writer)
        if described:
            writer.put_meta(DESCRIPTION, self.description())

    def description(self) -> dict[str, Any]:
        return {"kind": self.kind, "type": str(self.value_type)}

    @property
    def nbytes(self) -> int:
        """Bytes that it holds, in files it unpacked too; some kinds hold more once asked."""
        if self._nbytes is None:
            self._nbytes = self._held_bytes()
        return self._nbytes

    @abstractmethod
    def _held_bytes(self) -> int: ...

    # --- questions ---------------------------------------------------------------------------

    @abstractmethod
    def is_null(self) -> BitMap:
        """Rows without a value."""

    def is_not_null(self) -> BitMap:
        return everything(self.rows) - self.is_null()

    def one_of(self, values: pa.Array) -> BitMap:
        """Rows whose value is among these, none of which is null."""
        raise self._cannot("in")

    def between(
        self, low: pa.Scalar | None, high: pa.Scalar | None, with_low: bool, with_high: bool
    ) -> BitMap:
        """Rows whose value lies in the range; an end that is None is open."""
        raise self._cannot("range")

    def prefix(self, text: str) -> BitMap:
        raise self._cannot("prefix")

    def like(self, pattern: str) -> BitMap:
        """SQL's LIKE: `%` is any text, `_` one character, a backslash takes the next as it is."""
        raise self._cannot("like")

    def intersects(self, box: Sequence[float]) -> BitMap:
        """Rows whose box shares a point with (min x, min y, max x, max y), borders included."""
        raise self._cannot("intersects")

    # --- asking by name ----------------------------------------------------------------------

    def query(self, op: str, value: Any = None) -> BitMap:
        """Rows for which `op` holds: `in`, `not_in`, `=`, `!=`, `<`, `<=`, `>`, `>=`, `range`
        (low, high, both included; None is open), `prefix`, `like`, `intersects`, `is_null`,
        `is_not_null`."""
        match op:
            case "is_null":
                return self.is_null()
            case "is_not_null":
                return self.is_not_null()
            case "in":
                return self.one_of(self._values(op, value))
            case "not_in":
                return self.is_not_null() - self.one_of(self._values(op, value))
            case "=":
                return self.one_of(self._values(op, one(value)))
            case "!=":
                return self.is_not_null() - self.one_of(self._values(op, one(value)))
            case "<" | "<=":
                return self.between(None, self._value(op, value), True, op == "<=")
            case ">" | ">=":
                return self.between(self._value(op, value), None, op == ">=", True)
            case "range":
                if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
                    raise InvalidInput(f"range takes (low, high), not {value!r}; None is open")
                low, high = (None if end is None else self._value(op, end) for end in value)
                return self.between(low, high, True, True)
            case "prefix" | "like":
                if not isinstance(value, str) or not _is_unicode(value):
                    raise InvalidInput(f"{op} takes text, not {value!r}")
                return self.prefix(value) if op == "prefix" else self.like(value)
            case "intersects":
                return self.intersects(checked_box(value))
        raise InvalidInput(f"{op!r} is no question an index answers; see PackedIndex.query")

    def count(self, op: str, value: Any = None) -> int:
        """How many rows `query` would give."""
        return len(self.query(op, value))

    # --- inside ------------------------------------------------------------------------------

    def _values(self, op: str, values: Any) -> pa.Array:
        if isinstance(values, pa.ChunkedArray):
            values = values.combine_chunks()
        if isinstance(values, str | bytes):
            raise InvalidInput(f"{op} takes a list of values, not {values!r}")
        try:
            array = _exactly(values, self.value_type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise InvalidInput(
                f"{op}: {values!r} is not of the index's type {self.value_type} ({error})"
            ) from error
        if array.null_count:
            raise InvalidInput(f"{op} does not take null; ask is_null for rows without a value")
        return array

    def _value(self, op: str, value: Any) -> pa.Scalar:
        return self._values(op, one(value))[0]

    def _cannot(self, op: str) -> NotAnswered:
        return NotAnswered(f"a {self.kind} index of {self.value_type} does not answer {op!r}")


def one(value: Any) -> Any:
    """A value as a list of one; never by way of Python, which has no dates past the year 9999."""
    return pa.repeat(value, 1) if isinstance(value, pa.Scalar) else [value]


def _exactly(values: Any, value_type: pa.DataType) -> pa.Array:
    """The values as an array of the type; an error if they are not values of it.

    Arrow would make 1 of 1.5 and a day of a time on that day, and answer another question.
    """
    if not isinstance(values, pa.Array):
        listed = list(values)
        finer = [value for value in listed if isinstance(value, _FINER)]
        if finer and not pat.is_floating(value_type):
            _exactly(pa.array(finer), value_type)
        return pa.array(listed, value_type)
    if pat.is_dictionary(values.type):
        values = values.dictionary_decode()
    if values.type == value_type:
        return values
    cast = values.cast(value_type)
    if pat.is_date(value_type) and not cast.cast(values.type).equals(values):
        raise ValueError("they are not whole days")  # the one cast that does not mind
    return cast


def _is_unicode(text: str) -> bool:
    """Whether it can be written, as half of a surrogate pair cannot."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def everything(rows: int) -> BitMap:
    return BitMap(range(rows)) if rows else BitMap()


def checked_box(value: Any) -> tuple[float, float, float, float]:
    try:
        min_x, min_y, max_x, max_y = (float(end) for end in value)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"a box is (min x, min y, max x, max y), not {value!r}") from error
    if any(map(math.isnan, (min_x, min_y, max_x, max_y))) or min_x > max_x or min_y > max_y:
        raise InvalidInput(f"{value!r} is no box: each minimum must be at most its maximum")
    return min_x, min_y, max_x, max_y


class IndexKind(ABC):
    """How a kind of index comes to be; one instance per kind, in `indexes.KINDS`."""

    kind: ClassVar[str]

    @abstractmethod
    def build(self, array: pa.Array, **options: Any) -> PackedIndex:
        """Index every row of the array; `InvalidInput` for a type the kind does not take."""

    @abstractmethod
    def load(self, reader: EntryReader, value_type: pa.DataType) -> PackedIndex:
        """Read an index; `Corruption` if the entries cannot be what the kind writes."""
