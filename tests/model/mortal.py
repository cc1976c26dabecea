"""A table handle that is cut off from its store at some call, as a process is that is killed.

From that call on nothing more arrives. What Lance writes by itself between two calls is there or
not, just as the call before it was; the pieces in memory are thrown away with the handle.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import StorageError
from penstock.memwal.base_table import BaseTable
from penstock.storage.clock import SystemClock
from penstock.storage.entropy import SystemEntropy
from penstock.storage.faults import WRITES, FaultStore
from penstock.storage.open import open_store
from penstock.storage.seams import Seams
from penstock.table import Table


@dataclass(frozen=True, slots=True)
class Death:
    """When it comes: with the nth call, or the nth that writes; before or after it is done."""

    nth: int
    writes: bool
    after: bool


class _Hurried(SystemClock):
    """The dead do not wait for a store to come back."""

    def sleep_ms(self, ms: float) -> None:
        pass


class Mortal:
    def __init__(self, uri: str, death: Death) -> None:
        self.is_dead = False
        clock, entropy = _Hurried(), SystemEntropy()
        store = FaultStore(open_store(uri), clock, entropy)
        self.table = Table("doomed", BaseTable(store, None, Seams(clock=clock, entropy=entropy)))
        store.hook(before=self._refuse)
        last = WRITES if death.writes else "*"
        if death.after:
            store.hook(op=last, nth=death.nth, after=self._die)
        else:
            store.hook(op=last, nth=death.nth, before=self._die)

    def _refuse(self, op: str, key: str) -> None:
        if self.is_dead:
            raise StorageError(f"{op} of {key}: there is nobody any more to ask for it")

    def _die(self, op: str, key: str) -> None:
        self.is_dead = True
        raise StorageError(f"killed at {op} of {key}")
