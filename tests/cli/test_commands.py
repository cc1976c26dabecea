"""The commands on a table whose history is known: look at it, examine it, keep it healthy."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from tests.refusals import snapshot
from tests.s3_server import S3Server
from typer.testing import CliRunner

import penstock
from penstock.cli.main import app
from penstock.memwal import names
from penstock.storage.clock import SystemClock
from penstock.table import Table

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("body", pa.string())])


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    """Two regions by hash; a flush after the first rows, a delete behind it."""
    db = penstock.connect(tmp_path / "lake")
    made = db.create_table("docs", SCHEMA, primary_key="id", regions=penstock.bucket("id", 2))
    made.create_index("body", "fts")
    made.upsert([{"id": number, "body": f"row {number}"} for number in range(20)])
    made.upsert([{"id": 3, "body": "row three"}])
    made.flush()
    made.delete(keys=[7])
    yield made
    made.close()


def output(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def report(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output(*arguments, "--json"))
    return found


def region_with_tail(table: Table) -> str:
    """The directory of the region that took the delete after the flush."""
    region = next(r for r in table.status().regions if r.wal_lag_entries)
    return f"{table.uri}/_mem_wal/{region.region_id}"


def test_status_of_a_table_and_of_a_database(table: Table) -> None:
    (status,) = json.loads(output("status", table.uri, "--json"))
    assert timeless(status) == timeless(json.loads(json.dumps(table.status().to_dict())))
    (same,) = json.loads(output("status", str(Path(table.uri).parent), "--json"))
    assert timeless(same) == timeless(status)
    text = output("status", table.uri)
    for region in table.status().regions:
        assert str(region.region_id) in text
    for words in ("0 rows in the base table", "2 generations unmerged", "no snapshot", "body_idx"):
        assert words in text


def timeless(status: dict[str, Any]) -> dict[str, Any]:
    """A status without what changes while nobody does anything."""
    regions = [{**region, "freshness_seconds": None} for region in status["regions"]]
    return {**status, "freshness_seconds": None, "regions": regions}


def test_status_is_watched_until_it_is_interrupted(table: Table) -> None:
    command = [sys.executable, "-W", "error", "-m", "penstock.cli.main"]
    command += ["status", table.uri, "--watch", "--every", "0.1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as watching:
        assert watching.stdout is not None
        heads = 0
        for line in watching.stdout:
            heads += line.startswith(table.uri)
            if heads == 3:
                break
        watching.send_signal(signal.SIGINT)
        _, errors = watching.communicate(timeout=60)
    assert watching.returncode == 0
    assert errors == ""


def test_inspect_tells_every_field_of_a_wal_entry(table: Table) -> None:
    region = region_with_tail(table)
    position = next(r for r in table.status().regions if r.wal_lag_entries).wal_position
    path = f"{region}/wal/{names.bitrev(position)}.arrow"
    found = report("inspect", path)
    assert found["kind"] == "WAL entry"
    assert found["position"] == position
    assert found["size_bytes"] == Path(path).stat().st_size
    assert found["metadata"] == {"writer_epoch": "1", "generation": "2"}
    assert (found["rows"], found["tombstones"]) == (1, 1)
    assert found["first_rows"] == [{"id": 7, "body": None, "_tombstone": True}]
    # The parts lie one behind the other and the trailer ends the file.
    *messages, trailer = [*found["messages"], found["trailer"]]
    end = 0
    for message in messages:
        assert message["offset"] == end
        end += message["size_bytes"]
    assert [m["type"] for m in messages] == ["schema", "record batch", "end of stream"]
    assert messages[0]["announces_trailer"]
    assert trailer["offset"] == end == found["size_bytes"] - 32
    assert "PSTKWAL1" in output("inspect", path)


def test_inspect_knows_fences_manifests_generations_regions_and_tables(table: Table) -> None:
    region = region_with_tail(table)
    table.close()
    with table.writer() as writer:
        writer.claim_all()
        (state,) = [r for r in table.status().regions if r.wal_lag_entries]
        fence = report("inspect", f"{region}/wal/{names.bitrev(state.wal_position)}.arrow")
        assert (fence["kind"], fence["rows"]) == ("WAL entry (fence)", 0)
        assert fence["metadata"] == {"writer_epoch": "2", "fence_sentinel": "true"}

        manifest = report("inspect", f"{region}/manifest/{names.bitrev(1)}.binpb")
        assert (manifest["kind"], manifest["writer_epoch"]) == ("region manifest", 1)

        whole = report("inspect", region)
        assert (whole["kind"], whole["writer_epoch"]) == ("region", 2)
        assert whole["wal"]["to_replay_rows"] == 1
        (value,) = whole["region_field_entries"]
        assert value["value"] in (0, 1)

        (flushed,) = whole["flushed_generations"]
        generation = report("inspect", f"{region}/{flushed['path']}")
        assert generation["physical_rows"] == flushed["physical_rows"]
        assert generation["indexes"] == ["body_idx"]

    described = report("inspect", table.uri)
    assert described == json.loads(table.inspect().to_json())
    assert described["primary_key"] == ["id"]
    assert len(described["regions"]) == 2
    spec = described["region_specs"][0]["fields"][0]
    assert (spec["transform"], spec["parameters"]) == ("bucket", {"num_buckets": "2"})
    for path, words in [
        (region, "fence_positions"),
        (table.uri, "bucket(id, 2)"),
        (f"{region}/{flushed['path']}", "superseded_rows"),
    ]:
        assert words in output("inspect", path)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.stderr == ""
    return result.exit_code, result.stdout


def test_doctor_ends_with_the_severity_of_what_it_found(table: Table) -> None:
    table.flush()
    table.merge()
    table.close()
    code, text = run("doctor", table.uri)
    assert (code, "not covered" in text) == (1, True)
    assert f"penstock maintain {table.uri}" in text
    lance.dataset(table.uri).drop_index("body_idx")
    assert run("doctor", table.uri, "--deep")[0] == 0

    table.upsert([{"id": 100, "body": "new"}])
    table.flush()
    region = next(r for r in table.inspect().generations if not r.merged)
    shutil.rmtree(Path(table.uri) / region.path)
    code, text = run("doctor", str(Path(table.uri).parent), "--json")
    assert code == 2
    (diagnosis,) = json.loads(text)
    assert diagnosis["severity"] == "sick"
    assert [f["where"] for f in diagnosis["findings"] if f["severity"] == "sick"] == [
        f"{table.uri}/{region.path}"
    ]


def test_every_command_that_the_doctor_names_cures(table: Table) -> None:
    """Rows left in the log, unmerged, uncovered, in small fragments: until nothing is found."""
    table.flush()
    table.merge()
    rows_of_others = [{"id": number, "body": "small"} for number in range(100, 117)]
    small = pa.Table.from_pylist(rows_of_others, table.schema)
    lance.write_dataset(small, table.uri, mode="append", max_rows_per_file=1)
    for number in range(18):
        table.upsert([{"id": 200 + number, "body": "flushed"}])
        table.flush()
    with table.writer(flush_on_close=False) as writer:
        writer.upsert([{"id": number, "body": "left behind"} for number in range(300, 320)])
    table.close()
    hours_ago = SystemClock().now_ms() / 1000 - 7200
    for entry in Path(table.uri).glob("_mem_wal/*/wal/*.arrow"):
        os.utime(entry, (hours_ago, hours_ago))
    rows = table.count()

    checks = set()
    for _ in range(4):
        code, text = run("doctor", table.uri, "--json")
        (diagnosis,) = json.loads(text)
        problems = [finding for finding in diagnosis["findings"] if finding["severity"] != "ok"]
        if not problems:
            break
        assert code == 1
        checks |= {finding["check"] for finding in problems}
        for command in {finding["command"] for finding in problems}:
            program, *arguments = shlex.split(command)
            assert program == "penstock"
            text = output(*arguments)
            assert all(job in text for job in ("merge", "index", "compact", "clean up"))
    assert code == 0
    assert checks == {"log", "merge", "indexes", "fragments"}
    assert table.count() == rows == lance.dataset(table.uri).count_rows()


def test_clean_up_says_what_would_go_before_it_goes(table: Table) -> None:
    table.flush()
    table.merge()
    table.build_indexes()
    table.close()
    generations = list(Path(table.uri).glob("_mem_wal/*/*_gen_*"))
    assert generations
    before = snapshot(Path(table.uri))
    assert "would be removed" in output("gc", table.uri, "--dry-run", "--retain-seconds", "0")
    assert snapshot(Path(table.uri)) == before
    assert "generations: merged" in output("gc", table.uri, "--retain-seconds", "0")
    assert not any(directory.exists() for directory in generations)
    assert table.count() == 19


def test_what_goes_wrong_is_one_line_and_exit_code_1(table: Table, tmp_path: Path) -> None:
    region = region_with_tail(table)
    entry = Path(f"{region}/wal/{names.bitrev(1)}.arrow")
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 1
    damaged = tmp_path / entry.name
    damaged.write_bytes(data)
    notes = tmp_path / "notes"
    notes.mkdir()
    for arguments, words in [
        (["status", str(tmp_path / "nowhere")], "neither a table nor a database"),
        (["status", str(notes)], "neither a table nor a database"),
        (["status", "ftp://host/table"], "scheme"),
        (["status", table.uri, "-o", "region"], "key=value"),
        (["doctor", str(notes)], "neither a table nor a database"),
        (["maintain", str(notes)], "neither a table nor a database"),
        (["gc", str(tmp_path / "nowhere")], "neither a table nor a database"),
        (["inspect", str(notes)], "nothing that can be inspected"),
        (["inspect", str(damaged)], "checksum"),
        (["inspect", f"{table.uri}/_mem_wal/00000000-0000-4000-8000-000000000000"], "no region"),
    ]:
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 1, arguments
        assert result.stdout == ""
        assert result.stderr.startswith("penstock: ")
        assert result.stderr.count("\n") == 1
        assert words in result.stderr
    assert not (tmp_path / "nowhere").exists()


def test_a_table_on_s3_is_inspected_with_storage_options(s3: S3Server) -> None:
    options = s3.storage_options
    db = penstock.connect(s3.uri("cli"), options)
    table = db.create_table("docs", SCHEMA, primary_key="id")
    table.upsert([{"id": 1, "body": "far away"}])
    given = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
    (status,) = json.loads(output("status", table.uri, *given, "--json"))
    region = status["regions"][0]
    assert region["wal_lag_entries"] == 1
    entry = f"{table.uri}/_mem_wal/{region['region_id']}/wal/{names.bitrev(1)}.arrow"
    assert report("inspect", entry, *given)["first_rows"] == [
        {"id": 1, "body": "far away", "_tombstone": False}
    ]
    table.close()


def test_version_names_what_decides_the_formats() -> None:
    assert output("version").startswith(f"penstock {penstock.__version__} (pylance 14.0.2")
