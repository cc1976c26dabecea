"""Reading packed files: one tail read to open, then entries to memory, to files or as a stream.

Opening reads the last 64 KiB, which normally hold footer, directory and meta; if not, one more
read gets the rest. Entries that lie in those bytes cost nothing more. A large entry is read in
ranges (16 MiB, or its slices if it is encrypted) by a pool of `workers` threads that the reader
owns, straight to where the bytes belong.

Invariants
- Nothing unchecked leaves the reader: memory is handed out, a file gets its name and a stream
  its last piece only if the CRC-32C of the whole entry is that of the directory. Every byte is
  summed once, range by range, and the sums are joined.
- The magic is checked when opening if that costs no request, else together with the first data
  that is not in the tail.
- What goes to files or streams needs workers x slice of memory, and one more slice for each
  that is being decrypted, of which there are no more than processors, and for the piece of a
  stream that its consumer has not let go of, whatever the entry's size.
- Pool threads never wait for a consumer, nor for the budget.

A reader may be used by many threads. Close it, or use it as a context manager.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any

from penstock import metrics
from penstock.errors import Corruption, InvalidInput, StorageError
from penstock.packed.budget import ByteBudget, Lease
from penstock.packed.cipher import Cipher, FileCipher
from penstock.packed.crc import combine, crc32c
from penstock.packed.drafts import absolute, new_draft
from penstock.packed.layout import (
    FOOTER_BYTES,
    MAGIC_BYTES,
    META,
    Directory,
    EntryInfo,
    Footer,
    check_magic,
    decode_directory,
    decode_footer,
    directory_digest,
    parse_json,
    plain_slice_bytes,
    slice_label,
)
from penstock.packed.pieces import Piece, pieces_of
from penstock.packed.source import (
    COPY_BYTES,
    Buffers,
    Source,
    new_buffer,
    open_source,
    store_source,
    write_at,
)
from penstock.packed.workers import WORKERS, Workers, release_when_done
from penstock.storage.disk import check_replaceable
from penstock.storage.objects import Buffer, ObjectStore

TAIL_BYTES = 64 << 10
HEAD_BYTES = 1 << 20
"""An entry that ends within so many bytes of a file in a store is read together with the magic."""
SMALL_ENTRY_BYTES = 1 << 20
CACHE_BYTES = 8 << 20
"""Small entries that were read are kept, so many bytes of them."""

_REMEDY = "restore the file from a copy or write it again"
_HITS = metrics.cache_hits.labels("packed entries")
_MISSES = metrics.cache_misses.labels("packed entries")
_EVICTIONS = metrics.cache_evictions.labels("packed entries")

Path = str | os.PathLike[str]


class PackedReader:
    def __init__(
        self,
        source: Source,
        *,
        keys: Cipher | None = None,
        require_encrypted: bool = False,
        workers: int = WORKERS,
        budget: ByteBudget | None = None,
    ) -> None:
        """Use `open` or `from_store`; the reader closes the source."""
        self._source = source
        self._where = source.name
        self._workers = Workers(workers, budget)
        self._opening = threading.BoundedSemaphore(min(workers, os.cpu_count() or 1))
        self._cache = _SmallEntries(CACHE_BYTES)
        self._idle = threading.Condition()
        self._active = 0
        self._closed = False
        self._magic_seen = False
        self._file: FileCipher | None = None
        try:
            self._open(keys, require_encrypted)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(
        cls,
        source: Path | Buffer | bytearray,
        *,
        keys: Cipher | None = None,
        require_encrypted: bool = False,
        storage_options: Mapping[str, str] | None = None,
        workers: int = WORKERS,
        budget: ByteBudget | None = None,
    ) -> PackedReader:
        """Open a file by path or URI, or one that is in memory.

        An encrypted file needs `keys`. With them a plain file opens too, unless
        `require_encrypted`: then whoever can replace files cannot pass off one of his own.
        """
        return cls(
            open_source(source, storage_options),
            keys=keys,
            require_encrypted=require_encrypted,
            workers=workers,
            budget=budget,
        )

    @classmethod
    def from_store(
        cls,
        store: ObjectStore,
        key: str,
        *,
        keys: Cipher | None = None,
        require_encrypted: bool = False,
        workers: int = WORKERS,
        budget: ByteBudget | None = None,
    ) -> PackedReader:
        return cls(
            store_source(store, key),
            keys=keys,
            require_encrypted=require_encrypted,
            workers=workers,
            budget=budget,
        )

    def __repr__(self) -> str:
        return f"PackedReader({self._where!r})"

    def __enter__(self) -> PackedReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop, once reads under way have ended; streams that are not finished fail."""
        with self._idle:
            self._closed = True
            self._idle.wait_for(lambda: self._active == 0)
        self._workers.close()
        self._source.close()

    # --- what is there -----------------------------------------------------------------------

    @property
    def directory(self) -> Directory:
        return self._directory

    @property
    def size_bytes(self) -> int:
        """Of the whole file."""
        return self._size_bytes

    @property
    def is_encrypted(self) -> bool:
        return self._file is not None

    @property
    def meta(self) -> Mapping[str, Any]:
        if not isinstance(self._meta, dict):
            raise Corruption(
                f"{self._where}: its meta is JSON, but no object of keys and values; {_REMEDY}"
            )
        return MappingProxyType(self._meta)

    def names(self) -> Sequence[str]:
        return [name for name in self._entries if name != META]

    def size(self, name: str) -> int:
        return self._entry(name).size

    # --- reading -----------------------------------------------------------------------------

    def read(self, name: str) -> memoryview:
        entry = self._entry(name)
        with self._reading():
            found = self._cache.get(name)
            if found is None:
                found = self._whole(entry).toreadonly()
                if entry.size <= SMALL_ENTRY_BYTES:
                    self._cache.put(name, found)
            return found

    def read_to_file(self, name: str, path: Path) -> None:
        self.read_to_files({name: path})

    def read_to_files(self, paths: Mapping[str, Path]) -> None:
        """Write entries to files, all at once; no file gets its name before all are right."""
        targets = [
            (entry, pieces_of(entry, self._directory.encryption), absolute(path))
            for name, path in paths.items()
            for entry in [self._entry(name)]
        ]
        if len({path for _, _, path in targets}) != len(targets):
            raise InvalidInput(f"{self._where}: two entries cannot go to one file")
        drafts: list[str] = []
        try:
            for _, _, path in targets:
                check_replaceable(path)
            with self._reading():
                beside = None if self._magic_seen else self._read_magic
                sums = iter(self._workers.run_all(self._copies(targets, drafts), beside))
                for entry, pieces, _ in targets:
                    self._check(entry, pieces, [next(sums) for _ in pieces])
                for (_, _, path), draft in zip(targets, drafts, strict=True):
                    os.replace(draft, path)
        except OSError as error:
            raise StorageError(
                f"{self._where}: entries could not be written to files ({error}): check that "
                f"the directory is there, may be written to and has room"
            ) from error
        finally:
            for draft in drafts:
                with contextlib.suppress(OSError):
                    os.unlink(draft)

    def stream(self, name: str) -> Iterator[memoryview]:
        """The entry in order; a few pieces are read ahead, and no more when the caller stops."""
        entry = self._entry(name)
        pieces = pieces_of(entry, self._directory.encryption)
        return self._stream(entry, pieces) if len(pieces) > 1 else self._stream_small(name)

    # --- opening -----------------------------------------------------------------------------

    def _open(self, keys: Cipher | None, require_encrypted: bool) -> None:
        where = self._where
        tail = self._source.tail(TAIL_BYTES)
        self._size_bytes = tail.size_bytes
        self._tail_start = tail.size_bytes - len(tail.data)
        self._tail = tail.data
        footer = decode_footer(self._tail, self._size_bytes, where)
        if self._tail_start == 0:
            self._see_magic(self._tail)
        elif self._source.is_near:
            self._see_magic(self._source.read(0, MAGIC_BYTES))
        more = self._rest_of_tail(footer)
        if more:
            self._tail_start -= len(more)
            self._tail = memoryview(b"".join((more, self._tail)))
        end = len(self._tail) - FOOTER_BYTES
        self._directory = decode_directory(
            self._tail[end - footer.directory_bytes : end], footer, self._size_bytes, where
        )
        self._entries = {entry.name: entry for entry in self._directory.entries}
        self._open_encryption(keys, require_encrypted)
        text = self._whole(self._entries[META])
        self._meta: Any = parse_json(text, f"{where}: its meta") if text else {}
        if more:
            self._tail_start += len(more)
            self._tail = tail.data

    def _rest_of_tail(self, footer: Footer) -> memoryview:
        missing = footer.tail_bytes - len(self._tail)
        if missing <= 0:
            return memoryview(b"")
        return self._source.read(self._tail_start - missing, missing)

    def _open_encryption(self, keys: Cipher | None, require_encrypted: bool) -> None:
        encryption = self._directory.encryption
        if encryption is None:
            if require_encrypted:
                raise Corruption(
                    f"{self._where} is not encrypted, and was to be opened only if it is: "
                    f"find out who wrote it"
                )
            return
        if keys is None:
            raise InvalidInput(f"{self._where} is encrypted; give the keys to open it with")
        if not self._entries[META].slices:
            # It is what the rest of the directory is sealed to, and a writer writes at least {}.
            raise Corruption(f"{self._where}: {META} of an encrypted file is empty; {_REMEDY}")
        try:
            self._file = keys.open_file(encryption.edek, encryption.ez_id)
        except (InvalidInput, Corruption) as error:
            raise type(error)(f"{self._where}: {error}") from error
        self._digest = directory_digest(
            self._directory.entries,
            self._entries[META].size,
            encryption.slice_size,
            encryption.ez_id,
        )
        overhead, step = self._file.overhead_bytes, encryption.slice_size
        for entry in self._directory.entries:
            for number, stored in enumerate(entry.slices):
                sealed = plain_slice_bytes(entry, number, step) + overhead
                if stored.size != sealed:
                    raise Corruption(
                        f"{self._where}: slice {number} of entry {entry.name!r} has "
                        f"{stored.size} bytes by the directory, and must have {sealed}; {_REMEDY}"
                    )

    # --- whole entries -----------------------------------------------------------------------

    def _whole(self, entry: EntryInfo) -> memoryview:
        pieces = pieces_of(entry, self._directory.encryption)
        beside = self._beside(pieces)
        if len(pieces) == 1 and self._file is None:
            [data] = self._workers.run_all(
                [(pieces[0].stored_bytes, partial(self._bytes_of, pieces[0]))], beside
            )
            self._check(entry, pieces, [crc32c(data)])
            return data
        try:
            out = new_buffer(entry.size)
        except MemoryError:
            raise InvalidInput(
                f"{self._where}: entry {entry.name!r} has {entry.size} bytes, and there is not so "
                f"much memory: use stream or read_to_file"
            ) from None
        buffers = Buffers(_largest(pieces))
        tasks = (
            (
                piece.stored_bytes,
                partial(
                    self._piece_into, entry, piece, out[piece.at : piece.at + piece.size], buffers
                ),
            )
            for piece in pieces
        )
        self._check(entry, pieces, self._workers.run_all(tasks, beside))
        return out

    def _copies(
        self, targets: Sequence[tuple[EntryInfo, Sequence[Piece], str]], drafts: list[str]
    ) -> Iterator[tuple[int, Callable[[], int]]]:
        largest = _largest(piece for _, pieces, _ in targets for piece in pieces)
        buffers = Buffers(largest if self.is_encrypted else min(largest, COPY_BYTES))
        for entry, pieces, path in targets:
            drafts.append(new_draft(path, entry.size))
            for piece in pieces:
                yield (
                    piece.stored_bytes,
                    partial(self._piece_to_file, entry, piece, drafts[-1], buffers),
                )

    def _check(self, entry: EntryInfo, pieces: Sequence[Piece], sums: Sequence[int]) -> None:
        crc = 0
        for piece, piece_crc in zip(pieces, sums, strict=True):
            crc = combine(crc, piece_crc, piece.size) if piece.at else piece_crc
        if crc != entry.crc32:
            raise Corruption(
                f"{self._where}: entry {entry.name!r} has the CRC-32C {crc:08X}, and the "
                f"directory says {entry.crc32:08X}; {_REMEDY}"
            )
        metrics.packed_read_bytes.inc(entry.size)

    # --- streams -----------------------------------------------------------------------------

    def _stream_small(self, name: str) -> Iterator[memoryview]:
        data = self.read(name)
        if data:
            yield data

    def _stream(self, entry: EntryInfo, pieces: Sequence[Piece]) -> Iterator[memoryview]:
        buffers = Buffers(_largest(pieces))
        waiting = deque(pieces)
        window: deque[tuple[Future[tuple[memoryview, int]], Lease]] = deque()
        sums: list[int] = []

        def read_ahead(must: bool) -> None:
            # One piece is with the consumer, and counts. What waits for him must not be what
            # others wait for: only the piece that he waits for himself may wait for room.
            while waiting and len(window) < max(1, self._workers.count - 1):
                size_bytes = waiting[0].stored_bytes
                if must and not window:
                    lease: Lease | None = self._workers.lease(size_bytes)
                else:
                    lease = self._workers.lease_if_room(size_bytes)
                if lease is None:
                    return
                task = partial(self._piece_alone, entry, waiting.popleft(), buffers)
                window.append((self._workers.submit(task, lease, until_done=False), lease))

        try:
            while waiting or window:
                with self._reading():
                    read_ahead(must=True)
                    if not self._magic_seen:
                        self._read_magic()
                    data, crc = window[0][0].result()
                    window.popleft()[1].release()
                    sums.append(crc)
                    if len(sums) == len(pieces):
                        self._check(entry, pieces, sums)
                    read_ahead(must=False)
                yield data.toreadonly()
                del data
        finally:
            for future, lease in window:
                future.cancel()
                release_when_done(future, lease)

    # --- pieces ------------------------------------------------------------------------------

    def _piece_into(self, entry: EntryInfo, piece: Piece, out: memoryview, buffers: Buffers) -> int:
        if self._file is None:
            self._source.read_into(piece.start, out)
        else:
            with self._sealed(piece, buffers) as sealed:
                self._decrypt(self._file, entry, piece, sealed, out)
        return crc32c(out)

    def _piece_alone(
        self, entry: EntryInfo, piece: Piece, buffers: Buffers
    ) -> tuple[memoryview, int]:
        if self._file is None:
            out = self._source.read(piece.start, piece.size, buffers)
        else:
            with self._sealed(piece, buffers) as sealed, self._opening:
                out = buffers.lend(piece.size)
                self._decrypt(self._file, entry, piece, sealed, out)
        return out, crc32c(out)

    def _piece_to_file(self, entry: EntryInfo, piece: Piece, path: str, buffers: Buffers) -> int:
        file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            if self._file is None:
                return self._source.copy(piece.start, piece.size, file, piece.at, buffers)
            with (
                self._sealed(piece, buffers) as sealed,
                self._opening,
                buffers.borrow(piece.size) as out,
            ):
                self._decrypt(self._file, entry, piece, sealed, out)
                return write_at(file, out, piece.at)
        finally:
            os.close(file)

    def _decrypt(
        self, file: FileCipher, entry: EntryInfo, piece: Piece, sealed: memoryview, out: memoryview
    ) -> None:
        digest = self._digest if entry.name == META else b""
        sealed_at = plain_at = 0
        for number in piece.slices:
            sealed_end = sealed_at + entry.slices[number].size
            plain_end = plain_at + entry.slices[number].size - file.overhead_bytes
            try:
                file.open_into(
                    slice_label(entry.name, number, digest),
                    sealed[sealed_at:sealed_end],
                    out[plain_at:plain_end],
                )
            except Corruption as error:
                raise Corruption(
                    f"{self._where}: slice {number} of entry {entry.name!r} cannot be decrypted "
                    f"({error}); {_REMEDY}"
                ) from error
            sealed_at, plain_at = sealed_end, plain_end

    @contextlib.contextmanager
    def _sealed(self, piece: Piece, buffers: Buffers) -> Iterator[memoryview]:
        """The piece as it lies in the file, in memory that may be used again."""
        if piece.start >= self._tail_start or self._brings_magic(piece):
            yield self._bytes_of(piece)
        else:
            with self._source.borrowed(piece.start, piece.stored_bytes, buffers) as sealed:
                yield sealed

    def _bytes_of(self, piece: Piece) -> memoryview:
        """The piece as it lies in the file, from the tail if it is there."""
        if piece.start >= self._tail_start:
            return self._tail[piece.start - self._tail_start : piece.end - self._tail_start]
        if not self._brings_magic(piece):
            return self._source.read(piece.start, piece.stored_bytes)
        head = self._source.read(0, piece.end)
        self._see_magic(head)
        # A copy, as what is kept should not keep all that lies before it.
        return memoryview(bytes(head[piece.start :]))

    # --- the magic ---------------------------------------------------------------------------

    def _brings_magic(self, piece: Piece) -> bool:
        """Whether the read of the piece is to begin at the beginning of the file."""
        return not self._magic_seen and piece.at == 0 and piece.end <= HEAD_BYTES

    def _beside(self, pieces: Sequence[Piece]) -> Callable[[], None] | None:
        """What to run together with the reads of these pieces, so that the magic is seen."""
        if self._magic_seen or not pieces or pieces[0].start >= self._tail_start:
            return None
        return None if self._brings_magic(pieces[0]) else self._read_magic

    def _read_magic(self) -> None:
        self._see_magic(self._source.read(0, MAGIC_BYTES))

    def _see_magic(self, head: memoryview) -> None:
        check_magic(head, self._where)
        self._magic_seen = True

    # --- life --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        with self._idle:
            if self._closed:
                raise InvalidInput(f"the reader of {self._where} is closed; open the file again")
            self._active += 1
        try:
            yield
        finally:
            with self._idle:
                self._active -= 1
                self._idle.notify_all()

    def _entry(self, name: str) -> EntryInfo:
        entry = self._entries.get(name)
        if entry is None:
            known = ", ".join(map(repr, itertools.islice(self._entries, 8)))
            raise InvalidInput(f"{self._where} has no entry {name!r}; it begins with {known}")
        return entry


class _SmallEntries:
    """Entries that were read, up to a number of bytes; what was used longest ago goes first."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._entries: OrderedDict[str, memoryview] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str) -> memoryview | None:
        with self._lock:
            found = self._entries.get(name)
            if found is not None:
                self._entries.move_to_end(name)
        (_HITS if found is not None else _MISSES).inc()
        return found

    def put(self, name: str, data: memoryview) -> None:
        with self._lock:
            if self._entries.setdefault(name, data) is not data:
                return
            self._used_bytes += len(data)
            while self._used_bytes > self._limit_bytes:
                self._used_bytes -= len(self._entries.popitem(last=False)[1])
                _EVICTIONS.inc()


def _largest(pieces: Iterable[Piece]) -> int:
    return max((piece.stored_bytes for piece in pieces), default=0)
