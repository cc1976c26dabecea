"""The parts of a scan as values: spans of rows, each with the rows in it that are to be left out.

`split_scan` makes them, `split_read` reads them. They are sent between processes, so they hold ids,
numbers and bytes, and nothing that is open.
"""

from __future__ import annotations

import uuid
import zlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from penstock.errors import Corruption
from penstock.memwal.freshness import Mask
from penstock.memwal.manifest import FlushedGeneration


@dataclass(frozen=True, slots=True)
class BaseSpan:
    """Rows of a fragment: so many from `first` on, as they are numbered there.

    With a filter rows are numbered by their offset in the fragment, without one in the order of
    those that are not deleted; `hidden` is about offsets from `first` on in either case.
    """

    fragment: int
    first: int
    rows: int
    whole: bool
    hidden: bytes | None = None
    deleted: int = 0
    """By how much offsets may run ahead of those numbers."""


@dataclass(frozen=True, slots=True)
class GenerationSpan:
    """Rows of a generation, by their offset: so many from `first` on."""

    region_id: uuid.UUID
    flushed: FlushedGeneration
    first: int
    rows: int
    whole: bool
    hidden: bytes | None = None


@dataclass(frozen=True, slots=True)
class LogSpan:
    """The first rows of a region's log behind a position; `hidden` are those to be left out."""

    region_id: uuid.UUID
    after: int
    generation: int
    rows: int
    hidden: bytes | None = None


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows that come along, as an Arrow stream; they are filtered already."""

    stream: bytes
    rows: int


Span = BaseSpan | GenerationSpan | LogSpan | RowSpan


@dataclass(frozen=True, slots=True)
class SplitPart:
    """What one task reads."""

    version: int
    columns: tuple[str, ...]
    filter: str | None
    limit: int | None
    spans: tuple[Span, ...]

    @property
    def rows(self) -> int:
        """How many rows it looks at."""
        return sum(span.rows for span in self.spans)


def packed(mask: Mask) -> bytes:
    """One bit per row, compressed."""
    head = len(mask).to_bytes(8, "little")
    return head + zlib.compress(np.packbits(mask).tobytes(), 1)


def unpacked(data: bytes) -> Mask:
    rows = int.from_bytes(data[:8], "little")
    try:
        bits = np.frombuffer(zlib.decompress(data[8:]), dtype=np.uint8)
    except zlib.error as error:
        raise Corruption(f"a part of a scan is damaged ({error}); plan it again") from error
    return np.unpackbits(bits, count=rows).view(np.bool_)


def stream_of(rows: pa.Table) -> bytes:
    """Rows as an Arrow stream, compressed."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(sink, rows.schema, options=options) as writer:
        writer.write_table(rows.combine_chunks())
    written: bytes = sink.getvalue().to_pybytes()
    return written
