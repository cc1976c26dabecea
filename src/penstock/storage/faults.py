"""A store that fails as stores really fail, on a plan, and keeps a log of every call.

It stands in front of any other store. Each call passes the rules in the order they were given;
a rule applies to calls by operation, by key pattern, and by count or by chance drawn from the
injected entropy, so a run replays from its seed. Children share plan and log with their parent,
and patterns always match the whole key from the root of the `FaultStore`.

    store = FaultStore(LocalStore(path), clock, SeededEntropy(7))
    store.inject(Fault.FAIL_AFTER, op="put_if_absent", key="*/wal/*", nth=3)
    store.hook(op=WRITES, nth=5, after=lambda op, key: os.kill(os.getpid(), signal.SIGKILL))
    store.counts["put_if_absent"], [call.outcome for call in store.log]

Conditional puts are atomic in every store Penstock accepts, so `TORN` only ever touches `put`.
Objects written piece by piece show up as `open_writer`, any number of `write`, and `commit`; a
call that fails aborts the writer, and `abort` itself never fails.
"""

from __future__ import annotations

import enum
import fnmatch
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from penstock.errors import (
    InvalidInput,
    ObjectExists,
    ObjectNotFound,
    PreconditionFailed,
    StorageError,
)
from penstock.storage.clock import Clock
from penstock.storage.entropy import Entropy
from penstock.storage.objects import (
    Buffer,
    Object,
    ObjectMeta,
    ObjectStore,
    ObjectWriter,
    Payload,
    Tail,
    buffers_of,
    check_prefix,
)

READS = frozenset(("get", "get_range", "get_tail", "head", "exists", "list", "list_dirs"))
STREAM = frozenset(("open_writer", "write", "commit"))
WRITES = STREAM | {
    "put",
    "put_if_absent",
    "put_if_match",
    "copy",
    "delete",
    "delete_prefix",
    "sync",
}
MAX_LOGGED = 100_000

Hook = Callable[[str, str], None]
Result = TypeVar("Result")


class Fault(enum.Enum):
    NOTHING = "nothing"
    """Only run the rule's hooks."""
    FAIL_BEFORE = "fail before"
    """The request never arrives."""
    FAIL_AFTER = "fail after"
    """The request is carried out and its answer is lost."""
    DELAY = "delay"
    """The request takes `delay_ms` to arrive."""
    DELAY_ANSWER = "delay answer"
    """The answer takes `delay_ms` to come back."""
    DUPLICATE = "duplicate"
    """The request is carried out twice, and the second answer is the one that is seen.

    Not for streams: a store takes a part, and the end of an upload, any number of times.
    """
    TORN = "torn"
    """Only for put: half of the object appears, then the call fails."""
    BIT_FLIP = "bit flip"
    """Only for get, get_range and get_tail: one bit of the answer is wrong."""
    STALE_LIST = "stale list"
    """Only for list and list_dirs: the answer is that of when the rule was given."""
    HTTP_404 = "404"
    HTTP_409 = "409"
    HTTP_412 = "412"


_ONLY_FOR = {
    Fault.DUPLICATE: (READS | WRITES) - STREAM,
    Fault.TORN: frozenset(("put",)),
    Fault.BIT_FLIP: frozenset(("get", "get_range", "get_tail")),
    Fault.STALE_LIST: frozenset(("list", "list_dirs")),
    Fault.HTTP_404: frozenset(("get", "get_range", "get_tail", "head", "copy", "put_if_match")),
    Fault.HTTP_409: frozenset(("put_if_absent", "put_if_match")),
    Fault.HTTP_412: frozenset(("put_if_absent", "put_if_match")),
}


@dataclass(slots=True)
class Rule:
    """One entry of the plan; `matched` and `fired` count what came of it."""

    fault: Fault
    ops: frozenset[str]
    pattern: str
    nth: int | None
    times: int | None
    probability: float
    delay_ms: float
    before: Hook | None
    after: Hook | None
    listing: Sequence[ObjectMeta] = ()
    matched: int = 0
    fired: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    op: str
    key: str
    outcome: str
    """`ok`, or the name of the error the caller saw."""
    faults: tuple[Fault, ...] = ()


class _Plan:
    def __init__(self, inner: ObjectStore, clock: Clock, entropy: Entropy) -> None:
        self.inner = inner
        self.clock = clock
        self.entropy = entropy
        self.lock = threading.Lock()
        self.rules: list[Rule] = []
        self.log: deque[Call] = deque(maxlen=MAX_LOGGED)
        self.counts: Counter[str] = Counter()

    def due(self, op: str, key: str) -> list[Rule]:
        with self.lock:
            return [rule for rule in self.rules if self._fires(rule, op, key)]

    def _fires(self, rule: Rule, op: str, key: str) -> bool:
        if op not in rule.ops or not fnmatch.fnmatchcase(key, rule.pattern):
            return False
        rule.matched += 1
        if rule.times is not None and rule.fired >= rule.times:
            return False
        if rule.nth is not None and rule.matched < rule.nth:
            return False
        if rule.probability < 1.0 and self.entropy.uniform(0.0, 1.0) >= rule.probability:
            return False
        rule.fired += 1
        return True


class FaultStore:
    def __init__(self, inner: ObjectStore, clock: Clock, entropy: Entropy) -> None:
        self._inner = inner
        self._prefix = ""
        self._plan = _Plan(inner, clock, entropy)

    # --- the plan ----------------------------------------------------------------------------

    def inject(
        self,
        fault: Fault,
        *,
        op: str | Iterable[str] = "*",
        key: str = "*",
        nth: int | None = None,
        times: int | None = None,
        probability: float = 1.0,
        delay_ms: float = 0.0,
        before: Hook | None = None,
        after: Hook | None = None,
    ) -> Rule:
        """Add a rule. `nth` (from 1) waits for the nth matching call, and alone means only that.

        `times` bounds how often the rule fires; without `nth` and `times` it fires always, or
        with `probability`.
        """
        ops = READS | WRITES if op == "*" else frozenset((op,) if isinstance(op, str) else op)
        ops &= _ONLY_FOR.get(fault, ops)
        if not ops or not ops <= READS | WRITES:
            raise InvalidInput(f"{fault} cannot befall {op!r}")
        if nth is not None and times is None:
            times = 1
        listing = tuple(self._plan.inner.list()) if fault is Fault.STALE_LIST else ()
        rule = Rule(fault, ops, key, nth, times, probability, delay_ms, before, after, listing)
        with self._plan.lock:
            self._plan.rules.append(rule)
        return rule

    def hook(
        self,
        *,
        op: str | Iterable[str] = "*",
        key: str = "*",
        nth: int | None = None,
        times: int | None = None,
        before: Hook | None = None,
        after: Hook | None = None,
    ) -> Rule:
        """Run `before(op, key)` or `after(op, key)` around matching calls; they may raise."""
        return self.inject(
            Fault.NOTHING, op=op, key=key, nth=nth, times=times, before=before, after=after
        )

    def clear(self) -> None:
        """Forget every rule; the log stays."""
        with self._plan.lock:
            self._plan.rules.clear()

    @property
    def log(self) -> Sequence[Call]:
        with self._plan.lock:
            return list(self._plan.log)

    @property
    def counts(self) -> Counter[str]:
        """Calls by operation, since the start or since `reset_log`."""
        with self._plan.lock:
            return self._plan.counts.copy()

    def reset_log(self) -> None:
        with self._plan.lock:
            self._plan.log.clear()
            self._plan.counts.clear()

    # --- the seam ----------------------------------------------------------------------------

    @property
    def uri(self) -> str:
        return self._inner.uri

    @property
    def storage_options(self) -> dict[str, str]:
        return self._inner.storage_options

    def child(self, prefix: str) -> FaultStore:
        twin = FaultStore.__new__(FaultStore)
        twin._inner = self._inner.child(prefix)
        twin._prefix = f"{self._prefix}{check_prefix(prefix)}/" if prefix else self._prefix
        twin._plan = self._plan
        return twin

    def get(self, key: str) -> Object:
        def flip(found: Object) -> Object:
            return Object(self._flipped(found.data), found.etag)

        return self._call("get", key, lambda: self._inner.get(key), flip=flip)

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        return self._call(
            "get_range",
            key,
            lambda: self._inner.get_range(key, start, length),
            flip=self._flipped,
        )

    def get_tail(self, key: str, length: int) -> Tail:
        def flip(found: Tail) -> Tail:
            return Tail(self._flipped(found.data), found.size_bytes)

        return self._call("get_tail", key, lambda: self._inner.get_tail(key, length), flip=flip)

    def head(self, key: str) -> ObjectMeta:
        return self._call("head", key, lambda: self._inner.head(key))

    def exists(self, key: str) -> bool:
        return self._call("exists", key, lambda: self._inner.exists(key))

    def list(self, prefix: str = "") -> Iterator[ObjectMeta]:
        def stale(listing: Sequence[ObjectMeta]) -> Sequence[ObjectMeta]:
            cut, below = len(self._prefix), self._prefix + _as_directory(prefix)
            return [
                ObjectMeta(meta.key[cut:], meta.size_bytes, meta.etag, meta.modified_ms)
                for meta in listing
                if meta.key.startswith(below)
            ]

        return iter(self._call("list", prefix, lambda: [*self._inner.list(prefix)], stale=stale))

    def list_dirs(self, prefix: str = "") -> Sequence[str]:
        def stale(listing: Sequence[ObjectMeta]) -> Sequence[str]:
            below = self._prefix + _as_directory(prefix)
            rests = [meta.key[len(below) :] for meta in listing if meta.key.startswith(below)]
            return sorted({rest.partition("/")[0] for rest in rests if "/" in rest})

        return self._call("list_dirs", prefix, lambda: self._inner.list_dirs(prefix), stale=stale)

    def put(self, key: str, data: Payload) -> str:
        def tear() -> None:
            whole = _joined(data)
            self._inner.put(key, whole[: len(whole) // 2])

        return self._call("put", key, lambda: self._inner.put(key, data), tear=tear)

    def put_if_absent(self, key: str, data: Payload) -> str:
        return self._call("put_if_absent", key, lambda: self._inner.put_if_absent(key, data))

    def put_if_match(self, key: str, data: Payload, etag: str) -> str:
        return self._call("put_if_match", key, lambda: self._inner.put_if_match(key, data, etag))

    def open_writer(self, key: str, expected_bytes: int = 0) -> FaultWriter:
        opened: list[ObjectWriter] = []

        def real() -> None:
            opened.append(self._inner.open_writer(key, expected_bytes))

        try:
            self._call("open_writer", key, real)
        except BaseException:
            for writer in opened:
                writer.abort()
            raise
        return FaultWriter(opened[0], key, self._call)

    def copy(self, key: str, new_key: str) -> None:
        return self._call("copy", new_key, lambda: self._inner.copy(key, new_key))

    def delete(self, key: str) -> None:
        return self._call("delete", key, lambda: self._inner.delete(key))

    def delete_prefix(self, prefix: str) -> None:
        return self._call("delete_prefix", prefix, lambda: self._inner.delete_prefix(prefix))

    def sync(self, prefix: str) -> None:
        return self._call("sync", prefix, lambda: self._inner.sync(prefix))

    # --- inside ------------------------------------------------------------------------------

    def _call(
        self,
        op: str,
        key: str,
        real: Callable[[], Result],
        *,
        flip: Callable[[Result], Result] | None = None,
        stale: Callable[[Sequence[ObjectMeta]], Result] | None = None,
        tear: Callable[[], None] | None = None,
    ) -> Result:
        full = self._prefix + key
        rules = self._plan.due(op, full)
        faults = {rule.fault for rule in rules}
        outcome = "killed"
        try:
            for rule in rules:
                if rule.before is not None:
                    rule.before(op, full)
                if rule.fault is Fault.DELAY:
                    self._plan.clock.sleep_ms(rule.delay_ms)
            self._refuse(op, full, faults)
            if Fault.TORN in faults and tear is not None:
                tear()
                raise StorageError(f"injected: {op} of {full} was torn")
            if Fault.DUPLICATE in faults:
                real()
            if stale is not None and Fault.STALE_LIST in faults:
                result = stale(next(r.listing for r in rules if r.fault is Fault.STALE_LIST))
            else:
                result = real()
            if flip is not None and Fault.BIT_FLIP in faults:
                result = flip(result)
            for rule in rules:
                if rule.after is not None:
                    rule.after(op, full)
                if rule.fault is Fault.DELAY_ANSWER:
                    self._plan.clock.sleep_ms(rule.delay_ms)
            if Fault.FAIL_AFTER in faults:
                raise StorageError(f"injected: the answer to {op} of {full} was lost")
            outcome = "ok"
            return result
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            with self._plan.lock:
                self._plan.log.append(Call(op, full, outcome, tuple(r.fault for r in rules)))
                self._plan.counts[op] += 1

    def _refuse(self, op: str, key: str, faults: set[Fault]) -> None:
        if Fault.FAIL_BEFORE in faults:
            raise StorageError(f"injected: {op} of {key} never arrived")
        if Fault.HTTP_409 in faults:
            raise StorageError(f"injected: {op} of {key} kept meeting 409 Conflict")
        if Fault.HTTP_412 in faults and op == "put_if_absent":
            raise ObjectExists(f"injected: {key} exists")
        if faults & {Fault.HTTP_404, Fault.HTTP_412} and op == "put_if_match":
            raise PreconditionFailed(f"injected: {key} is another version, or missing")
        if Fault.HTTP_404 in faults:
            raise ObjectNotFound(f"injected: {key} is missing")

    def _flipped(self, data: memoryview) -> memoryview:
        wrong = bytearray(data)
        if wrong:
            bit = int(self._plan.entropy.uniform(0, len(wrong) * 8)) % (len(wrong) * 8)
            wrong[bit // 8] ^= 1 << bit % 8
        return memoryview(bytes(wrong))


class FaultWriter:
    """A writer whose every call passes the plan."""

    def __init__(self, inner: ObjectWriter, key: str, call: Callable[..., None]) -> None:
        self._inner = inner
        self._key = key
        self._call = call

    def write(self, data: Buffer) -> None:
        self._pass("write", lambda: self._inner.write(data))

    def commit(self) -> None:
        self._pass("commit", self._inner.commit)

    def abort(self) -> None:
        self._inner.abort()

    def __enter__(self) -> FaultWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    def _pass(self, op: str, real: Callable[[], None]) -> None:
        try:
            self._call(op, self._key, real)
        except BaseException:
            self._inner.abort()
            raise


def _as_directory(prefix: str) -> str:
    below = check_prefix(prefix)
    return f"{below}/" if below else ""


def _joined(data: Payload) -> bytes:
    return b"".join(buffers_of(data))
