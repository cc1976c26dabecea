"""What keeps a live table healthy, as methods of the table.

Each job is a module of `memwal/` with the same three parts: a plan, the work on one piece of it,
which can run anywhere, and a commit. The methods here run them one after the other in this
process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import pyarrow as pa

from penstock.errors import InvalidInput
from penstock.memwal import create_index as index_creation
from penstock.memwal import evolve, index_choice
from penstock.memwal.base_table import BaseTable
from penstock.memwal.build_indexes import IndexReport, build_indexes
from penstock.memwal.compact import DELETION_SHARE, TARGET_ROWS, compact_all
from penstock.memwal.compact_fit import CompactionReport
from penstock.memwal.doctor import Diagnosis, diagnose
from penstock.memwal.evolve import NewColumns
from penstock.memwal.gc import collect
from penstock.memwal.gc_limits import ORPHAN_SECONDS, RETAIN_SECONDS
from penstock.memwal.gc_report import GcReport
from penstock.memwal.index_details import MemWalIndexDetails
from penstock.memwal.inspect import Inspection, inspect_table
from penstock.memwal.maintain import MaintainReport, Progress, maintain
from penstock.memwal.merge import MERGE_ROWS, MergeReport, merge_all
from penstock.memwal.region_spec import RegionBy, bind
from penstock.memwal.snapshots import build_snapshot
from penstock.memwal.table_commit import commit_details
from penstock.memwal.writer import RegionWriter


class Upkeep(ABC):
    """The part of a table that administers it; the rest writes and reads."""

    def __init__(self, base: BaseTable) -> None:
        self._base = base

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def flush(self, *, recover: bool = False) -> None: ...

    @abstractmethod
    def update(self, *, where: str, values: Mapping[str, Any]) -> object: ...

    @abstractmethod
    def to_arrow(self, *, consistency: str = "strong", version: int | None = None) -> pa.Table: ...

    @abstractmethod
    def _region_writers(self) -> list[RegionWriter]: ...

    def create_index(
        self, column: str, kind: str, *, name: str | None = None, **options: Any
    ) -> str:
        """Create an index; returns its name.

        Kinds: `ivf_flat`, `ivf_pq`, `ivf_sq` (with `metric`, `num_partitions`, …), `fts`, `btree`,
        `bitmap`. Writers opened from now on maintain it. A column may have several; of vector and
        full-text indexes the one it had answers, until `use_index` names another.
        """
        chosen = index_creation.create_index(
            self._base, column, kind, name=name, live=self.to_arrow, options=options
        )
        self.close()
        return chosen

    def build_indexes(self, names: Sequence[str] | None = None) -> IndexReport:
        """Let the base table's indexes, or those named, cover what was merged.

        Only rows that are in none of an index's segments are read, unless the segments have
        become too many. Records what each index has caught up with.
        """
        return build_indexes(self._base, names)

    def use_index(self, name: str) -> None:
        """Let readers use this index, where a column has several vector or full-text indexes."""
        index_choice.use_index(self._base, name)

    def drop_index(self, name: str) -> int:
        """Take an index away; returns the version without it."""
        version = index_choice.drop_index(self._base, name)
        self.close()
        return version

    def set_regions(self, regions: RegionBy | Sequence[RegionBy]) -> int:
        """Divide the table anew; returns the id of the new region spec.

        Regions of the old spec are flushed and sealed by the next writer that opens.
        """

        def change(current: MemWalIndexDetails | None) -> MemWalIndexDetails:
            assert current is not None
            # Columns that change later than this make another attempt of it.
            shape = self._base.snapshot().shape
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

    def add_columns(self, columns: NewColumns) -> int:
        """Add columns; returns the version that has them.

        `columns` is a pyarrow field, a schema, or a dict from names to types: null in the rows
        there are. A dict may also have SQL expressions: columns that are added as nulls, and then
        set in the rows there are by `update`.
        """
        typed, computed = evolve.computed_columns(self._base, columns)
        version = evolve.add_columns(self._base, typed)
        self.close()
        if computed:
            try:
                self.update(where="true", values=computed)
            except InvalidInput:
                added = self._base.snapshot(version).shape.field_ids
                now = self._base.snapshot().shape.columns_by_id
                named = (now.get(added[name]) for name in typed)  # somebody may have renamed them
                if gone := [name for name in named if name is not None]:
                    self.drop_columns(gone)
                raise
        return version

    def rename_column(self, old: str, new: str) -> int:
        """Give a column another name; returns the version in which it has it."""
        version = evolve.rename_column(self._base, old, new)
        self.close()
        return version

    def drop_columns(self, names: str | Sequence[str]) -> int:
        """Take columns out of the table; returns the version without them.

        Older versions still have them. A column with an index, one of the key, or one that
        regions are divided by cannot be dropped.
        """
        version = evolve.drop_columns(self._base, names)
        self.close()
        return version

    def alter_column(self, name: str, data_type: pa.DataType) -> NoReturn:
        """Always refused, with the way round it: a column of a live table keeps its type."""
        evolve.refuse_type_change(self._base, name, data_type)

    def merge(self, *, max_rows: int = MERGE_ROWS) -> MergeReport:
        """Fold what is flushed into the base table, where every Lance tool finds it.

        At most `max_rows` rows of a region are folded at a time, which bounds memory.
        """
        return merge_all(self._base, max_rows=max_rows)

    def compact(
        self,
        *,
        target_rows: int = TARGET_ROWS,
        deletion_share: float = DELETION_SHARE,
        max_bytes: int | None = None,
        defer_index_remap: bool = False,
        gradual: bool = False,
    ) -> CompactionReport:
        """Make large fragments of the base table's small ones, and drop deleted rows for good.

        A fragment is due if more than `deletion_share` of its rows are deleted, or if it and one
        beside it have fewer than `target_rows`; with `gradual`, not before those beside it have
        as many rows as itself. What is read is limited to `max_bytes`, or one piece if that is
        larger; the report's `left` counts what is still due. Older versions and tags keep their
        files. Without stable row ids the indexes are rewritten, or with `defer_index_remap` told
        where rows went, which `optimize_indices` of Lance makes good later.
        """
        return compact_all(
            self._base,
            target_rows=target_rows,
            deletion_share=deletion_share,
            max_bytes=max_bytes,
            defer_index_remap=defer_index_remap,
            gradual=gradual,
        )

    def snapshot(self) -> int:
        """Bring what is flushed into the table's newest version, for eventual reads and others.

        Returns the version that holds it, which can be read as it is now for as long as the
        version and its generations are kept. Rows that are only in the log are not in it.
        """
        return build_snapshot(self._base)

    def gc(
        self,
        *,
        retain_seconds: float = RETAIN_SECONDS,
        orphan_seconds: float = ORPHAN_SECONDS,
        dry_run: bool = False,
    ) -> GcReport:
        """Remove what nobody needs any more; the report says what, why, and what has to stay.

        A version can be read for `retain_seconds` after a newer one replaced it, and for ever if
        a tag names it. Files that no version ever named go when they are `orphan_seconds` old;
        0 only if nothing else uses the table. With `dry_run` nothing is changed.
        """
        return collect(
            self._base,
            retain_seconds=retain_seconds,
            orphan_seconds=orphan_seconds,
            dry_run=dry_run,
        )

    def maintain(
        self,
        *,
        budget_seconds: float | None = None,
        budget_bytes: int | None = None,
        retain_seconds: float = RETAIN_SECONDS,
        recover: bool = False,
        on_progress: Progress | None = None,
    ) -> MaintainReport:
        """Do what is due: flush, merge, index, compact, snapshot, clean up; returns what was done.

        No piece of work is begun once `budget_seconds` have passed or `budget_bytes` were read;
        the report says what is left. This handle's rows are flushed first, and with `recover` also
        those that writers left behind, which claims their regions. `on_progress` is called with a
        job, the number of its pieces that are done, and of all.
        """
        self.flush(recover=recover)
        return maintain(
            self._base,
            budget_seconds=budget_seconds,
            budget_bytes=budget_bytes,
            retain_seconds=retain_seconds,
            on_progress=on_progress,
        )

    def inspect(self) -> Inspection:
        """What the table is made of, down to its files; prints as text, gives JSON and Arrow."""
        return inspect_table(self._base)

    def doctor(self, *, deep: bool = False) -> Diagnosis:
        """What is wrong with the table, if anything, and what cures it; changes nothing.

        With `deep`, every key of the base table is read, to see that each is there once.
        """
        held = {writer.region_id for writer in self._region_writers() if writer.failure is None}
        return diagnose(self._base, deep=deep, held=held)
