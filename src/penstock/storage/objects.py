"""The object-store seam: the only way Penstock reaches bytes that are its own.

Keys are relative to the store's root, use `/`, and never start or end with it; `check_key` is the
one rule, for every implementation. A prefix is a key, or a key and a `/`, or empty, and always
names a whole directory: `a` covers `a/b` and not `ab`. Every method blocks and is safe to call
from many threads. The contract each implementation keeps:

- `put*` returns only when the object is durable and wholly visible; a reader never sees a part.
- `put_if_absent` succeeds for exactly one of any number of concurrent callers.
- `put_if_match` succeeds only if the object's etag is still the one given; a missing object is
  `PreconditionFailed`. Two different contents of a key never share an etag; equal contents may.
- A `StorageError` that is not one of the named subclasses leaves the outcome unknown. Below a
  remote store requests are retried, so `ObjectExists` and `PreconditionFailed` may also be the
  echo of the caller's own first try: whoever must know puts an id of its own into the object,
  reads it back and compares.
- `get_range` gives exactly the bytes asked for, or `Corruption` if the object ends before.
- `get_tail` gives the last bytes, all of them if there are fewer, and the object's size: one
  request, except for empty objects on S3 and for every object on Azure, which need two.
- What `open_writer` began is visible, as a whole and durably, only once `commit` has returned,
  and replaces what had the key as `put` does. A writer that neither commits nor aborts leaves
  nothing to be seen, but bytes that wait for a sweep or the bucket's lifecycle rule.
- `list` gives the etag only where the store has it at hand, else an empty string: ask `head`.
- `delete` of a missing object succeeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, TypeAlias, cast

import pyarrow as pa

from penstock.errors import InvalidInput

Buffer: TypeAlias = bytes | memoryview | pa.Buffer
Payload: TypeAlias = Buffer | Sequence[Buffer]
"""One buffer, or several to be written one after the other without joining them first."""

MAX_KEY_BYTES = 1024
MAX_SEGMENT_BYTES = 255

TEMPORARY = "_penstock/tmp"
"""The directory, at any depth, in which local disk keeps unfinished writes; no key may enter it."""

_NO_SEGMENTS = frozenset(("", ".", ".."))


@dataclass(frozen=True, slots=True)
class ObjectMeta:
    key: str
    size_bytes: int
    etag: str
    modified_ms: int


@dataclass(frozen=True, slots=True)
class Object:
    data: memoryview
    etag: str


@dataclass(frozen=True, slots=True)
class Tail:
    data: memoryview
    size_bytes: int
    """Of the whole object."""


class ObjectWriter(Protocol):
    """One object, written piece by piece by one thread at a time.

    As a context manager it aborts at the end unless it was committed. A failed call aborts it.
    """

    def write(self, data: Buffer) -> None:
        """Append; the buffer may be reused on return. Waits while too much is under way."""

    def commit(self) -> None:
        """Make all that was written the object. Again: nothing happens."""

    def abort(self) -> None:
        """Forget what was written, if it was not committed. Never fails, and may be repeated."""

    def __enter__(self) -> ObjectWriter: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class ObjectStore(Protocol):
    @property
    def uri(self) -> str:
        """Where the root is, in the form Lance opens (a path, `s3://…`, `memory://…`)."""

    @property
    def storage_options(self) -> dict[str, str]:
        """The options to hand to Lance together with `uri`."""

    def child(self, prefix: str) -> ObjectStore:
        """The same store seen from a deeper root."""

    def get(self, key: str) -> Object: ...

    def get_range(self, key: str, start: int, length: int) -> memoryview: ...

    def get_tail(self, key: str, length: int) -> Tail:
        """The last `length` bytes, or all if there are fewer."""

    def head(self, key: str) -> ObjectMeta: ...

    def exists(self, key: str) -> bool:
        """Whether there is an object; cheaper than `head` where an etag costs something."""

    def list(self, prefix: str = "") -> Iterator[ObjectMeta]:
        """Every object below `prefix`, in key order, without limit on depth."""

    def list_dirs(self, prefix: str = "") -> Sequence[str]:
        """Names of the directories directly below `prefix`, sorted."""

    def put(self, key: str, data: Payload) -> str: ...

    def put_if_absent(self, key: str, data: Payload) -> str: ...

    def put_if_match(self, key: str, data: Payload, etag: str) -> str: ...

    def open_writer(self, key: str, expected_bytes: int = 0) -> ObjectWriter:
        """Write an object piece by piece, in memory that does not grow with it.

        `expected_bytes` matters above 78 GiB, on remote stores: it must not be too small there.
        """

    def copy(self, key: str, new_key: str) -> None:
        """Give an object that never changes a second name, which nobody else uses.

        Its bytes are not read, and only the new name's age counts from now on. Either can be
        deleted without the other.
        """

    def delete(self, key: str) -> None: ...

    def delete_prefix(self, prefix: str) -> None:
        """Remove everything below `prefix`, whoever wrote it, and the directory itself."""

    def sync(self, prefix: str) -> None:
        """Make durable what another library wrote below `prefix` (a no-op on object stores)."""


def check_key(key: str) -> str:
    """The key itself, if it may name an object."""
    segments = key.split("/")
    if (
        not _NO_SEGMENTS.isdisjoint(segments)
        or not key.isprintable()
        or "\\" in key
        or (TEMPORARY in key and f"/{TEMPORARY}/" in f"/{key}/")
        or not _fits(key, segments)
    ):
        raise InvalidInput(
            f"{key!r} cannot name an object: use relative segments joined by '/', none of them "
            f"empty, '.' or '..', printable characters without backslashes, nothing below "
            f"{TEMPORARY}/, at most {MAX_SEGMENT_BYTES} bytes a segment and {MAX_KEY_BYTES} in all"
        )
    return key


def check_prefix(prefix: str) -> str:
    """The prefix without its trailing `/`, if it may name a directory."""
    stripped = prefix[:-1] if prefix.endswith("/") else prefix
    return check_key(stripped) if stripped or prefix else ""


def check_range(key: str, start: int, length: int) -> None:
    if start < 0 or length < 0:
        raise InvalidInput(f"{key}: bytes from {start}, {length} long, is not a range")


def buffers_of(data: Payload) -> list[memoryview]:
    """The payload as byte views, in order, without copying and without empty ones."""
    single = isinstance(data, bytes | bytearray | memoryview | pa.Buffer)
    views = [memoryview(part) for part in cast("Sequence[Buffer]", (data,) if single else data)]
    return [view.cast("B") for view in views if view.nbytes]


def _fits(key: str, segments: list[str]) -> bool:
    if len(key) * 4 <= MAX_SEGMENT_BYTES:
        return True
    if key.isascii():
        return len(key) <= MAX_KEY_BYTES and max(map(len, segments)) <= MAX_SEGMENT_BYTES
    return len(key.encode()) <= MAX_KEY_BYTES and all(
        len(segment.encode()) <= MAX_SEGMENT_BYTES for segment in segments
    )
