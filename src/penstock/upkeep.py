"""What keeps a live table healthy, as methods of the table.

Each job is a module of `memwal/` with the same three parts: a plan, the work on one piece of it,
which can run anywhere, and a commit. The methods here run them one after the other in this
process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from penstock.memwal import create_index as index_creation
from penstock.memwal.base_table import BaseTable
from penstock.memwal.index_details import MemWalIndexDetails, commit_details
from penstock.memwal.merge import MERGE_ROWS, MergeReport, merge_all
from penstock.memwal.region_spec import RegionBy, bind
from penstock.memwal.snapshots import build_snapshot


class Upkeep(ABC):
    """The part of a table that administers it; the rest writes and reads."""

    def __init__(self, base: BaseTable) -> None:
        self._base = base

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def to_arrow(self, *, consistency: str = "strong", version: int | None = None) -> pa.Table: ...

    def create_index(
        self, column: str, kind: str, *, name: str | None = None, **options: Any
    ) -> str:
        """Create an index; returns its name.

        Kinds: `ivf_flat`, `ivf_pq`, `ivf_sq` (with `metric`, `num_partitions`, …), `fts`, `btree`,
        `bitmap`. Writers opened from now on maintain it.
        """
        chosen = index_creation.create_index(
            self._base, column, kind, name=name, live=self.to_arrow, options=options
        )
        self.close()
        return chosen

    def set_regions(self, regions: RegionBy | Sequence[RegionBy]) -> int:
        """Divide the table anew; returns the id of the new region spec.

        Regions of the old spec are flushed and sealed by the next writer that opens.
        """
        shape = self._base.snapshot().shape

        def change(current: MemWalIndexDetails | None) -> MemWalIndexDetails:
            assert current is not None
            specs = current.region_specs
            spec_id = max((spec.spec_id for spec in specs), default=0) + 1
            spec = bind(regions, shape.schema, shape.field_ids, shape.key_columns, spec_id)
            return current.with_spec(spec)

        details = commit_details(
            self._base.store, self._base.storage_options, change, self._base.seams
        )
        assert details is not None
        assert details.current_spec is not None
        self.close()
        return details.current_spec.spec_id

    def merge(self, *, max_rows: int = MERGE_ROWS) -> MergeReport:
        """Fold what is flushed into the base table, where every Lance tool finds it.

        At most `max_rows` rows of a region are folded at a time, which bounds memory.
        """
        return merge_all(self._base, max_rows=max_rows)

    def snapshot(self) -> int:
        """Bring what is flushed into the table's newest version, for eventual reads and others.

        Returns the version that holds it, which can be read as it is now for as long as the
        version and its generations are kept. Rows that are only in the log are not in it.
        """
        return build_snapshot(self._base)
