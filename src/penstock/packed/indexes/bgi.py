"""The `.bgi` entry: a Boost binary archive that holds one R-tree of boxes, and the tree itself.

A `Tree` is flat. For every depth, from the root down, it has the number of children of each node
and the boxes of all children, left to right; the children of the deepest nodes are the rows. So
child i of one depth is node i of the next, and both questions and encoding go depth by depth over
whole arrays.

After a header of fixed bytes the archive is the same tree depth first, in words of 8 bytes: per
node its number of children, then per child its box and its node, or in a leaf its box and its row.
Only the first object of each class is preceded by 5 zero bytes, so three short runs of them, at
places that depend on the depth alone, are all that is not words.

`decode(encode(tree)) == tree`, and of bytes that `decode` takes, `encode` gives the same bytes.
Decoding trusts no number before it was held against the bytes at hand: it allocates no more than a
few times the entry, and goes no deeper than the rows allow. A tree that it returns has every box
within the box above it, hence leaves out no row that a question should find.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.errors import Corruption
from penstock.storage.objects import Buffer

MAX_CHILDREN = 16
MIN_CHILDREN = 4
"""Of every node but the root. Both stand in the header, as parameters of Boost's tree."""

_SIGNATURE = b"serialization::archive"
_CLASS = bytes(5)
_HEADER = b"".join(
    [
        struct.pack("<Q", len(_SIGNATURE)),
        _SIGNATURE,
        struct.pack("<H4Bi", 19, 4, 8, 4, 8, 1),
        _CLASS,
        struct.pack("<4Q", MAX_CHILDREN, MIN_CHILDREN, 4, 32),
        _CLASS,
    ]
)
_COUNTS = struct.Struct("<QQ")
_START = len(_HEADER) + _COUNTS.size
_WORD, _BOX_WORDS, _LEAF_WORDS = 8, 4, 5

Boxes = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tree:
    sizes: tuple[Numbers, ...]
    """Per depth, how many children each node has; without any depth the tree is empty."""
    boxes: tuple[Boxes, ...]
    """Per depth, (min x, min y, max x, max y) of the children of all nodes, left to right."""
    rows: Numbers
    """The rows that the boxes of the deepest nodes belong to."""

    @property
    def leafs_level(self) -> int:
        return max(len(self.sizes) - 1, 0)


EMPTY = Tree((), (), np.empty(0, np.int64))


def starts_of(sizes: Numbers) -> Numbers:
    """Where the children of each node begin."""
    starts: Numbers = np.cumsum(sizes) - sizes
    return starts


def spread(starts: Numbers, sizes: Numbers, step: int = 1) -> Numbers:
    """start, start + step, … for every range, one range behind the other."""
    ranks = np.arange(int(sizes.sum()), dtype=np.int64) - np.repeat(starts_of(sizes), sizes)
    result: Numbers = np.repeat(starts, sizes) + ranks * step
    return result


def bounds(boxes: Boxes, sizes: Numbers) -> Boxes:
    """The smallest boxes around the children of each node, none of which is childless."""
    starts = starts_of(sizes)
    low = np.minimum.reduceat(boxes[:, :2], starts, axis=0)
    high = np.maximum.reduceat(boxes[:, 2:], starts, axis=0)
    return np.concatenate([low, high], axis=1)


# --- encoding ------------------------------------------------------------------------------


def encode(tree: Tree) -> bytes:
    header = _HEADER + _COUNTS.pack(len(tree.rows), tree.leafs_level)
    if not tree.sizes:
        return header
    words = np.empty(_total_words(tree), np.uint64)
    numbers, values = words.view(np.int64), words.view(np.float64)
    starts = np.zeros(1, np.int64)
    widths = _widths(tree)
    for depth, sizes in enumerate(tree.sizes):
        numbers[starts] = sizes
        is_leaf = depth == tree.leafs_level
        if is_leaf:
            places = spread(starts + 1, sizes, _LEAF_WORDS)
            numbers[places + _BOX_WORDS] = tree.rows
        else:
            below = _BOX_WORDS + widths[depth + 1]
            before = starts_of(below)
            first = before[starts_of(sizes)]
            places = np.repeat(starts + 1 - first, sizes) + before
            starts = places + _BOX_WORDS
        values[places[:, None] + np.arange(_BOX_WORDS)] = tree.boxes[depth]
    body = words.astype("<u8", copy=False).tobytes()
    parts = [header]
    begin = 0
    for end, zeros in _seams(tree.leafs_level):
        parts += [body[begin:end], bytes(zeros)]
        begin = end
    return b"".join([*parts, body[begin:]])


def _widths(tree: Tree) -> list[Numbers]:
    """Per depth, the words of each node with all below it."""
    widths = [1 + _LEAF_WORDS * tree.sizes[-1]]
    for sizes in reversed(tree.sizes[:-1]):
        widths.append(1 + np.add.reduceat(_BOX_WORDS + widths[-1], starts_of(sizes)))
    return widths[::-1]


def _total_words(tree: Tree) -> int:
    inner = sum(len(boxes) for boxes in tree.boxes[:-1])
    return (
        sum(len(sizes) for sizes in tree.sizes) + _BOX_WORDS * inner + _LEAF_WORDS * len(tree.rows)
    )


def _seams(level: int) -> list[tuple[int, int]]:
    """After how many bytes of words how many zero bytes come."""
    if level == 0:
        return [(_WORD, 3 * len(_CLASS))]
    first_leaf = _WORD + level * (_BOX_WORDS + 1) * _WORD
    return [(_WORD, 2 * len(_CLASS)), (first_leaf, len(_CLASS))]


# --- decoding ------------------------------------------------------------------------------


def decode(data: Buffer, name: str) -> Tree:
    """The tree in an entry; `Corruption` naming the entry if it cannot be one."""
    view = memoryview(data).cast("B")
    if len(view) < _START or view[: len(_HEADER)] != _HEADER:
        raise Corruption(
            f"entry {name} does not begin as the archive of an R-tree of 2-D boxes does; "
            "it is damaged or from another version of Boost: build the index again"
        )
    count, level = _COUNTS.unpack_from(view, len(_HEADER))
    if count == 0:
        if level or len(view) != _START:
            raise _damaged(name, "more than an empty tree has")
        return EMPTY
    if count > (len(view) - _START) // (_LEAF_WORDS * _WORD):
        raise _damaged(name, f"{count} rows in {len(view)} bytes")
    if level > 32 or MIN_CHILDREN**level > count:
        raise _damaged(name, f"{level} levels for {count} rows")
    tree = _Walk(_words(view, level, name), level, name).tree()
    if len(tree.rows) != count:
        raise _damaged(name, f"{len(tree.rows)} rows where the header says {count}")
    _check_boxes(tree, name)
    return tree


def _words(view: memoryview, level: int, name: str) -> npt.NDArray[np.uint64]:
    """The archive behind the header as words, the zero bytes between them checked and gone."""
    body_bytes = len(view) - _START - 3 * len(_CLASS)
    if body_bytes < _WORD or body_bytes % _WORD:
        raise _damaged(name, "an odd number of bytes")
    body = np.empty(body_bytes // _WORD, "<u8")
    into = body.data.cast("B")
    begin, taken = 0, _START
    for end, zeros in [*_seams(level), (body_bytes, 0)]:
        if end > body_bytes:
            raise _damaged(name, f"no room for {level} levels")
        into[begin:end] = view[taken : taken + end - begin]
        taken += end - begin
        if view[taken : taken + zeros] != bytes(zeros):
            raise _damaged(name, f"a class that is not known at byte {taken}")
        begin, taken = end, taken + zeros
    return body.astype(np.uint64, copy=False)


class _Walk:
    """One pass over the nodes, depth first; boxes and rows are gathered afterwards, at once."""

    def __init__(self, words: npt.NDArray[np.uint64], level: int, name: str) -> None:
        self.words, self.level, self.name = words, level, name
        self.sizes: list[list[int]] = [[] for _ in range(level + 1)]
        self.places: list[list[int]] = [[] for _ in range(level + 1)]

    def tree(self) -> Tree:
        self._visit()
        sizes = tuple(np.array(of_depth, np.int64) for of_depth in self.sizes)
        places = [np.array(of_depth, np.int64) for of_depth in self.places]
        places[-1] = spread(places[-1], sizes[-1], _LEAF_WORDS)
        values, numbers = self.words.view(np.float64), self.words.view(np.int64)
        boxes = tuple(values[of_depth[:, None] + np.arange(_BOX_WORDS)] for of_depth in places)
        return Tree(sizes, boxes, numbers[places[-1] + _BOX_WORDS])

    def _visit(self) -> None:
        words, level, end = self.words.data, self.level, len(self.words)
        left = [0] * (level + 1)
        position = depth = 0
        least = 1
        while True:
            size = words[position] if position < end else 0
            if not least <= size <= MAX_CHILDREN:
                raise _damaged(self.name, f"a node of {size} children at word {position}")
            position, least = position + 1, MIN_CHILDREN
            self.sizes[depth].append(size)
            if depth < level:
                left[depth] = size
            else:
                self.places[depth].append(position)
                position += _LEAF_WORDS * size
                depth -= 1
            while depth >= 0 and not left[depth]:
                depth -= 1
            if depth < 0:
                break
            left[depth] -= 1
            self.places[depth].append(position)
            position, depth = position + _BOX_WORDS, depth + 1
        if position != end:
            raise _damaged(self.name, f"{position} words where there are {end}")


def _check_boxes(tree: Tree, name: str) -> None:
    for boxes in tree.boxes:
        if not np.all(boxes[:, :2] <= boxes[:, 2:]):
            raise _damaged(name, "a box whose minimum is above its maximum")
    for above, boxes, sizes in zip(tree.boxes, tree.boxes[1:], tree.sizes[1:], strict=False):
        inside = bounds(boxes, sizes)
        if not (np.all(above[:, :2] <= inside[:, :2]) and np.all(above[:, 2:] >= inside[:, 2:])):
            raise _damaged(name, "a box outside of the box of its node")


def _damaged(name: str, what: str) -> Corruption:
    return Corruption(f"entry {name} is damaged: {what}; build the index again")
