"""Epoch fencing: a chain of immutable, numbered objects with one owner at a time.

Version n+1 is written with put-if-absent after version n was read, so every change is a
compare-and-swap on the whole object. The object carries an epoch. To become the owner is to
write a version whose epoch is one higher; from then on the former owner's changes are refused
with `Fenced`, because each change first compares the epoch it knows with the stored one.

A claim whose answer was lost is never taken for a success: two claimants may have written the
same bytes. The claimant tries again with a higher epoch; an epoch may be skipped, never shared.

Reading the latest version starts at a best-effort hint and probes forward. Old versions are
removed in ascending order only, so a version that still exists after its successor was found
missing is the latest; if it is gone, the directory is listed instead. A change by somebody who
stalled until the place of its version was cleaned up again lands there and is refused: the version
it was made from is gone then, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from penstock import metrics
from penstock.errors import (
    ClaimContention,
    CommitConflict,
    Fenced,
    ObjectExists,
    ObjectNotFound,
    StorageError,
)
from penstock.storage.objects import ObjectStore
from penstock.storage.seams import Seams

KEPT_VERSIONS = 16
"""So many of the newest versions are never removed."""


class Epochal(Protocol):
    @property
    def version(self) -> int: ...

    @property
    def writer_epoch(self) -> int: ...


T = TypeVar("T", bound=Epochal)


class VersionedObject(Generic[T]):
    """The chain of versions of one object, and the rules for changing it."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        name: str,
        directory: str,
        file_name: Callable[[int], str],
        version_of: Callable[[str], int | None],
        encode: Callable[[T], bytes],
        decode: Callable[[memoryview, str], T],
        seams: Seams,
    ) -> None:
        self.name = name
        self._store = store
        self._directory = directory
        self._file_name = file_name
        self._version_of = version_of
        self._encode = encode
        self._decode = decode
        self._seams = seams
        self._seen_version = 0

    # --- reading ---------------------------------------------------------------------------

    def latest(self) -> T | None:
        """The newest version, or None where nothing was ever written."""
        start = max(self._seen_version, self._read_hint(), 1)
        version = start
        while self._exists(version + 1):
            version += 1
        found = self._get(version)
        if found is None:
            listed = self._list_versions()
            if not listed:
                return None
            version = max(listed)
            while self._exists(version + 1):
                version += 1
            found = self._get(version)
            if found is None:
                raise StorageError(
                    f"{self.name}: version {version} was listed but cannot be read; "
                    "it is being cleaned up under us, try again"
                )
        self._seen_version = max(self._seen_version, version)
        return found

    def is_latest(self, version: int) -> bool:
        """Whether nothing newer than `version` exists; two HEAD requests at the most."""
        return not self._exists(version + 1) and self._exists(version)

    # --- changing --------------------------------------------------------------------------

    def claim(self, first: Callable[[], T], next_owner: Callable[[T], T]) -> tuple[T, bool]:
        """Take ownership; returns the version written and whether the object is new.

        `first` makes version 1 of an object that does not exist; `next_owner` makes the next
        version, with a higher epoch, from the latest one.
        """
        last_error: StorageError | None = None
        for _ in self._seams.attempts():
            try:
                current = self._latest_to_change()
                candidate = first() if current is None else next_owner(current)
                self._put(candidate)
            except StorageError as error:
                # Somebody else's version is there, or the answer was lost and whose it is cannot
                # be known. Either way the next attempt asks for a higher epoch.
                last_error = error
                metrics.claim_races.inc()
                continue
            return candidate, current is None
        raise ClaimContention(
            f"{self.name}: not claimed in {self._seams.backoff.attempts} attempts; other writers "
            f"may be claiming it at the same time, try again later (last: {last_error})"
        )

    def update(
        self, epoch: int, change: Callable[[T], T | None], *, landed: Callable[[T], bool]
    ) -> T:
        """Write the next version as the owner of `epoch`.

        `change` gets the latest version and returns the next, or None to leave things as they
        are. `landed` says whether a version already holds our change, which settles a put
        whose answer was lost.
        """
        last_error: StorageError | None = None
        for _ in self._seams.attempts():
            try:
                current = self._latest_to_change()
            except StorageError as error:
                last_error = error
                continue
            if current is None:
                raise Fenced(f"{self.name}: the object is gone; the table may have been dropped")
            if landed(current):
                return current
            self.check(current, epoch)
            candidate = change(current)
            if candidate is None:
                return current
            try:
                self._put(candidate)
            except ObjectExists:
                continue
            except StorageError as error:
                last_error = error
                continue
            return candidate
        raise CommitConflict(
            f"{self.name}: no update in {self._seams.backoff.attempts} attempts; "
            f"nothing was changed, try again (last error: {last_error})"
        )

    def check(self, current: T, epoch: int) -> None:
        """Raise `Fenced` unless `current` still belongs to `epoch`."""
        if current.writer_epoch != epoch:
            metrics.fenced_writers.inc()
            raise Fenced(
                f"{self.name}: this writer holds epoch {epoch}, but epoch "
                f"{current.writer_epoch} has taken over; open a new writer to claim it again"
            )

    # --- removing --------------------------------------------------------------------------

    def remove(self, versions: Sequence[int]) -> int:
        """Remove old versions, the oldest first; returns how many. The newest ones stay.

        Lance looks for the latest version from the hint on and nowhere else, so the hint has to
        be beyond what goes.
        """
        latest = self.latest()
        if latest is None:
            return 0
        old = sorted(v for v in versions if v <= latest.version - KEPT_VERSIONS)
        if not old:
            return 0
        if self._read_hint() <= old[-1]:
            self._write_hint(latest.version)
            if self._read_hint() <= old[-1]:
                raise StorageError(
                    f"{self.name}: its version hint does not stay where it was put, so no old "
                    "version can be removed; try again"
                )
        for version in old:
            self._store.delete(self._key(version))
        return len(old)

    # --- details ---------------------------------------------------------------------------

    def _latest_to_change(self) -> T | None:
        """The newest version, read twice.

        Versions carry no checksum, and what is read here goes into every version to come: a bit
        that was wrong only in passing would stay wrong for good.
        """
        current = self.latest()
        if current is not None:
            again = self._get(current.version)
            if again is None or self._encode(again) != self._encode(current):
                raise StorageError(
                    f"{self.name}: two reads of version {current.version} differ; the store or "
                    "the way to it damages data, try again"
                )
        return current

    def _put(self, value: T) -> None:
        key = self._key(value.version)
        self._store.put_if_absent(key, self._encode(value))
        if not self._continues(value.version):
            with suppress(StorageError):
                self._store.delete(key)
            raise StorageError(
                f"{self.name}: version {value.version} was written where clean-up had removed one; "
                "whoever wrote it had slept too long, try again"
            )
        self._seen_version = max(self._seen_version, value.version)
        try:
            self._write_hint(value.version)
        except StorageError:
            metrics.hint_failures.inc()

    def _continues(self, version: int) -> bool:
        """Whether a version that was just written follows another, or is really the first."""
        if version > 1:
            return self._exists(version - 1)
        return len(self._list_versions()) <= KEPT_VERSIONS

    def _write_hint(self, version: int) -> None:
        hint = json.dumps({"version": version}).encode()
        self._store.put(f"{self._directory}/version_hint.json", hint)

    def _get(self, version: int) -> T | None:
        key = self._key(version)
        try:
            return self._decode(self._store.get(key).data, key)
        except ObjectNotFound:
            return None

    def _exists(self, version: int) -> bool:
        return self._store.exists(self._key(version))

    def _read_hint(self) -> int:
        try:
            data = self._store.get(f"{self._directory}/version_hint.json").data
            hint = json.loads(bytes(data))["version"]
        except ObjectNotFound:
            return 0
        except (StorageError, ValueError, KeyError, TypeError):
            metrics.hint_failures.inc()
            return 0
        return hint if isinstance(hint, int) and 0 < hint < 2**63 else 0

    def _list_versions(self) -> list[int]:
        names = (meta.key.rsplit("/", 1)[-1] for meta in self._store.list(self._directory))
        return [v for v in map(self._version_of, names) if v is not None]

    def _key(self, version: int) -> str:
        return f"{self._directory}/{self._file_name(version)}"
