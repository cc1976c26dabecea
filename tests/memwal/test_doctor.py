"""The doctor: every sickness is made for real, found, cured by what the finding says, and gone."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import lance
import pyarrow as pa
import pytest
from tests.failures.lake import make_lake
from tests.refusals import snapshot

import penstock
from penstock import Table
from penstock.memwal import names, tabular
from penstock.memwal.base_table import BaseTable
from penstock.memwal.doctor import Finding, Severity, diagnose
from penstock.memwal.doctor_checks import Limits
from penstock.memwal.snapshots import build_snapshot
from penstock.storage.clock import SimulatedClock, SystemClock
from penstock.storage.seams import Seams

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("value", pa.string())])
HOUR = 3600.0


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    made = penstock.connect(tmp_path / "lake").create_table("t", SCHEMA, primary_key="id")
    yield made
    made.close()


def write(table: Table, ids: range, value: str = "row") -> None:
    table.upsert([{"id": i, "value": f"{value} {i}"} for i in ids])
    table.flush()


def again(table: Table, *, later_seconds: float = 0.0) -> Table:
    """The table as another process opens it, with a clock that is so much ahead."""
    seams = Seams(clock=SimulatedClock(SystemClock().now_ms() + round(later_seconds * 1000)))
    return penstock.connect(Path(table.uri).parent, seams=seams).open_table("t")


def problems(table: Table, *, deep: bool = False) -> list[Finding]:
    """What is found, and that looking changed nothing."""
    root = Path(table.uri)
    before = snapshot(root)
    found = table.doctor(deep=deep)
    assert snapshot(root) == before
    assert found.healthy == (not found.problems)
    assert all(finding.what in " ".join(str(found).split()) for finding in found.problems)
    return list(found.problems)


def only(table: Table, check: str, *, deep: bool = False) -> Finding:
    """The one problem there is."""
    (finding,) = problems(table, deep=deep)
    assert finding.check == check
    return finding


def run_cure(finding: Finding, table: Table) -> None:
    assert finding.cure is not None
    db = penstock.connect(Path(table.uri).parent)
    exec(finding.cure, {"table": table, "db": db})


def region_of(table: Table) -> tuple[uuid.UUID, Path]:
    (state,) = table.status().regions
    return state.region_id, Path(table.uri) / names.region_dir(state.region_id)


# --- well --------------------------------------------------------------------------------------


def test_a_well_table_is_healthy_and_every_check_says_what_it_saw(table: Table) -> None:
    write(table, range(100))
    table.create_index("value", "btree")
    table.merge()
    write(table, range(5))
    table.upsert([{"id": 1, "value": "in the log"}])
    found = table.doctor(deep=True)
    lagging = [finding for finding in found.findings if finding.check == "indexes"]
    assert [finding.severity for finding in lagging] == [Severity.ATTENTION]
    others = [finding for finding in found.findings if finding.check != "indexes"]
    assert {finding.severity for finding in others} == {Severity.OK}
    assert len(others) == 12
    plain = found.to_dict()
    assert plain["severity"] == "attention"
    assert len(plain["findings"]) == 13
    assert all(
        len(line) <= tabular.WIDTH for line in str(found).splitlines()[1:] if "penstock" not in line
    )


# --- late: it wants attention, and a command cures it --------------------------------------------


def test_many_generations_want_a_merge(table: Table) -> None:
    for step in range(9):
        write(table, range(step, step + 2))
    finding = only(table, "merge")
    assert "9 generations with 18 rows" in finding.what
    assert finding.command == f"penstock maintain {table.uri}"
    run_cure(finding, table)
    assert not problems(table)


def test_rows_of_a_writer_that_is_gone_want_to_be_recovered(table: Table) -> None:
    writer = table.writer()
    writer.upsert([{"id": 1, "value": "left behind"}])
    writer.abandon()
    assert not problems(again(table))
    late = again(table, later_seconds=HOUR)
    finding = only(late, "log")
    assert "60 min" in finding.what
    assert finding.command == f"penstock maintain {table.uri} --recover"
    run_cure(finding, late)
    assert late.get(1) == {"id": 1, "value": "left behind"}
    assert not problems(late)

    # Whoever owns the region is still going to flush it.
    late.upsert([{"id": 2, "value": "in good hands"}])
    assert only(again(table, later_seconds=HOUR), "log").where == finding.where
    assert not problems(late)
    late.close()


def test_regions_of_a_replaced_spec_want_to_be_sealed(table: Table) -> None:
    write(table, range(10))
    table.set_regions(penstock.bucket("id", 2))
    finding = only(table, "region specs")
    run_cure(finding, table)
    assert not problems(table)
    assert lance.dataset(table.uri).count_rows() == 10


def test_uncovered_rows_want_an_index_build(table: Table) -> None:
    write(table, range(100))
    table.merge()
    table.create_index("value", "btree")
    write(table, range(100, 120))
    table.merge()
    finding = only(table, "indexes")
    assert "20 of 120 rows (16.7%)" in finding.what
    run_cure(finding, table)
    assert not problems(table)


def test_small_fragments_and_deleted_rows_want_compaction(table: Table) -> None:
    rows = [{"id": i, "value": "by another tool"} for i in range(170)]
    many = pa.Table.from_pylist(rows, table.schema)
    lance.write_dataset(many, table.uri, mode="append", max_rows_per_file=10)
    finding = only(table, "fragments")
    assert "17 of 17 fragments are small" in finding.what
    run_cure(finding, table)
    assert not problems(table)
    assert table.count() == 170

    write(table, range(0, 170, 3), "new")
    table.merge()
    finding = only(table, "deletions")
    run_cure(finding, table)
    assert not problems(table)
    assert table.count() == 170


def test_an_old_snapshot_wants_another(table: Table) -> None:
    write(table, range(5))
    table.snapshot()
    assert not problems(again(table, later_seconds=HOUR * 2))  # old, but it lacks nothing
    write(table, range(5, 9))
    assert not problems(table)
    late = again(table, later_seconds=HOUR * 2)
    finding = only(late, "snapshot")
    assert "lacks 1 generation" in finding.what
    run_cure(finding, late)
    assert not problems(late)
    assert late.count(consistency="eventual") == 9


@pytest.mark.parametrize("where", ["generation", "data file"])
def test_what_a_crash_left_is_for_the_collector(table: Table, where: str) -> None:
    write(table, range(5))
    table.merge()
    root = Path(table.uri)
    _, directory = region_of(table)
    if where == "generation":
        left = directory / "00000000_gen_2"
        shutil.copytree(next(directory.glob("*_gen_1")), left)
    else:
        left = root / "data" / "0123456789.lance"
        shutil.copy(next(root.glob("data/*.lance")), left)
    assert not problems(table)  # it may belong to something that is under way
    make_old(left, days=2)
    finding = only(table, "orphans")
    assert finding.where == str(left)
    assert finding.command == f"penstock gc {table.uri}"
    run_cure(finding, table)
    assert not left.exists()
    assert not problems(table)
    assert table.count() == 5


def make_old(path: Path, *, days: int) -> None:
    then_ns = (SystemClock().now_ms() - days * 86_400_000) * 1_000_000
    for file in [path] if path.is_file() else path.rglob("*"):
        os.utime(file, ns=(then_ns, then_ns))


def test_what_is_no_region_has_no_place_among_regions(table: Table) -> None:
    write(table, range(5))
    stranger = Path(table.uri) / "_mem_wal" / "notes"
    stranger.mkdir()
    (stranger / "todo.txt").write_text("tidy up")
    assert only(table, "orphans").where.endswith("/_mem_wal/notes/")
    shutil.rmtree(stranger)
    assert not problems(table)


def test_many_versions_want_clean_up(table: Table) -> None:
    for step in range(5):
        write(table, range(step * 2, step * 2 + 2))
        table.merge()
    limits = Limits(versions=3)

    def found() -> list[Finding]:
        return list(diagnose(table._base, limits=limits).problems)

    (finding,) = found()
    assert (finding.check, finding.cure) == ("versions", "table.gc(retain_seconds=60)")
    for manifest in Path(table.uri).glob("_versions/*.manifest"):
        make_old(manifest, days=1)
    (finding,) = found()
    assert (finding.cure, finding.command) == ("table.gc()", f"penstock gc {table.uri}")
    run_cure(finding, table)
    assert not found()
    assert table.count() == 10


def test_many_index_segments_want_to_be_joined(table: Table) -> None:
    write(table, range(10))
    table.merge()
    table.create_index("value", "btree")
    for step in range(1, 10):
        rows = [{"id": step * 10 + i, "value": f"row {i}"} for i in range(10)]
        dataset = lance.write_dataset(
            pa.Table.from_pylist(rows, table.schema), table.uri, mode="append"
        )
        dataset.optimize.optimize_indices(num_indices_to_merge=0)
    lance.dataset(table.uri).optimize.compact_files()
    found = {finding.check: finding for finding in problems(table)}
    assert "10 segments" in found["indexes"].what
    run_cure(found["indexes"], table)
    assert "indexes" not in {finding.check for finding in problems(table)}


# --- sick: rows cannot be read -------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def damaged_manifest(root: Path, region: Path) -> Path:
    manifest = max(region.glob("manifest/*.binpb"), key=lambda p: names.from_bitrev(p.stem) or 0)
    manifest.write_bytes(b"not a manifest at all, but long enough")
    return region


def damaged_entry(root: Path, region: Path) -> Path:
    truncate(newest_entry(region))
    return newest_entry(region)


def missing_entry(root: Path, region: Path) -> Path:
    entries = sorted(region.glob("wal/*.arrow"), key=lambda p: names.from_bitrev(p.stem) or 0)
    entries[-2].unlink()
    return entries[-2]


def missing_generation(root: Path, region: Path) -> Path:
    (generation,) = region.glob("*_gen_2")
    shutil.rmtree(generation)
    return generation


def truncated_generation(root: Path, region: Path) -> Path:
    (file,) = region.glob("*_gen_2/data/*")
    truncate(file)
    return file.parents[1]


def generation_without_keys(root: Path, region: Path) -> Path:
    (keys,) = region.glob("*_gen_2/_pk_index")
    shutil.rmtree(keys)
    return keys.parent


def missing_data_file(root: Path, region: Path) -> Path:
    (file,) = root.glob("data/*")
    file.unlink()
    return file


def truncated_data_file(root: Path, region: Path) -> Path:
    (file,) = root.glob("data/*")
    truncate(file)
    return file


def missing_index_segment(root: Path, region: Path) -> Path:
    (segment,) = root.glob("_indices/*")
    shutil.rmtree(segment)
    return segment


def newest_entry(region: Path) -> Path:
    return max(region.glob("wal/*.arrow"), key=lambda p: names.from_bitrev(p.stem) or 0)


@pytest.mark.parametrize(
    ("damage", "check"),
    [
        (damaged_manifest, "regions"),
        (damaged_entry, "log"),
        (missing_entry, "log"),
        (missing_generation, "generations"),
        (truncated_generation, "generations"),
        (generation_without_keys, "generations"),
        (missing_data_file, "files"),
        (truncated_data_file, "files"),
        (missing_index_segment, "files"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damage_is_named_and_gone_when_it_is_restored(
    table: Table, tmp_path: Path, damage: Callable[[Path, Path], Path], check: str
) -> None:
    write(table, range(20))
    table.merge()
    table.create_index("value", "btree")
    write(table, range(2))
    table.upsert([{"id": 7, "value": "in the log"}])
    table.upsert([{"id": 8, "value": "in the log"}])
    table.close()
    root = Path(table.uri)
    _, region = region_of(table)
    shutil.copytree(root, tmp_path / "copy")
    damaged = damage(root, region)

    handle = again(table)
    finding = only(handle, check)
    assert finding.severity is Severity.SICK
    assert handle.doctor().severity is Severity.SICK
    named = f"{finding.where} {finding.what}"
    assert damaged.relative_to(root).as_posix() in named or damaged.name in named
    assert "restore" in finding.what
    assert finding.command is None

    shutil.rmtree(root)
    shutil.copytree(tmp_path / "copy", root)
    assert not problems(again(table))


def test_a_merged_generation_that_is_gone_is_nothing(table: Table) -> None:
    write(table, range(5))
    table.merge()
    _, directory = region_of(table)
    (generation,) = directory.glob("*_gen_1")
    shutil.rmtree(generation)
    assert not problems(table)


def test_a_region_without_a_manifest_is_sick(table: Table) -> None:
    write(table, range(5))
    directory = Path(table.uri) / names.region_dir(uuid.uuid4())
    (directory / "wal").mkdir(parents=True)
    (directory / "wal" / f"{names.bitrev(1)}.arrow").write_bytes(b"?")
    assert only(table, "regions").where.endswith(directory.name)


def test_a_snapshot_whose_file_is_gone_is_taken_again(table: Table) -> None:
    write(table, range(5))
    build_snapshot(table._base, inline_regions=0)
    (file,) = Path(table.uri).glob("_indices/*/index.lance")
    file.unlink()
    finding = only(table, "snapshot")
    assert finding.severity is Severity.SICK
    assert file.parent.name in finding.what
    run_cure(finding, table)
    assert not problems(table)
    assert table.count(consistency="eventual") == 5


@pytest.mark.parametrize("how", ["dropped", "overwritten"])
def test_a_table_that_lost_its_index_goes_on_where_it_was(table: Table, how: str) -> None:
    """What was merged before must not be merged again over what others wrote since."""
    write(table, range(5), "merged")
    table.merge()
    write(table, range(4, 7), "flushed")
    table.set_regions(penstock.bucket("id", 3))
    dataset = lance.dataset(table.uri)
    if how == "dropped":
        dataset.drop_index("__lance_mem_wal")
        lance.dataset(table.uri).update({"value": "'by others'"}, where="id = 0")
    else:
        rows = [{"id": 0, "value": "by others"}]
        lance.write_dataset(pa.Table.from_pylist(rows, dataset.schema), table.uri, mode="overwrite")
    finding = only(table, "base table")
    assert finding.severity is Severity.SICK
    run_cure(finding, table)
    table.flush(recover=True)
    table.merge()
    assert table.doctor().severity is not Severity.SICK
    found = {row["id"]: row["value"] for row in table.to_arrow().to_pylist()}
    kept = {i: f"merged {i}" for i in range(1, 4)} if how == "dropped" else {}
    flushed = {i: f"flushed {i}" for i in range(4, 7)}
    assert found == {0: "by others", **kept, **flushed}
    assert table.inspect().region_specs[-1].spec_id == 2


def test_a_key_that_is_there_twice_is_found_by_reading_all_keys(table: Table) -> None:
    write(table, range(20))
    table.merge()
    double = pa.Table.from_pylist([{"id": 3, "value": "again"}], table.schema)
    lance.write_dataset(double, table.uri, mode="append")
    assert not problems(table)
    finding = only(table, "keys", deep=True)
    assert finding.where == "keys 3"
    run_cure(finding, table)
    assert not problems(table, deep=True)
    assert lance.dataset(table.uri).count_rows("id = 3") == 1


def test_what_another_process_removes_meanwhile_is_not_told(tmp_path: Path) -> None:
    """Between the manifests and the look at a generation it is merged and collected."""
    lake = make_lake(tmp_path)
    mine, other = lake.process(), lake.process()
    write(other.table, range(5))
    generation = lake.manifest().flushed_generations[0].path
    removed: list[str] = []

    def merge_and_remove(op: str, key: str) -> None:
        if not removed:
            removed.append(key)
            other.table.merge()
            lake.store.delete_prefix(f"{names.region_dir(lake.manifest().region_id)}/{generation}")

    mine.store.hook(op="list", key="data*", before=merge_and_remove)
    assert mine.table.doctor().healthy
    assert removed
    other.table.close()


def test_a_location_that_lance_cannot_open_is_sick(table: Table) -> None:
    write(table, range(5))
    for manifest in Path(table.uri).glob("_versions/*.manifest"):
        truncate(manifest)
    found = diagnose(BaseTable(table._base.store, None, Seams()))
    assert found.severity is Severity.SICK
    assert [finding.check for finding in found.findings] == ["base table"]
