"""A live table: the facade that people use.

`upsert` and `delete` keep a writer open between calls. It claims regions back when another process
has taken them, so any number of processes may call them; each call returns when its rows are
durable. `writer()` gives a writer of one's own, which is told when it is fenced. Reads see every
row acknowledged before they began, whoever wrote it, unless they ask for less.
"""

from __future__ import annotations

import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

import pyarrow as pa

from penstock.errors import Fenced, InvalidInput, WriterClosed
from penstock.memwal.base_table import BaseTable
from penstock.memwal.config import WriterConfig
from penstock.memwal.ingest import keys_to_arrays, reusable_rows
from penstock.memwal.lookup import get_many, plan_lookup, regions_without
from penstock.memwal.scan import checked_columns, count_view, plan_scan, scan_view
from penstock.memwal.status import TableStatus, table_status
from penstock.memwal.table_writer import TableWriter
from penstock.memwal.view import Reader, View
from penstock.memwal.writer import RegionWriter
from penstock.query import HybridQuery, TextQuery, VectorQuery, search
from penstock.upkeep import Upkeep

if TYPE_CHECKING:
    from penstock.memwal.bulk import BulkReport
    from penstock.memwal.changes import ChangeReport
    from penstock.memwal.feed import Changes
    from penstock.memwal.filters import Filter
    from penstock.memwal.merge_insert import MergeInsert

Writer = TableWriter
BATCH_ROWS = 100_000
"""Changes of a batch, if nobody says how many."""
_REOPEN_ATTEMPTS = 16

T = TypeVar("T")


class Table(Upkeep):
    def __init__(self, name: str, base: BaseTable) -> None:
        super().__init__(base)
        self.name = name
        self._lock = threading.Lock()
        self._shared: TableWriter | None = None
        self._left: set[uuid.UUID] = set()
        """Regions in whose WAL a shared writer left rows; `flush` still owes them."""
        self._tracking = threading.Lock()
        self._writers: weakref.WeakSet[TableWriter] = weakref.WeakSet()
        self._reader = Reader(base)
        base.snapshot()

    def __repr__(self) -> str:
        return f"Table({self.name!r}, uri={self.uri!r})"

    @property
    def uri(self) -> str:
        return self._base.uri

    @property
    def version(self) -> int:
        """The newest version of the base table."""
        return int(self._base.dataset().version)

    @property
    def schema(self) -> pa.Schema:
        return self._base.snapshot().shape.schema

    @property
    def primary_key(self) -> tuple[str, ...]:
        return self._base.snapshot().shape.key_columns

    # --- writing ---------------------------------------------------------------------------

    def upsert(self, data: Any) -> int:
        """Insert rows, or replace those with the same key; returns when they are durable."""
        rows = reusable_rows(data)
        return self._with_shared(lambda shared: shared.upsert(rows))

    def delete(self, *, keys: Any = None, where: str | None = None) -> int:
        """Delete rows by key, or those that match a condition; returns when that is durable.

        Returns how many keys were given, or how many rows matched. `where="true"` deletes all.
        """
        if (keys is None) == (where is None):
            given = "None of them" if keys is None else "both"
            raise InvalidInput(
                "delete needs a list of keys or a condition, keys=[…] or where='…', one of the "
                f"two; {given} was given"
            )
        if where is not None:
            from penstock.memwal.changes import delete_rows

            return delete_rows(_Access(self), where).rows
        arrays = keys_to_arrays(keys, self._shared_writer().shape)
        return self._with_shared(lambda shared: shared.delete(pa.table(arrays)))

    def update(self, *, where: str, values: Mapping[str, Any]) -> ChangeReport:
        """Set columns of the rows that match a condition; returns when that is durable.

        A string is an SQL expression over the row as it was: `{"price": "price * 2", "name":
        "'new'"}`. Anything else is a value. The last writer of a row wins.
        """
        from penstock.memwal.changes import update_rows

        return update_rows(_Access(self), where, values)

    def merge_insert(self, on: str | Sequence[str] | None = None) -> MergeInsert:
        """Match rows of data with rows of the table by `on` (the primary key if not given).

        What is to become of those that match and of those that do not, the builder is told;
        `execute(data)` does it.
        """
        from penstock.memwal.merge_insert import MergeInsert

        return MergeInsert(_Access(self), on)

    def bulk_load(self, data: Any) -> BulkReport:
        """Add many rows straight to the base table, in one version; for first loads.

        With a primary key they replace rows with the same key, and it is refused while rows that
        were written before are not merged. A reader or a dataset is streamed.
        """
        from penstock.memwal.bulk import load

        return load(self._base, data, overwrite=False, flush=partial(self.flush, recover=True))

    def overwrite(self, data: Any) -> BulkReport:
        """Put these rows in the place of all rows, in one version of the base table.

        Rows that others write meanwhile come after it. Regions with rows in their log are claimed.
        """
        from penstock.memwal.bulk import load

        return load(self._base, data, overwrite=True, flush=partial(self.flush, recover=True))

    def writer(
        self,
        *,
        durable: bool | None = None,
        indexed: bool | None = None,
        region: str | uuid.UUID | None = None,
        **options: Any,
    ) -> Writer:
        """A writer of one's own; claims regions as it meets them, or only the one given.

        Further options are those of `WriterConfig`; what is not given comes from the table's
        defaults.
        """
        given = dict(options)
        if durable is not None:
            given["durable"] = durable
        if indexed is not None:
            given["indexed"] = indexed
        config = self._default_config().with_options(given)
        return self._track(TableWriter(self._base, config, region=_region_id(region)))

    def flush(self, *, recover: bool = False) -> None:
        """Bring what this handle wrote into generations.

        With `recover`, also what writers that are gone left in the WAL; that claims their regions.
        """
        if recover or self._left:
            # First, because one that is outdated is let go, and leaves what it held.
            shared = self._shared_writer()
            with self._lock:
                left, self._left = self._left, set()
            held = {writer.region_id for writer in self._region_writers() if _stands(writer)}
            wanted = (lambda region: region not in held) if recover else left.__contains__
            shared.claim_all(wanted)
        for writer in self._tracked():
            if not writer.closed:
                writer.flush()

    def close(self) -> None:
        """Let go of the writer that `upsert` and `delete` keep; the rows stay where they are."""
        self._reader.forget()
        self._let_go(self._shared)

    # --- reading ---------------------------------------------------------------------------
    #
    # Every read takes `consistency`: "strong" sees every acknowledged row, "eventual" what the
    # last `snapshot` brought into the newest version; and `version`, to read an older version.

    def get(
        self, key: Any, *, consistency: str = "strong", version: int | None = None
    ) -> dict[str, Any] | None:
        """The row with that key, or None."""
        found = self.get_many([key], consistency=consistency, version=version).to_pylist()
        return found[0] if found else None

    def get_many(
        self, keys: Any, *, consistency: str = "strong", version: int | None = None
    ) -> pa.Table:
        """The rows with these keys, those that exist, in no particular order."""
        given = _reusable(keys)
        return self._reader.read(
            self._region_writers,
            lambda view: get_many(view, keys_to_arrays(given, view.shape)),
            consistency=consistency,
            version=version,
            leave_out=lambda base, regions: regions_without(
                base, regions, keys_to_arrays(given, base.shape)
            ),
            kind="lookup",
        )

    def explain_get(
        self,
        keys: Any,
        *,
        analyze: bool = False,
        consistency: str = "strong",
        version: int | None = None,
    ) -> str:
        """The plan of `get_many`; with `analyze` it is run, and each node says what it did."""
        given = _reusable(keys)

        def work(view: View) -> str:
            plan = plan_lookup(view, keys_to_arrays(given, view.shape))
            return plan.explained(analyze=analyze)

        return self._read(work, consistency, version)

    def to_arrow(self, *, consistency: str = "strong", version: int | None = None) -> pa.Table:
        """Every row."""
        return self._read(lambda view: scan_view(view).read_all(), consistency, version)

    def scan(
        self,
        columns: Sequence[str] | None = None,
        filter: str | None = None,
        limit: int | None = None,
        offset: int = 0,
        *,
        consistency: str = "strong",
        version: int | None = None,
    ) -> pa.RecordBatchReader:
        """Rows as they are now, streamed: the newest version of each, deleted ones left out.

        `filter` is an SQL condition over the table's columns.
        """
        return self._read(
            lambda view: scan_view(view, columns, _filter(filter, view), limit, offset),
            consistency,
            version,
        )

    def explain(
        self,
        columns: Sequence[str] | None = None,
        filter: str | None = None,
        limit: int | None = None,
        offset: int = 0,
        *,
        analyze: bool = False,
        consistency: str = "strong",
        version: int | None = None,
    ) -> str:
        """The plan of such a scan; with `analyze` it is run, and each node says what it did."""

        def work(view: View) -> str:
            chosen = checked_columns(view, columns)
            plan = plan_scan(view, chosen, _filter(filter, view), limit, offset)
            return plan.explained(analyze=analyze)

        return self._read(work, consistency, version)

    def count(
        self,
        filter: str | None = None,
        *,
        consistency: str = "strong",
        version: int | None = None,
    ) -> int:
        """How many rows there are, or match a filter."""
        return self._read(
            lambda view: count_view(view, _filter(filter, view)), consistency, version
        )

    @overload
    def search(
        self,
        query: str,
        column: str | Sequence[str] | None = None,
        *,
        consistency: str = "strong",
        version: int | None = None,
    ) -> TextQuery: ...

    @overload
    def search(
        self,
        query: None = None,
        column: None = None,
        *,
        vector: Any,
        text: str,
        vector_column: str | None = None,
        text_column: str | Sequence[str] | None = None,
        consistency: str = "strong",
        version: int | None = None,
    ) -> HybridQuery: ...

    @overload
    def search(
        self,
        query: Any,
        column: str | None = None,
        *,
        consistency: str = "strong",
        version: int | None = None,
    ) -> VectorQuery: ...

    def search(
        self,
        query: Any = None,
        column: str | Sequence[str] | None = None,
        *,
        vector: Any = None,
        text: str | None = None,
        vector_column: str | None = None,
        text_column: str | Sequence[str] | None = None,
        consistency: str = "strong",
        version: int | None = None,
    ) -> VectorQuery | TextQuery | HybridQuery:
        """The rows nearest to a vector, or whose texts match words best, or both; best first.

        A vector gives a `VectorQuery`, a string a `TextQuery`, `vector=` and `text=` together a
        `HybridQuery`; these say what can be asked of them, and read nothing until they are run.
        A column may be left out if only one holds vectors; without one, text is searched for in
        every column that has a full-text index.
        """
        self._reader.check(consistency, version)

        def read(work: Callable[[View], T]) -> T:
            kind = "text" if isinstance(query, str) else "vector" if vector is None else "hybrid"
            return self._reader.read(
                self._region_writers, work, consistency=consistency, version=version, kind=kind
            )

        return search(
            read,
            query,
            column,
            vector=vector,
            text=text,
            vector_column=vector_column,
            text_column=text_column,
        )

    def changes(self, since: object = "earliest", *, max_rows: int = BATCH_ROWS) -> Changes:
        """What was upserted and deleted since a position, in batches that are read as they come.

        `since` is "earliest" (the whole table first), "latest", a version, or the `position` of a
        batch or of these changes. They end with what is there when they are gone through.
        """
        from penstock.memwal.feed import Changes

        return Changes(self._base, since, max_rows)

    def status(self) -> TableStatus:
        return table_status(self._base)

    # --- details ---------------------------------------------------------------------------

    def _read(self, work: Callable[[View], T], consistency: str, version: int | None) -> T:
        return self._reader.read(
            self._region_writers, work, consistency=consistency, version=version
        )

    def _default_config(self) -> WriterConfig:
        return WriterConfig().with_defaults(self._base.snapshot().details.writer_config_defaults)

    def _let_go(self, shared: TableWriter | None) -> None:
        """Close the shared writer, unless another thread has."""
        with self._lock:
            if shared is None or shared is not self._shared:
                return
            self._shared = None
        shared.close(flush=False)
        with self._lock:
            self._left.update(writer.region_id for writer in shared.region_writers())

    def _shared_writer(self) -> TableWriter:
        shared = self._shared
        if shared is not None and shared.outdated:
            self._let_go(shared)
        with self._lock:
            if self._shared is None or self._shared.closed:
                config = self._default_config().with_options({"durable": True})
                self._shared = self._track(TableWriter(self._base, config, reclaim=True))
            return self._shared

    def _with_shared(self, work: Callable[[TableWriter], int]) -> int:
        """Run `work` on the shared writer, on the next one if this one is closed or outdated."""
        for _ in range(_REOPEN_ATTEMPTS):
            writer = self._shared_writer()
            try:
                return work(writer)
            except WriterClosed:
                if not writer.closed:
                    raise
            except InvalidInput:
                if not writer.outdated:
                    raise
        raise WriterClosed(f"{self.uri}: the writer is closed again and again by other threads")

    def _track(self, writer: TableWriter) -> TableWriter:
        with self._tracking:
            self._writers.add(writer)
        return writer

    def _tracked(self) -> list[TableWriter]:
        with self._tracking:
            return list(self._writers)

    def _region_writers(self) -> list[RegionWriter]:
        writers = [writer for writer in self._tracked() if not writer.released]
        return [region for writer in writers for region in writer.region_writers()]


class _Access:
    """What changes of rows need of a table (`memwal.changes.Access`)."""

    def __init__(self, table: Table) -> None:
        self._table = table

    @property
    def base(self) -> BaseTable:
        return self._table._base

    def read(self, work: Callable[[View], T]) -> T:
        return self._table._read(work, "strong", None)

    def write(self, work: Callable[[TableWriter], int]) -> int:
        return self._table._with_shared(work)

    def settle(self) -> None:
        self._table.flush(recover=True)
        self._table.merge()


def _filter(sql: str | None, view: View) -> Filter | None:
    if sql is None:
        return None
    # Only here, because loading DataFusion takes longer than many a program runs.
    from penstock.memwal.filters import Filter

    return Filter.parse(sql, view.shape.schema)


def _reusable(keys: Any) -> Any:
    """Keys that can be gone through again, should the view go stale."""
    return list(keys) if isinstance(keys, Iterator) else keys


def _stands(writer: RegionWriter) -> bool:
    """Whether a region is still the writer's own."""
    try:
        writer.verify()
    except Fenced:
        return False
    return writer.failure is None


def _region_id(region: str | uuid.UUID | None) -> uuid.UUID | None:
    if region is None or isinstance(region, uuid.UUID):
        return region
    try:
        return uuid.UUID(region)
    except (ValueError, AttributeError, TypeError) as error:
        raise InvalidInput(f"{region!r} is not a region id; it must be a UUID") from error
