"""A lease on one object: at most one live holder, and a fencing token that only rises.

The object is JSON, `{holder, fencing_token, acquired_at, expires_at, lease_id, ttl_ms,
released}`, times in RFC 3339. It is created by put-if-absent, changed only by put-if-match on
the etag that was read, and never deleted, so no token is ever given out twice:

    absent or expired --acquire: token + 1--> held --renew: later expiry--> held
                                              held --release: marked expired--> expired

Invariants
- Every write is a compare-and-swap against the version the decision was made on. Release too:
  after a takeover it finds another version and changes nothing.
- A refused or unanswered write is settled by reading: `lease_id` tells our own write, whose answer
  was lost, from somebody else's.
- The holder measures its time on its monotonic clock from before the request was sent, so its
  wall clock may jump. A contender goes by `expires_at`, or by having watched one version for a
  whole TTL on its own monotonic clock, so a lease stamped by a clock far ahead is not for ever.
- A lease that expired but was not taken over may still be renewed: nobody has acted in between.
- Expiry alone protects nothing: whoever works under a lease also checks the token where it commits.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from penstock.errors import (
    Corruption,
    InvalidInput,
    LeaseHeld,
    LeaseLost,
    ObjectExists,
    ObjectNotFound,
    PreconditionFailed,
    StorageError,
)
from penstock.storage.clock import Clock, SystemClock
from penstock.storage.entropy import Entropy, SystemEntropy
from penstock.storage.objects import ObjectStore
from penstock.storage.retry import Backoff

DEFAULT_TTL_MS = 300_000
MAX_PAUSE_MS = 500.0
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Lease:
    """One version of the lease object, as its holder or a reader sees it."""

    holder: str
    token: int
    lease_id: str
    acquired_ms: int
    expires_ms: int
    ttl_ms: int
    released: bool = False
    etag: str = ""
    deadline_ms: float = 0.0
    """Until when the holder may rely on it, by its own monotonic clock; 0 for other people's."""


class LeaseKeeper:
    """Acquires, renews and releases the lease stored under `key`, for one holder."""

    def __init__(
        self,
        store: ObjectStore,
        key: str,
        holder: str,
        *,
        ttl_ms: int = DEFAULT_TTL_MS,
        clock: Clock | None = None,
        entropy: Entropy | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        if ttl_ms <= 0:
            raise InvalidInput(f"a lease of {ttl_ms} ms would never be held")
        self._store = store
        self._key = key
        self._holder = holder
        self._ttl_ms = ttl_ms
        self._clock = clock or SystemClock()
        self._entropy = entropy or SystemEntropy()
        self._backoff = backoff or Backoff(attempts=6, base_ms=20, max_ms=1000)
        self._watched: tuple[str, float] = ("", 0.0)

    def read(self) -> Lease | None:
        """The lease as it is stored, whoever holds it."""
        try:
            found = self._store.get(self._key)
        except ObjectNotFound:
            return None
        return _decode(bytes(found.data), found.etag, f"{self._key} in {self._store.uri}")

    def acquire(self, wait_ms: float = 0.0) -> Lease:
        """Take the lease, or raise `LeaseHeld` if it is still somebody else's after `wait_ms`."""
        give_up_ms = self._clock.monotonic_ms() + wait_ms
        while True:
            try:
                return self._acquire_now()
            except LeaseHeld:
                left_ms = give_up_ms - self._clock.monotonic_ms()
                if left_ms <= 0:
                    raise
                pause_ms = self._entropy.uniform(0.5, 1.0) * min(self._ttl_ms / 10, MAX_PAUSE_MS)
                self._clock.sleep_ms(min(left_ms, pause_ms))

    def renew(self, lease: Lease) -> Lease:
        """The same lease with a full TTL from now, or `LeaseLost`."""
        failure: StorageError | None = None
        for _ in self._backoff.pauses(self._clock, self._entropy):
            started_ms = self._clock.monotonic_ms()
            wanted = self._stamped(lease, started_ms)
            try:
                etag = self._store.put_if_match(self._key, _encode(wanted), lease.etag)
                return replace(wanted, etag=etag)
            except StorageError as error:
                failure = error
            found = self._read_own(lease)
            if found is not None and found.expires_ms == wanted.expires_ms:
                return replace(wanted, etag=found.etag)
            lease = replace(lease, etag=found.etag) if found is not None else lease
        raise StorageError(
            f"the lease {self._where()} could not be renewed; stop the work before it expires"
        ) from failure

    def release(self, lease: Lease) -> bool:
        """Mark the lease expired. False if it was taken over before; then nothing is changed."""
        failure: StorageError | None = None
        for _ in self._backoff.pauses(self._clock, self._entropy):
            expires_ms = min(self._clock.now_ms(), lease.expires_ms)
            try:
                released = replace(lease, expires_ms=expires_ms, released=True)
                self._store.put_if_match(self._key, _encode(released), lease.etag)
                return True
            except StorageError as error:
                failure = error
            try:
                found = self._read_own(lease, or_released=True)
            except LeaseLost:
                return False
            if found is not None and found.released:
                return True
            lease = replace(lease, etag=found.etag) if found is not None else lease
        raise StorageError(
            f"the lease {self._where()} could not be released; it expires by itself"
        ) from failure

    def check(self, lease: Lease) -> None:
        """Raise `LeaseLost` if the holder may no longer rely on it; asks only its own clock."""
        if self._clock.monotonic_ms() >= lease.deadline_ms:
            raise LeaseLost(
                f"the lease {self._where()} with token {lease.token} ran out before it was "
                f"renewed; commit nothing under it, and start again with a new one"
            )

    @contextlib.contextmanager
    def hold(self, wait_ms: float = 0.0) -> Iterator[HeldLease]:
        """Acquire, renew in the background as long as the block runs, release."""
        held = HeldLease(self, self.acquire(wait_ms), self._ttl_ms, self._clock)
        held.start()
        try:
            yield held
        except BaseException as error:
            try:
                held.stop()
            except StorageError as unreleased:
                error.add_note(str(unreleased))
            raise
        held.stop()

    # --- inside ------------------------------------------------------------------------------

    def _acquire_now(self) -> Lease:
        lease_id = self._entropy.uuid4().hex
        started_ms = self._clock.monotonic_ms()
        failure: StorageError | None = None
        for _ in self._backoff.pauses(self._clock, self._entropy):
            try:
                found = self.read()
                if found is not None and found.lease_id == lease_id:
                    return replace(found, deadline_ms=started_ms + found.ttl_ms)
                if found is not None and not self._is_expired(found):
                    raise self._held_by(found)
                started_ms = self._clock.monotonic_ms()
                wanted = self._stamped(
                    Lease(
                        holder=self._holder,
                        token=1 if found is None else found.token + 1,
                        lease_id=lease_id,
                        acquired_ms=self._clock.now_ms(),
                        expires_ms=0,
                        ttl_ms=self._ttl_ms,
                    ),
                    started_ms,
                )
                if found is None:
                    etag = self._store.put_if_absent(self._key, _encode(wanted))
                else:
                    etag = self._store.put_if_match(self._key, _encode(wanted), found.etag)
                return replace(wanted, etag=etag)
            except StorageError as error:
                failure = error
        if isinstance(failure, ObjectExists | PreconditionFailed):
            raise LeaseHeld(
                f"the lease {self._where()} went to others {self._backoff.attempts} times in a "
                f"row; try again later"
            ) from failure
        raise StorageError(
            f"the lease {self._where()} could not be acquired; try again when the store answers"
        ) from failure

    def _stamped(self, lease: Lease, started_ms: float) -> Lease:
        return replace(
            lease,
            expires_ms=self._clock.now_ms() + lease.ttl_ms,
            deadline_ms=started_ms + lease.ttl_ms,
        )

    def _is_expired(self, found: Lease) -> bool:
        if found.released or self._clock.now_ms() >= found.expires_ms:
            return True
        now_ms = self._clock.monotonic_ms()
        etag, since_ms = self._watched
        if etag != found.etag:
            self._watched = (found.etag, now_ms)
            return False
        return now_ms - since_ms > found.ttl_ms

    def _read_own(self, lease: Lease, or_released: bool = False) -> Lease | None:
        """The stored version of our lease; None if it cannot be read now; LeaseLost if not ours."""
        try:
            found = self.read()
        except StorageError:
            return None
        ours = found is not None and found.lease_id == lease.lease_id
        if found is None or not ours or (found.released and not or_released):
            now = "gone" if found is None else f"{found.holder}'s with token {found.token}"
            raise LeaseLost(
                f"the lease {self._where()} with token {lease.token} is no longer held: it is "
                f"{now}; commit nothing under it, and start again with a new one"
            )
        return found

    def _held_by(self, found: Lease) -> LeaseHeld:
        left_ms = max(0, found.expires_ms - self._clock.now_ms())
        return LeaseHeld(
            f"the lease {self._where()} is held by {found.holder} with token {found.token} for "
            f"another {left_ms} ms; wait, or stop that holder"
        )

    def _where(self) -> str:
        return f"{self._key} in {self._store.uri}"


class HeldLease:
    """A lease that is renewed by a thread each third of its TTL until it is stopped or lost."""

    def __init__(self, keeper: LeaseKeeper, lease: Lease, ttl_ms: int, clock: Clock) -> None:
        self._keeper = keeper
        self._lease = lease
        self._ttl_ms = ttl_ms
        self._clock = clock
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._lost: LeaseLost | None = None
        self._thread = threading.Thread(target=self._renew_on, name="penstock-lease", daemon=True)

    @property
    def token(self) -> int:
        return self._lease.token

    def check(self) -> None:
        """Raise `LeaseLost` if work under the lease must stop; call before every commit."""
        if self._lost is not None:
            raise self._lost
        self._keeper.check(self._lease)

    def renew_if_due(self) -> None:
        """Renew if a third of the TTL is gone; the work may call it between its steps too."""
        with self._lock:
            if self._lost is not None:
                raise self._lost
            left_ms = self._lease.deadline_ms - self._clock.monotonic_ms()
            if left_ms > self._ttl_ms * 2 / 3:
                return
            try:
                self._lease = self._keeper.renew(self._lease)
            except LeaseLost as error:
                self._lost = error
                raise

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop renewing and give the lease back."""
        self._stopped.set()
        self._thread.join()
        if self._lost is None:
            self._keeper.release(self._lease)

    def _renew_on(self) -> None:
        while not self._stopped.wait(self._ttl_ms / 3000):
            try:
                self.renew_if_due()
            except LeaseLost:
                return
            except StorageError:
                continue  # check() tells the worker once the deadline has passed


def _encode(lease: Lease) -> bytes:
    return json.dumps(
        {
            "holder": lease.holder,
            "fencing_token": lease.token,
            "acquired_at": _rfc3339(lease.acquired_ms),
            "expires_at": _rfc3339(lease.expires_ms),
            "lease_id": lease.lease_id,
            "ttl_ms": lease.ttl_ms,
            "released": lease.released,
        }
    ).encode()


def _decode(data: bytes, etag: str, where: str) -> Lease:
    """The lease in `data`; one written without our own three fields is understood as well."""
    try:
        fields = json.loads(data)
        acquired_ms, expires_ms = _ms(fields["acquired_at"]), _ms(fields["expires_at"])
        return Lease(
            holder=str(fields["holder"]),
            token=int(fields["fencing_token"]),
            lease_id=str(fields.get("lease_id", "")),
            acquired_ms=acquired_ms,
            expires_ms=expires_ms,
            ttl_ms=int(fields.get("ttl_ms", max(expires_ms - acquired_ms, DEFAULT_TTL_MS))),
            released=bool(fields.get("released", False)),
            etag=etag,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corruption(
            f"the lease {where} cannot be read ({error!r}); if no holder is alive, replace it by "
            f"an expired one whose fencing_token is higher than any ever used"
        ) from error


def _rfc3339(ms: int) -> str:
    moment = _EPOCH + timedelta(milliseconds=ms)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _ms(text: str) -> int:
    return (datetime.fromisoformat(text) - _EPOCH) // timedelta(milliseconds=1)
