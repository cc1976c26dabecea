"""The public names, pinned: to add, rename or drop one is to edit this file on purpose."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

import penstock
from penstock import errors, query

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
    "VersionNotFound",
    "WriterClosed",
    "WriterPoisoned",
}
# Properties have None; of a method the parameters, `*` before those given by keyword only.
MEMBERS: dict[str, dict[str, str | None]] = {
    "Database": {
        "create_table": "name, schema, *, primary_key, regions, stable_row_ids, writer_defaults",
        "drop_table": "name",
        "list_tables": "",
        "open_table": "name, *, adopt",
        "uri": None,
    },
    "Table": {
        "add_columns": "columns",
        "alter_column": "name, data_type",
        "build_indexes": "names",
        "bulk_load": "data",
        "changes": "since, *, max_rows",
        "close": "",
        "compact": "*, target_rows, deletion_share, max_bytes, defer_index_remap, gradual",
        "count": "filter, *, consistency, version",
        "create_index": "column, kind, *, name, **options",
        "delete": "*, keys, where",
        "doctor": "*, deep",
        "drop_columns": "names",
        "drop_index": "name",
        "explain": "columns, filter, limit, offset, *, analyze, consistency, version",
        "explain_get": "keys, *, analyze, consistency, version",
        "flush": "*, recover",
        "gc": "*, retain_seconds, orphan_seconds, dry_run",
        "get": "key, *, consistency, version",
        "get_many": "keys, *, consistency, version",
        "inspect": "",
        "maintain": "*, budget_seconds, budget_bytes, retain_seconds, recover, on_progress",
        "merge": "*, max_rows",
        "merge_insert": "on",
        "overwrite": "data",
        "primary_key": None,
        "rename_column": "old, new",
        "scan": "columns, filter, limit, offset, *, consistency, version",
        "schema": None,
        "search": (
            "query, column, *, vector, text, vector_column, text_column, consistency, version"
        ),
        "set_regions": "regions",
        "snapshot": "",
        "status": "",
        "to_arrow": "*, consistency, version",
        "update": "*, where, values",
        "upsert": "data",
        "uri": None,
        "use_index": "name",
        "version": None,
        "writer": "*, durable, indexed, region, **options",
    },
    "Writer": {
        "abandon": "",
        "claim_all": "wanted",
        "close": "*, flush",
        "closed": None,
        "delete": "keys",
        "enter_once": "parts, transaction",
        "flush": "",
        "outdated": None,
        "region_writers": "",
        "released": None,
        "stats": "",
        "tick": "",
        "upsert": "data",
        "write_once": "rows, transaction",
    },
}
EVERY_QUERY: dict[str, str | None] = {
    "explain": "*, analyze",
    "limit": "rows",
    "offset": "rows",
    "scores": None,
    "select": "columns",
    "to_arrow": "",
    "to_list": "",
    "to_pandas": "",
    "to_polars": "",
    "where": "filter",
}
VECTOR_OPTIONS = {"metric": "name", "nprobes": "partitions", "refine": "factor"}
TEXT_OPTIONS = {"boost": "factors", "operator": "name", "phrase": ""}
FUSION_OPTIONS = {"depth": "rows", "rank_constant": "constant", "weights": "vector, text"}
QUERIES: dict[str, dict[str, str | None]] = {
    "VectorQuery": {**EVERY_QUERY, **VECTOR_OPTIONS, "distance_range": "low, high"},
    "TextQuery": {**EVERY_QUERY, **TEXT_OPTIONS},
    "HybridQuery": {**EVERY_QUERY, **VECTOR_OPTIONS, **TEXT_OPTIONS, **FUSION_OPTIONS},
}
FUNCTIONS = {
    "bucket": "column, num_buckets",
    "connect": "uri, storage_options, *, seams",
    "day": "column",
    "expression": "sql, columns, result_type",
    "hour": "column",
    "identity": "column",
    "month": "column",
    "multi_bucket": "columns, num_buckets",
    "truncate": "column, width",
    "unsharded": "",
    "year": "column",
}


def parameters(function: Callable[..., object]) -> str:
    """The parameter list without `self`, types and defaults."""
    written: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in written:
            written.append("*")
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        written.append(stars + parameter.name)
    return ", ".join(written)


def test_the_package_exports_exactly_these_names() -> None:
    assert set(penstock.__all__) == ENTRY | REGION_SPECS | ERRORS
    assert len(penstock.__all__) == len(set(penstock.__all__))
    assert all(hasattr(penstock, name) for name in penstock.__all__)


@pytest.mark.parametrize("name", [*sorted(MEMBERS), *QUERIES])
def test_a_class_has_exactly_these_public_members(name: str) -> None:
    owner = getattr(penstock if name in MEMBERS else query, name)
    public = {member: getattr(owner, member) for member in dir(owner) if member[0] != "_"}
    found = {
        member: parameters(value) if callable(value) else None for member, value in public.items()
    }
    assert found == (MEMBERS | QUERIES)[name]


def test_functions_keep_their_parameters() -> None:
    functions = {name: getattr(penstock, name) for name in FUNCTIONS}
    assert {name: parameters(function) for name, function in functions.items()} == FUNCTIONS
    assert {"connect", *REGION_SPECS} == set(FUNCTIONS)


def test_every_error_is_exported_and_has_the_one_root() -> None:
    defined = {
        name: value
        for name, value in inspect.getmembers(errors, inspect.isclass)
        if value.__module__ == errors.__name__
    }
    assert set(defined) == ERRORS
    assert all(issubclass(error, penstock.PenstockError) for error in defined.values())
    assert all(getattr(penstock, name) is error for name, error in defined.items())
