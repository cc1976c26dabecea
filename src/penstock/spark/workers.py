"""What the Python processes of Spark do once, and keep.

Spark uses its processes again, for the next task and the next batch, so a table that was opened
stays open. Another one may have been made in its place meanwhile, which is looked at each time.

Spark collects garbage after each task, and goes through all that was ever imported: some 30 ms in a
process with Lance. What is there when the first task begins stays anyway, so it is set aside.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from penstock.memwal.base_table import BaseTable
from penstock.storage.open import open_store
from penstock.storage.seams import Seams

KEPT_TABLES = 4
_tables: dict[TablePlace, BaseTable] = {}


@dataclass(frozen=True, slots=True)
class TablePlace:
    """Where a table is: all that a task needs to open it."""

    uri: str
    storage_options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, uri: str, storage_options: Mapping[str, str] | None) -> TablePlace:
        return cls(uri, tuple(sorted((storage_options or {}).items())))

    def base_table(self, opened: Callable[[], BaseTable] | None = None) -> BaseTable:
        """The table; the same object each time within a process, as long as it is the same table.

        `opened` opens it, if whoever asks has to be told more when it is not there.
        """
        table = _tables.pop(self, None)
        if table is None or not table.is_the_same():
            table = (opened or self._open)()
        _tables[self] = table
        while len(_tables) > KEPT_TABLES:
            _tables.pop(next(iter(_tables)), None)
        return table

    def _open(self) -> BaseTable:
        options = dict(self.storage_options) or None
        return BaseTable(open_store(self.uri, options), options, Seams())


@cache
def calm() -> None:
    """Let collections pass over everything that is there already."""
    gc.collect()
    gc.freeze()
