"""From data to pieces that can be written, in bounded memory: plain ones, and sealed runs.

Both are generators that a writer drains in order; a piece is good until the next one is asked for.
Close them if they are not drained to the end: they wait for what still works with their buffers
and with the data.

`plain_pieces` reads the next piece of a file while the last one is used. `sealed_runs` keeps a
window of runs under way, each a few slices that one worker reads, sums, seals and, if told where,
puts to their place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

from penstock.packed.cipher import FileCipher
from penstock.packed.crc import crc32c
from penstock.packed.entry_data import Data, FileData, MemoryData
from penstock.packed.sink import Put

CHUNK_BYTES = 4 << 20
"""What is read, summed and written at a time of a plain entry."""
RUN_BYTES = 1 << 20
"""Slices smaller than this are sealed several at a time."""
SPARE_BYTES = 32 << 20
"""What buffers may take beside one slice for each worker."""


class Buffers:
    """Memory that is used again; never more of it than was in use at one time."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self, size: int) -> memoryview:
        """A buffer of at least that size."""
        for n, buffer in enumerate(self._free):
            if buffer.nbytes >= size:
                return self._free.pop(n)
        if self._free:
            self._free.pop()
        return np.empty(size, np.uint8).data

    def give(self, *buffers: memoryview) -> None:
        self._free.extend(buffers)

    def clear(self) -> None:
        self._free.clear()


class Workshop:
    """What the entries of one file share: buffers, and threads that are there once needed."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.buffers = Buffers()
        self._executor: ThreadPoolExecutor | None = None

    @property
    def pool(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self.workers, "penstock-packed")
        return self._executor

    def close(self) -> None:
        self.buffers.clear()
        if self._executor is not None:
            self._executor.shutdown()


# --- plain ----------------------------------------------------------------------------------------


def plain_pieces(data: Data, shop: Workshop) -> Generator[memoryview, None, None]:
    if isinstance(data, MemoryData):
        for start in range(0, data.size, CHUNK_BYTES):
            yield data.view[start : start + CHUNK_BYTES]
    elif isinstance(data, FileData):
        yield from _file_pieces(data, shop)
    else:
        out = shop.buffers.take(CHUNK_BYTES)
        while got := data.read_into(out):
            yield out[:got]
        shop.buffers.give(out)


def _file_pieces(data: FileData, shop: Workshop) -> Generator[memoryview, None, None]:
    here = shop.buffers.take(min(CHUNK_BYTES, data.size))
    there = shop.buffers.take(CHUNK_BYTES) if data.size > CHUNK_BYTES else here
    reading: Future[None] | None = None
    try:
        for offset in range(0, data.size, CHUNK_BYTES):
            piece = here[: min(CHUNK_BYTES, data.size - offset)]
            if reading is None:
                data.read_into(offset, piece)
            else:
                reading.result()
            if (behind := offset + CHUNK_BYTES) < data.size:
                rest = there[: min(CHUNK_BYTES, data.size - behind)]
                reading = shop.pool.submit(data.read_into, behind, rest)
            yield piece
            here, there = there, here
    finally:
        if reading is not None:
            wait([reading])
    shop.buffers.give(here, *([there] if there is not here else []))


# --- sealed ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SealedRun:
    data: memoryview
    """Sealed slices, one behind the other."""
    slice_bytes: list[int]
    """How long each of them is."""
    plain_bytes: int
    crc32: int
    """Of the run's plaintext."""


@dataclass(slots=True)
class _Run:
    """A run under way, and the buffers to give back when it is done with."""

    out: memoryview
    slice_bytes: list[int]
    plain_bytes: int
    crc: Future[int]
    buffers: tuple[memoryview, ...]


@dataclass(frozen=True, slots=True)
class Sealing:
    """How the slices of one entry are sealed; `sequence` is that of its first slice."""

    cipher: FileCipher
    slice_size: int
    sequence: int
    label: Callable[[int], bytes]

    def seal(self, first: int, plain: memoryview, out: memoryview) -> None:
        """The slices from number `first` on, from one buffer into another."""
        overhead = self.cipher.overhead_bytes
        end = 0
        for n, start in enumerate(range(0, plain.nbytes, self.slice_size), first):
            piece = plain[start : start + self.slice_size]
            sealed = out[end : (end := end + piece.nbytes + overhead)]
            self.cipher.seal_into(self.sequence + n, self.label(n), piece, sealed)


def sealed_runs(
    data: Data, sealing: Sealing, shop: Workshop, put: Put | None = None
) -> Generator[SealedRun, None, None]:
    """Runs in order; with `put`, each was put to its place before it comes."""
    slice_size = sealing.slice_size
    run_bytes = max(1, RUN_BYTES // slice_size) * slice_size
    copies = 1 if isinstance(data, MemoryData) else 2
    limit = (shop.workers * slice_size + SPARE_BYTES) // (copies * run_bytes)
    limit = max(1, min(limit, shop.workers + 2))

    window: deque[_Run] = deque()
    offset = 0
    try:
        while True:
            while len(window) < limit:
                run = _begin_run(data, offset, run_bytes, sealing, shop, put)
                if run is None:
                    break
                window.append(run)
                offset += run.plain_bytes
            if not window:
                return
            done = window[0]
            crc = done.crc.result()
            yield SealedRun(done.out, done.slice_bytes, done.plain_bytes, crc)
            window.popleft()
            shop.buffers.give(*done.buffers)
    finally:
        wait([run.crc for run in window])


def _begin_run(
    data: Data,
    offset: int,
    run_bytes: int,
    sealing: Sealing,
    shop: Workshop,
    put: Put | None,
) -> _Run | None:
    """Read and seal what is next, in the pool unless it is all there is; None at the end."""
    length = run_bytes if data.size is None else min(run_bytes, data.size - offset)
    if length == 0:
        return None
    if isinstance(data, MemoryData):
        buffers: tuple[memoryview, ...] = ()
        plain = data.view[offset : offset + length]
    else:
        buffers = (shop.buffers.take(length),)
        plain = buffers[0][:length]
        if not isinstance(data, FileData):
            plain = plain[: data.read_into(plain)]
            if not plain.nbytes:
                shop.buffers.give(*buffers)
                return None
    starts = range(0, plain.nbytes, sealing.slice_size)
    overhead = sealing.cipher.overhead_bytes
    slice_bytes = [min(sealing.slice_size, plain.nbytes - start) + overhead for start in starts]
    buffers += (shop.buffers.take(sum(slice_bytes)),)
    out = buffers[-1][: sum(slice_bytes)]

    def work() -> int:
        if isinstance(data, FileData):
            data.read_into(offset, plain)
        first = offset // sealing.slice_size
        sealing.seal(first, plain, out)
        crc = crc32c(plain)
        if put is not None:
            put(offset + first * overhead, out)
        return crc

    if offset == 0 and plain.nbytes == data.size:
        crc: Future[int] = Future()
        crc.set_result(work())
    else:
        crc = shop.pool.submit(work)
    return _Run(out, slice_bytes, plain.nbytes, crc, buffers)
