"""The order in which libstdc++'s `std::sort` leaves equal values.

Milvus sorts (value, row) pairs by value alone, so rows of one value come in whatever order the
algorithm leaves them: introsort, as the library has written it for decades. This is that algorithm
in plain Python, swap for swap. No reader depends on the order, and it is some hundred times slower
than `order.stable_order`; its one use is to make files that equal Milvus' byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence

THRESHOLD = 16
"""Stretches up to this length are left to the insertion sort at the end."""


def std_sort_order(keys: Sequence[int]) -> list[int]:
    """Positions of the keys in the order `std::sort` would leave them."""
    items = [(key, position) for position, key in enumerate(keys)]
    if items:
        _introsort(items, 0, len(items), 2 * (len(items).bit_length() - 1))
        _final_insertion_sort(items)
    return [position for _, position in items]


_Items = list[tuple[int, int]]


def _introsort(items: _Items, first: int, last: int, depth_limit: int) -> None:
    while last - first > THRESHOLD:
        if depth_limit == 0:
            _heap_sort(items, first, last)
            return
        depth_limit -= 1
        middle = first + (last - first) // 2
        _median_to_first(items, first, first + 1, middle, last - 1)
        cut = _partition(items, first + 1, last, items[first][0])
        _introsort(items, cut, last, depth_limit)
        last = cut


def _median_to_first(items: _Items, target: int, a: int, b: int, c: int) -> None:
    at_a, at_b, at_c = items[a][0], items[b][0], items[c][0]
    if at_a < at_b:
        median = b if at_b < at_c else c if at_a < at_c else a
    else:
        median = a if at_a < at_c else c if at_b < at_c else b
    items[target], items[median] = items[median], items[target]


def _partition(items: _Items, first: int, last: int, pivot: int) -> int:
    while True:
        while items[first][0] < pivot:
            first += 1
        last -= 1
        while pivot < items[last][0]:
            last -= 1
        if first >= last:
            return first
        items[first], items[last] = items[last], items[first]
        first += 1


def _final_insertion_sort(items: _Items) -> None:
    for place in range(1, len(items)):
        item = items[place]
        if place < THRESHOLD and item[0] < items[0][0]:
            items[1 : place + 1] = items[:place]
            items[0] = item
            continue
        hole = place
        while item[0] < items[hole - 1][0]:
            items[hole] = items[hole - 1]
            hole -= 1
        items[hole] = item


# --- where the recursion went too deep -----------------------------------------------------


def _heap_sort(items: _Items, first: int, last: int) -> None:
    length = last - first
    for parent in range((length - 2) // 2, -1, -1):
        _sift(items, first, parent, length, items[first + parent])
    for end in range(last - 1, first, -1):
        item = items[end]
        items[end] = items[first]
        _sift(items, first, 0, end - first, item)


def _sift(items: _Items, first: int, hole: int, length: int, item: tuple[int, int]) -> None:
    """Let the hole sink to a leaf along the greater children, then the item rise from there."""
    top = hole
    child = hole
    while child < (length - 1) // 2:
        child = 2 * child + 2
        if items[first + child][0] < items[first + child - 1][0]:
            child -= 1
        items[first + hole] = items[first + child]
        hole = child
    if length % 2 == 0 and child == (length - 2) // 2:
        child = 2 * child + 1
        items[first + hole] = items[first + child]
        hole = child
    parent = (hole - 1) // 2
    while hole > top and items[first + parent][0] < item[0]:
        items[first + hole] = items[first + parent]
        hole = parent
        parent = (hole - 1) // 2
    items[first + hole] = item
