"""Taking stock: an inspection and a status say what Lance, the manifests and the disk say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from tests.refusals import snapshot

import penstock
from penstock import Table
from penstock.memwal import names, tabular
from penstock.memwal.base_parts import FragmentPart
from penstock.memwal.claim import RegionIdentity, claim_region
from penstock.memwal.inspect import Inspection
from penstock.memwal.snapshots import build_snapshot
from penstock.storage.clock import SimulatedClock, SystemClock
from penstock.storage.seams import Seams

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("body", pa.string()),
        pa.field("place", pa.struct([("x", pa.int32()), ("y", pa.int32())])),
    ]
)


def rows(ids: range) -> list[dict[str, Any]]:
    return [{"id": i, "body": f"row {i}", "place": {"x": i, "y": -i}} for i in ids]


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    """Two merges in two regions, an index on the first only, one more flush, a claim, a tail."""
    db = penstock.connect(tmp_path / "lake")
    made = db.create_table("t", SCHEMA, primary_key="id", regions=penstock.bucket("id", 2))
    made.upsert(rows(range(100)))
    made.flush()
    made.merge()
    made.create_index("body", "fts")
    made.upsert(rows(range(90, 150)))
    made.flush()
    made.merge()
    made.upsert(rows(range(140, 170)))
    made.flush()
    made.upsert(rows(range(3)))
    lance.dataset(made.uri).tags.create("first", 3)
    yield made
    made.close()


def later(table: Table, seconds: float) -> Table:
    """The same table as somebody sees it whose clock is so much ahead."""
    now_ms = SystemClock().now_ms()
    seams = Seams(clock=SimulatedClock(now_ms + round(seconds * 1000)))
    return penstock.connect(Path(table.uri).parent, seams=seams).open_table("t")


def test_an_inspection_is_what_lance_and_the_disk_say(table: Table) -> None:
    root = Path(table.uri)
    before = snapshot(root)
    found = table.inspect()
    assert snapshot(root) == before

    dataset = lance.dataset(table.uri)
    assert (found.version, found.rows) == (dataset.version, dataset.count_rows())
    assert found.primary_key == ("id",)
    assert found.stable_row_ids
    for part, fragment in zip(found.fragments, dataset.get_fragments(), strict=True):
        assert part.fragment_id == fragment.fragment_id
        assert (part.rows, part.physical_rows) == (fragment.count_rows(), fragment.physical_rows)
        ids = dataset.scanner(columns=[], with_row_id=True, fragments=[fragment]).to_table()
        ((first, last),) = part.row_ids
        assert last - first + 1 == part.physical_rows
        assert set(ids.column("_rowid").to_pylist()) <= set(range(first, last + 1))
        (file,) = part.files
        assert file.columns == ("id", "body", "place")
        assert file.size_bytes == part.size_bytes == (root / file.path).stat().st_size
        if part.deleted_rows:
            assert part.deletion_kind == "array"
            assert part.deletion_file is not None
            assert (root / part.deletion_file).exists()
        else:
            assert part.deletion_file is part.deletion_kind is None
    assert sum(part.deleted_rows for part in found.fragments) == 10

    (index,) = found.indexes
    assert (index.name, index.kind, index.columns) == ("body_idx", "Inverted", ("body",))
    (described,) = [i for i in dataset.describe_indices() if i.name == "body_idx"]
    covered = list(described.segments[0].fragment_ids)
    assert index.fragments == tabular.ranges(covered) != "none"
    assert (index.covered_rows, index.uncovered_rows) == (90, 60)
    (segment,) = index.segments
    assert (segment.fragments, segment.rows) == (index.fragments, 90)
    assert (root / "_indices" / segment.uuid).is_dir()
    assert index.caught_up == {str(region.region_id): 1 for region in found.regions}

    assert {region.values["bucket"] for region in found.regions} == {0, 1}
    assert all(region.merged_generation == 2 for region in found.regions)
    assert sum(region.wal_lag_entries for region in found.regions) == len(
        [log for log in found.logs if log.oldest_unflushed_ms]
    )
    assert [g.merged for g in found.generations] == [True, True, False] * 2
    for generation in found.generations:
        directory = root / generation.path
        sizes = [file.stat().st_size for file in directory.rglob("*") if file.is_file()]
        assert (generation.present, generation.size_bytes) == (True, sum(sizes))
        assert generation.indexes == (("body_idx",) if generation.generation > 1 else ())
        stored = lance.dataset(str(directory))
        assert generation.physical_rows == stored.get_fragments()[0].physical_rows
    for log in found.logs:
        files = list((root / names.region_dir(log.region_id) / "wal").iterdir())
        assert (log.entries, log.size_bytes) == (len(files), sum(f.stat().st_size for f in files))
        assert log.fences == 1  # create_index let the writer go, the next one claimed again
    assert [part.version for part in found.versions] == [v["version"] for v in dataset.versions()]
    assert found.tags == {"first": 3}
    assert found.snapshot is None


def test_text_fits_and_json_and_arrow_say_the_same(table: Table) -> None:
    found = table.inspect()
    text = str(found)
    assert all(len(line) <= tabular.WIDTH for line in text.splitlines())
    for word in ("fragments", "body_idx", "bucket(id, 2)", "unmerged", "bucket = 1"):
        assert word in text
    plain = json.loads(found.to_json())
    assert plain == found.to_dict()
    kinds = found.to_arrow()
    for name in ("columns", "fragments", "indexes", "regions", "generations", "logs", "versions"):
        assert kinds[name].num_rows == len(plain[name]) > 0
    fragments = kinds["fragments"].to_pylist()
    assert [[r["first"], r["last"]] for f in fragments for r in f["row_ids"]] == [
        pair for f in plain["fragments"] for pair in f["row_ids"]
    ]
    assert kinds["segments"].column("rows").to_pylist() == [90]
    assert dict(kinds["regions"]["values"][0].as_py()).keys() == {"bucket"}
    assert set(kinds["data_files"]["path"].to_pylist()) == {
        file["path"] for part in plain["fragments"] for file in part["files"]
    }


def test_row_ids_and_deletions_after_the_base_was_rewritten(table: Table) -> None:
    """Compaction leaves holes in the row ids, an update scatters them, many deletes: a bitmap."""
    dataset = lance.dataset(table.uri)
    dataset.optimize.compact_files()
    dataset.update({"body": "'other'"}, where="id in (3, 50, 7)")
    for part, fragment in fragments_of(table):
        ids = fragment.to_table(columns=[], with_row_id=True).column("_rowid").to_pylist()
        inside = {number for first, last in part.row_ids for number in range(first, last + 1)}
        assert set(ids) <= inside
        if not part.deleted_rows:
            assert (min(ids), max(ids)) == (min(inside), max(inside))
    assert part.physical_rows == 3

    many = pa.table({"id": range(1000, 60_000)}, schema=pa.schema([SCHEMA.field("id")]))
    lance.dataset(table.uri).insert(many)
    lance.dataset(table.uri).delete("id >= 1000 and id % 3 != 0")
    found = fragments_of(table)
    assert [part.rows for part, _ in found] == [fragment.count_rows() for _, fragment in found]
    assert {part.deletion_kind for part, _ in found} >= {"array", "bitmap"}


def fragments_of(table: Table) -> list[tuple[FragmentPart, lance.LanceFragment]]:
    fragments = lance.dataset(table.uri).get_fragments()
    return list(zip(table.inspect().fragments, fragments, strict=True))


def test_a_snapshot_and_a_missing_generation_are_told(table: Table) -> None:
    build_snapshot(table._base, inline_regions=0)
    found: Inspection = later(table, 7200).inspect()
    assert found.snapshot is not None
    assert found.snapshot.regions == 2
    assert found.snapshot.age_seconds == pytest.approx(7200, abs=100)
    assert found.snapshot.file is not None
    assert (Path(table.uri) / found.snapshot.file).exists()
    assert "2 h 0 min ago" in str(found)

    lost = next(g for g in found.generations if not g.merged)
    for file in sorted((Path(table.uri) / lost.path).rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    assert "MISSING" in str(table.inspect())


def test_status_counts_what_lags(table: Table) -> None:
    status = later(table, 500).status()
    assert status.base_rows == 150
    assert (
        status.fragments == status.small_fragments == len(lance.dataset(table.uri).get_fragments())
    )
    assert status.deleted_rows == 10
    assert status.deletion_share == 10 / 160
    (index,) = status.index_lag
    assert (index.name, index.covered_rows, index.uncovered_rows) == ("body_idx", 90, 60)
    assert status.unmerged_generations == 2
    assert status.unmerged_rows == 30
    assert status.freshness_seconds == pytest.approx(500, abs=100)
    assert status.snapshot_age_seconds is None
    assert status.versions == len(lance.dataset(table.uri).versions())
    assert all(len(line) <= tabular.WIDTH for line in str(status).splitlines()[1:])
    assert json.loads(json.dumps(status.to_dict()))["freshness_seconds"] == status.freshness_seconds

    # Only the log is left, then only fences in it, which nobody waits for.
    table.merge()
    waiting = later(table, 500).status()
    assert waiting.unmerged_rows == 0
    assert waiting.freshness_seconds == pytest.approx(500, abs=100)
    table.flush()
    table.merge()
    table.close()
    for region in waiting.regions:
        claim_region(table._base.store, RegionIdentity(region.region_id), Seams())
    fenced = later(table, 500).status()
    assert sum(region.wal_lag_entries for region in fenced.regions) == 2
    assert fenced.freshness_seconds == 0


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], "none"), ([4], "4"), ([0, 1, 2, 3, 5], "0-3,5"), ([9, 8, 2, 2], "2,8-9")],
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert tabular.ranges(numbers) == text


def test_ages_and_sizes_are_readable() -> None:
    assert [tabular.age(s) for s in (0.04, 59.7, 600, 12_000, 400_000)] == [
        "0.0 s",
        "60 s",
        "10 min",
        "3 h 20 min",
        "4 d",
    ]
    assert [tabular.size(b) for b in (None, 5, 2048, 5 << 30)] == ["-", "5 B", "2.0 KiB", "5.0 GiB"]
    given = [(1, "key"), (2, "key"), (1200, "entry"), (0, "index")]
    words = ["1 key", "2 keys", "1,200 entries", "0 indexes"]
    assert [tabular.counted(number, thing) for number, thing in given] == words
