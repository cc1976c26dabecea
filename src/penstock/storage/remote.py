"""The object store over `obstore`: S3 and what speaks it, GCS, Azure, and memory.

One dict of `storage_options` serves Lance and this module alike, with Lance's keys (the names of
the Rust object_store crate, such as `aws_access_key_id`, `endpoint`, `allow_http`). Options only
Lance knows are passed over, as Lance passes over what it does not know.

Two things to know about conditional puts
- obstore retries requests by itself. If a put succeeded and its answer was lost, the retry is
  told that the object exists, or that the etag has changed: `ObjectExists` and
  `PreconditionFailed` may be the echo of one's own write. The WAL, the lease and the manifests
  put an id into what they write and compare it when they are refused.
- S3 answers 409 when conditional requests on one key collide; it says nothing about who won, and
  obstore reports it as if the object existed. It is told apart here and tried again, a bounded
  number of times; the next try gets the real answer.

GCS compares generations instead of etags, so there the etag of the seam is the generation.
Memory stores live in this process only: Lance cannot open them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from penstock.errors import (
    Corruption,
    InvalidInput,
    ObjectExists,
    ObjectNotFound,
    PenstockError,
    PreconditionFailed,
    StorageError,
    StoreUnsupported,
)
from penstock.storage.clock import Clock, SystemClock
from penstock.storage.entropy import Entropy, SystemEntropy
from penstock.storage.objects import (
    Object,
    ObjectMeta,
    Payload,
    Tail,
    buffers_of,
    check_key,
    check_prefix,
    check_range,
)
from penstock.storage.retry import Backoff
from penstock.storage.streams import RemoteWriter

SCHEMES = ("s3", "gs", "az", "memory")
CONFLICT_BACKOFF = Backoff(attempts=6, base_ms=20, max_ms=1000)
SINGLE_PUT_BYTES = 64 << 20
DELETE_BATCH = 1000
LIST_CHUNK = 1000


class RemoteStore:
    def __init__(
        self,
        backend: Any,
        scheme: str,
        bucket: str,
        prefix: str,
        storage_options: Mapping[str, str],
        clock: Clock | None = None,
        entropy: Entropy | None = None,
    ) -> None:
        self._backend = backend
        self._scheme = scheme
        self._bucket = bucket
        self._prefix = f"{check_prefix(prefix)}/" if prefix else ""
        self._options = dict(storage_options)
        self._clock = clock or SystemClock()
        self._entropy = entropy or SystemEntropy()

    @property
    def uri(self) -> str:
        below = f"/{self._prefix}".rstrip("/")
        return f"{self._scheme}://{self._bucket}{below}"

    @property
    def storage_options(self) -> dict[str, str]:
        return dict(self._options)

    def __repr__(self) -> str:
        return f"RemoteStore({self.uri!r})"

    def __reduce__(self) -> tuple[Callable[..., RemoteStore], tuple[Any, ...]]:
        if self._scheme == "memory":
            raise InvalidInput(f"{self.uri} lives in one process and cannot be sent to another")
        return open_remote, (self._scheme, self._bucket, self._prefix.rstrip("/"), self._options)

    def child(self, prefix: str) -> RemoteStore:
        deeper = f"{self._prefix}{check_prefix(prefix)}".rstrip("/")
        return RemoteStore(
            self._backend,
            self._scheme,
            self._bucket,
            deeper,
            self._options,
            self._clock,
            self._entropy,
        )

    # --- reading -----------------------------------------------------------------------------

    def get(self, key: str) -> Object:
        path = self._path(key)
        try:
            result = obstore.get(self._backend, path)
            return Object(memoryview(result.bytes()), self._etag(result.meta))
        except Exception as error:
            self._fail("get", key, error)

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        check_range(key, start, length)
        path = self._path(key)
        if length == 0:
            return memoryview(b"")
        try:
            data = memoryview(obstore.get_range(self._backend, path, start=start, length=length))
        except exceptions.GenericError as error:
            size_bytes = self.head(key).size_bytes
            if start + length <= size_bytes:
                self._fail("get_range", key, error)
            raise self._too_short(key, start, length, size_bytes) from error
        except Exception as error:
            self._fail("get_range", key, error)
        if data.nbytes != length:
            raise self._too_short(key, start, length, start + data.nbytes)
        return data

    def get_tail(self, key: str, length: int) -> Tail:
        check_range(key, 0, length)
        path = self._path(key)
        try:
            if length and self._scheme != "az":
                result = obstore.get(self._backend, path, options={"range": {"suffix": length}})
                return Tail(memoryview(result.bytes()), result.meta["size"])
        except exceptions.GenericError as error:
            # S3 refuses every range of an empty object.
            if self.head(key).size_bytes:
                self._fail("get_tail", key, error)
            return Tail(memoryview(b""), 0)
        except Exception as error:
            self._fail("get_tail", key, error)
        size_bytes = self.head(key).size_bytes
        start = max(size_bytes - length, 0)
        return Tail(self.get_range(key, start, size_bytes - start), size_bytes)

    def head(self, key: str) -> ObjectMeta:
        path = self._path(key)
        try:
            return self._meta(key, obstore.head(self._backend, path))
        except Exception as error:
            self._fail("head", key, error)

    def exists(self, key: str) -> bool:
        try:
            self.head(key)
        except ObjectNotFound:
            return False
        return True

    def list(self, prefix: str = "") -> Iterator[ObjectMeta]:
        below = self._below(prefix)
        last = ""
        try:
            for chunk in obstore.list(self._backend, prefix=below, chunk_size=LIST_CHUNK):
                for found in chunk:
                    key = found["path"][len(self._prefix) :]
                    if key <= last:
                        raise StorageError(
                            f"{self.uri} lists {key} after {last}, not in key order; "
                            f"use a store whose listings are ordered (S3 Express is not)"
                        )
                    last = key
                    yield self._meta(key, found)
        except Exception as error:
            self._fail("list", prefix, error)

    def list_dirs(self, prefix: str = "") -> Sequence[str]:
        below = self._below(prefix)
        try:
            found = obstore.list_with_delimiter(self._backend, prefix=below)
            return sorted(path.rpartition("/")[2] for path in found["common_prefixes"])
        except Exception as error:
            self._fail("list_dirs", prefix, error)

    # --- writing -----------------------------------------------------------------------------

    def put(self, key: str, data: Payload) -> str:
        path = self._path(key)
        body = _body_of(data)
        try:
            result = obstore.put(
                self._backend, path, body, use_multipart=len(body) > SINGLE_PUT_BYTES
            )
            return self._etag(result)
        except Exception as error:
            self._fail("put", key, error)

    def put_if_absent(self, key: str, data: Payload) -> str:
        return self._put_conditionally("put_if_absent", key, data, "create")

    def put_if_match(self, key: str, data: Payload, etag: str) -> str:
        mode = {"version": etag} if self._scheme == "gs" else {"e_tag": etag}
        return self._put_conditionally("put_if_match", key, data, mode)

    def open_writer(self, key: str, expected_bytes: int = 0) -> RemoteWriter:
        path = self._path(key)

        def put(body: bytearray) -> None:
            obstore.put(self._backend, path, body, use_multipart=False)

        def begin(part_bytes: int, in_flight: int) -> Any:
            return obstore.open_writer(
                self._backend, path, buffer_size=part_bytes, max_concurrency=in_flight
            )

        def fail(op: str, error: Exception) -> NoReturn:
            self._fail(op, key, error)

        return RemoteWriter(key, self.uri, put, begin, fail, expected_bytes)

    def copy(self, key: str, new_key: str) -> None:
        path, new_path = self._path(key), self._path(new_key)
        try:
            obstore.copy(self._backend, path, new_path)
        except Exception as error:
            self._fail("copy", key, error)

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            obstore.delete(self._backend, path)
        except FileNotFoundError:
            return
        except Exception as error:
            self._fail("delete", key, error)

    def delete_prefix(self, prefix: str) -> None:
        batch: list[str] = []
        for found in self.list(prefix):
            batch.append(self._prefix + found.key)
            if len(batch) == DELETE_BATCH:
                self._delete_all(prefix, batch)
                batch = []
        if batch:
            self._delete_all(prefix, batch)

    def sync(self, prefix: str) -> None:
        check_prefix(prefix)

    # --- inside ------------------------------------------------------------------------------

    def _put_conditionally(self, op: str, key: str, data: Payload, mode: Any) -> str:
        path = self._path(key)
        body = _body_of(data)
        for _ in CONFLICT_BACKOFF.pauses(self._clock, self._entropy):
            try:
                result = obstore.put(self._backend, path, body, mode=mode, use_multipart=False)
                return self._etag(result)
            except Exception as error:
                if not self._is_conflict(error):
                    self._fail(op, key, error)
                conflict = error
        raise StorageError(
            f"{op} of {key} in {self.uri} met 409 Conflict {CONFLICT_BACKOFF.attempts} times; "
            f"whether it was written is unknown: read the object, and write to it less often"
        ) from conflict

    def _is_conflict(self, error: Exception) -> bool:
        """Whether S3 said 409. Azure's 409 is its way of saying that the object exists."""
        return (
            self._scheme == "s3"
            and isinstance(error, exceptions.AlreadyExistsError)
            and "status code: 409" in str(error)
        )

    def _delete_all(self, prefix: str, paths: Sequence[str]) -> None:
        try:
            obstore.delete(self._backend, paths)
        except Exception as error:
            self._fail("delete_prefix", prefix, error)

    def _path(self, key: str) -> str:
        return check_key(self._prefix + key)

    def _below(self, prefix: str) -> str | None:
        return f"{self._prefix}{check_prefix(prefix)}".rstrip("/") or None

    def _etag(self, meta: Mapping[str, Any]) -> str:
        return str(meta.get("version" if self._scheme == "gs" else "e_tag") or "")

    def _meta(self, key: str, meta: Mapping[str, Any]) -> ObjectMeta:
        modified_ms = int(meta["last_modified"].timestamp() * 1000)
        return ObjectMeta(key, meta["size"], self._etag(meta), modified_ms)

    def _too_short(self, key: str, start: int, length: int, size_bytes: int) -> Corruption:
        return Corruption(
            f"{key} in {self.uri} ends at byte {size_bytes}, before the {length} bytes from "
            f"{start} that were asked for: it was cut short, or what points into it is wrong"
        )

    def _fail(self, op: str, key: str, error: Exception) -> NoReturn:
        """Raise the Penstock error that means what this one means."""
        if isinstance(error, PenstockError):
            raise error
        missing = isinstance(error, FileNotFoundError | exceptions.NotFoundError)
        if missing and op in ("get", "get_range", "get_tail", "head", "copy"):
            raise ObjectNotFound(f"{key} is not in {self.uri}") from None
        if isinstance(error, exceptions.AlreadyExistsError) and op == "put_if_absent":
            raise ObjectExists(f"{key} in {self.uri} exists; nothing was written") from None
        if isinstance(error, exceptions.PreconditionError):
            raise PreconditionFailed(
                f"{key} in {self.uri} is no longer the version expected; nothing was written: "
                f"read it again and decide anew"
            ) from None
        if isinstance(error, NotImplementedError | exceptions.NotSupportedError):
            raise StoreUnsupported(f"{self.uri} cannot {op}: {error}; use another store") from error
        reason = str(error).partition("\n\nDebug source:")[0]
        raise StorageError(
            f"{op} of {key!r} in {self.uri} failed: {reason}; "
            f"check storage_options, credentials and that the store can be reached"
        ) from error


_MEMORY: WeakValueDictionary[str, MemoryStore] = WeakValueDictionary()
_MEMORY_LOCK = threading.Lock()


def open_remote(
    scheme: str, bucket: str, prefix: str, storage_options: Mapping[str, str]
) -> RemoteStore:
    """A store at `{scheme}://{bucket}/{prefix}`.

    `memory://name` is the same store for everybody in this process who holds it open;
    `memory://` alone is a new one each time.
    """
    try:
        backend = _open_backend(scheme, bucket, storage_options)
    except (exceptions.BaseError, ValueError, TypeError) as error:
        raise InvalidInput(
            f"{scheme}://{bucket} cannot be opened with these storage_options "
            f"({', '.join(sorted(storage_options)) or 'none'}): {error}"
        ) from error
    return RemoteStore(backend, scheme, bucket, prefix, storage_options)


def _open_backend(scheme: str, bucket: str, options: Mapping[str, str]) -> Any:
    if scheme == "memory":
        with _MEMORY_LOCK:
            backend = _MEMORY.get(bucket) if bucket else None
            if backend is None:
                backend = MemoryStore()
                if bucket:
                    _MEMORY[bucket] = backend
            return backend
    retry = {
        "max_retries": int(options.get("client_max_retries", 5)),
        "retry_timeout": timedelta(seconds=int(options.get("client_retry_timeout", 30))),
    }
    config = {name.lower(): value for name, value in options.items()}
    kind = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[scheme]
    while True:
        try:
            return kind(bucket, config=config, retry_config=retry)
        except exceptions.UnknownConfigurationKeyError as error:
            unknown = [name for name in config if f"'{name}'" in str(error)]
            if not unknown:
                raise
            # Lance has options of its own, and passes over those it does not know.
            del config[unknown[0]]


def _body_of(data: Payload) -> bytes | memoryview:
    parts = buffers_of(data)
    return parts[0] if len(parts) == 1 else b"".join(parts)
