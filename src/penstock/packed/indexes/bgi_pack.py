"""Packing boxes into a tree, all at once: the tree that Boost's bulk loading makes of them.

Boost halves the rows again and again: along the longer side of the box around them, at the middle
of the boxes, so many to the left that the nodes there are full. Rows are not sorted for that, only
parted with `std::nth_element`, so the order of the rows within a leaf is that function's, and files
equal those of Milvus only if it is imitated swap by swap. `_part` does so for many ranges at a
time: a step of the original moves pairs of rows that depend on the range as it was before, thus
all pairs of all ranges are found and exchanged together.

`pack` takes n boxes without NaN and n row numbers. Every node of its tree but the root has between
`MIN_CHILDREN` and `MAX_CHILDREN` children.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.packed.indexes.bgi import (
    EMPTY,
    MAX_CHILDREN,
    MIN_CHILDREN,
    Boxes,
    Numbers,
    Tree,
    bounds,
    spread,
)

_SMALL_ROWS = 3
"""Ranges of so many rows are sorted rather than parted."""
_LARGE_ROWS = 4096
"""Ranges from so many rows on are parted one by one, which costs fewer passes over the rows."""


def pack(boxes: Boxes, rows: Numbers) -> Tree:
    if not len(rows):
        return EMPTY
    order, limits = _halve(boxes)
    leaf_boxes = boxes[order]
    sizes = [np.diff(limits[-1], append=len(rows))]
    levels = [leaf_boxes]
    for above, below in zip(limits[-2::-1], limits[:0:-1], strict=True):
        levels.append(bounds(levels[-1], sizes[-1]))
        first = np.searchsorted(below, above)
        sizes.append(np.diff(first, append=len(below)))
    return Tree(tuple(reversed(sizes)), tuple(reversed(levels)), rows[order])


def _halve(boxes: Boxes) -> tuple[Numbers, list[Numbers]]:
    """The order of the boxes in the leaves, and per depth where the nodes begin in it."""
    total = len(boxes)
    most = 1
    while most * MAX_CHILDREN < total:
        most *= MAX_CHILDREN
    middles = _middles(boxes)
    order = np.arange(total)
    firsts, lasts = np.zeros(1, np.int64), np.full(1, total)
    around = np.concatenate([boxes[:, :2].min(axis=0), boxes[:, 2:].max(axis=0)])[None, :]
    limits = [firsts]
    while most > 1:
        least = MIN_CHILDREN * (most // MAX_CHILDREN)
        while (wide := lasts - firsts > most).any():
            first, last, box = firsts[wide], lasts[wide], around[wide]
            middle = first + _left_rows(last - first, most, least)
            along, left, right = _half_boxes(box)
            _part(order, middles, along, first, middle, last)
            firsts = np.concatenate([firsts[~wide], first, middle])
            lasts = np.concatenate([lasts[~wide], middle, last])
            around = np.concatenate([around[~wide], left, right])
        by_place = np.argsort(firsts)
        firsts, lasts, around = firsts[by_place], lasts[by_place], around[by_place]
        limits.append(firsts)
        most //= MAX_CHILDREN
    return order, limits


def _middles(boxes: Boxes) -> Boxes:
    """The middle of every box; of one that has none, being infinite both ways, 0."""
    with np.errstate(all="ignore"):
        middles: Boxes = (boxes[:, :2] + boxes[:, 2:]) / 2
    middles[np.isnan(middles)] = 0.0
    return middles


def _left_rows(rows: Numbers, most: int, least: int) -> Numbers:
    """How many rows go to the left, so that its nodes are full and the last node is big enough."""
    nodes, rest = np.divmod(rows, most)
    fewer_nodes, fewer_rest = np.divmod(rows - least, most)
    lent = np.where(
        fewer_rest == 0,
        (fewer_nodes + 1) // 2 * most,
        np.where(fewer_nodes == 0, fewer_rest, (fewer_nodes + 2) // 2 * most),
    )
    whole = np.where(rest == 0, nodes // 2, (nodes + 1) // 2) * most
    result: Numbers = np.where((rest == 0) | (rest >= least), whole, lent)
    return result


def _half_boxes(around: Boxes) -> tuple[Numbers, Boxes, Boxes]:
    """Which side is longer, 0 for x and 1 for y, and the two halves along it."""
    with np.errstate(all="ignore"):
        lengths = around[:, 2:] - around[:, :2]
        along = (lengths[:, 1] > lengths[:, 0]).astype(np.int64)
        each = np.arange(len(around))
        centre = around[each, along] + lengths[each, along] / 2
    left, right = around.copy(), around.copy()
    left[each, along + 2] = centre
    right[each, along] = centre
    return along, left, right


# --- std::nth_element over many ranges at once ---------------------------------------------


def _part(
    order: Numbers, middles: Boxes, along: Numbers, first: Numbers, nth: Numbers, last: Numbers
) -> None:
    """Reorder each range so that none before `nth` has a greater middle than one from there on."""
    places = spread(first, last - first)
    keys = np.empty(len(order))
    keys[places] = middles[order[places], np.repeat(along, last - first)]
    first, last = first.copy(), last.copy()
    steps = 2 * (np.frexp((last - first).astype(np.float64))[1].astype(np.int64) - 1)
    while (wide := np.flatnonzero(last - first > _SMALL_ROWS)).size:
        for spent in wide[steps[wide] == 0]:
            _select_by_heap(keys, order, int(first[spent]), int(nth[spent]), int(last[spent]))
            last[spent] = first[spent]
        wide = wide[steps[wide] > 0]
        steps[wide] -= 1
        _median_to_first(keys, order, first[wide], last[wide])
        is_large = last[wide] - first[wide] >= _LARGE_ROWS
        cut = np.empty(len(wide), np.int64)
        cut[~is_large] = _partition(keys, order, first[wide[~is_large]], last[wide[~is_large]])
        for each in np.flatnonzero(is_large):
            cut[each] = _partition_one(keys, order, int(first[wide[each]]), int(last[wide[each]]))
        right = cut <= nth[wide]
        first[wide[right]] = cut[right]
        last[wide[~right]] = cut[~right]
    _sort_small(keys, order, first, last)


def _partition(keys: Boxes, order: Numbers, first: Numbers, last: Numbers) -> Numbers:
    """One step of Hoare's partition in each range, around its first key; where greater begin."""
    if not len(first):
        return first
    sizes = last - first - 1
    places = spread(first + 1, sizes)
    here = keys[places]
    pivot = np.repeat(keys[first], sizes)
    owner = np.repeat(np.arange(len(first)), sizes)
    # What is not below the pivot goes right, what is not above it goes left, the outermost first.
    rights, lefts = np.flatnonzero(~(here < pivot)), np.flatnonzero(~(pivot < here))
    right_counts = np.bincount(owner[rights], minlength=len(first))
    left_counts = np.bincount(owner[lefts], minlength=len(first))
    right_starts = np.cumsum(right_counts) - right_counts
    left_ends = np.cumsum(left_counts)
    pairs = np.minimum(right_counts, left_counts)
    from_left = places[rights[spread(right_starts, pairs)]]
    from_right = places[lefts[spread(left_ends - 1, pairs, -1)]]
    apart = from_left < from_right
    swaps = np.bincount(np.repeat(np.arange(len(first)), pairs)[apart], minlength=len(first))
    _swap(keys, order, from_left[apart], from_right[apart])
    never = np.int64(len(keys))
    next_right = np.where(
        swaps < right_counts,
        places[rights[np.minimum(right_starts + swaps, len(rights) - 1)]],
        never,
    )
    last_swapped = np.where(
        swaps > 0, places[lefts[np.minimum(left_ends - swaps, len(lefts) - 1)]], never
    )
    cut: Numbers = np.minimum(next_right, last_swapped)
    return cut


def _partition_one(keys: Boxes, order: Numbers, first: int, last: int) -> int:
    here = keys[first + 1 : last]
    rights = np.flatnonzero(here >= keys[first]) + (first + 1)
    lefts = np.flatnonzero(here <= keys[first])[::-1] + (first + 1)
    pairs = min(len(rights), len(lefts))
    swaps = int(np.count_nonzero(rights[:pairs] < lefts[:pairs]))
    _swap(keys, order, rights[:swaps], lefts[:swaps])
    ends = [rights[swaps : swaps + 1], lefts[:swaps][-1:]]
    return int(np.concatenate(ends).min())


def _median_to_first(keys: Boxes, order: Numbers, first: Numbers, last: Numbers) -> None:
    low, middle, high = first + 1, first + (last - first) // 2, last - 1
    a, b, c = keys[low], keys[middle], keys[high]
    rising = np.where(b < c, middle, np.where(a < c, high, low))
    falling = np.where(a < c, low, np.where(b < c, high, middle))
    _swap(keys, order, first, np.where(a < b, rising, falling))


def _swap(keys: Boxes, order: Numbers, one: Numbers, other: Numbers) -> None:
    keys[one], keys[other] = keys[other], keys[one]
    order[one], order[other] = order[other], order[one]


def _sort_small(keys: Boxes, order: Numbers, first: Numbers, last: Numbers) -> None:
    for least, place in ((2, 0), (3, 1), (3, 0)):
        one = first[last - first >= least] + place
        one = one[keys[one + 1] < keys[one]]
        _swap(keys, order, one, one + 1)


def _select_by_heap(
    keys: npt.NDArray[np.float64], order: Numbers, first: int, nth: int, last: int
) -> None:
    """What `std::nth_element` does when halving went badly for too long; hardly ever reached."""
    heap = list(zip(keys[first:last].tolist(), order[first:last].tolist(), strict=True))
    size = nth - first + 1

    def sift(hole: int, value: tuple[float, int]) -> None:
        top, child = hole, hole
        while child < (size - 1) // 2:
            child = 2 * (child + 1)
            if heap[child][0] < heap[child - 1][0]:
                child -= 1
            heap[hole] = heap[child]
            hole = child
        if size % 2 == 0 and child == (size - 2) // 2:
            child = 2 * (child + 1)
            heap[hole] = heap[child - 1]
            hole = child - 1
        while hole > top and heap[(hole - 1) // 2][0] < value[0]:
            heap[hole] = heap[(hole - 1) // 2]
            hole = (hole - 1) // 2
        heap[hole] = value

    for parent in range((size - 2) // 2, -1, -1) if size > 1 else ():
        sift(parent, heap[parent])
    for place in range(size, len(heap)):
        if heap[place][0] < heap[0][0]:
            value, heap[place] = heap[place], heap[0]
            sift(0, value)
    heap[0], heap[size - 1] = heap[size - 1], heap[0]
    keys[first:last] = [key for key, _ in heap]
    order[first:last] = [row for _, row in heap]
