"""The base table: a Lance dataset with a MemWAL index, and what writers and readers need of it.

A `BaseSnapshot` is one version of the table together with the MemWAL index of exactly that
version. The newest one is kept and only asked for whether it still is; a few older ones are kept
as well, because they never change. The parameters of indexes (centroids, codebooks, tokenizers)
are read once per index and kept while their uuids do not change.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import lance
from lance.lance import _Session as Session

from penstock.errors import (
    Corruption,
    NotATable,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    VersionNotFound,
)
from penstock.index.base import SYSTEM_INDEX_PREFIX, IndexSpec, load_index_specs
from penstock.memwal import names
from penstock.memwal.cache import FewCache
from penstock.memwal.flush import FlushTarget, check_field_ids
from penstock.memwal.index_details import MemWalIndexDetails
from penstock.memwal.packed_specs import packed_specs
from penstock.memwal.shape import TableShape
from penstock.memwal.table_versions import (
    is_latest_version,
    list_versions,
    read_details,
    version_exists,
)
from penstock.storage.objects import ObjectStore
from penstock.storage.seams import Seams

_TABLE_KEY = f"{names.PRIVATE}/table.json"
_KEPT_VERSIONS = 4
_RECENT_MS = 1000.0
_DROPPED_COLUMN = "<unknown>"
"""What Lance calls a column that was dropped while somebody else built an index on it."""


@dataclass(frozen=True, slots=True)
class BaseSnapshot:
    dataset: lance.LanceDataset
    version: int
    details: MemWalIndexDetails
    shape: TableShape
    rows: int


class BaseTable:
    def __init__(
        self, store: ObjectStore, storage_options: Mapping[str, str] | None, seams: Seams
    ) -> None:
        self.store = store
        self.storage_options = dict(storage_options) if storage_options else None
        self.seams = seams
        self._session = Session()
        self._lock = threading.Lock()
        self._specs: tuple[frozenset[tuple[str, ...]], list[IndexSpec]] | None = None
        self._table_id: uuid.UUID | None = None
        self._latest: BaseSnapshot | None = None
        self._looked_ms = 0.0
        self._older: FewCache[BaseSnapshot] = FewCache(_KEPT_VERSIONS)

    @property
    def uri(self) -> str:
        return self.store.uri

    def dataset(self, version: int | None = None) -> lance.LanceDataset:
        try:
            return lance.dataset(
                self.uri,
                version=version,
                storage_options=self.storage_options,
                session=self._session,
            )
        except (OSError, ValueError) as error:
            raise NotATable(
                f"{self.uri} cannot be opened as a table: {_first_line(error)}; "
                "check the name, or create the table first"
            ) from error

    def snapshot(self, version: int | None = None) -> BaseSnapshot:
        """A version of the table (the newest by default) with its MemWAL index.

        The newest one is opened once, and afterwards only asked for whether it still is. Of an
        older one it is asked whether it is still there.
        """
        if version is not None:
            return self._at_version(version)
        latest = self._latest
        self._looked_ms = self.seams.clock.monotonic_ms()
        if latest is None or not is_latest_version(self.store, latest.version):
            dataset = self.dataset()
            found = read_details(self.store, dataset.version)
            if found is None:
                raise NotATable(
                    f"{self.uri} is a Lance table without a MemWAL index; "
                    "open it with open_table(…, adopt=True) to add one"
                )
            before = latest.shape if latest is not None else None
            latest = self._latest = _base_snapshot(dataset, found[0], before)
        return latest

    def recent_snapshot(self) -> BaseSnapshot:
        """The newest version, or one that was the newest less than a second ago.

        It is for those who can do with an older one: if the store fails, it is the last one seen.
        """
        latest = self._latest
        now_ms = self.seams.clock.monotonic_ms()
        if latest is None:
            return self.snapshot()
        if now_ms - self._looked_ms >= _RECENT_MS:
            self._looked_ms = now_ms
            with suppress(StorageError, NotATable):
                return self.snapshot()
        return latest

    def _at_version(self, version: int) -> BaseSnapshot:
        if not version_exists(self.store, version):
            raise VersionNotFound(self._no_such_version(version))
        latest = self._latest
        if latest is not None and latest.version == version:
            return latest
        return self._older.get(version, lambda: self._open_version(version))

    def _open_version(self, version: int) -> BaseSnapshot:
        try:
            dataset = self.dataset(version)
            found = read_details(self.store, version)
        except NotATable as error:
            if version_exists(self.store, version):
                raise
            raise VersionNotFound(self._no_such_version(version)) from error
        # A version of before the table was live has no index: it is what Lance says it is.
        return _base_snapshot(dataset, found[0] if found else MemWalIndexDetails())

    def _no_such_version(self, version: int) -> str:
        there = list_versions(self.store)
        known = f"{len(there)} from {there[0]} to {there[-1]}" if there else "none"
        return (
            f"{self.uri} has no version {version}; there are: {known}. "
            "It was cleaned up, or never was: read one of these"
        )

    def index_specs(self, base: BaseSnapshot) -> list[IndexSpec]:
        """The indexes that MemTables and generations of this table maintain."""
        described = [
            index
            for index in base.dataset.describe_indices()
            if not index.name.startswith(SYSTEM_INDEX_PREFIX)
            and _DROPPED_COLUMN not in index.field_names
        ]
        # With the names of their columns, which may be renamed under an index.
        segments = frozenset((str(s.uuid), *d.field_names) for d in described for s in d.segments)
        with self._lock:
            if self._specs is not None and self._specs[0] == segments:
                specs = self._specs[1]
            else:
                specs = load_index_specs(base.dataset, [index.name for index in described])
                self._specs = (segments, specs)
        if base.details.maintain_all_indexes:
            return list(specs)
        maintained = set(base.details.maintained_indexes)
        return [spec for spec in specs if spec.name in maintained]

    def flush_target(self, base: BaseSnapshot) -> FlushTarget:
        check_field_ids(base.shape.wal_schema)
        return FlushTarget(
            store=self.store,
            storage_options=self.storage_options,
            data_storage_version=base.dataset.data_storage_version,
            index_specs=self.index_specs(base),
            seams=self.seams,
            packed_specs=packed_specs(base.details),
        )

    def table_id(self) -> uuid.UUID:
        """The table's own id, wherever it is moved to; made when first asked for."""
        if self._table_id is None:
            try:
                self._table_id = self._read_table_id()
            except ObjectNotFound:
                body = json.dumps({"format": 1, "table_id": str(self.seams.entropy.uuid4())})
                # Somebody else may name it in the same moment; the name that landed is read.
                with suppress(ObjectExists):
                    self.store.put_if_absent(_TABLE_KEY, body.encode())
                self._table_id = self._read_table_id()
        return self._table_id

    def known_table_id(self) -> uuid.UUID | None:
        """The table's own id, or None if nobody has asked for one yet."""
        if self._table_id is None:
            with suppress(ObjectNotFound):
                self._table_id = self._read_table_id()
        return self._table_id

    def is_the_same(self) -> bool:
        """Whether the table has not been dropped since, nor another one made in its place."""
        try:
            return self._read_table_id() == self.table_id()
        except ObjectNotFound:
            return False

    def _read_table_id(self) -> uuid.UUID:
        data = bytes(self.store.get(_TABLE_KEY).data)
        if bytes(self.store.get(_TABLE_KEY).data) != data:
            # A wrong digit would send rows to regions that nobody else finds.
            raise StorageError(f"{self.uri}/{_TABLE_KEY}: two reads of it differ; try again")
        try:
            return uuid.UUID(json.loads(data)["table_id"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Corruption(
                f"{self.uri}/{_TABLE_KEY} is damaged ({error}); restore it from a copy, the "
                "table's regions are named after it"
            ) from error


def _base_snapshot(
    dataset: lance.LanceDataset, details: MemWalIndexDetails, before: TableShape | None = None
) -> BaseSnapshot:
    """A version; if its rows have the shape that they had before, it is the very same object."""
    ids = {field.name(): field.id() for field in dataset.lance_schema.fields()}
    shape = TableShape.of(dataset.schema, ids)
    if before is not None and shape.is_like(before):
        shape = before
    return BaseSnapshot(dataset, dataset.version, details, shape, dataset.count_rows())


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].partition(", /")[0]
