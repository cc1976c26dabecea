"""Boxes around geometries in WKB, the binary form that spatial systems exchange.

Both byte orders, Z, M and ZM, in the numbering of ISO (1001 is a point with Z) and in that of
PostGIS (flags in the high bits, and an SRID that is read over). Points, line strings, polygons,
the Multi* of each, polyhedral surfaces, TINs, triangles, and collections of any. Curves are
refused: their corners do not bound them.

Every geometry becomes runs of coordinates: where in the bytes they begin, how many there are and
how far apart. Points, line strings and polygons of one ring give theirs by arithmetic over all
rows at once; the others are walked one by one. Then the boxes of all rows come from their runs,
again at once.

A coordinate whose x or y is NaN is none; a geometry without any is empty and its box is all NaN, as
is the box of a null row. Bytes that are no WKB are an `InvalidInput` that names the row; counts are
held against the bytes at hand before they are used, and collections nest `MAX_NESTING` deep.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import InvalidInput
from penstock.packed.indexes.bgi import Boxes, Numbers, spread, starts_of

MAX_NESTING = 32
BATCH_POINTS = 1 << 20
"""Coordinates looked at together; bounds the memory beside the geometries."""

_HEADER_BYTES, _POINT_BYTES = 5, 16
_Z, _M, _SRID, _NUMBER = 0x80000000, 0x40000000, 0x20000000, 0x1FFFFFFF
_POINT, _LINE, _POLYGON, _TRIANGLE = 1, 2, 3, 17
_PARTS = {4: _POINT, 5: _LINE, 6: _POLYGON, 7: None, 15: _POLYGON, 16: _TRIANGLE}
"""What MultiPoint, MultiLineString, MultiPolygon, collection (any), PolyhedralSurface and TIN
are made of."""
_KINDS = frozenset({_POINT, _LINE, _POLYGON, _TRIANGLE, *_PARTS})

Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
_Run: TypeAlias = "tuple[int, int, int, int, bool]"


def boxes_of(array: pa.Array) -> Boxes:
    """(min x, min y, max x, max y) of every row of an array of binary values."""
    values = _Values.of(array)
    boxes = np.full((len(array), 4), np.nan)
    left = values.valid.copy()
    for kind in (_POINT, _LINE, _POLYGON):
        runs = _simple_runs(values, kind, left)
        left[runs.row] = False
        _grow(boxes, values, runs)
    walked: list[_Run] = []
    for each in np.flatnonzero(left).tolist():
        _walk(values, each, walked)
    if walked:
        row, start, count, stride, big = map(np.array, zip(*walked, strict=True))
        _grow(boxes, values, _Runs(row, start, count, stride, big))
    return boxes


@dataclass(frozen=True, slots=True)
class _Values:
    """The rows' bytes, one row after the other in one buffer."""

    bytes: Bytes
    starts: Numbers
    ends: Numbers
    valid: Mask

    @staticmethod
    def of(array: pa.Array) -> _Values:
        array = array.cast(pa.large_binary())
        _, offset_buffer, data = array.buffers()
        if offset_buffer is None or not len(array):
            offsets = np.zeros(len(array) + 1, np.int64)
        else:
            offsets = np.frombuffer(offset_buffer, "<i8", len(array) + 1, 8 * array.offset)
        found = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
        return _Values(found, offsets[:-1], offsets[1:], np.asarray(array.is_valid()))

    def windows(self, places: Numbers, size: int) -> Bytes:
        """A copy of `size` bytes from each place on, all of which are there."""
        if not len(places):
            return np.empty((0, size), np.uint8)
        taken: Bytes = np.lib.stride_tricks.sliding_window_view(self.bytes, size)[places]
        return taken

    def uint32(self, places: Numbers, big: Mask) -> Numbers:
        found = self.windows(places, 4).view("<u4").ravel()
        return np.where(big, found.byteswap(), found).astype(np.int64)


# --- coordinates to boxes ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Runs:
    """Per run of coordinates: its row, ascending; its first byte; how many; how far apart."""

    row: Numbers
    start: Numbers
    count: Numbers
    stride: Numbers
    big: Mask

    def where(self, some: Mask | slice) -> _Runs:
        return _Runs(
            self.row[some], self.start[some], self.count[some], self.stride[some], self.big[some]
        )


def _grow(boxes: Boxes, values: _Values, runs: _Runs) -> None:
    """Make the rows' boxes as large as their runs ask."""
    runs = runs.where(runs.count > 0)
    for batch in _batches(runs):
        found = _bounds(values, batch)
        firsts = np.flatnonzero(np.diff(batch.row, prepend=-1))
        rows = batch.row[firsts]
        low = np.fmin.reduceat(found[:, :2], firsts, axis=0)
        high = np.fmax.reduceat(found[:, 2:], firsts, axis=0)
        boxes[rows, :2] = np.fmin(boxes[rows, :2], low)
        boxes[rows, 2:] = np.fmax(boxes[rows, 2:], high)


def _batches(runs: _Runs) -> Iterator[_Runs]:
    """The runs in pieces of at most `BATCH_POINTS` coordinates each."""
    pieces = -(-runs.count // BATCH_POINTS)
    if np.any(pieces > 1):
        ranks = spread(np.zeros(len(pieces), np.int64), pieces) * BATCH_POINTS
        runs = runs.where(np.repeat(np.arange(len(pieces)), pieces))
        runs = replace(
            runs,
            start=runs.start + ranks * runs.stride,
            count=np.minimum(runs.count - ranks, BATCH_POINTS),
        )
    ends = np.cumsum(runs.count)
    low = before = 0
    while low < len(ends):
        high = int(np.searchsorted(ends, before + BATCH_POINTS, side="right"))
        yield runs.where(slice(low, high))
        low, before = high, int(ends[high - 1])


def _bounds(values: _Values, runs: _Runs) -> Boxes:
    places = np.repeat(runs.start, runs.count)
    places += spread(np.zeros(len(runs.count), np.int64), runs.count) * np.repeat(
        runs.stride, runs.count
    )
    points = values.windows(places, _POINT_BYTES).view("<f8")
    swapped = np.repeat(runs.big, runs.count)
    if swapped.any():
        points[swapped] = points[swapped].byteswap()
    points[np.isnan(points).any(axis=1)] = np.nan
    firsts = starts_of(runs.count)
    low = np.fmin.reduceat(points, firsts, axis=0)
    high = np.fmax.reduceat(points, firsts, axis=0)
    return np.concatenate([low, high], axis=1)


# --- geometries to coordinates -------------------------------------------------------------


def _simple_runs(values: _Values, kind: int, among: Mask) -> _Runs:
    """The runs of the rows that are points, line strings or polygons of one ring, and no more."""
    lengths = values.ends - values.starts
    rows = np.flatnonzero(among & (lengths >= _HEADER_BYTES))
    rows = rows[values.bytes[values.starts[rows]] <= 1]
    starts, lengths = values.starts[rows], lengths[rows]
    big = values.bytes[starts] == 0
    code = values.uint32(starts + 1, big)
    numbering, geometry = np.divmod(code & _NUMBER, 1000)
    has_z = ((code & _Z) > 0) | (numbering == 1) | (numbering == 3)
    has_m = ((code & _M) > 0) | (numbering == 2) | (numbering == 3)
    stride = _POINT_BYTES + 8 * has_z.astype(np.int64) + 8 * has_m
    # A line string has its number of points before them, a polygon before that the one of rings.
    counters = kind - _POINT
    first = starts + _HEADER_BYTES + 4 * ((code & _SRID) > 0)
    after = first + 4 * counters
    fits = (geometry == kind) & (numbering <= 3) & (after <= starts + lengths)
    runs = _Runs(rows, after, np.ones(len(rows), np.int64), stride, big).where(fits)
    first, ends = first[fits], (starts + lengths)[fits]
    if kind == _POINT:
        return runs.where(runs.start + runs.stride == ends)
    runs = replace(runs, count=values.uint32(runs.start - 4, runs.big))
    whole = runs.start + runs.count * runs.stride == ends
    if kind == _POLYGON:
        whole &= values.uint32(first, runs.big) == 1
    return runs.where(whole)


@dataclass(slots=True)
class _Cursor:
    """Where in a row's bytes the walk is; every step is checked against their end."""

    data: Bytes
    position: int
    end: int
    row: int
    depth: int = 0

    def take(self, size: int) -> int:
        """Step over so many bytes and say where they began."""
        begin = self.position
        if size > self.end - begin:
            raise self.bad(f"{size} bytes are due where {self.end - begin} are left")
        self.position = begin + size
        return begin

    def uint32(self, big: bool) -> int:
        (found,) = struct.unpack_from(">I" if big else "<I", self.data.data, self.take(4))
        return int(found)

    def bad(self, why: str) -> InvalidInput:
        return InvalidInput(
            f"row {self.row} is no geometry in WKB: {why}; correct it, or make it null"
        )


def _walk(values: _Values, row: int, runs: list[_Run]) -> None:
    cursor = _Cursor(values.bytes, int(values.starts[row]), int(values.ends[row]), row)
    _geometry(cursor, None, runs)
    if cursor.position != cursor.end:
        raise cursor.bad(f"{cursor.end - cursor.position} bytes are left behind it")


def _geometry(cursor: _Cursor, expected: int | None, runs: list[_Run]) -> None:
    order = int(cursor.data[cursor.take(1)])
    if order > 1:
        raise cursor.bad(f"its byte order is {order}, not 0 or 1")
    big = order == 0
    code = cursor.uint32(big)
    numbering, kind = divmod(code & _NUMBER, 1000)
    if numbering > 3 or kind not in _KINDS or expected not in (None, kind):
        raise cursor.bad(f"{code} is no type that is known, or not one that belongs there")
    if code & _SRID:
        cursor.take(4)
    has_z, has_m = code & _Z or numbering in (1, 3), code & _M or numbering in (2, 3)
    stride = _POINT_BYTES + 8 * bool(has_z) + 8 * bool(has_m)
    if kind in _PARTS:
        cursor.depth += 1
        if cursor.depth > MAX_NESTING:
            raise cursor.bad(f"its collections nest more than {MAX_NESTING} deep")
        for _ in range(cursor.uint32(big)):
            _geometry(cursor, _PARTS[kind], runs)
        cursor.depth -= 1
    elif kind == _POINT:
        runs.append((cursor.row, cursor.take(stride), 1, stride, big))
    else:
        for _ in range(1 if kind == _LINE else cursor.uint32(big)):
            count = cursor.uint32(big)
            runs.append((cursor.row, cursor.take(count * stride), count, stride, big))
