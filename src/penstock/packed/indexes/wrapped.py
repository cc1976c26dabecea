"""An index around another one, which answers what it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyroaring import BitMap

from penstock.packed.indexes.base import PackedIndex


class WrappedIndex(PackedIndex):
    def __init__(self, inner: PackedIndex) -> None:
        super().__init__(inner.rows, inner.value_type)
        self.inner = inner

    @property
    def nbytes(self) -> int:
        return self._held_bytes()  # what is inside may grow

    def _held_bytes(self) -> int:
        return self.inner.nbytes

    def is_null(self) -> BitMap:
        return self.inner.is_null()

    def is_not_null(self) -> BitMap:
        return self.inner.is_not_null()

    def one_of(self, values: pa.Array) -> BitMap:
        return self.inner.one_of(values)

    def between(
        self, low: pa.Scalar | None, high: pa.Scalar | None, with_low: bool, with_high: bool
    ) -> BitMap:
        return self.inner.between(low, high, with_low, with_high)

    def prefix(self, text: str) -> BitMap:
        return self.inner.prefix(text)

    def like(self, pattern: str) -> BitMap:
        return self.inner.like(pattern)

    def intersects(self, box: Sequence[float]) -> BitMap:
        return self.inner.intersects(box)

    def count(self, op: str, value: Any = None) -> int:
        return self.inner.count(op, value)
