"""A database: a location that holds tables, each a directory `<name>.lance`."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import lance
import pyarrow as pa

from penstock.errors import InvalidInput, NotATable, PenstockError, TableExists, TableNotFound
from penstock.index.primary_key import check_key_type, mark_primary_key
from penstock.memwal.base_table import BaseTable
from penstock.memwal.config import WriterConfig
from penstock.memwal.flush import check_field_ids
from penstock.memwal.index_details import MemWalIndexDetails
from penstock.memwal.region_spec import RegionBy, bind, unsharded
from penstock.memwal.regions import list_region_ids
from penstock.memwal.shape import TableShape, check_column_names
from penstock.memwal.table_commit import commit_details
from penstock.memwal.table_versions import last_details
from penstock.memwal.wal import TOMBSTONE
from penstock.storage.objects import ObjectStore
from penstock.storage.open import open_store
from penstock.storage.probe import probe_conditional_puts
from penstock.storage.seams import Seams
from penstock.table import Table

_SUFFIX = ".lance"
_NAME = re.compile(r"[^\W_][\w.-]*")
_NAME_BYTES = 128
_probed: set[str] = set()
_probed_lock = threading.Lock()


def connect(
    uri: str | os.PathLike[str],
    storage_options: Mapping[str, str] | None = None,
    *,
    seams: Seams | None = None,
) -> Database:
    """Open a database at a path or object-store URI; it need not exist yet.

    `storage_options` are those Lance takes (`aws_access_key_id`, `aws_endpoint`, …). The store is
    asked once per process whether it honours conditional puts, and refused if it does not.
    """
    store = open_store(uri, storage_options)
    if store.uri.startswith("memory:"):
        raise InvalidInput(
            "a database cannot live in memory://, because Lance does not share it; use a path"
        )
    with _probed_lock:
        known = store.uri in _probed
    if not known:
        probe_conditional_puts(store)
        with _probed_lock:
            _probed.add(store.uri)
    return Database(store, storage_options, seams or Seams())


class Database:
    def __init__(
        self, store: ObjectStore, storage_options: Mapping[str, str] | None, seams: Seams
    ) -> None:
        self._store = store
        self._storage_options = dict(storage_options) if storage_options else None
        self._seams = seams

    @property
    def uri(self) -> str:
        return self._store.uri

    def __repr__(self) -> str:
        return f"Database({self.uri!r})"

    def create_table(
        self,
        name: str,
        schema: pa.Schema,
        *,
        primary_key: str | Sequence[str] | None = None,
        regions: RegionBy | Sequence[RegionBy] | None = None,
        stable_row_ids: bool = True,
        writer_defaults: Mapping[str, Any] | None = None,
    ) -> Table:
        """Create an empty table. Without a primary key it only takes new rows."""
        store = self._table_store(name)
        keys = _key_names(primary_key)
        regions = unsharded() if regions is None else regions
        marked = _checked_schema(schema, keys)
        defaults = WriterConfig().with_options(writer_defaults or {}).to_defaults()
        # Bind once before anything exists, so that a wrong spec leaves nothing behind.
        numbered = {field.name: number for number, field in enumerate(marked)}
        bind(regions, marked, numbered, keys, 1)
        if store.list_dirs(""):
            raise TableExists(f"table {name!r} exists in {self.uri}; open it, or drop it first")
        try:
            lance.write_dataset(
                marked.empty_table(),
                store.uri,
                mode="create",
                enable_stable_row_ids=stable_row_ids,
                storage_options=self._storage_options,
            )
        except OSError as error:
            if "already exists" in str(error):
                raise TableExists(f"table {name!r} was created by somebody else") from error
            raise PenstockError(f"table {name!r} in {self.uri}: {error}") from error
        base = BaseTable(store, self._storage_options, self._seams)
        _initialize(base, regions, defaults)
        store.sync("")
        return Table(name, base)

    def open_table(self, name: str, *, adopt: bool = False) -> Table:
        """Open a table. With `adopt`, a plain Lance table becomes a live one first."""
        store = self._table_store(name)
        children = store.list_dirs("")
        if not children:
            known = ", ".join(self.list_tables()) or "none"
            raise TableNotFound(f"no table {name!r} in {self.uri}; there are: {known}")
        if "_versions" not in children:
            raise NotATable(f"{store.uri} is not a Lance table: it has no _versions directory")
        base = BaseTable(store, self._storage_options, self._seams)
        if adopt:
            _initialize(base, unsharded(), {})
        return Table(name, base)

    def list_tables(self) -> list[str]:
        """The names of all tables, sorted."""
        names = [d.removesuffix(_SUFFIX) for d in self._store.list_dirs("") if d.endswith(_SUFFIX)]
        return sorted(names)

    def drop_table(self, name: str) -> None:
        """Remove a table and everything in it, for good."""
        store = self._table_store(name)
        if not store.list_dirs(""):
            raise TableNotFound(f"no table {name!r} in {self.uri}")
        # The versions go first: what is left after a crash is no table, and can be dropped again.
        store.delete_prefix("_versions")
        store.delete_prefix("")

    def _table_store(self, name: str) -> ObjectStore:
        if (
            not isinstance(name, str)
            or not _NAME.fullmatch(name)
            or ".." in name
            or len(name.encode()) > _NAME_BYTES
        ):
            raise InvalidInput(
                f"{name!r} cannot name a table; use letters, digits, '_', '-' and '.', starting "
                f"with a letter or digit, at most {_NAME_BYTES} bytes"
            )
        return self._store.child(f"{name}{_SUFFIX}")


def _key_names(primary_key: str | Sequence[str] | None) -> list[str]:
    if primary_key is None:
        return []
    keys = [primary_key] if isinstance(primary_key, str) else primary_key
    if not isinstance(keys, list | tuple) or not all(isinstance(name, str) for name in keys):
        raise InvalidInput(
            f"primary_key must be a column's name or a list of names, not {primary_key!r}"
        )
    return list(keys)


def _checked_schema(schema: pa.Schema, keys: list[str]) -> pa.Schema:
    if not isinstance(schema, pa.Schema):
        raise InvalidInput(f"schema must be a pyarrow.Schema, not {type(schema).__name__}")
    if not len(schema):
        raise InvalidInput("a table needs at least one column")
    check_column_names(schema.names)
    return mark_primary_key(schema, keys)


def _check_adoptable(shape: TableShape) -> None:
    for name in shape.key_columns:
        check_key_type(name, shape.schema.field(name).type)
    if TOMBSTONE in shape.schema.names:
        raise InvalidInput(f"a live table has a {TOMBSTONE} of its own; rename that column first")
    check_field_ids(shape.wal_schema)


def _initialize(
    base: BaseTable, regions: RegionBy | Sequence[RegionBy], defaults: Mapping[str, str]
) -> None:
    """Give a Lance table its MemWAL index, unless it has one."""
    dataset = base.dataset()
    ids = {field.name(): field.id() for field in dataset.lance_schema.fields()}
    shape = TableShape.of(dataset.schema, ids)
    _check_adoptable(shape)
    spec = bind(regions, shape.schema, shape.field_ids, shape.key_columns, 1)

    def change(current: MemWalIndexDetails | None) -> MemWalIndexDetails | None:
        if current is not None:
            return None
        earlier = last_details(base.store) if list_region_ids(base.store) else None
        if earlier is not None:
            # Somebody replaced the table or dropped the index. The regions are still there, and
            # what of them was merged must not be merged again.
            return replace(earlier, inline_snapshots=None, index_catchup={})
        fresh = MemWalIndexDetails(writer_config_defaults=defaults)
        return fresh.with_spec(spec)

    commit_details(base.store, base.storage_options, change, base.seams)
    base.table_id()
