"""The demos, run small as a user runs them: a real writer or driver, really killed, and an honest
account."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest

import penstock
from penstock.cli.demo_changes import plan_changes
from penstock.cli.documents import documents, embed

COMMAND = [sys.executable, "-W", "error", "-m", "penstock.cli.main"]


def run(
    *arguments: str, cwd: Path, timeout_seconds: float = 110, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )


@pytest.mark.soak
@pytest.mark.timeout(420)
def test_the_demo_streams_with_spark_and_kills_the_driver(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    from penstock.spark.session import check_java

    try:
        check_java()
    except penstock.PenstockError as error:
        pytest.skip(str(error))
    ended = run("demo", "--documents", "300", "--json", cwd=tmp_path, timeout_seconds=400)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr == ""
    account = json.loads(ended.stdout)["account"]
    assert account["sound"]
    assert account["deletes"] > 0
    assert 0 < account["seen_at_kill"] <= account["written_at_kill"] < account["files"]
    assert account["replayed_batches"] in (0, 1)
    assert account["lost"] == account["changed"] == account["duplicates"] == 0
    assert account["came_back"] == account["lost_after_kill"] == 0
    assert all(reads["count"] for reads in account["reads"].values())
    assert min(account["recall_before"], account["recall_after"]) > 0.8
    assert account["after"]["unmerged_generations"] == account["after"]["log_entries"] == 0
    assert account["after"]["files"] < account["before"]["files"]

    table = penstock.connect(tmp_path / "demo-lake").open_table("documents")
    assert table.count() == lance.dataset(table.uri).count_rows() == account["rows"]
    assert table.status().indexes == ("body_idx", "module_idx", "vector_idx")


def test_the_demo_does_without_spark_where_there_is_no_java(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    ended = run("demo", "--documents", "300", "--json", cwd=tmp_path, PATH="", JAVA_HOME="")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("\n") == 1
    assert "Java" in ended.stderr
    assert json.loads(ended.stdout)["account"]["acknowledged"] == 300


def test_the_demo_kills_its_writer_and_loses_nothing(tmp_path: Path) -> None:
    first = run("demo", "--without-spark", "--documents", "500", "--json", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert first.stderr == ""
    account = json.loads(first.stdout)["account"]
    assert account["documents"] == account["acknowledged"] == 500
    assert 250 <= account["acknowledged_at_kill"] < 500
    assert account["recovered_from_wal"] > 0
    assert account["lost_after_kill"] == account["lost"] == account["changed"] == 0
    assert account["duplicates"] == 0
    assert all(
        a > b for b, a in zip(account["epochs_before"], account["epochs_after"], strict=True)
    )
    assert account["sound"]

    table = penstock.connect(tmp_path / "demo-lake").open_table("documents")
    assert table.count() == 500
    assert table.status().indexes == ("body_idx", "module_idx", "vector_idx")

    # Again in the same place, for people: the table of the first run is replaced.
    second = run("demo", "--without-spark", "--documents", "500", "--regions", "2", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    for words in ("recovered from the WAL", "epochs", "time to recover", "penstock status"):
        assert words in second.stdout
    assert penstock.connect(tmp_path / "demo-lake").open_table("documents").count() == 500


def test_the_demo_leaves_a_table_alone_that_it_did_not_make(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    mine = penstock.connect(tmp_path / "lake").create_table("documents", schema, primary_key="id")
    mine.upsert([{"id": 1}])
    refused = run("demo", "--without-spark", "--documents", "300", "--dir", "lake", cwd=tmp_path)
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert "--dir" in refused.stderr
    assert mine.count() == 1
    mine.close()


def test_the_end_of_the_stream_is_known_before_it_begins() -> None:
    plan = plan_changes(documents(700))
    table = {row["id"]: row for row in plan.loaded.to_pylist()}
    watched: set[str] = set()
    came_back = 0
    for number, file in enumerate(plan.files, 1):
        rows = file.rows.to_pylist()
        assert file.number == number
        assert len({row["id"] for row in rows}) == len(rows)
        for row in rows:
            if row.pop("_op") == "delete":
                assert table.pop(row["id"])["id"] not in watched
            else:
                came_back += row["id"] not in table and row["body"].endswith(f"Revision {number}.")
                table[row["id"]] = row
        assert file.watched
        watched |= set(file.watched)
    assert came_back
    assert plan.expected.num_rows == len(table)
    assert all(table[row["id"]] == row for row in plan.expected.to_pylist())

    key = next(key for key, states in plan.history.items() if any(gone for _, gone in states[1:]))
    first, (deleted, _) = plan.history[key][0][0], next(s for s in plan.history[key] if s[1])
    assert plan.is_allowed(key, None, deleted, deleted)
    assert plan.is_allowed(key, None, 0, deleted)
    assert not plan.is_allowed(key, first, deleted, deleted)
    assert not plan.is_allowed(key, None, first, first)


def test_documents_are_the_same_every_time_and_near_when_alike() -> None:
    stream = documents(300)
    assert stream.equals(documents(300))
    assert len(set(stream["id"].to_pylist())) == 300
    texts = ["open a file for reading", "open the file for reading", "complex logarithm", ""]
    vectors = np.array(embed(pa.array(texts)).to_pylist())
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1.0)
    assert vectors[0] @ vectors[1] > 0.7 > vectors[0] @ vectors[2]
