"""The pipeline where executors are processes of their own, on an object store, and when killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import lance
import pytest
from tests.s3_server import S3Server
from tests.spark.pipelines import Story

from penstock.memwal.gc_report import NEVER_NAMED

pytestmark = [
    pytest.mark.xdist_group("spark-cluster"),
    pytest.mark.usefixtures("java"),
    pytest.mark.timeout(300),
]

ROOT = Path(__file__).resolve().parents[2]
PROCESS = "tests.spark.pipeline_process"
SECONDS = 280
"""Several Java machines start, which takes long where others are at work."""


def pipeline(
    directory: Path,
    master: str,
    story: Story,
    where: str = "-",
) -> subprocess.CompletedProcess[str]:
    options: Mapping[str, str] = story.storage_options or {}
    directory.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-m", PROCESS, master, story.uri, json.dumps(options), where],
        cwd=directory,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "SPARK_WORKER_DIR": str(directory / "executors")},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def orphans(story: Story) -> int:
    """Files that nothing ever named, as a crash leaves them; they are removed."""
    report = story.table.gc(retain_seconds=0, orphan_seconds=0)
    return sum(line.files for line in report.removed if line.why in NEVER_NAMED)


def test_executors_that_fail_at_first_on_a_cluster_and_s3(tmp_path: Path, s3: S3Server) -> None:
    story = Story(s3.uri("pipeline"), storage_options=s3.storage_options).indexed().unfold(1_200)
    done = pipeline(tmp_path / "run", "local-cluster[2,1,1024]", story)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("executors") == 2
    assert found["merge"] == 4
    assert min(found["index"], found["snapshot"], found["gc"]) > 0
    story.check()
    plain = lance.dataset(story.uri, storage_options=story.storage_options)
    assert plain.stats.index_stats("vec_idx")["num_indexed_rows"] == len(story.expected)
    assert orphans(story) > 0, "what the failed attempts wrote"
    story.check_clean()


@pytest.mark.soak
@pytest.mark.parametrize("where", ["commit_pieces", "commit_compaction"])
def test_a_pipeline_that_is_killed_before_a_commit_is_continued(tmp_path: Path, where: str) -> None:
    story = Story(str(tmp_path / "lake")).indexed().unfold()
    story.table.maintain()
    story.unfold()
    before = story.table.version
    done = pipeline(tmp_path / "killed", "local[2,3]", story, where)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    after = story.table.version
    assert (after == before) == (where == "commit_pieces")
    assert Story.held(story.table.to_arrow()) == story.expected

    report = story.table.maintain()
    assert report.finished
    story.check()
    assert orphans(story) > 0, "what was written for the commit that never came"
    story.check_clean()
