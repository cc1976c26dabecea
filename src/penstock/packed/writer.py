"""Writing a packed file: entries one after the other, in memory that does not grow with them.

How data flows. Plain entries go straight from where they are to the sink; of large ones the CRC is
computed, and of files the next piece is read, while a piece is being written. Encrypted entries
are cut into slices, and a few slices at a time (a run) are read and sealed by a pool of workers
into buffers that are used again and again; sealed runs go to the sink in order. If the data's size
is known and the sink is a path, each worker puts its run into the file itself, so that all
processors have work while one of them is in the kernel. The CRCs of runs are combined, so that no
thread waits for another's. At the end come `__meta__`, the directory and the footer, and only then
does the sink show the file.

Invariants
- Buffers take at most `workers` slices and 32 MiB together, whatever the size of an entry; what
  the sink has under way comes on top, at most 32 MiB.
- Every slice of an encrypted file has the next sequence number, in the order of the file; no
  number is used twice. Plaintext never leaves memory.
- Arguments are refused before anything of the entry was written, and the writer goes on. Whatever
  fails later leaves half an entry behind: the file is dropped at once and the writer refuses to go
  on (`WriterPoisoned`). Only a commit whose answer is lost can leave a file, and that is whole.
"""

from __future__ import annotations

import enum
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from types import TracebackType
from typing import Any, BinaryIO

from penstock import metrics
from penstock.errors import InvalidInput, WriterClosed, WriterPoisoned
from penstock.packed.cipher import Cipher, FileCipher
from penstock.packed.crc import combine, crc32c
from penstock.packed.entries import EntryData
from penstock.packed.entry_data import Data, MemoryData, open_data
from penstock.packed.layout import (
    MAGIC,
    MAX_DIRECTORY_BYTES,
    MAX_META_BYTES,
    META,
    SLICE_ALIGNMENT_BYTES,
    SLICE_BYTES,
    Directory,
    Encryption,
    EntryInfo,
    SliceInfo,
    canonical_json,
    directory_digest,
    encode_directory,
    encode_footer,
    slice_label,
)
from penstock.packed.sealing import RUN_BYTES, Sealing, Workshop, plain_pieces, sealed_runs
from penstock.packed.sink import Sink, open_sink, store_sink
from penstock.packed.workers import checked_workers
from penstock.storage.objects import ObjectStore

WORKERS = max(2, min(8, os.cpu_count() or 2))
MAX_SLICE_BYTES = 64 << 20

_ENTRY_TEXT_BYTES = 40
_SLICE_TEXT_BYTES = 22
"""What an entry and a slice take in the directory at the very least."""


class _State(enum.Enum):
    OPEN = "open"
    FINISHED = "was finished"
    ABORTED = "was aborted"
    POISONED = "failed"


class PackedWriter:
    """One packed file. Calls from several threads take turns.

    `target` is a path, the URI of an object, or a file open for writing bytes; `to_store` is for a
    store and a key. Used as a context manager it finishes at the end, or aborts if there was an
    error. `slice_size` matters to encrypted files only; `expected_bytes` to uploads above 78 GiB.
    """

    _meta: dict[str, bytes]
    _meta_bytes: int

    def __init__(
        self,
        target: str | os.PathLike[str] | BinaryIO,
        *,
        cipher: Cipher | None = None,
        slice_size: int = SLICE_BYTES,
        storage_options: Mapping[str, str] | None = None,
        workers: int = WORKERS,
        expected_bytes: int = 0,
    ) -> None:
        self._prepare(cipher, slice_size, workers)
        self._begin(open_sink(target, storage_options, expected_bytes))

    @classmethod
    def to_store(
        cls,
        store: ObjectStore,
        key: str,
        *,
        cipher: Cipher | None = None,
        slice_size: int = SLICE_BYTES,
        workers: int = WORKERS,
        expected_bytes: int = 0,
    ) -> PackedWriter:
        writer = cls.__new__(cls)
        writer._prepare(cipher, slice_size, workers)
        writer._begin(store_sink(store, key, expected_bytes))
        return writer

    def __enter__(self) -> PackedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and self._state in (_State.OPEN, _State.POISONED):
            self.finish()
        else:
            self.abort()

    # --- entries and meta --------------------------------------------------------------------

    def write_entry(self, name: str, data: EntryData, size: int | None = None) -> None:
        """Write one entry: bytes, the file at a path, or an open binary file from where it stands.

        `size` says how many bytes a file or stream has to give; without it, all it has. Data that
        ends before is an error.
        """
        with self._lock:
            self._check_open()
            self._check_name(name)
            with open_data(name, data, size) as found:
                self._check_directory(name, found.size or 0)
                with self._poisoning(f"writing entry {name!r}"):
                    self._add(name, found)

    def put_meta(self, key: str, value: Any) -> None:
        """Set one key of the file's meta, to a value as it is now; the last one put counts."""
        with self._lock:
            self._check_open()
            encoded = _encode_meta(key, value)
            before = self._meta.get(key)
            freed = 0 if before is None else _meta_bytes(key, before)
            self._meta_bytes = _checked_meta_bytes(
                self._meta_bytes - freed + _meta_bytes(key, encoded)
            )
            self._meta[key] = encoded

    def set_meta(self, meta: Mapping[str, Any]) -> None:
        """Make this the file's meta, instead of all that was set before."""
        with self._lock:
            self._check_open()
            if not isinstance(meta, Mapping):
                raise InvalidInput(f"meta must map keys to values, not be {type(meta).__name__}")
            whole = {key: _encode_meta(key, value) for key, value in meta.items()}
            size = sum(_meta_bytes(key, value) for key, value in whole.items())
            self._meta_bytes = _checked_meta_bytes(size)
            self._meta = whole

    # --- the end -----------------------------------------------------------------------------

    def finish(self) -> int:
        """Complete the file and make it visible; the number of its bytes."""
        with self._lock:
            self._check_open()
            with self._poisoning("finishing it"):
                meta = self._add_meta()
                encryption = None
                if self._cipher is not None:
                    encryption = Encryption(self._edek, self._ez_id, self._slice_size)
                directory = encode_directory(Directory(tuple(self._entries), encryption))
                self._write(memoryview(directory))
                self._write(memoryview(encode_footer(meta.stored_bytes, len(directory))))
                self._sink.commit()
            self._end(_State.FINISHED)
            metrics.packed_written_bytes.inc(self._total_bytes)
            return self._total_bytes

    def abort(self) -> None:
        """Drop the file, unless it was finished. May be repeated."""
        with self._lock:
            if self._state is _State.OPEN:
                self._sink.abort()
                self._end(_State.ABORTED)

    @property
    def total_bytes(self) -> int:
        """How many bytes of the file have been written so far."""
        return self._total_bytes

    # --- life --------------------------------------------------------------------------------

    def _prepare(self, cipher: Cipher | None, slice_size: int, workers: int) -> None:
        checked_workers(workers)
        if (
            type(slice_size) is not int
            or not SLICE_ALIGNMENT_BYTES <= slice_size <= MAX_SLICE_BYTES
            or slice_size % SLICE_ALIGNMENT_BYTES
        ):
            raise InvalidInput(
                f"slice_size must be a multiple of {SLICE_ALIGNMENT_BYTES} up to "
                f"{MAX_SLICE_BYTES}, not {slice_size!r}"
            )
        self._slice_size = slice_size
        self._cipher: FileCipher | None = None
        if cipher is not None:
            self._cipher = cipher.new_file()
            self._edek, self._ez_id = self._cipher.edek, self._cipher.ez_id
            # What the directory cannot hold is to be known before hours of work.
            canonical_json([self._edek, self._ez_id])
        self._lock = threading.Lock()
        self._state = _State.OPEN
        self._entries: list[EntryInfo] = []
        self._names: set[str] = set()
        self._meta = {}
        self._meta_bytes = 0
        self._least_directory_bytes = 0
        self._sequence = 0
        self._total_bytes = 0
        self._shop = Workshop(workers)

    def _begin(self, sink: Sink) -> None:
        self._sink = sink
        with self._poisoning("beginning it"):
            self._write(memoryview(MAGIC))

    def _check_open(self) -> None:
        if self._state is _State.POISONED:
            raise WriterPoisoned(
                f"{self._sink.where} was given up because an earlier call failed; write it again "
                f"with a new writer (only if it was finish that failed, it may be there, whole)"
            )
        if self._state is not _State.OPEN:
            raise WriterClosed(
                f"{self._sink.where} {self._state.value} and takes nothing more; open a new writer"
            )

    @contextmanager
    def _poisoning(self, doing: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._sink.abort()
            self._end(_State.POISONED)
            error.add_note(f"while {doing}, packed file {self._sink.where}; it was given up")
            raise

    def _end(self, state: _State) -> None:
        self._state = state
        self._shop.close()

    # --- what is refused before anything was written -------------------------------------------

    def _check_name(self, name: str) -> None:
        if not isinstance(name, str):
            raise InvalidInput(f"the name of an entry must be text, not {name!r}")
        if name == META:
            raise InvalidInput(f"{META} is the file's own: use put_meta and set_meta")
        if name in self._names:
            raise InvalidInput(
                f"{self._sink.where} has an entry {name!r} already; names are unique"
            )
        canonical_json(name)

    def _check_directory(self, name: str, size: int) -> None:
        least = self._least_directory_bytes + _ENTRY_TEXT_BYTES + len(name)
        if self._cipher is not None:
            least += -(-size // self._slice_size) * _SLICE_TEXT_BYTES
        if least > MAX_DIRECTORY_BYTES:
            raise InvalidInput(
                f"the directory of {self._sink.where} would have more than {MAX_DIRECTORY_BYTES} "
                f"bytes with entry {name!r}: use fewer entries, shorter names or larger slices"
            )
        self._least_directory_bytes = least

    # --- writing -----------------------------------------------------------------------------

    def _add_meta(self) -> EntryInfo:
        pairs = (canonical_json(key) + b":" + self._meta[key] for key in sorted(self._meta))
        text = b"{" + b",".join(pairs) + b"}"
        digest = b""
        if self._cipher is not None:
            digest = directory_digest(self._entries, len(text), self._slice_size, self._ez_id)
        return self._add(META, MemoryData(memoryview(text)), digest)

    def _add(self, name: str, data: Data, digest: bytes = b"") -> EntryInfo:
        if self._cipher is None:
            entry = self._add_plain(name, data)
        else:
            entry = self._add_sealed(self._cipher, name, data, digest)
        self._entries.append(entry)
        self._names.add(name)
        return entry

    def _write(self, data: memoryview) -> None:
        self._sink.write(data)
        self._total_bytes += data.nbytes

    @property
    def _offset(self) -> int:
        return self._total_bytes - len(MAGIC)

    def _add_plain(self, name: str, data: Data) -> EntryInfo:
        start = self._offset
        crc = 0
        with closing(plain_pieces(data, self._shop)) as pieces:
            for piece in pieces:
                if piece.nbytes < RUN_BYTES:
                    crc = crc32c(piece, crc)
                    self._write(piece)
                    continue
                summing = self._shop.pool.submit(crc32c, piece, crc)
                try:
                    self._write(piece)
                finally:
                    crc = summing.result()
        size = self._offset - start
        return EntryInfo(name, size, crc, (SliceInfo(start, size),))

    def _add_sealed(self, cipher: FileCipher, name: str, data: Data, digest: bytes) -> EntryInfo:
        def label(slice_number: int) -> bytes:
            return slice_label(name, slice_number, digest)

        sealing = Sealing(cipher, self._slice_size, self._sequence, label)
        slices: list[SliceInfo] = []
        size = crc = 0
        put = None
        if data.size is not None and data.size > RUN_BYTES:
            count = -(-data.size // self._slice_size)
            put = self._sink.reserve(data.size + count * cipher.overhead_bytes)
        with closing(sealed_runs(data, sealing, self._shop, put)) as runs:
            for run in runs:
                offset = self._offset
                for sealed_bytes in run.slice_bytes:
                    slices.append(SliceInfo(offset, sealed_bytes))
                    offset += sealed_bytes
                if put is None:
                    self._sink.write(run.data)
                self._total_bytes = len(MAGIC) + offset
                crc = combine(crc, run.crc32, run.plain_bytes) if size else run.crc32
                size += run.plain_bytes
        self._sequence += len(slices)
        return EntryInfo(name, size, crc, tuple(slices))


def _meta_bytes(key: str, value: bytes) -> int:
    """What a key and its value take, at the least."""
    return len(key) + len(value) + 4


def _checked_meta_bytes(size: int) -> int:
    # Sealing makes it longer, by less than this.
    if size > MAX_META_BYTES - (MAX_META_BYTES >> 4):
        raise InvalidInput(
            f"a meta of {size} bytes is more than a packed file may have: meta is for small "
            f"things, write large ones as entries"
        )
    return size


def _encode_meta(key: str, value: Any) -> bytes:
    if not isinstance(key, str):
        raise InvalidInput(f"a key of the meta must be text, not {key!r}")
    canonical_json(key)
    try:
        return canonical_json(value)
    except InvalidInput as error:
        raise InvalidInput(f"meta {key!r}: {error}") from error
