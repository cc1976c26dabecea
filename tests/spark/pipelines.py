"""A small table with everything that a pipeline has to keep, and what its rows have to be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lance
import numpy as np
import pyarrow as pa

import penstock
from penstock.memwal.doctor import Severity
from penstock.table import Table

DIMENSIONS = 8
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("vec", pa.list_(pa.float32(), DIMENSIONS)),
        pa.field("text", pa.string()),
    ]
)


def rows(ids: Any, said: str) -> pa.Table:
    ids = np.asarray(ids, dtype=np.int64)
    values = np.random.default_rng(len(ids)).random((len(ids), DIMENSIONS), dtype=np.float32)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), DIMENSIONS)
    return pa.table([ids, vectors, [f"{said} number{i}" for i in ids]], schema=SCHEMA)


class Story:
    """A table that is written to, and beside it what it has to hold."""

    def __init__(
        self,
        lake: str,
        *,
        regions: int = 4,
        keyed: bool = True,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        self.storage_options = dict(storage_options) if storage_options else None
        database = penstock.connect(lake, self.storage_options)
        self.table: Table = database.create_table(
            "docs",
            SCHEMA,
            primary_key="id" if keyed else None,
            regions=penstock.bucket("id", regions),
        )
        self.expected: dict[int, str] = {}

    @property
    def uri(self) -> str:
        return self.table.uri

    def put(self, ids: Any, said: str) -> None:
        """Write rows, and flush them."""
        self.table.upsert(rows(ids, said))
        self.expected |= {int(i): f"{said} number{i}" for i in ids}
        self.table.flush()

    def take_out(self, ids: Any) -> None:
        self.table.delete(keys=[int(i) for i in ids])
        for i in ids:
            del self.expected[int(i)]
        self.table.flush()

    def indexed(self) -> Story:
        self.table.create_index("id", "btree")
        self.table.create_index("text", "fts")
        return self

    def unfold(self, count: int = 3_000) -> Story:
        """Rows that are written, rewritten and deleted, in several generations of each region."""
        self.put(range(count), "first")
        self.put(range(0, count, 3), "second")
        self.take_out(range(0, count, 10))
        return self

    def check(self) -> None:
        """The table and, once everything is merged, plain Lance have the rows."""
        assert self.held(self.table.to_arrow()) == self.expected
        plain = lance.dataset(self.uri, storage_options=self.storage_options)
        assert self.held(plain.to_table()) == self.expected
        assert plain.count_rows() == len(self.expected)

    def check_clean(self) -> None:
        """Nothing is wrong, and clean-up leaves no file that nothing needs."""
        self.table.gc(retain_seconds=0, orphan_seconds=0)
        left = self.table.gc(retain_seconds=0, orphan_seconds=0, dry_run=True)
        assert left.files == 0, str(left)
        assert not left.unknown
        told = self.table.doctor(deep=True)
        assert told.severity <= Severity.ATTENTION, str(told)

    @staticmethod
    def held(found: pa.Table) -> dict[int, str]:
        ids, texts = found.column("id").to_pylist(), found.column("text").to_pylist()
        held = dict(zip(ids, texts, strict=True))
        assert len(held) == len(ids)
        return held
