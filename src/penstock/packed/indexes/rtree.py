"""The `rtree` kind: which boxes meet a box, over geometries in WKB or over boxes themselves.

Rows become boxes (`wkb`, or the columns of an array of boxes), boxes become a tree (`bgi_pack`),
and the tree is one entry (`bgi`), the same bytes that Milvus writes for the same boxes. Beside it
stand a small JSON entry with the number of boxes and, if any row is null, the list of those.

A question goes down the tree depth by depth, all nodes of a depth at once, and keeps the children
whose boxes meet it. The answer is about boxes: for geometries it is the candidates, of which an
exact test may strike some but to which it never adds one.

A geometry that is empty (`POINT EMPTY`, no coordinates at all) and a box of four NaN are not null,
and meet no box. They are in neither the tree nor the list of nulls, so how many rows there are
follows from the file only if our description is in it; without it, empty rows at the very end are
forgotten.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pat
from pyroaring import BitMap

from penstock.errors import InvalidInput
from penstock.packed.entries import EntryReader, EntryWriter
from penstock.packed.indexes import bgi, wkb
from penstock.packed.indexes.base import (
    DESCRIPTION,
    MAX_ROWS,
    IndexKind,
    PackedIndex,
    checked_box,
)
from penstock.packed.indexes.bgi import Boxes, Numbers, Tree, spread, starts_of
from penstock.packed.indexes.bgi_pack import pack
from penstock.packed.indexes.postings import (
    NULL_OFFSETS,
    damaged,
    read_array,
    read_nulls,
    rows_bitmap,
    write_nulls,
)

TREE, COUNTS, FILE_NAMES = "index_file.bgi", "index_file.meta.json", "file_names"
DIMENSION = 2
MAX_COUNTS_BYTES = 4096

_CORNERS = (("minx", "miny", "maxx", "maxy"), ("xmin", "ymin", "xmax", "ymax"))


class RtreeIndex(PackedIndex):
    kind = "rtree"

    def __init__(
        self, tree: Tree, nulls: npt.NDArray[np.uint64], rows: int, value_type: pa.DataType
    ) -> None:
        super().__init__(rows, value_type)
        self._tree = tree
        self._starts = [starts_of(sizes) for sizes in tree.sizes]
        self._nulls = nulls

    def _held_bytes(self) -> int:
        parts = (*self._tree.sizes, *self._tree.boxes, *self._starts, self._tree.rows, self._nulls)
        return sum(part.nbytes for part in parts)

    def write_entries(self, writer: EntryWriter) -> None:
        writer.write_entry(TREE, bgi.encode(self._tree))
        counts = {"count": len(self._tree.rows), "dimension": DIMENSION}
        writer.write_entry(COUNTS, json.dumps(counts, separators=(",", ":")).encode())
        write_nulls(writer, self._nulls)
        writer.put_meta(FILE_NAMES, [TREE, COUNTS])

    def description(self) -> dict[str, Any]:
        # No question takes a value of the column's type, so one that every reader knows will do.
        return {"kind": self.kind, "type": "binary", "rows": self.rows}

    def is_null(self) -> BitMap:
        return rows_bitmap(self._nulls)

    def intersects(self, box: Sequence[float]) -> BitMap:
        low_x, low_y, high_x, high_y = checked_box(box)
        if not self._tree.sizes:
            return BitMap()
        found: Numbers = np.zeros(1, np.int64)
        for sizes, starts, boxes in zip(
            self._tree.sizes, self._starts, self._tree.boxes, strict=True
        ):
            children = spread(starts[found], sizes[found])
            min_x, min_y, max_x, max_y = boxes[children].T
            meets = (min_x <= high_x) & (max_x >= low_x) & (min_y <= high_y) & (max_y >= low_y)
            found = children[meets]
        return rows_bitmap(np.sort(self._tree.rows[found]))


class RtreeKind(IndexKind):
    """Builds from WKB (binary, large_binary) or from boxes: a fixed-size list of 4 doubles, or a
    struct with the fields minx, miny, maxx, maxy (or xmin, ymin, xmax, ymax) in any order."""

    kind = "rtree"

    def build(self, array: pa.Array, **options: Any) -> RtreeIndex:
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        if options:
            raise InvalidInput(f"an rtree index has no option {', '.join(map(repr, options))}")
        if len(array) > MAX_ROWS:
            raise InvalidInput(f"{len(array)} rows; an index holds at most {MAX_ROWS}: split it")
        boxes = _boxes_of(array)
        rows = np.flatnonzero(~np.isnan(boxes[:, 0]))
        nulls = np.flatnonzero(np.asarray(array.is_null())).astype(np.uint64)
        return RtreeIndex(pack(boxes[rows], rows), nulls, len(array), array.type)

    def load(self, reader: EntryReader, value_type: pa.DataType) -> RtreeIndex:
        names = reader.meta.get(FILE_NAMES)
        if not isinstance(names, list) or {TREE, COUNTS} - set(map(str, names)):
            raise damaged("__meta__", f"{FILE_NAMES} must name {TREE} and {COUNTS}")
        nulls = read_nulls(reader)
        tree = bgi.decode(read_array(reader, TREE, "u1").data, TREE)
        _check_counts(reader, len(tree.rows))
        rows = _check_rows(reader, tree.rows, nulls)
        return RtreeIndex(tree, nulls, rows, value_type)


# --- rows to boxes -------------------------------------------------------------------------


def _boxes_of(array: pa.Array) -> Boxes:
    """A box per row; all NaN where the row is null or empty."""
    kind = array.type
    if pat.is_binary(kind) or pat.is_large_binary(kind) or pat.is_binary_view(kind):
        return wkb.boxes_of(array)
    if pat.is_fixed_size_list(kind) and kind.list_size == 4 and pat.is_floating(kind.value_type):
        corners = array.values.slice(4 * array.offset, 4 * len(array))
        every = np.arange(0, len(corners), 4)
        return _checked([corners.take(pa.array(every + at)) for at in range(4)], array)
    if pat.is_struct(kind):
        for fields in _CORNERS:
            if set(fields) == {field.name for field in kind} and len(kind) == len(fields):
                return _checked([array.field(name) for name in fields], array)
    raise InvalidInput(
        f"an rtree index does not take {kind}; it takes WKB as binary, a fixed-size list of 4 "
        f"doubles (min x, min y, max x, max y), or a struct of {', '.join(_CORNERS[0])}"
    )


def _checked(corners: Sequence[pa.Array], array: pa.Array) -> Boxes:
    """The columns min x, min y, max x and max y as boxes."""
    valid = np.asarray(array.is_valid())
    missing = np.stack([np.asarray(column.is_null()) for column in corners], axis=1)
    columns = [column.cast(pa.float64()).to_numpy(zero_copy_only=False) for column in corners]
    boxes = np.where(valid[:, None], np.stack(columns, axis=1), np.nan)
    nans = np.isnan(boxes).sum(axis=1)
    wrong = missing.any(axis=1) | (nans % 4 > 0) | np.any(boxes[:, :2] > boxes[:, 2:], axis=1)
    wrong &= valid
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise InvalidInput(
            f"row {row} is no box: {array[row].as_py()}; each minimum must be at most its "
            "maximum and none be missing (4 NaN are an empty box; split one that crosses 180°)"
        )
    return boxes


# --- what a file must hold -----------------------------------------------------------------


def _check_counts(reader: EntryReader, boxes: int) -> None:
    if COUNTS not in reader.names() or reader.size(COUNTS) > MAX_COUNTS_BYTES:
        raise damaged(COUNTS, "it is missing or too long")
    try:
        counts = json.loads(bytes(reader.read(COUNTS)))
    except ValueError as error:
        raise damaged(COUNTS, f"no JSON ({error})") from error
    if not isinstance(counts, dict) or counts.get("dimension") != DIMENSION:
        raise damaged(COUNTS, "its tree is not one of 2-D boxes")
    if counts.get("count") != boxes:
        raise damaged(COUNTS, f"{counts.get('count')} boxes where the tree has {boxes}")


def _check_rows(reader: EntryReader, rows: Numbers, nulls: npt.NDArray[np.uint64]) -> int:
    """How many rows there are, none of which may be twice in the tree or also null."""
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < MAX_ROWS:
        raise damaged(TREE, "a row below 0 or too high")
    seen = rows_bitmap(np.sort(rows))
    if len(seen) != len(rows):
        raise damaged(TREE, "a row is in it twice")
    if seen.intersection_cardinality(rows_bitmap(nulls)):
        raise damaged(NULL_OFFSETS, "a row with a box is among the null rows")
    least = max(len(rows) + len(nulls), int(rows.max(initial=-1)) + 1)
    if len(nulls):
        least = max(least, int(nulls[-1]) + 1)
    described = reader.meta.get(DESCRIPTION)
    said = described.get("rows") if isinstance(described, dict) else None
    if said is None:
        return least
    if type(said) is not int or not least <= said <= MAX_ROWS:
        raise damaged("__meta__", f"{said} rows where there are at least {least}")
    return said
