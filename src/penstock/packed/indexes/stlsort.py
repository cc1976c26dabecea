"""Kind `stlsort`: numbers and text have layouts of their own, and the type says which it is."""

from __future__ import annotations

from typing import Any, ClassVar

import pyarrow as pa

from penstock.packed.entries import EntryReader
from penstock.packed.indexes.base import IndexKind
from penstock.packed.indexes.numeric_sort import NumericSortIndex, NumericSortKind
from penstock.packed.indexes.ordered import plain_array
from penstock.packed.indexes.string_sort import StringSortIndex, StringSortKind, is_text


class StlSortKind(IndexKind):
    kind: ClassVar[str] = "stlsort"

    def build(self, array: pa.Array, **options: Any) -> NumericSortIndex | StringSortIndex:
        array = plain_array(array, self.kind)
        return self._of(array.type).build(array, **options)

    def load(
        self, reader: EntryReader, value_type: pa.DataType
    ) -> NumericSortIndex | StringSortIndex:
        return self._of(value_type).load(reader, value_type)

    def _of(self, value_type: pa.DataType) -> NumericSortKind | StringSortKind:
        return StringSortKind() if is_text(value_type) else NumericSortKind()
