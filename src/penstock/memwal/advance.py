"""Going on to the next version of the base table without making reads wait.

What a reader keeps in memory (keys, hidden rows, vectors, words) belongs to one version of the
base, and to work it out again takes far longer than a read. A merge, a compaction or an index
build makes a version whose rows, seen together with what lies in front, are the very same. So
when a reader finds such a version, it goes on reading the one it knows, with every generation and
log entry since, and tries the next one in the background: the last read of each kind is run on
it, and its answer thrown away. When that is done, the next read uses it.

A read is as strong as ever, since both versions show the same rows. Anything else that another
commit may have done to the base (a delete, an update, a new column or index) is seen at once.
Commits say by a property of their transaction that they only moved rows; that other tools create
or drop indexes and compact is known from the transaction itself.

If the older version cannot be read any more, because clean-up took it or a generation that only
it needs, the reader moves on at once and the read is done again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lance import LanceOperation

from penstock import metrics
from penstock.memwal.base_table import BaseSnapshot, BaseTable
from penstock.memwal.table_commit import MOVED_ROWS
from penstock.memwal.table_versions import version_exists

if TYPE_CHECKING:
    from penstock.memwal.view import View

ADVANCE_ROWS = 50_000
"""A base with fewer rows is read anew so fast that nothing is gained."""
ADVANCE_LIMIT_MS = 30_000.0
"""A reader moves on after this time at the latest, ready or not."""
MOVING = (LanceOperation.CreateIndex, LanceOperation.Rewrite)
"""What other tools commit that leaves all rows as they are."""
_VERSIONS = 64
_KINDS = 8

Recipe = Callable[["View"], object]


class Advance:
    """The version of the base that a reader uses, and the one that it is getting ready for."""

    def __init__(self, table: BaseTable, done: Callable[[], None]) -> None:
        """`done` is called whenever something was tried."""
        self._table = table
        self._done = done
        self._lock = threading.Lock()
        self._used: BaseSnapshot | None = None
        self._next: BaseSnapshot | None = None
        self._next_is_ready = False
        self._seen_ms = 0.0
        self._running: threading.Thread | None = None
        self._recipes: dict[str, Recipe] = {}

    def remember(self, kind: str, recipe: Recipe) -> None:
        """A read that was done, to be tried on versions to come."""
        if kind in self._recipes or len(self._recipes) < _KINDS:
            self._recipes[kind] = recipe

    def choose(self, newest: BaseSnapshot, view_of: Callable[[BaseSnapshot], View]) -> BaseSnapshot:
        """The version to read, given the newest; `view_of` makes a view of a version."""
        with self._lock:
            used = self._used
            if used is newest or used is None:
                return self._use(newest)
            if self._next is not newest:
                if not self.waits(newest) or not self._shows_the_same(used, newest):
                    return self._use(newest)
                if self._next is None:
                    self._seen_ms = self._table.seams.clock.monotonic_ms()
                self._next, self._next_is_ready = newest, False
            waited_ms = self._table.seams.clock.monotonic_ms() - self._seen_ms
            if self._next_is_ready or waited_ms > ADVANCE_LIMIT_MS:
                return self._use(newest)
            if not version_exists(self._table.store, used.version):
                return self._use(newest)
            self._start(newest, view_of)
            return used

    def waits(self, base: BaseSnapshot) -> bool:
        """Whether what is new is tried before it is used; not worth it where tables are small."""
        return bool(self._recipes) and base.rows >= ADVANCE_ROWS

    def prepare(self, base: BaseSnapshot, view_of: Callable[[BaseSnapshot], View]) -> None:
        """Try what has come in front of the base, unless something is being tried already."""
        with self._lock:
            self._start(base, view_of)

    def _start(self, target: BaseSnapshot, view_of: Callable[[BaseSnapshot], View]) -> None:
        if self._running is None:
            self._running = threading.Thread(
                target=self._prepare,
                args=(target, view_of, list(self._recipes.values())),
                name="penstock-advance",
            )
            self._running.start()

    def move_on(self) -> bool:
        """Give up the version in use; False if it is the newest known anyway."""
        with self._lock:
            behind = self._next is not None
            self._used = self._next = None
        return behind

    def forget(self) -> None:
        """Let go of what is kept, and let what is under way come to its end."""
        with self._lock:
            self._used = self._next = None
            self._recipes.clear()
            running = self._running
        if running is not None and running is not threading.current_thread():
            running.join()

    def _use(self, newest: BaseSnapshot) -> BaseSnapshot:
        self._used, self._next, self._next_is_ready = newest, None, False
        return newest

    def _shows_the_same(self, used: BaseSnapshot, newest: BaseSnapshot) -> bool:
        if not 0 < newest.version - used.version <= _VERSIONS:
            return False
        if _described(used) != _described(newest):
            return False
        since = used if self._next is None else self._next
        return all(
            _only_moved(newest, version) for version in range(since.version + 1, newest.version + 1)
        )

    def _prepare(
        self,
        target: BaseSnapshot,
        view_of: Callable[[BaseSnapshot], View],
        recipes: list[Recipe],
    ) -> None:
        try:
            for recipe in recipes:
                recipe(view_of(target))
        except Exception:
            # Whatever it is, a read that uses the version meets it and says it properly.
            metrics.failed_advances.inc()
        finally:
            self._done()
            with self._lock:
                self._running = None
                if self._next is target:
                    self._next_is_ready = True


def _described(base: BaseSnapshot) -> object:
    """What a read can ask of a table."""
    indexes = {index.name for index in base.dataset.describe_indices()}
    return base.shape.schema, base.shape.field_ids, base.details.region_specs, indexes


def _only_moved(newest: BaseSnapshot, version: int) -> bool:
    """Whether a version was made by a commit that leaves all rows as they are."""
    try:
        transaction: Any = newest.dataset.read_transaction(version)
        if transaction is None:
            return False
        properties: Mapping[str, str] = transaction.transaction_properties or {}
        operation = transaction.operation
        if MOVED_ROWS in properties or isinstance(operation, MOVING):
            return True
        # Lance has operations that only make room for others, and does not tell which.
        unnamed = type(operation) is LanceOperation.BaseOperation
        return unnamed and _fragments(newest, version) == _fragments(newest, version - 1)
    except TypeError as error:
        # What a compaction says of indexes it rewrote, Lance cannot turn into its own class.
        return "RewrittenIndex" in str(error)
    except (OSError, ValueError, RuntimeError):
        return False


def _fragments(base: BaseSnapshot, version: int) -> list[object]:
    found = base.dataset.checkout_version(version).get_fragments()
    return [fragment.metadata.to_json() for fragment in found]
