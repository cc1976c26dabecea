"""The public names, pinned: to add, rename or drop one is to edit this file on purpose."""

from __future__ import annotations

import inspect

import pytest

import penstock
from penstock import errors

ENTRY = {"connect", "Database", "Table", "Writer", "__version__"}
REGION_SPECS = {
    "bucket",
    "day",
    "expression",
    "hour",
    "identity",
    "month",
    "multi_bucket",
    "truncate",
    "unsharded",
    "year",
}
ERRORS = {
    "AmbiguousWrite",
    "BackPressure",
    "ClaimContention",
    "CommitConflict",
    "Corruption",
    "Fenced",
    "InvalidInput",
    "LeaseHeld",
    "LeaseLost",
    "NotATable",
    "ObjectExists",
    "ObjectNotFound",
    "PenstockError",
    "PreconditionFailed",
    "RegionSealed",
    "StorageError",
    "StoreUnsupported",
    "TableExists",
    "TableNotFound",
    "WriterClosed",
    "WriterPoisoned",
}
MEMBERS = {
    "Database": {"create_table", "drop_table", "list_tables", "open_table", "uri"},
    "Table": {
        "close",
        "count",
        "create_index",
        "delete",
        "flush",
        "get",
        "schema",
        "status",
        "to_arrow",
        "upsert",
        "uri",
        "version",
        "writer",
    },
    "Writer": {"close", "delete", "flush", "stats", "upsert"},
}


def test_the_package_exports_exactly_these_names() -> None:
    assert set(penstock.__all__) == ENTRY | REGION_SPECS | ERRORS
    assert len(penstock.__all__) == len(set(penstock.__all__))
    assert all(hasattr(penstock, name) for name in penstock.__all__)


@pytest.mark.parametrize("name", sorted(MEMBERS))
def test_a_class_has_exactly_these_public_members(name: str) -> None:
    members = {member for member in dir(getattr(penstock, name)) if not member.startswith("_")}
    assert members == MEMBERS[name]


def test_every_error_is_exported_and_has_the_one_root() -> None:
    defined = {
        name: value
        for name, value in inspect.getmembers(errors, inspect.isclass)
        if value.__module__ == errors.__name__
    }
    assert set(defined) == ERRORS
    assert all(issubclass(error, penstock.PenstockError) for error in defined.values())
    assert all(getattr(penstock, name) is error for name, error in defined.items())


def test_calls_keep_their_keywords() -> None:
    def keywords(function: object) -> set[str]:
        assert callable(function)
        return set(inspect.signature(function).parameters) - {"self"}

    assert "storage_options" in keywords(penstock.connect)
    assert {"schema", "primary_key", "regions"} <= keywords(penstock.Database.create_table)
    assert {"durable", "indexed"} <= keywords(penstock.Table.writer)
    assert "keys" in keywords(penstock.Table.delete)
