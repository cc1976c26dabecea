"""From what was typed to what is meant: a table, a region, a generation, or one file.

Commands that only look do not go through `connect`, which asks the store whether it honours
conditional puts and writes to find out; `live_tables`, for those that change a table, does.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence

from penstock.database import connect
from penstock.errors import InvalidInput, TableNotFound
from penstock.memwal import names
from penstock.memwal.base_table import BaseTable
from penstock.storage.objects import ObjectStore
from penstock.storage.open import open_store
from penstock.storage.seams import Seams
from penstock.table import Table

_SUFFIX = ".lance"


def storage_options(pairs: Sequence[str]) -> dict[str, str]:
    """`key=value` arguments as the dict that stores and Lance take."""
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise InvalidInput(f"{pair!r} is not a storage option; write key=value")
        options[key] = value
    return options


def split(location: str) -> tuple[str, str]:
    """The directory a path or URI is in, and its last part."""
    above, _, name = location.rstrip("/").rpartition("/")
    return above or ("/" if location.startswith("/") else "."), name


def tables_at(location: str, options: Mapping[str, str]) -> list[BaseTable]:
    """The table at a location, or all tables of the database there."""
    store = open_store(location, options)
    children = store.list_dirs("")
    if "_versions" in children:
        return [base_table(store, options)]
    found = [name for name in children if name.endswith(_SUFFIX)]
    if not found:
        raise TableNotFound(
            f"neither a table nor a database with tables at {location}; "
            "give the directory of a table, such as ./lake/docs.lance, or of a database"
        )
    return [base_table(store.child(name), options) for name in found]


def live_tables(location: str, options: Mapping[str, str]) -> list[Table]:
    """The table at a location, or all tables of the database there, ready to be changed."""
    children = open_store(location, options).list_dirs("")
    if "_versions" not in children:
        tables_at(location, options)  # says what is wrong if there are none
        db = connect(location, dict(options) or None)
        return [db.open_table(name) for name in db.list_tables()]
    above, name = split(location)
    if not name.endswith(_SUFFIX):
        raise InvalidInput(f"{location} is a table outside a database; its name must end in .lance")
    return [connect(above, dict(options) or None).open_table(name.removesuffix(_SUFFIX))]


def base_table(store: ObjectStore, options: Mapping[str, str]) -> BaseTable:
    return BaseTable(store, dict(options) or None, Seams())


def region_of(location: str) -> uuid.UUID | None:
    """The region a location is, or is inside of."""
    parts = location.rstrip("/").split("/")
    if names.MEM_WAL not in parts[:-1]:
        return None
    try:
        return uuid.UUID(parts[parts.index(names.MEM_WAL) + 1])
    except ValueError:
        return None


def table_location(location: str) -> str:
    """The table that a region's location belongs to."""
    return location.split(f"/{names.MEM_WAL}/")[0] or "/"
