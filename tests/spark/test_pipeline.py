"""Maintenance as Spark jobs: what is due is done once, whoever else is at it, and said clearly."""

from __future__ import annotations

import io
import logging
import os
import pickle
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lance
import numpy as np
import pytest
from pyspark.sql import SparkSession
from rich.console import Console
from tests.spark.pipelines import DIMENSIONS, Story, rows

from penstock.errors import Corruption, InvalidInput, PenstockError, TableNotFound
from penstock.memwal import index_parts
from penstock.memwal.merge import commit_pieces, fold_piece, merge_piece, plan_merges
from penstock.spark import jobs, tasks
from penstock.spark.pipeline import Pipeline, PipelineReport

pytestmark = pytest.mark.xdist_group("spark")


@pytest.fixture
def in_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the work is, tasks do it."""
    monkeypatch.setattr(jobs, "DRIVER_ROWS", 1)
    monkeypatch.setattr(jobs, "TASK_ROWS", 1)
    monkeypatch.setattr(jobs, "DRIVER_REGIONS", 2)
    monkeypatch.setattr(jobs, "DRIVER_FILES", 0)
    monkeypatch.setattr(index_parts, "PART_ROWS", 200)


def descriptions(spark: SparkSession) -> list[str]:
    """What Spark's web page would say of its jobs."""
    found = spark.sparkContext._jsc.sc().statusStore().jobsList(None)
    told = [found.apply(number).description() for number in range(found.size())]
    return [one.get() for one in told if one.isDefined()]


def merged(report: PipelineReport) -> int:
    found = re.match(r"(\d+) generations", report["merge"].did)
    return int(found[1]) if found else 0


# --- one run -------------------------------------------------------------------------------


def test_a_run_leaves_an_ordinary_lance_table_and_nothing_to_do(
    spark: SparkSession, tmp_path: Path, in_tasks: None
) -> None:
    story = Story(str(tmp_path)).indexed().unfold()
    pipeline = Pipeline(spark, story.uri)
    report = pipeline.run()
    story.check()
    assert [job.name for job in report.jobs] == ["merge", "index", "compact", "snapshot", "gc"]
    assert report.finished
    assert merged(report) == 12
    assert report["merge"].tasks == 4
    assert report["index"].tasks >= 2
    assert report["index"].did.count("caught up") == 2
    assert "penstock merge docs: 4 regions, 12 generations" in descriptions(spark)
    assert report["snapshot"].did == "none was ever asked for"
    shown = str(report)
    assert shown.splitlines()[0] == story.uri
    assert re.search(r"merge +12 generations, .* 4 +4 +\d+\.\d\d", shown)

    again = pipeline.run()
    assert (again["merge"].did, again["merge"].tasks) == ("nothing to merge", 0)
    # The second time rows are replaced that are in the base table, and fragments become fewer.
    story.unfold(3_000)
    later = pipeline.run(retain_seconds=0)
    story.check()
    assert later["compact"].tasks > 0
    assert later["gc"].tasks > 0
    plain = lance.dataset(story.uri)
    assert plain.to_table(full_text_query="number1").column("id").to_pylist() == [1]
    assert plain.to_table(filter="id = 7").num_rows == 1
    story.check_clean()


def test_little_work_is_done_by_the_driver(spark: SparkSession, tmp_path: Path) -> None:
    story = Story(str(tmp_path)).indexed().unfold(100)
    before = len(descriptions(spark))
    report = Pipeline(spark, story.uri.removesuffix(".lance")).run(retain_seconds=0)
    story.check()
    assert merged(report) == 12
    assert sum(job.tasks for job in report.jobs) == 0
    assert len(descriptions(spark)) == before


def test_regions_of_an_older_division_go_first(
    spark: SparkSession, tmp_path: Path, in_tasks: None
) -> None:
    import penstock

    story = Story(str(tmp_path)).unfold(400)
    story.table.set_regions(penstock.bucket("id", 3))
    story.put(range(0, 400, 2), "divided anew")
    report = Pipeline(spark, story.uri).run("merge")
    story.check()
    assert merged(report) == 15
    assert report["merge"].tasks >= 5


def test_rows_without_a_key_are_merged_once(
    spark: SparkSession, tmp_path: Path, in_tasks: None
) -> None:
    story = Story(str(tmp_path), keyed=False)
    story.put(range(200), "one")
    story.put(range(200, 300), "two")
    Pipeline(spark, story.uri).run()
    story.check()


def test_a_budget_leaves_the_rest_to_the_next_run(
    spark: SparkSession, tmp_path: Path, in_tasks: None
) -> None:
    story = Story(str(tmp_path)).indexed().unfold()
    pipeline = Pipeline(spark, story.uri)
    report = pipeline.run(budget_bytes=1)
    assert not report.finished
    assert merged(report) == 3
    assert report["merge"].left == "9 generations to merge"
    assert report["gc"].left == "clean-up"
    assert merged(pipeline.run()) == 9
    story.check()


def test_snapshots_of_many_regions_are_loaded_by_tasks(
    spark: SparkSession, tmp_path: Path, in_tasks: None
) -> None:
    story = Story(str(tmp_path), regions=9)
    story.put(range(500), "flushed")
    report = Pipeline(spark, story.uri).run(["snapshot"])
    assert report["snapshot"].tasks == 5
    assert Story.held(story.table.to_arrow(consistency="eventual")) == story.expected
    assert Pipeline(spark, story.uri).run(["snapshot"])["snapshot"].did.endswith("has it")


# --- indexes -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ivf_pq", "ivf_sq"])
def test_an_index_is_trained_on_a_sample_and_built_in_parts(
    spark: SparkSession, tmp_path: Path, in_tasks: None, kind: str
) -> None:
    story = Story(str(tmp_path))
    story.put(range(2_000), "base")
    pipeline = Pipeline(spark, story.uri)
    pipeline.run("merge")
    story.put(range(1_500, 2_400), "in front")
    version = story.table.version
    options = {"num_sub_vectors": 4} if kind == "ivf_pq" else {}
    assert pipeline.create_index("vec", kind, num_partitions=4, **options) == "vec_idx"
    assert story.table.version == version + 1
    told = descriptions(spark)
    assert any("index docs: a sample of" in one for one in told)
    parts = "1 part" if kind == "ivf_sq" else "2 parts"
    assert f"penstock index docs: {kind} on vec, {parts}" in told

    query = rows(range(2_000), "base").column("vec").chunk(0).values.to_numpy()[:DIMENSIONS]
    pipeline.run()
    plain = lance.dataset(story.uri)
    assert plain.stats.index_stats("vec_idx")["num_unindexed_rows"] == 0
    every = {"column": "vec", "q": query, "k": 10}
    exact = plain.to_table(nearest=every | {"use_index": False}, columns=["id"])
    found = plain.to_table(nearest=every | {"nprobes": 4, "refine_factor": 10}, columns=["id"])
    shared = np.intersect1d(exact["id"].to_numpy(), found["id"].to_numpy())
    assert len(shared) >= 9
    # Again under the same name, in place of the one before.
    pipeline.create_index("vec", kind, num_partitions=2, **options)
    now = lance.dataset(story.uri).stats.index_stats("vec_idx")
    assert now["indices"][0]["num_partitions"] == 2
    story.check_clean()


@pytest.mark.parametrize(("column", "kind"), [("id", "btree"), ("text", "fts"), ("id", "bitmap")])
def test_other_indexes_are_built_in_parts_too(
    spark: SparkSession, tmp_path: Path, in_tasks: None, column: str, kind: str
) -> None:
    story = Story(str(tmp_path)).unfold(1_000)
    pipeline = Pipeline(spark, story.uri)
    pipeline.run("merge")
    pipeline.create_index(column, kind, name="theirs")
    plain = lance.dataset(story.uri)
    assert plain.stats.index_stats("theirs")["num_indexed_rows"] == len(story.expected)
    if kind == "fts":
        assert plain.to_table(full_text_query="number77")["id"].to_pylist() == [77]
    else:
        assert plain.to_table(filter="id in (77, 78)").num_rows == 2
    if kind == "bitmap":
        assert pipeline.create_index("id", "packed_stlsort", name="ours") == "ours"
        assert any("packed file" in one for one in descriptions(spark))
        assert "packed=[ours]" in story.table.explain(filter="id = 77")
        assert story.table.count("id IN (77, 78)") == 2
    story.check()
    story.check_clean()


# --- others at it --------------------------------------------------------------------------


def test_pipelines_and_a_maintain_at_once_do_the_work_once(
    spark: SparkSession, tmp_path: Path, in_tasks: None
) -> None:
    story = Story(str(tmp_path)).indexed().unfold()
    pipelines = [Pipeline(spark, story.uri) for _ in range(2)]
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(pipeline.run) for pipeline in pipelines]
        beside = pool.submit(story.table.maintain)
        reports = [one.result(60) for one in running]
        other = beside.result(60)
    by_hand = re.match(r"(\d+) generations", other["merge"].did)
    assert sum(map(merged, reports)) + (int(by_hand[1]) if by_hand else 0) == 12
    pipelines[0].run()
    story.check()
    story.check_clean()


def test_what_was_folded_elsewhere_fits_a_table_that_went_on(tmp_path: Path) -> None:
    story = Story(str(tmp_path)).unfold(300)
    story.table.merge()
    story.put(range(300, 400), "added")
    story.table.merge()
    story.unfold(300)
    base = story.table._base
    started_ms = base.seams.clock.monotonic_ms()
    plans, _ = plan_merges(base, together=False)
    pieces = [pickle.loads(pickle.dumps(fold_piece(base, plan))) for plan in plans]
    assert len(pieces) == 4
    # Rows of the base table move, so what they were looked up as is not true any more,
    assert story.table.compact().fragments_after == 1
    # and somebody else merges one of the regions.
    assert merge_piece(base, plans[2]).generations == 3
    done = commit_pieces(base, pieces, started_ms)
    assert done.generations == 9
    story.check()
    story.check_clean()
    assert commit_pieces(base, pieces, started_ms).generations == 0
    story.check()


def test_a_running_pipeline_keeps_up_and_stops(
    spark: SparkSession, tmp_path: Path, in_tasks: None
) -> None:
    story = Story(str(tmp_path))
    with Pipeline(spark, story.uri).start(interval_seconds=0.05) as running:
        for number in range(3):
            story.put(range(number * 50, 200), f"round {number}")
            story.take_out([number])
        seen = running.rounds
        deadline = time.monotonic() + 60
        while running.rounds < seen + 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert running.is_running
        last = running.stop()
        assert last is not None
        assert running.last is last
    assert not running.is_running
    assert running.wait(0)
    story.check()


def test_what_does_not_end_is_cancelled(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story(str(tmp_path))
    begun = threading.Event()

    def endless(work: jobs.Work) -> tuple[str, str]:
        begun.set()
        tasks.run(work.spark, time.sleep, [600, 600], "endless", group=work.group)
        return "never", ""

    monkeypatch.setattr(jobs, "merge", endless)
    running = Pipeline(spark, story.uri).start(jobs="merge")
    assert begun.wait(30)
    assert running.stop(timeout_seconds=0.5 if not running.wait(0.5) else 0) is None
    assert not running.is_running


# --- when it goes wrong --------------------------------------------------------------------


def test_an_error_of_a_task_arrives_as_it_was(
    spark: SparkSession, tmp_path: Path, in_tasks: None, caplog: pytest.LogCaptureFixture
) -> None:
    story = Story(str(tmp_path)).unfold(200)
    generation = sorted((tmp_path / "docs.lance" / "_mem_wal").glob("*/*_gen_1"))[0]
    lost = tmp_path / "lost"
    shutil.move(generation, lost)
    pipeline = Pipeline(spark, story.uri)
    version = story.table.version
    with pytest.raises(Corruption, match="Restore the directory") as caught:
        pipeline.run()
    assert generation.name in str(caught.value)
    assert "java" not in str(caught.value).lower()
    assert story.table.version == version

    # In the background it is kept and logged, and a later round finds it cured.
    with caplog.at_level(logging.ERROR):
        running = pipeline.start(interval_seconds=0.2)
        deadline = time.monotonic() + 60
        while running.failure is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert isinstance(running.failure, Corruption)
        assert "will try again" in caplog.text
        with pytest.raises(Corruption):
            running.stop()
    shutil.move(lost, generation)
    pipeline.run()
    story.check()
    story.check_clean()


def fails(kind: str) -> int:
    if kind == "input":
        raise InvalidInput("column 'x' is not there; name another")
    if kind == "odd":

        class Odd(Exception):
            def __reduce__(self) -> str:
                raise TypeError("not to be sent")

        raise Odd("it is odd")
    if kind == "gone":
        os._exit(7)
    return len(kind)


def test_tasks_are_one_for_each_item_and_tell_what_went_wrong(spark: SparkSession) -> None:
    from pyspark import cloudpickle

    here = __import__(fails.__module__, fromlist=["fails"])
    cloudpickle.register_pickle_by_value(here)
    try:
        terminal = Console(file=io.StringIO(), force_terminal=True)
        words = ["a", "bb", "", "dddd"] * 5
        found = tasks.run(spark, fails, words, "penstock words", group="words", console=terminal)
        assert found == [len(word) for word in words]
        assert "penstock words" in terminal.file.getvalue()
        tracker = spark.sparkContext.statusTracker()
        (job,) = tracker.getJobIdsForGroup("words")
        info = tracker.getJobInfo(job)
        assert info is not None
        assert [tracker.getStageInfo(stage).numTasks for stage in info.stageIds] == [len(words)]
        assert spark.sparkContext.getLocalProperty("spark.jobGroup.id") is None
        with pytest.raises(InvalidInput, match="column 'x' is not there; name another"):
            tasks.run(spark, fails, ["a", "input"], "words")
        with pytest.raises(PenstockError, match="Odd: it is odd"):
            tasks.run(spark, fails, ["odd"], "words")
        with pytest.raises(PenstockError, match=r"words: Spark gave up on a task .*run it again"):
            tasks.run(spark, fails, ["gone"], "words")
    finally:
        cloudpickle.unregister_pickle_by_value(here)
    assert tasks.run(spark, len, [], "nothing") == []


def test_bad_input_is_refused_before_anything_is_done(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(TableNotFound, match="no table at"):
        Pipeline(spark, tmp_path / "nothing.lance")
    assert not (tmp_path / "nothing.lance").exists()
    story = Story(str(tmp_path))
    pipeline = Pipeline(spark, story.uri)
    with pytest.raises(InvalidInput, match="unknown job 'mergge'; there are: merge, index"):
        pipeline.run(["mergge"])
    with pytest.raises(InvalidInput, match="budget_seconds must be a positive number"):
        pipeline.start(budget_seconds=-1)
    with pytest.raises(InvalidInput, match="interval_seconds"):
        pipeline.start(0)
    with pytest.raises(InvalidInput, match="no column 'nope'"):
        pipeline.create_index("nope", "btree")
