"""From what was typed to what is meant: a table, a region, a generation, or one file.

Everything here only reads. It does not go through `connect`, which asks the store whether it
honours conditional puts and writes to find out.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence

from penstock.errors import InvalidInput, TableNotFound
from penstock.memwal import names
from penstock.memwal.base_table import BaseTable
from penstock.storage.objects import ObjectStore
from penstock.storage.open import open_store
from penstock.storage.seams import Seams

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
