"""The demo, run small as a user runs it: a real writer, really killed, and an honest account."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

import penstock
from penstock.cli.documents import documents, embed

COMMAND = [sys.executable, "-W", "error", "-m", "penstock.cli.main"]


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], cwd=cwd, capture_output=True, text=True, timeout=110, check=False
    )


def test_the_demo_kills_its_writer_and_loses_nothing(tmp_path: Path) -> None:
    first = run("demo", "--documents", "500", "--json", cwd=tmp_path)
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
    second = run("demo", "--documents", "500", "--regions", "2", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    for words in ("recovered from the WAL", "epochs", "time to recover", "penstock status"):
        assert words in second.stdout
    assert penstock.connect(tmp_path / "demo-lake").open_table("documents").count() == 500


def test_the_demo_leaves_a_table_alone_that_it_did_not_make(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    mine = penstock.connect(tmp_path / "lake").create_table("documents", schema, primary_key="id")
    mine.upsert([{"id": 1}])
    refused = run("demo", "--documents", "300", "--dir", "lake", cwd=tmp_path)
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert "--dir" in refused.stderr
    assert mine.count() == 1
    mine.close()


def test_documents_are_the_same_every_time_and_near_when_alike() -> None:
    stream = documents(300)
    assert stream.equals(documents(300))
    assert len(set(stream["id"].to_pylist())) == 300
    texts = ["open a file for reading", "open the file for reading", "complex logarithm", ""]
    vectors = np.array(embed(pa.array(texts)).to_pylist())
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1.0)
    assert vectors[0] @ vectors[1] > 0.7 > vectors[0] @ vectors[2]
