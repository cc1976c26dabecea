"""Tables in Spark SQL: queries, inserts, merges, and maintenance as functions.

A view `USING penstock` is a table: `SELECT` reads it, `INSERT INTO` upserts, `INSERT OVERWRITE`
replaces all rows. Spark plans the read of such a view once and keeps the plan, so the view goes on
showing the rows that were there when it was first read; `query` makes its views anew each time.

Spark gives sources that are written in Python no `MERGE INTO`, `UPDATE` or `DELETE FROM`, and its
catalogue drops the options of a permanent table of theirs. So there are `merge_into` and
`delete_from`, and only temporary views.

    SELECT * FROM penstock_maintain('/lake/docs.lance')

runs a round of maintenance in one task of an executor and gives a row for each job. For large
tables `Pipeline` spreads the work over many. Spark may run a function again; a round that finds
nothing to do does nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.functions import udtf
from pyspark.sql.udtf import UserDefinedTableFunction

from penstock.errors import InvalidInput
from penstock.spark.options import SourceOptions

_FORMAT = "penstock"
_OPERATION = "_op"
_NAME = re.compile(r"[^\W\d]\w*")
_MATCHED = ("update", "delete", "ignore")
_NOT_MATCHED = ("insert", "ignore")
_NUMBERS = (
    "version",
    "base_rows",
    "fragments",
    "deleted_rows",
    "unmerged_generations",
    "unmerged_rows",
    "freshness_seconds",
)
_QUERY = re.compile(r"\s*(select|with|values|table|from|\()\b", re.IGNORECASE)


def register_table(
    spark: SparkSession,
    name: str,
    uri: str,
    *,
    storage_options: Mapping[str, str] | None = None,
    **options: Any,
) -> DataFrame:
    """Make a table a temporary view of that name, to be used in SQL; returns it as a frame.

    It shows the rows that are there when it is first read; register it again to see later ones.
    Further options are those of the data source, such as `version=3`. The functions of
    `register_functions` are there afterwards, too.
    """
    if not _NAME.fullmatch(name):
        raise InvalidInput(f"{name!r} cannot name a view; use letters, digits and '_'")
    given = _options(uri, storage_options) | {key: str(value) for key, value in options.items()}
    SourceOptions.of(given).locate()  # Spark would not look before the first query
    listed = ", ".join(f"{_quoted(key)} {_quoted(value)}" for key, value in given.items())
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW {name} USING {_FORMAT} OPTIONS ({listed})")
    register_functions(spark)
    return spark.table(name)


def query(
    spark: SparkSession,
    text: str,
    *,
    storage_options: Mapping[str, str] | None = None,
    **tables: str,
) -> DataFrame:
    """Run SQL on tables as they are now: `query(spark, "SELECT … FROM docs", docs=uri)`."""
    for name, uri in tables.items():
        register_table(spark, name, uri, storage_options=storage_options)
    return spark.sql(text)


def merge_into(
    spark: SparkSession,
    uri: str,
    source: str | DataFrame,
    *,
    matched: str = "update",
    not_matched: str = "insert",
    storage_options: Mapping[str, str] | None = None,
) -> None:
    """Merge the rows of a query, view or frame into a table, by its primary key.

    Rows whose key the table has update it (whole rows), delete it, or are ignored; others are
    inserted or ignored. A column `_op` of the source with 'upsert' and 'delete' says it row by
    row, if every row is to count.
    """
    for what, value, known in (
        ("matched", matched, _MATCHED),
        ("not_matched", not_matched, _NOT_MATCHED),
    ):
        if value not in known:
            raise InvalidInput(f"{what} is one of {', '.join(known)}, not {value!r}")
    given = _options(uri, storage_options)
    table = SourceOptions.of(given).open()
    keys = list(table.primary_key)
    if not keys:
        raise InvalidInput(f"{uri} has no primary key to merge by; append the rows instead")
    rows = _frame(spark, source)
    missing = [key for key in keys if key not in rows.columns]
    if missing:
        raise InvalidInput(f"the source lacks the key column {missing[0]!r}")
    every = (matched, not_matched) == ("update", "insert")
    if _OPERATION in rows.columns and not every:
        raise InvalidInput(f"a column {_OPERATION!r} says what becomes of each row; say no more")
    parts: list[DataFrame] = []
    if every:
        parts = [rows]
    elif matched == "delete" and not_matched == "ignore":
        parts = [rows.select(*keys).withColumn(_OPERATION, sf.lit("delete"))]
    else:

        def there() -> DataFrame:
            # Each time another one: Spark keeps one plan for all reads of a frame.
            found = spark.read.format(_FORMAT).options(**given).option("columns", json.dumps(keys))
            return found.load().select(*keys)

        if matched != "ignore":
            operation = "upsert" if matched == "update" else "delete"
            old = rows.join(there(), keys, "left_semi").select(*rows.columns)
            parts.append(old.withColumn(_OPERATION, sf.lit(operation)))
        if not_matched != "ignore":
            new = rows.join(there(), keys, "left_anti").select(*rows.columns)
            parts.append(new.withColumn(_OPERATION, sf.lit("upsert")))
    if parts:
        together = parts[0] if len(parts) == 1 else parts[0].unionByName(parts[1])
        together.write.format(_FORMAT).options(**given).mode("append").save()


def delete_from(uri: str, where: str, *, storage_options: Mapping[str, str] | None = None) -> int:
    """Delete the rows that match a condition; returns how many. Runs in this process."""
    table = SourceOptions.of(_options(uri, storage_options)).open()
    try:
        return table.delete(where=where)
    finally:
        table.close()


def register_functions(spark: SparkSession) -> None:
    """Let SQL call `penstock_maintain(uri)` and `penstock_status(uri)`.

    A second argument, if need be, has the options of the table's store as a map.
    """
    for name, function in (("maintain", _Maintain), ("status", _Status)):
        made = udtf(function, returnType=function.columns)
        spark.udtf.register(f"penstock_{name}", cast(UserDefinedTableFunction, made))


# --- functions of SQL ----------------------------------------------------------------------


class _Maintain:
    columns = "job string, seconds double, did string, left string"

    def eval(self, uri: str, storage: Mapping[str, str] | None = None) -> Iterator[tuple[Any, ...]]:
        table = SourceOptions.of(_options(uri, storage)).open()
        try:
            for job in table.maintain(recover=True).jobs:
                yield job.name, job.seconds, job.did, job.left
        finally:
            table.close()


class _Status:
    columns = "name string, value double"

    def eval(self, uri: str, storage: Mapping[str, str] | None = None) -> Iterator[tuple[Any, ...]]:
        status = SourceOptions.of(_options(uri, storage)).open().status()
        for name in _NUMBERS:
            yield name, float(getattr(status, name))


# --- details -------------------------------------------------------------------------------


def _options(uri: str, storage: Mapping[str, str] | None) -> dict[str, str]:
    return {"path": uri} | {f"storage.{key}": value for key, value in (storage or {}).items()}


def _frame(spark: SparkSession, source: str | DataFrame) -> DataFrame:
    if isinstance(source, DataFrame):
        return source
    return spark.sql(source) if _QUERY.match(source) else spark.table(source)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
