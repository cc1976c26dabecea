"""Kind `hybrid`: an index of another kind, chosen by how many distinct values the column has.

Up to `MAX_BITMAP_VALUES` distinct values make a bitmap index, more a sort index. The file is that
of the inner index, and the meta says in `index_type` which it is. Marisa and inverted indexes,
which other writers choose, are read too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import Corruption, InvalidInput
from penstock.packed.entries import EntryReader, EntryWriter
from penstock.packed.indexes.base import IndexKind
from penstock.packed.indexes.bitmap import BitmapKind
from penstock.packed.indexes.numeric import checked_type
from penstock.packed.indexes.ordered import no_options, plain_array
from penstock.packed.indexes.stlsort import StlSortKind
from penstock.packed.indexes.string_sort import is_text
from penstock.packed.indexes.wrapped import WrappedIndex

MAX_BITMAP_VALUES = 100

INDEX_TYPE = "index_type"

INNER_KINDS: Mapping[int, str] = {1: "bitmap", 2: "stlsort", 3: "marisa", 4: "inverted"}
"""What the numbers of `index_type` mean."""

_NUMBERS = {name: number for number, name in INNER_KINDS.items()}


class HybridIndex(WrappedIndex):
    kind: ClassVar[str] = "hybrid"

    def write_entries(self, writer: EntryWriter) -> None:
        self.inner.write_entries(writer)
        writer.put_meta(INDEX_TYPE, _NUMBERS[self.inner.kind])


class HybridKind(IndexKind):
    kind: ClassVar[str] = "hybrid"

    def build(self, array: pa.Array, **options: Any) -> HybridIndex:
        """Options: `inner`, "bitmap" or "stlsort", to choose it; `is_nested`; `nullable`, for a
        bitmap; `ties`, for a sort of numbers."""
        array = plain_array(array, self.kind)
        inner = options.pop("inner", None)
        kept = {name: options.pop(name) for name in ("is_nested",) if name in options}
        nullable = {name: options.pop(name) for name in ("nullable",) if name in options}
        ties = {name: options.pop(name) for name in ("ties",) if name in options}
        no_options(self.kind, options)
        if not is_text(array.type):
            checked_type(array.type, self.kind)
        if inner is None:
            inner = "bitmap" if _has_few_values(array) else "stlsort"
        if inner == "bitmap":
            return HybridIndex(BitmapKind().build(array, **kept, **nullable))
        if inner == "stlsort":
            return HybridIndex(StlSortKind().build(array, **kept, **ties))
        raise InvalidInput(f"a hybrid index is built of bitmap or stlsort, not of {inner!r}")

    def load(self, reader: EntryReader, value_type: pa.DataType) -> HybridIndex:
        number = reader.meta.get(INDEX_TYPE)
        name = INNER_KINDS.get(number) if type(number) is int else None
        if name is None:
            raise Corruption(
                f"the meta of a hybrid index has {number!r} for {INDEX_TYPE!r}; "
                f"known are {', '.join(f'{n} ({kind})' for n, kind in INNER_KINDS.items())}"
            )
        return HybridIndex(_kind(name).load(reader, value_type))


def _kind(name: str) -> IndexKind:
    # The registry names this module, and marisa and tantivy take a while to import.
    from penstock.packed.indexes import KINDS

    found: IndexKind = KINDS[name]
    return found


def _has_few_values(array: pa.Array) -> bool:
    """Whether a bitmap index is the better one; a sample settles it for most columns."""
    for some in (array[: 64 * MAX_BITMAP_VALUES], array):
        if pc.count_distinct(some, mode="only_valid").as_py() > MAX_BITMAP_VALUES:
            return False
    return True
