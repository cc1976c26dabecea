"""Where Spark looks for Penstock: it imports every top-level module `pyspark_…` to find sources.

So `spark.read.format("penstock")` works without registering anything. Spark imports this module in
processes that may have no use for it, hence nothing of Penstock is loaded before it is used.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import DataSource


class DefaultSource(DataSource):
    """Stands for `penstock.spark.source.PenstockSource`, and becomes one when it is made."""

    def __new__(cls, options: Any = None) -> Any:
        from penstock.spark.source import PenstockSource

        return PenstockSource(options)

    @classmethod
    def name(cls) -> str:
        return "penstock"
