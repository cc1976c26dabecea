"""Packed indexes on a table's columns: the same rows, found by reading fewer."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import penstock
from penstock.errors import Corruption, InvalidInput
from penstock.memwal import packed_reads, sources
from penstock.memwal.base_table import BaseTable
from penstock.memwal.packed_indexes import PACKED_KINDS
from penstock.memwal.packed_specs import DIRECTORY
from penstock.storage.faults import FaultStore
from penstock.storage.local import LocalStore
from penstock.storage.seams import Seams
from penstock.table import Table

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("tenant", pa.int32()),
        pa.field("name", pa.string()),
        pa.field("score", pa.float64()),
    ]
)
FILTERS = [
    "tenant = 7",
    "tenant IN (3, 4, 400) AND score > 0.9",
    "tenant < 2 OR tenant >= 98",
    "tenant IS NULL AND score < 0.1",
    "name = 'n5' AND tenant > 50",
    "name LIKE 'n1%' AND tenant = 5",
    "name LIKE '%99' AND id < 400",
    "name LIKE 'n_7%' AND tenant < 50",
    "name LIKE 'n%7' AND NOT (name LIKE '_1_')",
    "NOT (tenant < 97)",
    "NOT (tenant IN (1, NULL))",
    "tenant NOT IN (1, 2, 3) AND name = 'n77'",
    "score BETWEEN 0.5 AND 0.502",
    "tenant = 7 AND length(name) = 2",
    "tenant = 12345",
    "tenant != 7",
    "score > 2",
    "score < 0.001",
]


def rows(ids: range | list[int], seed: int) -> pa.Table:
    rng = np.random.default_rng(seed)
    count = len(ids)
    tenants = rng.integers(0, 100, count).astype(np.int32)
    scores = rng.random(count)
    scores[rng.random(count) < 0.01] = np.nan
    return pa.table(
        {
            "id": pa.array(list(ids), pa.int64()),
            "tenant": pa.array(tenants, mask=rng.random(count) < 0.05),
            "name": pa.array([f"n{n}" for n in rng.integers(0, 100, count)]),
            "score": pa.array(scores, mask=rng.random(count) < 0.05),
        },
        schema=SCHEMA,
    )


def found(table: penstock.Table, where: str, **options: Any) -> list[dict[str, Any]]:
    got = table.scan(filter=where, **options).read_all()
    return sorted(got.to_pylist(), key=lambda row: row["id"])


def same(table: penstock.Table, plain: penstock.Table) -> None:
    for where in FILTERS:
        assert repr(found(table, where)) == repr(found(plain, where)), where
        assert table.count(where) == plain.count(where), where


def pair(tmp_path: Path, kind: str) -> tuple[penstock.Table, penstock.Table]:
    """A table with packed indexes, and one without, to be told the same."""
    db = penstock.connect(tmp_path)
    table = db.create_table("indexed", SCHEMA, primary_key="id")
    plain = db.create_table("plain", SCHEMA, primary_key="id")
    table.create_index("tenant", kind)
    table.create_index("name", kind if kind != "packed_ngram" else "packed_bitmap")
    table.create_index("score", "packed_stlsort")
    return table, plain


@pytest.mark.parametrize(
    "kind", ["packed_hybrid", "packed_stlsort", "packed_bitmap", "packed_inverted"]
)
def test_filters_find_the_same_rows_wherever_they_are(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_reads, "TAKEN_SHARE", 0.5)
    monkeypatch.setattr(packed_reads, "LISTED_FOR_MS", 0.0)
    table, plain = pair(tmp_path, kind)
    for t in (table, plain):
        t.upsert(rows(range(3000), 1))
        t.delete(keys=list(range(0, 300, 7)))
        t.flush()
    same(table, plain)  # a generation, with superseded rows and tombstones
    for t in (table, plain):
        t.merge()
        t.upsert(rows(range(2900, 4000), 2))
        t.flush()
    same(table, plain)  # a base without indexes yet
    table.build_indexes()
    same(table, plain)
    assert "packed=[name_idx, tenant_idx]" in table.explain(filter="tenant = 7 AND name = 'n1'")
    for t in (table, plain):
        t.update(where="tenant = 7 AND id % 2 = 0", values={"tenant": "tenant + 1"})
        t.delete(where="tenant = 8 AND id % 3 = 0")
        t.flush()
        t.merge()
        t.upsert(rows([3, 5, 3999, 9000], 3))
    same(table, plain)
    table.build_indexes()
    table.compact()
    same(table, plain)  # fragments whose indexes are not built
    table.maintain()
    same(table, plain)


def files_of(table: penstock.Table) -> list[Path]:
    return sorted((Path(table.uri) / DIRECTORY).glob("*/*.v3"))


def filled(tmp_path: Path, kind: str = "packed_hybrid") -> penstock.Table:
    table = penstock.connect(tmp_path).create_table("t", SCHEMA, primary_key="id")
    table.upsert(rows(range(5000), 1))
    table.flush()
    table.merge()
    table.create_index("tenant", kind)
    return table


def test_an_index_covers_what_is_in_the_base_at_once(tmp_path: Path) -> None:
    table = filled(tmp_path)
    before = found(table, "tenant = 7")
    (file,) = files_of(table)
    assert len(before) > 10
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(Corruption, match="build_indexes"):
        found(penstock.connect(tmp_path).open_table("t"), "tenant = 7")
    file.unlink()
    again = penstock.connect(tmp_path).open_table("t")
    assert found(again, "tenant = 7") == before  # only slower
    assert "5000 rows of 1 fragments" in str(again.build_indexes())
    assert files_of(table) == [file]
    assert found(again, "tenant = 7") == before


def test_values_that_an_index_cannot_hold_are_scanned(tmp_path: Path) -> None:
    table = penstock.connect(tmp_path).create_table("t", SCHEMA, primary_key="id")
    table.create_index("name", "packed_inverted")
    long = "x" * 70_000
    for name in ("a", long):  # one file that can be indexed, and one that cannot
        table.upsert([{"id": len(name) + n, "name": name} for n in range(100)])
        table.flush()
        assert len(found(table, f"name = '{name}'")) == 100
        table.merge()
    assert "100 rows of 1 fragments, behind\nname_idx: not built, " in str(table.build_indexes())
    assert len(files_of(table)) == 1
    assert "70000 bytes" in str(table.maintain())
    assert len(found(table, f"name IN ('a', '{long}')")) == 200
    before = (table.version, files_of(table))
    for name in ("another", "name_idx"):
        with pytest.raises(InvalidInput, match="70000 bytes"):
            table.create_index("name", "packed_inverted", name=name)
    assert (table.version, files_of(table)) == before  # the one it was to replace is still there
    assert table.status().indexes == ("name_idx",)


def test_an_index_that_is_built_again_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    table = penstock.connect(tmp_path).create_table("t", SCHEMA, primary_key="id")
    table.bulk_load([{"id": n, "name": f"name {n}"} for n in range(20_000)])
    table.create_index("name", "packed_inverted")
    (file,) = files_of(table)
    first = file.read_bytes()
    file.unlink()
    table.build_indexes()
    assert file.read_bytes() != first  # tantivy's files have names of their own each time
    seams = Seams()
    store = FaultStore(LocalStore(table.uri), seams.clock, seams.entropy)

    def put_the_first_back(op: str, key: str) -> None:
        file.write_bytes(first)

    store.hook(op="get_tail", key="*.v3", nth=1, after=put_the_first_back)
    assert Table("t", BaseTable(store, None, seams)).count("name = 'name 77'") == 1
    assert store.counts["get_tail"] == 2


def test_an_index_of_another_file_is_not_believed(tmp_path: Path) -> None:
    table = filled(tmp_path)
    (first,) = files_of(table)
    table.upsert(rows(range(5000, 5100), 2))
    table.flush()
    table.merge()
    table.build_indexes()
    (second,) = set(files_of(table)) - {first}
    shutil.copy(first, second)
    with pytest.raises(Corruption, match="5000 rows and the data file has 100"):
        found(penstock.connect(tmp_path).open_table("t"), "tenant = 7")


def test_older_versions_find_rows_that_are_deleted_today(tmp_path: Path) -> None:
    table = filled(tmp_path)
    version = table.version
    before = found(table, "tenant = 7")
    table.delete(where="tenant = 7")
    table.flush()
    table.merge()
    for file in files_of(table):
        file.unlink()
    table.build_indexes()  # built while most of the rows are deleted
    assert found(table, "tenant = 7") == []
    assert found(table, "tenant = 7", version=version) == before


def test_an_adopted_file_keeps_its_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.memwal import adopt

    monkeypatch.setattr(adopt, "ADOPTED_ROWS", 100)
    table = penstock.connect(tmp_path).create_table("t", SCHEMA, primary_key="id")
    table.create_index("tenant", "packed_hybrid")
    table.upsert(rows(range(5000), 1))
    table.delete(keys=[3, 4])
    table.flush()
    before = found(table, "tenant = 7")
    table.merge()
    assert len(files_of(table)) == 1
    assert not str(table.build_indexes()).count("5000 rows")
    assert found(table, "tenant = 7") == before


def test_a_dropped_index_and_one_of_the_same_name_share_nothing(tmp_path: Path) -> None:
    table = filled(tmp_path)
    (old,) = files_of(table)
    version = table.version
    assert table.drop_index("tenant_idx") == version + 1
    assert "tenant_idx" not in table.status().indexes
    table.create_index("name", "packed_hybrid", name="tenant_idx")
    table.create_index("score", "packed_stlsort", name="tenant_idx")  # in its place
    assert len(files_of(table)) == 3
    before = found(table, "tenant = 7 AND score < 0.5")
    table.gc(retain_seconds=0, orphan_seconds=0)
    assert len(files_of(table)) == 1
    assert not old.exists()
    assert found(table, "tenant = 7 AND score < 0.5") == before


def test_clean_up_takes_indexes_with_their_data_files(tmp_path: Path) -> None:
    table = filled(tmp_path)
    (old,) = files_of(table)
    table.upsert(rows(range(5000), 2))
    table.flush()
    table.merge()
    table.compact()
    table.build_indexes()
    table.gc(retain_seconds=3600)
    assert old.exists()  # its version can still be read
    table.gc(retain_seconds=0)
    assert not old.exists()
    assert files_of(table)
    assert len(found(table, "tenant = 7")) == table.count("tenant = 7") > 0


def test_columns_may_be_renamed_under_an_index_and_not_dropped(tmp_path: Path) -> None:
    table = filled(tmp_path)
    before = [row["id"] for row in found(table, "tenant = 7")]
    table.rename_column("tenant", "customer")
    assert [row["id"] for row in found(table, "customer = 7")] == before
    assert "packed=[tenant_idx]" in table.explain(filter="customer = 7")
    with pytest.raises(InvalidInput, match="tenant_idx"):
        table.drop_columns(["customer"])


def test_bad_input_declares_nothing(tmp_path: Path) -> None:
    table = filled(tmp_path)
    table.create_index("id", "btree")
    version = table.version
    for column, kind, options, said in [
        ("tenant", "btree", {}, "has an index 'tenant_idx'"),
        ("id", "packed_hybrid", {}, "has an index 'id_idx'"),
        ("tenant", "packed_rtree", {}, "unknown index kind"),
        ("tenant", "packed_marisa", {"name": "other"}, "marisa"),
        ("score", "packed_ngram", {}, "ngram"),
        ("nothing", "packed_hybrid", {}, "no column"),
        ("score", "packed_hybrid", {"colour": 3}, "colour"),
        ("score", "packed_hybrid", {"name": "__lance_x"}, "cannot name an index"),
    ]:
        with pytest.raises(InvalidInput, match=said):
            table.create_index(column, kind, **options)
    with pytest.raises(InvalidInput, match="for filters"):
        table.use_index("tenant_idx")
    assert table.version == version
    assert set(PACKED_KINDS) >= {"packed_hybrid", "packed_inverted"}


def test_random_changes_with_indexes_and_without_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_reads, "TAKEN_SHARE", 1.0)
    monkeypatch.setattr(packed_reads, "LISTED_FOR_MS", 0.0)
    monkeypatch.setattr(sources, "_KEPT_ROWS", 50)
    rng = random.Random(5)
    table, plain = pair(tmp_path, "packed_hybrid")
    for step in range(40):
        match rng.randrange(7):
            case 0 | 1:
                ids = rng.sample(range(800), 120)
                changes = rows(ids, step)
                table.upsert(changes)
                plain.upsert(changes)
            case 2:
                ids = rng.sample(range(800), 30)
                table.delete(keys=ids)
                plain.delete(keys=ids)
            case 3:
                table.flush()
            case 4:
                table.flush()
                table.merge()
            case 5:
                table.build_indexes()
            case _:
                table.compact(target_rows=rng.choice([100, 1000]))
        where = rng.choice(FILTERS)
        assert repr(found(table, where)) == repr(found(plain, where)), (step, where)
