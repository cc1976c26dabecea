"""Boxes of WKB: every type, dimension, byte order and flavour against boxes known beforehand."""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidInput
from penstock.packed.indexes import wkb

POINT, LINE, POLYGON, COLLECTION, TRIANGLE = 1, 2, 3, 7, 17
PARTS = {4: POINT, 5: LINE, 6: POLYGON, 15: POLYGON, 16: TRIANGLE}

Point = tuple[float, float]


@dataclass(frozen=True)
class Flavour:
    """How a geometry is written down; none of it changes its box."""

    big: bool = False
    has_z: bool = False
    has_m: bool = False
    iso: bool = True
    srid: bool = False

    def number(self, value: int) -> bytes:
        return struct.pack(">I" if self.big else "<I", value)

    def header(self, kind: int) -> bytes:
        if self.iso:
            code = kind + 1000 * self.has_z + 2000 * self.has_m
        else:
            code = kind | self.has_z << 31 | self.has_m << 30
        code |= self.srid << 29
        return bytes([not self.big]) + self.number(code) + (self.number(4326) if self.srid else b"")

    def point(self, point: Point) -> bytes:
        more = [1e300] * (self.has_z + self.has_m)
        return struct.pack(f"{'>' if self.big else '<'}{2 + len(more)}d", *point, *more)

    def points(self, points: list[Point]) -> bytes:
        return self.number(len(points)) + b"".join(map(self.point, points))


flavours = st.builds(
    Flavour, st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.booleans()
)
ordinates = st.floats(allow_nan=False, allow_infinity=False, width=32)
points = st.tuples(ordinates, ordinates | st.just(np.nan))

Geometry = tuple[bytes, list[Point]]


@st.composite
def simple(draw: st.DrawFn, kind: int | None = None) -> Geometry:
    kind = draw(st.sampled_from([POINT, LINE, POLYGON, TRIANGLE])) if kind is None else kind
    flavour = draw(flavours)
    if kind == POINT:
        point = draw(st.just((np.nan, np.nan)) | points)
        return flavour.header(kind) + flavour.point(point), [point]
    rings = [draw(st.lists(points, max_size=5))]
    if kind != LINE:
        rings = draw(st.lists(st.lists(points, max_size=5), max_size=3))
    body = b"".join(map(flavour.points, rings))
    counted = b"" if kind == LINE else flavour.number(len(rings))
    return flavour.header(kind) + counted + body, [point for ring in rings for point in ring]


def together(kind: int, flavour: Flavour, parts: list[Geometry]) -> Geometry:
    data = flavour.header(kind) + flavour.number(len(parts)) + b"".join(p for p, _ in parts)
    return data, [point for _, of_part in parts for point in of_part]


@st.composite
def multiple(draw: st.DrawFn) -> Geometry:
    kind, part = draw(st.sampled_from(sorted(PARTS.items())))
    return together(kind, draw(flavours), draw(st.lists(simple(part), max_size=3)))


geometries = st.recursive(
    simple() | multiple(),
    lambda inner: st.builds(together, st.just(COLLECTION), flavours, st.lists(inner, max_size=3)),
    max_leaves=6,
)


def box_of(known: list[Point] | None) -> list[float]:
    usable = [point for point in known or [] if not np.isnan(point).any()]
    if not usable:
        return [np.nan] * 4
    xs, ys = zip(*usable, strict=True)
    return [min(xs), min(ys), max(xs), max(ys)]


@given(
    st.lists(st.none() | geometries, max_size=12),
    st.sampled_from([pa.binary(), pa.large_binary(), pa.binary_view()]),
    st.integers(0, 3),
)
@settings(max_examples=50, deadline=None)
def test_boxes_of_everything_in_any_flavour(
    rows: list[Geometry | None], value_type: pa.DataType, dropped: int
) -> None:
    array = pa.array([row and row[0] for row in rows], value_type).slice(dropped)
    expected = [box_of(row and row[1]) for row in rows][dropped:]
    np.testing.assert_array_equal(wkb.boxes_of(array), np.array(expected, float).reshape(-1, 4))


def test_long_lines_are_looked_at_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wkb, "BATCH_POINTS", 7)
    spans = [np.arange(size, dtype=float) for size in (1, 100, 0, 7, 8, 3, 3, 3)]
    lines = [[(x, -x) for x in span] for span in spans]
    plain = Flavour()
    rows = [plain.header(LINE) + plain.points(line) for line in lines]
    rows.append(together(5, plain, [(row, []) for row in rows])[0])
    found = wkb.boxes_of(pa.array(rows))
    expected = [box_of(line) for line in [*lines, [point for line in lines for point in line]]]
    np.testing.assert_array_equal(found, np.array(expected))


@given(geometries, st.data())
@settings(max_examples=50, deadline=None)
def test_no_bytes_are_read_past_a_geometry(geometry: Geometry, data: st.DataObject) -> None:
    """Cut short, lengthened or changed: refused with the row's number, or read as something."""
    whole = geometry[0]
    cut = data.draw(st.integers(0, len(whole) - 1))
    for bad in (whole[:cut], whole + b"\0"):
        with pytest.raises(InvalidInput, match="row 1 is no geometry"):
            wkb.boxes_of(pa.array([whole, bad], pa.binary()))
    at, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    changed = whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
    with suppress(InvalidInput):
        assert wkb.boxes_of(pa.array([changed], pa.binary())).shape == (1, 4)


def test_what_is_refused() -> None:
    plain = Flavour()
    nested = plain.header(POINT) + plain.point((1, 2))
    for _ in range(wkb.MAX_NESTING):
        nested = together(COLLECTION, plain, [(nested, [])])[0]
    assert wkb.boxes_of(pa.array([nested])).tolist() == [[1, 2, 1, 2]]
    line = plain.header(LINE) + plain.points([(0, 0)])
    refused = {
        "nest": together(COLLECTION, plain, [(nested, [])])[0],
        "byte order": b"\2" + line[1:],
        "type that is known": plain.header(8) + line[5:],
        "4001": plain.header(4001) + line[5:],
        "belongs there": together(4, plain, [(line, [])])[0],
        "4 bytes are due": plain.header(POLYGON) + plain.number(2) + line[5:],
        "bytes are due": plain.header(LINE) + plain.number(2**32 - 1) + line[9:],
    }
    for why, bad in refused.items():
        with pytest.raises(InvalidInput, match=why):
            wkb.boxes_of(pa.array([None, line, bad], pa.binary()))
