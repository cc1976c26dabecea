"""The `json` kind: an index of another kind over the values at a path in a column of JSON text.

The values come from `json_values`; the inner index, of any kind that takes their type, holds them
and answers every question about them. For it, all rows without a value of the type are null. This
kind keeps apart why there is none, and answers four questions more:

- `exists`: the document has something at the path, be it null or of another type
- `not_exists`: there is a document, and nothing at the path
- `is_json_null`: the document has a null there
- `is_other_type`: it has something else there than the type asks for

In the file stand the inner index's entries and the list of rows without the path, which has null
rows in it as Milvus has them there. Our description adds two entries, the null rows and those of
another type. A file without them answers `exists` alike, counts null rows into `not_exists`, and
cannot answer the last two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyroaring import BitMap

from penstock.errors import InvalidInput
from penstock.packed.entries import EntryReader, EntryWriter
from penstock.packed.indexes.base import DESCRIPTION, IndexKind, PackedIndex, everything
from penstock.packed.indexes.json_values import State, extract, pointer
from penstock.packed.indexes.postings import damaged, read_array, rows_bitmap
from penstock.packed.indexes.wrapped import WrappedIndex

NON_EXIST, HAS_NON_EXIST = "json_index_non_exist_offsets", "has_non_exist"
NULL_ROWS, OTHER_TYPE = "penstock_json_null_rows", "penstock_json_other_type"

Rows = npt.NDArray[np.uint64]


class JsonIndex(WrappedIndex):
    kind = "json"

    def __init__(
        self,
        inner: PackedIndex,
        path: str | None,
        non_exist: Rows,
        null_rows: Rows | None = None,
        other_type: Rows | None = None,
    ) -> None:
        """`path` and the last two are None if the file does not say them."""
        super().__init__(inner)
        self.path = path
        self._non_exist, self._null_rows, self._other_type = non_exist, null_rows, other_type

    # --- entries -----------------------------------------------------------------------------

    def _held_bytes(self) -> int:
        lists = (self._non_exist, self._null_rows, self._other_type)
        return self.inner.nbytes + sum(rows.nbytes for rows in lists if rows is not None)

    def write_entries(self, writer: EntryWriter) -> None:
        self.inner.write_entries(writer)
        if len(self._non_exist):
            writer.write_entry(NON_EXIST, self._non_exist.astype("<u8", copy=False))
        writer.put_meta(HAS_NON_EXIST, bool(len(self._non_exist)))

    def write(self, writer: EntryWriter, *, described: bool = True) -> None:
        self.write_entries(writer)
        if not described:
            return
        for name, rows in ((NULL_ROWS, self._null_rows), (OTHER_TYPE, self._other_type)):
            if rows is not None:
                writer.write_entry(name, rows.astype("<u8", copy=False))
        writer.put_meta(DESCRIPTION, self.description())

    def description(self) -> dict[str, Any]:
        return {
            **self.inner.description(),
            "kind": self.kind,
            "inner": self.inner.kind,
            "path": self.path,
        }

    # --- questions ---------------------------------------------------------------------------

    def query(self, op: str, value: Any = None) -> BitMap:
        match op:
            case "exists":
                return everything(self.rows) - rows_bitmap(self._non_exist)
            case "not_exists":
                missing = rows_bitmap(self._non_exist)
                return (
                    missing if self._null_rows is None else missing - rows_bitmap(self._null_rows)
                )
            case "is_json_null":
                there = self.is_null() - rows_bitmap(self._non_exist)
                return there - rows_bitmap(self._known_other_type(op))
            case "is_other_type":
                return rows_bitmap(self._known_other_type(op))
        return self.inner.query(op, value)

    def count(self, op: str, value: Any = None) -> int:
        if op in ("exists", "not_exists", "is_json_null", "is_other_type"):
            return len(self.query(op))
        return self.inner.count(op, value)

    def _known_other_type(self, op: str) -> Rows:
        if self._other_type is None:
            raise self._cannot(op)
        return self._other_type


class JsonKind(IndexKind):
    """Options: `path`, a JSON pointer or a list of steps; `value_type`, an Arrow type or its name;
    `inner`, the kind that holds the values (hybrid); all others go to the inner kind."""

    kind = "json"

    def build(self, array: pa.Array, **options: Any) -> JsonIndex:
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        if "path" not in options or "value_type" not in options:
            raise InvalidInput(
                "a json index needs path=, such as '/user/age', and value_type=, such as 'int64'"
            )
        path = pointer(options.pop("path"))
        value_type = _type(options.pop("value_type"))
        inner = _inner_kind(options.pop("inner", "hybrid"))
        found = extract(array, path, value_type)
        return JsonIndex(
            inner.build(found.values, **options),
            path,
            found.rows(State.MISSING, State.NULL_ROW),
            found.rows(State.NULL_ROW),
            found.rows(State.OTHER_TYPE),
        )

    def load(self, reader: EntryReader, value_type: pa.DataType) -> JsonIndex:
        from penstock.packed.indexes import inner_kind_of

        described = reader.meta.get(DESCRIPTION)
        said: Mapping[str, Any] = described if isinstance(described, Mapping) else {}
        chosen = said.get("inner")
        if chosen is None:
            is_hybrid = isinstance(reader.meta.get("index_type"), int)
            chosen = "hybrid" if is_hybrid else inner_kind_of(reader)
        try:
            kind = _inner_kind(chosen)
        except InvalidInput as error:
            raise damaged("__meta__", str(error)) from error
        path = said.get("path")
        if not (path is None or isinstance(path, str)):
            raise damaged("__meta__", f"its path is {path!r}")
        inner = kind.load(reader, value_type)
        non_exist = self._non_exist(reader, inner)
        null_rows = _listed(reader, NULL_ROWS, rows_bitmap(non_exist))
        has_path = inner.is_null() - rows_bitmap(non_exist)
        return JsonIndex(inner, path, non_exist, null_rows, _listed(reader, OTHER_TYPE, has_path))

    @staticmethod
    def _non_exist(reader: EntryReader, inner: PackedIndex) -> Rows:
        said, rows = reader.meta.get(HAS_NON_EXIST), _listed(reader, NON_EXIST, inner.is_null())
        if said is not (rows is not None):
            raise damaged("__meta__", f"{HAS_NON_EXIST} and the entry {NON_EXIST!r} disagree")
        return np.empty(0, np.uint64) if rows is None else rows


def _listed(reader: EntryReader, name: str, among: BitMap) -> Rows | None:
    """A list of rows, ascending and all among those; None if the file has none."""
    if name not in reader.names():
        return None
    rows: Rows = read_array(reader, name, "<u8").astype(np.uint64, copy=False)
    if np.any(rows[1:] <= rows[:-1]) or (len(rows) and rows[-1] >= np.uint64(1 << 32)):
        raise damaged(name, "its rows are not in ascending order, or too high")
    if not rows_bitmap(rows).issubset(among):
        raise damaged(name, "it names rows that are elsewhere or not there at all")
    return rows


def _type(named: Any) -> pa.DataType:
    if isinstance(named, pa.DataType):
        return named
    try:
        return pa.type_for_alias(str(named))
    except ValueError as error:
        raise InvalidInput(f"value_type is an Arrow type or its name, not {named!r}") from error


def _inner_kind(name: Any) -> IndexKind:
    from penstock.packed.indexes import KINDS

    if not isinstance(name, str) or name not in KINDS or name in ("json", "rtree"):
        raise InvalidInput(f"{name!r} is no kind of index over values of JSON")
    return KINDS[name]
