"""After `maintain()`, who has Lance and no Penstock sees exactly the table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import penstock
from penstock import Table

PROGRAM = Path(__file__).with_name("plain_lance.py")
WIDTH = 8
QUERY = [0.5] * WIDTH
SCHEMA = pa.schema(
    [
        pa.field("tenant", pa.string(), nullable=False),
        pa.field("id", pa.int32(), nullable=False),
        pa.field("amount", pa.int64()),
        pa.field("body", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), WIDTH)),
    ]
)
KEY = ["tenant", "id"]
Row = dict[str, Any]
Key = tuple[str, int]


def make_row(number: int, turn: int, **more: Any) -> Row:
    drawn = np.random.default_rng((number, turn)).random(WIDTH, np.float32)
    word = "cold" if (number + turn) % 4 == 0 else "warm"
    return {
        "tenant": f"tenant {number % 3}",
        "id": number,
        "amount": number * 10 + turn,
        "body": f"{word} river {turn}",
        "vector": drawn.tolist(),
        **more,
    }


def keyed(rows: list[Row]) -> dict[Key, Row]:
    found = {(row["tenant"], row["id"]): row for row in rows}
    assert len(found) == len(rows)
    return found


def ask_lance(table: Table, vector: str, text: str, filter: str) -> dict[str, Any]:
    asked = {
        "packages": [str(Path(lance.__file__).parents[1])],
        "uri": table.uri,
        "key": KEY,
        "filter": filter,
        "vector": {"column": vector, "query": QUERY, "k": 20},
        "text": {"query": text},
    }
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(PROGRAM)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


def assert_same(table: Table, expected: dict[Key, Row], body: str) -> None:
    """What Lance says, what we say and what was written are one and the same."""
    filter = "tenant = 'tenant 1' AND amount % 4 = 2"
    said = ask_lance(table, "vector", "cold", filter)
    assert said["columns"] == table.schema.names
    assert said["count"] == table.count() == len(expected)
    assert keyed(said["rows"]) == keyed(table.to_arrow().to_pylist()) == expected

    def keys(found: pa.Table) -> list[Key]:
        return [(row["tenant"], row["id"]) for row in found.to_pylist()]

    def told(name: str) -> list[Key]:
        return [(tenant, number) for tenant, number, *_ in said[name]]

    matching = [
        key for key, row in expected.items() if key[0] == "tenant 1" and row["amount"] % 4 == 2
    ]
    assert sorted(told("filtered")) == sorted(keys(table.scan(filter=filter).read_all()))
    assert sorted(told("filtered")) == sorted(matching)
    away = {
        key: float(np.square(np.array(row["vector"], np.float32) - 0.5).sum())
        for key, row in expected.items()
    }
    near = sorted(away, key=away.__getitem__)[:20]
    assert told("nearest") == keys(table.search(QUERY).nprobes(16).limit(20).to_arrow()) == near
    assert [found[-1] for found in said["nearest"]] == pytest.approx([away[key] for key in near])
    assert "ANN" in said["plan"], "the index was meant to be used"
    cold = sorted(key for key, row in expected.items() if row[body].startswith("cold"))
    ours = table.search("cold").limit(10_000).to_arrow()
    assert sorted(told("matching")) == sorted(keys(ours)) == cold


@pytest.mark.parametrize("stable", [True, False], ids=["stable row ids", "addresses"])
def test_a_lance_user_without_penstock_sees_exactly_the_table(tmp_path: Path, stable: bool) -> None:
    table = penstock.connect(tmp_path).create_table(
        "t",
        SCHEMA,
        primary_key=KEY,
        regions=penstock.identity("tenant"),
        stable_row_ids=stable,
    )
    expected: dict[Key, Row] = {}

    def upsert(numbers: range, turn: int, **more: Any) -> None:
        rows = [make_row(number, turn, **more) for number in numbers]
        table.upsert(rows)
        expected.update(keyed(rows))

    def delete(numbers: range) -> None:
        keys = [(f"tenant {number % 3}", number) for number in numbers]
        table.delete(keys=keys)
        for key in keys:
            expected.pop(key, None)

    upsert(range(200), 0)
    table.maintain()
    table.create_index("vector", "ivf_flat", num_partitions=4)
    table.create_index("body", "fts")
    table.create_index("amount", "btree")

    # Rows are replaced and deleted in every layer, some of them twice, in several generations.
    upsert(range(150, 250), 1)
    delete(range(0, 40, 2))
    table.flush()
    upsert(range(0, 20), 2)
    delete(range(140, 160))
    table.flush()
    upsert(range(145, 150), 3)
    table.update(where="id >= 60 AND id < 70", values={"amount": "amount + 1000"})
    for number in range(60, 70):
        expected[f"tenant {number % 3}", number]["amount"] += 1000
    report = table.maintain()
    assert report.finished
    assert_same(table, expected, "body")

    # The columns change while rows are on their way.
    upsert(range(30, 35), 4)
    table.add_columns({"note": pa.string()})
    for row in expected.values():
        row["note"] = None
    upsert(range(100, 120), 5, note="new")
    table.rename_column("body", "story")
    for row in expected.values():
        row["story"] = row.pop("body")
    rows = [make_row(number, 6, note="newer") for number in range(110, 130)]
    for row in rows:
        row["story"] = row.pop("body")
    table.upsert(rows)
    expected.update(keyed(rows))
    delete(range(90, 105))
    assert table.maintain().finished
    assert_same(table, expected, "story")

    # The same again, when nothing but the newest version is left.
    table.compact(target_rows=1 << 20)
    table.build_indexes()
    table.close()
    table.gc(retain_seconds=0, orphan_seconds=0)
    assert len(lance.dataset(table.uri).versions()) == 1
    assert_same(table, expected, "story")
