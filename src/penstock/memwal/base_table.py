"""The base table: a Lance dataset with a MemWAL index, and what writers and readers need of it.

A `BaseSnapshot` is one version of the table together with the MemWAL index of exactly that
version. Opening the newest one is cheap; the parameters of indexes (centroids, codebooks,
tokenizers) are read once per index and kept while their uuids do not change.
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
)
from penstock.index.base import IndexSpec, load_index_specs
from penstock.memwal import names
from penstock.memwal.flush import FlushTarget, check_field_ids
from penstock.memwal.index_details import (
    INDEX_NAME,
    MemWalIndexDetails,
    is_latest_version,
    read_details,
)
from penstock.memwal.shape import TableShape
from penstock.storage.objects import ObjectStore
from penstock.storage.seams import Seams

_TABLE_KEY = f"{names.PRIVATE}/table.json"


@dataclass(frozen=True, slots=True)
class BaseSnapshot:
    dataset: lance.LanceDataset
    version: int
    details: MemWalIndexDetails
    shape: TableShape


class BaseTable:
    def __init__(
        self, store: ObjectStore, storage_options: Mapping[str, str] | None, seams: Seams
    ) -> None:
        self.store = store
        self.storage_options = dict(storage_options) if storage_options else None
        self.seams = seams
        self._session = Session()
        self._lock = threading.Lock()
        self._specs: tuple[frozenset[str], list[IndexSpec]] | None = None
        self._table_id: uuid.UUID | None = None
        self._latest: BaseSnapshot | None = None

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

        The newest one is opened once, and afterwards only asked for whether it still is.
        """
        if version is not None:
            return self._open_snapshot(version)
        latest = self._latest
        if latest is None or not is_latest_version(self.store, latest.version):
            latest = self._open_snapshot(None)
            self._latest = latest
        return latest

    def _open_snapshot(self, version: int | None) -> BaseSnapshot:
        dataset = self.dataset(version)
        found = read_details(self.store, dataset.version)
        if found is None:
            raise NotATable(
                f"{self.uri} is a Lance table without a MemWAL index; "
                "open it with open_table(…, adopt=True) to add one"
            )
        ids = {field.name(): field.id() for field in dataset.lance_schema.fields()}
        shape = TableShape.of(dataset.schema, ids)
        return BaseSnapshot(dataset, dataset.version, found[0], shape)

    def index_specs(self, base: BaseSnapshot) -> list[IndexSpec]:
        """The indexes that MemTables and generations of this table maintain."""
        described = [d for d in base.dataset.describe_indices() if d.name != INDEX_NAME]
        segments = frozenset(str(s.uuid) for d in described for s in d.segments)
        with self._lock:
            if self._specs is not None and self._specs[0] == segments:
                specs = self._specs[1]
            else:
                specs = load_index_specs(base.dataset, None)
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


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].partition(", /")[0]
