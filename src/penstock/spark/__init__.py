"""Tables in Spark: the data source `penstock`, and the jobs that keep tables healthy.

Importing this loads neither PySpark nor Java; that happens when a name is first used.

- `local_session()` gives a Spark session that suits tables, in this process.
- `register(spark)` makes a session of your own ready; `spark.read.format("penstock")` then works.
- `read(spark, uri, columns=…)` reads a table, and only the columns named.
- `read_changes(spark, uri)` streams what is upserted and deleted from now on, or from earlier.
- `load_files(spark, paths, uri)` loads Parquet files; `create_table(frame, uri)` makes a table.
- `query(spark, "SELECT … FROM docs", docs=uri)` runs SQL; `merge_into` merges a query's rows.
- `Pipeline(spark, uri)` runs merges, index builds, compaction and clean-up as Spark jobs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.spark.bulk import load_files as load_files
    from penstock.spark.create import create_table as create_table
    from penstock.spark.pipeline import Pipeline as Pipeline
    from penstock.spark.reader import read as read
    from penstock.spark.session import local_session as local_session
    from penstock.spark.session import register as register
    from penstock.spark.sql import delete_from as delete_from
    from penstock.spark.sql import merge_into as merge_into
    from penstock.spark.sql import query as query
    from penstock.spark.sql import register_functions as register_functions
    from penstock.spark.sql import register_table as register_table
    from penstock.spark.stream_read import read_changes as read_changes

_HOMES = {
    "Pipeline": "penstock.spark.pipeline",
    "create_table": "penstock.spark.create",
    "delete_from": "penstock.spark.sql",
    "load_files": "penstock.spark.bulk",
    "local_session": "penstock.spark.session",
    "read": "penstock.spark.reader",
    "read_changes": "penstock.spark.stream_read",
    "merge_into": "penstock.spark.sql",
    "query": "penstock.spark.sql",
    "register": "penstock.spark.session",
    "register_functions": "penstock.spark.sql",
    "register_table": "penstock.spark.sql",
}

__all__ = [
    "Pipeline",
    "create_table",
    "delete_from",
    "load_files",
    "local_session",
    "merge_into",
    "query",
    "read",
    "read_changes",
    "register",
    "register_functions",
    "register_table",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"penstock.spark has no {name!r}; it has {', '.join(__all__)}")
    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("pyspark", "py4j", "pandas"):
            raise
        raise PenstockError(
            f"penstock.spark.{name} needs {error.name}, which is not installed; install "
            "penstock[spark] (pyspark 4.3 and pandas 2) and Java 17"
        ) from error


def __dir__() -> list[str]:
    return sorted(__all__)
