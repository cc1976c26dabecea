"""The rtree kind: golden files byte for byte, and answers equal to comparing every box."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.packed.fixtures import names, spec
from tests.packed.memory_entries import MemoryEntries, golden_entries

from penstock.errors import Corruption, InvalidInput
from penstock.packed.indexes import bgi, bgi_pack
from penstock.packed.indexes.base import PackedIndex
from penstock.packed.indexes.postings import NULL_OFFSETS
from penstock.packed.indexes.rtree import COUNTS, TREE, RtreeKind

BOXES = pa.list_(pa.float64(), 4)
STRUCT = pa.struct([(name, pa.float64()) for name in ("maxx", "minx", "miny", "maxy")])
EVERYWHERE = (-np.inf, -np.inf, np.inf, np.inf)

Box = tuple[float, float, float, float]


def boxes_array(boxes: list[Any]) -> pa.Array:
    return pa.array(boxes, BOXES)


def written(index: PackedIndex, *, described: bool = True) -> MemoryEntries:
    entries = MemoryEntries()
    index.write(entries, described=described)
    return entries


def loaded(index: PackedIndex, *, described: bool = True) -> PackedIndex:
    return RtreeKind().load(written(index, described=described), index.value_type)


def as_wkb(box: Box | None) -> bytes | None:
    """A line string from corner to corner, or for a box without extent a point."""
    if box is None:
        return None
    if box[:2] == box[2:]:
        return struct.pack("<BI2d", 1, 1, *box[:2])
    return struct.pack(">BII4d", 0, 2, 2, *box)


@pytest.mark.parametrize("name", names("r_"))
def test_golden_files_are_read_and_written_again(name: str) -> None:
    golden, boxes = golden_entries(name), spec(name)["boxes"]
    tree = bgi.decode(golden.read(TREE), TREE)
    assert bgi.encode(tree) == golden.entries[TREE]
    leaves = tree.boxes[-1].tolist() if tree.boxes else []
    assert dict(zip(tree.rows.tolist(), leaves, strict=True)) == {
        row: box for row, box in enumerate(boxes) if box is not None
    }
    for array in (boxes_array(boxes), pa.array([as_wkb(box) for box in boxes], pa.binary())):
        index = RtreeKind().build(array)
        again = written(index, described=False)
        assert (again.entries, again.meta) == (golden.entries, golden.meta)
        assert list(again.entries) == list(golden.entries)
    read = RtreeKind().load(golden, pa.binary())
    assert read.rows == len(boxes)
    assert list(read.is_null()) == [row for row, box in enumerate(boxes) if box is None]
    assert read.query("intersects", EVERYWHERE) == read.is_not_null()


# --- answers -------------------------------------------------------------------------------


def brute(boxes: list[Box | None], asked: Box) -> list[int]:
    return [
        row
        for row, box in enumerate(boxes)
        if box is not None
        and box[0] <= asked[2]
        and box[2] >= asked[0]
        and box[1] <= asked[3]
        and box[3] >= asked[1]
    ]


# Few values, so that borders touch and middles are equal.
ordinates = st.integers(-4, 4).map(float) | st.sampled_from([-np.inf, np.inf, 1e308, -1e308, -0.0])


@st.composite
def boxes_strategy(draw: st.DrawFn) -> Box:
    (x1, x2), (y1, y2) = (sorted((draw(ordinates), draw(ordinates))) for _ in range(2))
    return x1, y1, x2, y2


EMPTY_BOX = (np.nan,) * 4


@given(
    st.lists(st.none() | st.just(EMPTY_BOX) | boxes_strategy(), max_size=80),
    st.lists(boxes_strategy(), min_size=1, max_size=5),
    st.integers(0, 2),
)
@settings(max_examples=50, deadline=None)
def test_answers_equal_comparing_every_box(
    boxes: list[Box | None], asked: list[Box], dropped: int
) -> None:
    index = RtreeKind().build(boxes_array(boxes).slice(dropped))
    kept = boxes[dropped:]
    for each in (index, loaded(index), loaded(index, described=False)):
        for box in asked:
            assert list(each.query("intersects", box)) == brute(kept, box)
            assert each.count("intersects", box) == len(brute(kept, box))
        assert list(each.is_null()) == [row for row, box in enumerate(kept) if box is None]
    # Empty boxes are there, only not to be met.
    for each in (index, loaded(index)):
        assert each.rows == len(kept)
        assert list(each.is_not_null()) == [row for row, box in enumerate(kept) if box is not None]


@given(st.integers(0, 1200), st.integers(0, 2**32), st.sampled_from([3, 50, 10**9]))
@settings(max_examples=30, deadline=None)
def test_every_tree_is_one_that_boost_takes(size: int, seed: int, distinct: int) -> None:
    """Decoding checks the sizes of nodes, and that every box is within the one above it."""
    rng = np.random.default_rng(seed)
    low = rng.integers(0, distinct, (size, 2)).astype(float)
    boxes = np.concatenate([low, low + rng.integers(0, 3, (size, 2))], axis=1)
    tree = bgi_pack.pack(boxes, np.arange(size))
    data = bgi.encode(tree)
    again = bgi.decode(data, TREE)
    assert bgi.encode(again) == data
    assert np.array_equal(np.sort(again.rows), np.arange(size))
    if size:
        assert np.array_equal(again.boxes[-1], boxes[again.rows])
        deepest = again.sizes[-1]
        assert (deepest == bgi.MAX_CHILDREN).sum() >= len(deepest) - 2


@pytest.mark.parametrize(
    ("rows", "left", "leaves"),
    [
        (17, 13, [13, 4]),
        (20, 16, [16, 4]),
        (35, 16, [16, 15, 4]),
        (51, 32, [16, 16, 15, 4]),
        (52, 32, [16, 16, 16, 4]),
        (64, 32, [16, 16, 16, 16]),
    ],
)
def test_leaves_are_full_but_for_the_last(rows: int, left: int, leaves: list[int]) -> None:
    assert bgi_pack._left_rows(np.array([rows]), 16, 4).tolist() == [left]
    boxes = np.repeat(np.arange(float(rows)), 4).reshape(-1, 4)
    tree = bgi_pack.pack(boxes, np.arange(rows))
    assert tree.sizes[-1].tolist() == leaves


def test_rows_that_are_hard_to_part_are_parted_as_by_the_c_library() -> None:
    """An order against which halving fails until `std::nth_element` turns to a heap.

    Made with a comparison that decides as late as it can; the result is the library's own.
    """
    order = np.arange(len(HARD_KEYS))
    middles = np.array([HARD_KEYS, HARD_KEYS], float).T
    one = np.ones(1, np.int64)
    bgi_pack._part(order, middles, 0 * one, 0 * one, HARD_NTH * one, len(HARD_KEYS) * one)
    assert order.tolist() == HARD_PARTED


HARD_NTH = 49
# fmt: off
HARD_KEYS = [
    45, 1, 39, 3, 47, 5, 37, 7, 43, 9, 35, 11, 20, 13, 33, 15, 34, 17, 31, 19, 48, 46, 44, 42, 40,
    38, 36, 41, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 32, 29, 30, 27, 28, 25, 26, 23, 24, 21, 22, 49,
    57, 57, 57, 57, 57, 57, 57,
]
HARD_PARTED = [
    1, 28, 3, 29, 5, 30, 7, 31, 9, 32, 11, 33, 13, 34, 15, 35, 17, 36, 19, 37, 12, 4, 20, 0, 21,
    8, 22, 27, 23, 2, 24, 6, 25, 10, 26, 14, 16, 18, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48,
    49, 50, 51, 52, 53, 54, 55, 56,
]
# fmt: on


def test_a_million_boxes() -> None:
    rng = np.random.default_rng(11)
    low = rng.uniform(-180, 180, (1_000_000, 2)).astype(np.float32).astype(np.float64)
    boxes = np.concatenate([low, low + rng.uniform(0, 0.5, low.shape)], axis=1)
    valid = rng.random(len(boxes)) > 0.01
    array = pa.FixedSizeListArray.from_arrays(pa.array(boxes.ravel()), 4, mask=pa.array(~valid))
    index = RtreeKind().build(array)
    for each in (index, loaded(index)):
        for box in ((0, 0, 1, 1), (-200, -200, 0, 0), (10.5, -3, 10.5, -3), EVERYWHERE):
            found = np.array(each.query("intersects", box), np.int64)
            assert np.array_equal(found, np.flatnonzero(valid & meets(boxes, box)))
    assert len(index.is_null()) == np.count_nonzero(~valid)


def meets(boxes: npt.NDArray[np.float64], asked: tuple[float, ...]) -> npt.NDArray[np.bool_]:
    min_x, min_y, max_x, max_y = boxes.T
    hits: npt.NDArray[np.bool_] = (
        (min_x <= asked[2]) & (max_x >= asked[0]) & (min_y <= asked[3]) & (max_y >= asked[1])
    )
    return hits


# --- what goes in --------------------------------------------------------------------------


def test_structs_of_corners_and_what_is_refused() -> None:
    rows = [{"minx": 0, "miny": 1, "maxx": 2, "maxy": 3}, None]
    index = RtreeKind().build(pa.array(rows, STRUCT))
    assert list(index.intersects((2, 3, 9, 9))) == [0]
    assert list(index.is_null()) == [1]
    with pytest.raises(InvalidInput, match="does not answer"):
        index.query("=", b"")
    with pytest.raises(InvalidInput, match="is no box"):
        index.query("intersects", (3, 0, 2, 0))
    for bad in ([2, 0, 1, 0], [0, 2, 0, 1], [0, np.nan, 1, 1], [0, None, 1, 1]):
        with pytest.raises(InvalidInput, match="row 1 is no box"):
            RtreeKind().build(boxes_array([None, bad]))
    for array in (pa.array(["a"]), pa.array([[1.0, 2.0]], pa.list_(pa.float64(), 2))):
        with pytest.raises(InvalidInput, match="does not take"):
            RtreeKind().build(array)


# --- what comes out of damaged files -------------------------------------------------------


def with_tree(golden: MemoryEntries, data: bytes) -> MemoryEntries:
    return golden.replaced(**{TREE: data})


def test_damaged_entries_are_named() -> None:
    golden = golden_entries("r_n40_nulls")
    tree = golden.entries[TREE]
    again = struct.pack("<q", 0)
    nulls = golden.entries[NULL_OFFSETS]
    small = bgi.Tree(
        (np.array([2]), np.array([3, 4])),
        (np.array([[0.0, 0, 9, 9]] * 2), np.array([[1.0, 1, 2, 2]] * 7)),
        np.arange(7),
    )
    bad = {
        "3 children": with_tree(golden, bgi.encode(small)),
        "archive": with_tree(golden, b"\0" + tree[1:]),
        "odd number": with_tree(golden, tree[:-1]),
        "words": with_tree(golden, tree[:-8]),
        "levels": with_tree(golden, tree[:90] + struct.pack("<Q", 2**63) + tree[98:]),
        "rows in": with_tree(golden, tree[:82] + struct.pack("<Q", 2**60) + tree[90:]),
        "children": with_tree(golden, tree[:98] + struct.pack("<Q", 17) + tree[106:]),
        "class": with_tree(golden, tree[:106] + b"\1" + tree[107:]),
        "outside": with_tree(golden, tree[:116] + struct.pack("<d", -100.0) + tree[124:]),
        "twice": with_tree(golden, tree.replace(struct.pack("<q", 14), again)),
        "below 0": with_tree(golden, tree[:-8] + struct.pack("<q", -1)),
        "no entry": golden.replaced(**{TREE: None}),
        "disagree": golden.replaced(**{NULL_OFFSETS: None}),
        "file_names": golden.with_meta(file_names=[TREE]),
        "ascending": golden.replaced(**{NULL_OFFSETS: nulls[8:] + nulls[:8]}),
        "among the null": golden.replaced(**{NULL_OFFSETS: again + nulls}),
        "no array": golden.replaced(**{NULL_OFFSETS: nulls[1:]}),
        "where the tree has 35": golden.replaced(**{COUNTS: b'{"count":36,"dimension":2}'}),
        "2-D": golden.replaced(**{COUNTS: b'{"count":35,"dimension":3}'}),
        "no JSON": golden.replaced(**{COUNTS: b"{"}),
        "at least": golden.with_meta(penstock={"kind": "rtree", "type": "binary", "rows": 3}),
    }
    for why, entries in bad.items():
        with pytest.raises(Corruption, match=why):
            RtreeKind().load(entries, pa.binary())


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_a_changed_bit_is_damage_or_another_tree(data: st.DataObject) -> None:
    """The file's checksum is not there to help, so all that is promised is order and bounds."""
    tree = bytearray(golden_entries("r_n300_nulls").entries[TREE])
    at = data.draw(st.integers(0, len(tree) - 1))
    tree[at] ^= 1 << data.draw(st.integers(0, 7))
    kept = bytes(tree[: data.draw(st.sampled_from([len(tree), at]))])
    with suppress(Corruption):
        assert bgi.encode(bgi.decode(kept, TREE)) == kept
