"""The write-ahead log of a region: one object per entry, in strict order.

An entry is an Arrow IPC stream, exactly as Lance writes it, followed by a trailer of ours that
stream readers never reach:

    IPC schema message   metadata: writer_epoch, generation (or fence_sentinel); padded with
                         "PSTKWAL1", which says that a trailer must follow
    IPC batch messages   rows in the order of their acknowledgement
    IPC end of stream    8 bytes
    trailer              "PSTKWAL1", 16-byte write id, CRC-32C of all before it (u32 LE), 4 zeros;
                         "PSTKTXN1" if the write id names a transaction

Entries count from 1. Entry n+1 is written only when entry n is durable, so the log has no holes
beyond what clean-up removed at its start, and its end can be found by galloping. The write id
is unique to one append: it tells our own entry, whose acknowledgement was lost, from that of
another writer who fenced us. Lance's entries have no trailer and are read without a checksum.

The mark hides in the padding, which no Arrow reader looks at, because Lance compares the schema of
an entry with the table's, metadata included, and refuses to replay one with a key it does not know.
"""

from __future__ import annotations

import struct
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import crc32c
import pyarrow as pa

from penstock import metrics
from penstock.errors import Corruption, Fenced, ObjectExists, ObjectNotFound, StorageError
from penstock.memwal import names
from penstock.memwal.transactions import Transaction
from penstock.storage.objects import Buffer, ObjectStore
from penstock.storage.seams import Seams

FIRST_POSITION = 1
TOMBSTONE = "_tombstone"

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_MAGIC = b"PSTKWAL1"
_TRANSACTION_MAGIC = b"PSTKTXN1"
_TRAILER_BYTES = 32
_CONTINUATION = b"\xff\xff\xff\xff"
_FENCE_MOVES = 10_000
_READ_ONE_BY_ONE = 4
"""A reader that keeps up finds few new entries or none, which is not worth a thread."""
_READ_AHEAD_ENTRIES = 16
_READ_AHEAD_THREADS = 16

_READ_OPTIONS = pa.ipc.IpcReadOptions(ensure_alignment=pa.ipc.Alignment.DataTypeSpecific)
"""An answer of a remote store begins anywhere in memory, and Lance panics at values that do."""
_READ_WIDE_OPTIONS = pa.ipc.IpcReadOptions(ensure_alignment=pa.ipc.Alignment.At64Byte)
"""For values of 16 bytes and more, which Arrow in C++ aligns to 8 and Lance wants at 16."""


@dataclass(frozen=True, slots=True)
class WalEntry:
    """One decoded entry."""

    position: int
    writer_epoch: int
    generation: int
    is_fence: bool
    write_id: bytes | None
    batches: tuple[pa.RecordBatch, ...]
    size_bytes: int
    transaction: Transaction | None = None


def schema_message(schema: pa.Schema, epoch: int, generation: int) -> pa.Buffer:
    """The head of every entry of one writer and generation; worth keeping between entries."""
    stamped = {
        b"writer_epoch": str(epoch).encode(),
        b"generation": str(generation).encode(),
    }
    return _marked(schema.with_metadata(stamped))


def _marked(schema: pa.Schema) -> pa.Buffer:
    """The IPC message of a schema: continuation, u32 length, flatbuffer, padding with our mark."""
    flatbuffer = schema.serialize().to_pybytes()[8:]
    length = struct.pack("<I", len(flatbuffer) + len(_MAGIC))
    return pa.py_buffer(_CONTINUATION + length + flatbuffer + _MAGIC)


def _is_marked(entry: memoryview) -> bool:
    end = 8 + int.from_bytes(entry[4:8], "little")
    return bytes(entry[end - len(_MAGIC) : end]) == _MAGIC


def encode_entry(
    head: Buffer, bodies: Sequence[Buffer], write_id: bytes, *, in_transaction: bool = False
) -> list[Buffer]:
    """The parts of an entry, ready to be written one after the other."""
    crc = crc32c.crc32c(head)
    for body in bodies:
        crc = crc32c.crc32c(body, crc)
    magic = _TRANSACTION_MAGIC if in_transaction else _MAGIC
    tail = _END_OF_STREAM + magic + write_id
    crc = crc32c.crc32c(tail, crc)
    return [head, *bodies, tail + struct.pack("<II", crc, 0)]


def encode_fence(epoch: int, write_id: bytes) -> list[Buffer]:
    """A data-less entry that occupies a position, so that a former owner collides with it."""
    metadata = {
        b"writer_epoch": str(epoch).encode(),
        b"fence_sentinel": b"true",
    }
    return encode_entry(_marked(pa.schema([], metadata=metadata)), [], write_id)


def _is_wide(kind: pa.DataType) -> bool:
    if pa.types.is_decimal(kind):
        return bool(kind.bit_width > 64)
    return any(_is_wide(kind.field(i).type) for i in range(kind.num_fields))


def decode_entry(data: memoryview | bytes, position: int, key: str) -> WalEntry:
    """Read an entry and verify its checksum if it has one."""
    view = memoryview(data)
    write_id = None
    trailer = view[-_TRAILER_BYTES:]
    transaction = None
    if len(view) > _TRAILER_BYTES and bytes(trailer[:8]) in (_MAGIC, _TRANSACTION_MAGIC):
        write_id = bytes(trailer[8:24])
        if bytes(trailer[:8]) == _TRANSACTION_MAGIC:
            transaction = Transaction.of_write_id(write_id)
        stored, padding = struct.unpack("<II", trailer[24:32])
        actual = crc32c.crc32c(view[:-8])
        if stored != actual or padding:
            raise Corruption(
                f"{key}: checksum {actual:08x} where {stored:08x} was stored, with {padding:08x} "
                "behind it where zeros belong; the entry is damaged, restore it from a copy"
            )
    try:
        reader = pa.ipc.open_stream(pa.py_buffer(view), options=_READ_OPTIONS)
        if any(_is_wide(kind) for kind in reader.schema.types):
            reader = pa.ipc.open_stream(pa.py_buffer(view), options=_READ_WIDE_OPTIONS)
        metadata = reader.schema.metadata or {}
        epoch = int(metadata[b"writer_epoch"])
        generation = int(metadata.get(b"generation", b"0"))
        batches = tuple(reader)
        if write_id is None and (_is_marked(view) or view[-8:] != _END_OF_STREAM):
            raise ValueError("its end is missing")
    except (pa.ArrowInvalid, OSError, KeyError, ValueError) as error:
        raise Corruption(
            f"{key} is not a WAL entry ({error}); the entry is damaged, restore it from a copy"
        ) from error
    return WalEntry(
        position=position,
        writer_epoch=epoch,
        generation=generation,
        is_fence=b"fence_sentinel" in metadata,
        write_id=write_id,
        batches=batches,
        size_bytes=len(view),
        transaction=transaction,
    )


class _OlderEntry(Corruption):
    """A position is taken by an epoch that is not above ours."""


class Wal:
    """The log of one region: append at a position, find the tip, read a range."""

    def __init__(self, store: ObjectStore, region_id: uuid.UUID, seams: Seams) -> None:
        self._store = store
        self._region_id = region_id
        self._seams = seams

    def append(self, position: int, parts: list[Buffer], write_id: bytes, epoch: int) -> None:
        """Make an entry durable at `position`.

        A storage error is retried at the same position with the same bytes. Raises `Fenced`
        if another writer's entry is there, and `StorageError` when the retries are used up,
        after which nobody can tell whether the entry exists.
        """
        key = names.wal_key(self._region_id, position)
        failure: StorageError | None = None
        for attempt in self._seams.attempts():
            if attempt:
                metrics.wal_retries.inc()
            try:
                self._store.put_if_absent(key, parts)
                return
            except ObjectExists:
                try:
                    found = self.read(position)
                except StorageError as error:
                    failure = error
                    continue
                if found is not None and (found.write_id, found.writer_epoch) == (write_id, epoch):
                    return
                self._refuse(position, key, found, epoch)
            except StorageError as error:
                failure = error
        raise StorageError(
            f"{key} could not be written in {self._seams.backoff.attempts} attempts: {failure}"
        )

    def fence(self, after: int, epoch: int, covered: int = 0) -> int:
        """Occupy the first free position behind `after` with a fence; returns the position.

        Entries up to `covered` were flushed before the claim, and are not looked at.

        A former owner may still land entries before us: each such entry moves the fence on,
        and is replayed because it lies before it. Behind the fence nobody else can write.
        """
        last = self.read(after) if after > covered else None
        if last is not None and last.writer_epoch > epoch:
            # A later claim has fenced already: our fence would land where its owner writes next.
            self._refuse(after, names.wal_key(self._region_id, after), last, epoch)
        write_id = self._seams.entropy.token_bytes(16)
        parts = encode_fence(epoch, write_id)
        position = after + 1
        for _ in range(_FENCE_MOVES):
            try:
                self.append(position, parts, write_id, epoch)
                return position
            except _OlderEntry:
                position += 1
        raise StorageError(
            f"region {self._region_id}: a former owner kept writing ahead of the fence for "
            f"{_FENCE_MOVES} entries; try again"
        )

    def _refuse(self, position: int, key: str, found: WalEntry | None, epoch: int) -> None:
        if found is not None and found.writer_epoch <= epoch:
            raise _OlderEntry(
                f"{key} was written by epoch {found.writer_epoch} although epoch {epoch} owns "
                "the region; two writers share an epoch, stop both and open a new one"
            )
        metrics.fenced_writers.inc()
        other = "a newer writer" if found is None else f"epoch {found.writer_epoch}"
        raise Fenced(
            f"region {self._region_id}: WAL position {position} belongs to {other}, this writer "
            f"holds epoch {epoch}; open a new writer to claim the region again"
        )

    def read(self, position: int) -> WalEntry | None:
        """The entry at a position, or None where there is none."""
        key = names.wal_key(self._region_id, position)
        try:
            data = self._store.get(key).data
        except ObjectNotFound:
            return None
        return decode_entry(data, position, key)

    def exists(self, position: int) -> bool:
        return self._store.exists(names.wal_key(self._region_id, position))

    def tip(self, known: int) -> int:
        """The last position in the log, given one that is covered or was seen to exist."""
        step, low = 1, known
        while self.exists(low + step):
            low += step
            step *= 2
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            if self.exists(middle):
                low = middle
            else:
                high = middle
        return low

    def replay(self, after: int, until: int) -> Iterator[WalEntry]:
        """The entries in `(after, until]`, all of which must exist."""
        for entry in self.tail(after, until):
            after = entry.position
            yield entry
        if after != until:
            raise Corruption(
                f"region {self._region_id}: WAL entry {after + 1} is missing although entry "
                f"{until} exists; restore it from a copy"
            )

    def tail(self, after: int, until: int = names.MAX_POSITION) -> Iterator[WalEntry]:
        """The entries behind `after`, in order, to the first position that is empty.

        Reads ahead by a bounded number of entries, so that a long log costs few round trips.
        """
        for _ in range(_READ_ONE_BY_ONE):
            entry = self.read(after + 1) if after < until else None
            if entry is None:
                return
            yield entry
            after += 1
        ahead: deque[Future[WalEntry | None]] = deque()
        position = after + 1
        width = 1
        while True:
            while len(ahead) < width and position <= until:
                ahead.append(_readers().submit(self.read, position))
                position += 1
            if not ahead:
                return
            entry = ahead.popleft().result()
            if entry is None:
                return
            width = min(width * 2, _READ_AHEAD_ENTRIES)
            yield entry


@cache
def _readers() -> ThreadPoolExecutor:
    """Threads that read entries ahead, for all logs of the process."""
    return ThreadPoolExecutor(_READ_AHEAD_THREADS, "penstock-wal-read")
