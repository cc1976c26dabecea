"""Vector search: the nearest live rows of the merged table, wherever they are, and k of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tests.memwal.searching import search_vectors

import penstock
from penstock import Table
from penstock.errors import InvalidInput
from penstock.index.ivf import exact_distances
from penstock.memwal import vector_blocks, view
from penstock.memwal.filters import Filter
from penstock.memwal.vector_blocks import FragmentBlock, VectorMemory

Floats = npt.NDArray[np.float32]
WIDTH = 16
METRICS = ["l2", "cosine", "dot"]


def schema(width: int = WIDTH, value: pa.DataType | None = None) -> pa.Schema:
    return pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            ("price", pa.int64()),
            ("vector", pa.list_(value or pa.float32(), width)),
        ]
    )


def rows(ids: Iterable[int], vectors: Floats, price: int | None = None) -> pa.Table:
    numbers = np.fromiter(ids, dtype=np.int64)
    prices = numbers % 100 if price is None else np.full(len(numbers), price)
    width = vectors.shape[1]
    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), width)
    return pa.table([numbers, prices, column], schema=schema(width))


def clustered(rng: np.random.Generator, centres: Floats, count: int, spread: float) -> Floats:
    noise = rng.normal(size=(count, centres.shape[1]))
    chosen: Floats = centres[rng.integers(0, len(centres), count)] + spread * noise
    return chosen.astype(np.float32)


def in_base(table: Table, data: pa.Table) -> None:
    """Rows put straight into the base table, as a merge leaves them there."""
    base = lance.dataset(table.uri)
    lance.write_dataset(data.cast(base.schema), table.uri, mode="append")


def nearest_ids(
    table: Table, query: Floats, k: int, metric: str = "l2", keep: Callable[[pa.Table], Any] = len
) -> list[int]:
    """What a search must find: every row compared, in plain sight."""
    live = table.to_arrow()
    live = live.filter(live.column("vector").is_valid())
    mask = keep(live)
    if not isinstance(mask, int):
        live = live.filter(mask)
    flat = live.column("vector").combine_chunks().flatten().to_numpy()
    vectors = flat.astype(np.float32).reshape(live.num_rows, -1)
    if metric == "cosine":
        directed = vectors.any(axis=1)
        live, vectors = live.filter(pa.array(directed)), vectors[directed]
    distances = exact_distances(query, vectors, metric)
    ids: Any = live.column("id").to_numpy()
    return [int(n) for n in ids[np.argsort(distances, kind="stable")[:k]]]


def found_ids(result: pa.Table) -> list[int]:
    distances = result.column("_distance").to_pylist()
    assert distances == sorted(distances)
    ids: list[int] = result.column("id").to_pylist()
    assert len(set(ids)) == len(ids)
    return ids


def layered(tmp_path: Path, index: str | None, metric: str, *, key: str | None = "id") -> Table:
    """Base with an unindexed tail, two generations, MemTables; two regions; a little of all."""
    rng = np.random.default_rng(7)
    db = penstock.connect(tmp_path / "lake")
    table = db.create_table("t", schema(), primary_key=key, regions=penstock.bucket("id", 2))
    vectors = rng.normal(size=(3000, WIDTH)).astype(np.float32)
    in_base(table, rows(range(1000), vectors[:1000]))
    if index is not None:
        more = {"num_sub_vectors": 8} if index == "ivf_pq" else {}
        table.create_index("vector", index, metric=metric, num_partitions=8, **more)
    in_base(table, rows(range(1000, 1200), vectors[1000:1200]))
    table.upsert(rows(range(800, 1400), vectors[1200:1800]))
    if key:
        table.delete(keys=list(range(0, 1200, 7)))
    table.flush()
    table.upsert(rows(range(1100, 1600), vectors[1800:2300]))
    table.flush()
    table.upsert(rows(range(0, 1700, 3), vectors[2300:2867]))
    if key:
        table.delete(keys=list(range(0, 1700, 11)))
    table.upsert([{"id": 5000, "price": 1, "vector": None}])
    table.upsert(rows([5001], np.zeros((1, WIDTH), np.float32)))
    return table


# --- right, whatever the layers ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "metric"),
    [(None, "dot"), ("ivf_sq", "dot"), *((k, m) for k in ("ivf_flat", "ivf_pq") for m in METRICS)],
)
@pytest.mark.parametrize("where", ["memory", "lance"])
def test_the_nearest_live_rows_are_found_in_every_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: str | None, metric: str, where: str
) -> None:
    if where == "lance":  # as if the generations were too large to be kept in memory
        monkeypatch.setattr(vector_blocks, "VECTOR_CACHE_BYTES", 0)
    table = layered(tmp_path, index, metric)
    other = penstock.connect(tmp_path / "lake").open_table("t")  # reads the WAL, has no indexes
    rng = np.random.default_rng(8)
    for n in range(6):
        query = rng.normal(size=WIDTH).astype(np.float32)
        asked = table.search(query).metric(metric).nprobes(8).refine(100)
        everywhere = nearest_ids(table, query, 10, metric)
        assert found_ids(asked.to_arrow()) == everywhere
        cheap = nearest_ids(
            table, query, 10, metric, lambda live: pa.array(live["price"].to_numpy() < 9)
        )
        assert found_ids(asked.where("price < 9").to_arrow()) == cheap
        if n < 2:
            again = other.search(query).metric(metric).nprobes(8).refine(100)
            assert found_ids(again.to_arrow()) == everywhere
            assert found_ids(again.where("price < 9").to_arrow()) == cheap


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("index", [None, "ivf_pq"])
def test_every_row_can_be_asked_for_and_comes_once_as_it_is_now(
    tmp_path: Path, index: str | None, metric: str
) -> None:
    table = layered(tmp_path, index, metric)
    query = np.ones(WIDTH, np.float32)
    result = table.search(query).limit(10_000).metric(metric).nprobes(1).to_arrow()
    assert sorted(found_ids(result)) == sorted(nearest_ids(table, query, 10_000, metric))
    now = {row["id"]: row for row in table.to_arrow().to_pylist()}
    for row in result.to_pylist():
        distance = row.pop("_distance")
        assert row == now[row["id"]]
        vector = np.array([row["vector"]], np.float32)
        assert distance == pytest.approx(exact_distances(query, vector, metric)[0], abs=1e-3)


def test_another_metric_than_that_of_the_index_is_still_right(tmp_path: Path) -> None:
    table = layered(tmp_path, "ivf_pq", "l2")
    query = np.random.default_rng(3).normal(size=WIDTH).astype(np.float32)
    for metric in ("cosine", "dot"):
        result = table.search(query).metric(metric).nprobes(1).to_arrow()
        assert found_ids(result) == nearest_ids(table, query, 10, metric)


def test_a_table_without_a_key_shows_every_row(tmp_path: Path) -> None:
    table = layered(tmp_path, "ivf_flat", "l2", key=None)
    query = np.zeros(WIDTH, np.float32)
    result = table.search(query).limit(10_000).to_arrow()
    assert result.num_rows == table.count() - 1  # all but the one without a vector


def test_keys_of_hits_are_compared_where_the_base_has_too_many_to_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "KEY_INDEX_CACHE_BYTES", 0)
    table = layered(tmp_path, "ivf_pq", "l2")
    query = np.random.default_rng(4).normal(size=WIDTH).astype(np.float32)
    for k in (1, 50, 5000):
        result = table.search(query).limit(k).nprobes(8).refine(100).to_arrow()
        assert found_ids(result) == nearest_ids(table, query, k)


# --- failures of others ------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["memory", "lance"])
@pytest.mark.parametrize("index", [None, "ivf_flat", "ivf_pq"])
def test_failure_12_dropped_hits_are_replaced_by_deeper_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: str | None, where: str
) -> None:
    if where == "lance":
        monkeypatch.setattr(vector_blocks, "VECTOR_CACHE_BYTES", 0)
    rng = np.random.default_rng(5)
    query = np.zeros(WIDTH, np.float32)
    near = (0.01 * rng.normal(size=(600, WIDTH))).astype(np.float32)
    far = (5 + rng.normal(size=(900, WIDTH))).astype(np.float32)
    table = penstock.connect(tmp_path).create_table("t", schema(), primary_key="id")
    in_base(table, rows(range(1500), np.concatenate([near, far])))
    if index is not None:
        more = {"num_sub_vectors": 8} if index == "ivf_pq" else {}
        table.create_index("vector", index, num_partitions=12, **more)
    # The nearest rows of the base are superseded, those of the first generation again, and so on.
    for start in (0, 200, 400):
        table.upsert(rows(range(start, start + 200), far[start : start + 200] + 20))
        table.upsert(rows(range(2000 + start, 2200 + start), near[start : start + 200]))
        table.flush()
    table.delete(keys=[*range(2000, 2200), *range(2200, 2400), *range(2400, 2600)])
    result = table.search(query).limit(25).nprobes(1).to_arrow()
    assert result.num_rows == 25
    assert not set(found_ids(result)) & {*range(600), *range(2000, 2600)}
    assert found_ids(table.search(query).limit(25).nprobes(12).refine(60).to_arrow()) == (
        nearest_ids(table, query, 25)
    )
    left = table.count()
    assert table.search(query).limit(left + 9).nprobes(1).to_arrow().num_rows == left


@pytest.mark.parametrize("index", [None, "ivf_flat", "ivf_pq"])
def test_failure_13_the_filter_comes_before_the_cut(tmp_path: Path, index: str | None) -> None:
    table = layered(tmp_path, index, "l2")
    query = np.random.default_rng(6).normal(size=WIDTH).astype(np.float32)
    for sql in ("price = 3", "id % 50 = 1", "id IN (1, 801, 1101, 1501, 1600)", "price > 1000"):
        matching = table.count(f"({sql}) AND vector IS NOT NULL")
        for k in (1, 4, 10, 100):
            result = table.search(query).where(sql).limit(k).nprobes(1).to_arrow()
            assert result.num_rows == min(k, matching), (sql, k)


def test_an_index_made_on_an_empty_base_hides_nothing_that_comes_later(tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    vectors = rng.normal(size=(900, WIDTH)).astype(np.float32)
    table = penstock.connect(tmp_path).create_table("t", schema(), primary_key="id")
    query = vectors[5]
    assert table.search(query).to_list() == []
    table.upsert(rows(range(300), vectors[:300]))
    assert found_ids(table.search(query).to_arrow()) == nearest_ids(table, query, 10)
    table.create_index("vector", "ivf_pq", num_partitions=4, num_sub_vectors=4)
    table.flush()
    in_base(table, rows(range(1000, 1300), vectors[300:600]))
    table.upsert(rows(range(200, 500), vectors[600:]))
    for n in (5, 350, 700):
        result = table.search(vectors[n]).nprobes(4).refine(50).to_arrow()
        assert found_ids(result) == nearest_ids(table, vectors[n], 10)


def test_rows_that_the_live_index_has_not_reached_are_found(tmp_path: Path) -> None:
    rng = np.random.default_rng(10)
    vectors = rng.normal(size=(1200, WIDTH)).astype(np.float32)
    table = penstock.connect(tmp_path).create_table("t", schema(), primary_key="id")
    in_base(table, rows(range(500), vectors[:500]))
    table.create_index("vector", "ivf_flat", num_partitions=16)
    with table.writer(indexed=False) as writer:
        for at in range(500, 1200, 100):
            writer.upsert(rows(range(at, at + 100), vectors[at : at + 100]))
        for n in range(500, 1200, 37):
            assert found_ids(table.search(vectors[n]).limit(1).nprobes(1).to_arrow()) == [n]


@pytest.mark.parametrize("value", [pa.float16(), pa.float64()], ids=str)
def test_vectors_of_other_widths(tmp_path: Path, value: pa.DataType) -> None:
    rng = np.random.default_rng(11)
    vectors = rng.normal(size=(300, WIDTH)).astype(np.float16)
    table = penstock.connect(tmp_path).create_table("t", schema(value=value), primary_key="id")
    data = rows(range(300), vectors.astype(np.float32)).cast(schema(value=value))
    in_base(table, data.slice(0, 100))
    table.upsert(data.slice(50, 150))
    table.flush()
    table.upsert(data.slice(150, 150))
    for n in (20, 120, 250):
        query = vectors[n].astype(np.float32)
        assert found_ids(table.search(query).to_arrow())[0] == n
        assert set(found_ids(table.search(query).to_arrow())) == set(nearest_ids(table, query, 10))


def test_a_view_answers_for_its_own_moment(tmp_path: Path) -> None:
    table = layered(tmp_path, "ivf_flat", "l2")
    query = np.zeros(WIDTH, np.float32)
    taken = table._reader.view(table._region_writers())
    before = nearest_ids(table, query, 5)
    table.upsert(rows(range(9000, 9010), np.zeros((10, WIDTH), np.float32)))
    table.delete(keys=before)
    assert table.search(query).limit(11).to_arrow().column("id").to_pylist()[0] >= 9000
    where = Filter.parse("id >= 0", taken.shape.schema)
    for asked in (None, where):
        result = search_vectors(taken, "vector", query, 5, nprobes=8, where=asked)
        assert found_ids(result) == before


def test_generations_written_before_a_column_was_added_are_searched(tmp_path: Path) -> None:
    table = layered(tmp_path, "ivf_pq", "l2")
    lance.dataset(table.uri).add_columns(pa.field("extra", pa.int64()))
    again = penstock.connect(tmp_path / "lake").open_table("t")
    query = np.random.default_rng(12).normal(size=WIDTH).astype(np.float32)
    result = again.search(query).nprobes(8).refine(100).to_arrow()
    assert found_ids(result) == nearest_ids(again, query, 10)
    some = again.search(query).where("extra IS NULL").nprobes(8).refine(100).to_arrow()
    assert some.num_rows == 10
    assert some.column("extra").null_count == 10


def test_what_cannot_be_searched_is_said(tmp_path: Path) -> None:
    table = layered(tmp_path, None, "l2")
    query = np.ones(WIDTH, np.float32)
    with pytest.raises(InvalidInput, match="no column 'vectr'; the table has id, price, vector"):
        table.search(query, column="vectr").to_arrow()
    with pytest.raises(InvalidInput, match=r"'price' is int64.*columns with vectors: vector"):
        table.search(query, column="price").to_arrow()
    with pytest.raises(InvalidInput, match="vectors of 16 dimensions, the query has 3 dimensions"):
        table.search([1.0, 2.0, 3.0]).to_arrow()
    with pytest.raises(InvalidInput, match="no direction"):
        table.search(np.zeros(WIDTH)).metric("cosine").to_arrow()
    taken = table._reader.view(table._region_writers())
    with pytest.raises(InvalidInput, match="not finite"):
        search_vectors(taken, "vector", query * np.float32(np.nan), 3)
    with pytest.raises(InvalidInput, match="unknown metric 'hamming'; there are: l2, cosine, dot"):
        search_vectors(taken, "vector", query, 3, metric="hamming")


# --- what is kept in memory --------------------------------------------------------------------


@pytest.mark.parametrize("metric", METRICS)
def test_many_generations_are_searched_as_one(tmp_path: Path, metric: str) -> None:
    table = layered(tmp_path, "ivf_flat", metric)
    rng = np.random.default_rng(21)
    for number in range(6):
        at = 200 * number
        fresh = rng.normal(size=(150, WIDTH)).astype(np.float32)
        table.upsert(rows(range(at, at + 150), fresh))
        table.delete(keys=[at + 7, at + 8])
        table.flush()
        query = rng.normal(size=WIDTH).astype(np.float32)
        expected = nearest_ids(table, query, 10, metric)
        assert found_ids(table.search(query).nprobes(8).to_arrow()) == expected
        cheap = nearest_ids(table, query, 10, metric, lambda live: pc.less(live["price"], 20))
        assert found_ids(table.search(query).nprobes(8).where("price < 20").to_arrow()) == cheap
    memory = table._reader.memory(VectorMemory)
    (group,) = memory._groups.values()
    assert len(group.generations) > vector_blocks._GROUP_GENERATIONS
    # An older version has only some of the group's generations, and rows that were newest then.
    version = table.snapshot()
    query = rng.normal(size=WIDTH).astype(np.float32)
    expected = nearest_ids(table, query, 10, metric)
    table.upsert(rows(range(1600), rng.normal(size=(1600, WIDTH)).astype(np.float32)))
    table.flush()
    assert found_ids(table.search(query).nprobes(8).to_arrow()) != expected
    assert found_ids(table.search(query, version=version).nprobes(8).to_arrow()) == expected


@pytest.mark.parametrize("key", ["id", None])
def test_base_rows_that_the_index_has_not_reached_are_compared_in_memory(
    tmp_path: Path, key: str | None
) -> None:
    table = layered(tmp_path, "ivf_pq", "l2", key=key)
    rng = np.random.default_rng(22)
    for query in rng.normal(size=(4, WIDTH)).astype(np.float32):
        asked = table.search(query).nprobes(8).refine(100)
        assert found_ids_of(asked, key) == nearest_ids(table, query, 10)
        cheap = nearest_ids(table, query, 10, keep=lambda live: pc.less(live["price"], 9))
        assert found_ids_of(asked.where("price < 9"), key) == cheap
    assert "unindexed fragment 1" in table.search(query).explain()
    kept = table._reader.memory(VectorMemory).blocks._items.values()
    (fragment,) = [block for block in kept if isinstance(block, FragmentBlock)]
    assert len(fragment.row_ids) == 200
    # Rows deleted by another tool are at once out of sight, though their vectors were kept.
    gone = [number for number in range(1000, 1200) if number % 2]
    lance.dataset(table.uri).delete(f"id IN ({', '.join(map(str, gone))})")
    assert found_ids_of(table.search(query).nprobes(8).refine(100), key) == nearest_ids(
        table, query, 10
    )


def found_ids_of(query: Any, key: str | None) -> list[int]:
    result = query.to_arrow()
    return found_ids(result) if key else list(result.column("id").to_pylist())


def test_vectors_far_from_the_origin_and_close_together_keep_their_order(tmp_path: Path) -> None:
    """|v|^2 - 2vq + |q|^2 has no digit left here that would tell these rows apart."""
    rng = np.random.default_rng(23)
    table = penstock.connect(tmp_path).create_table("t", schema(), primary_key="id")
    data = (1e4 + rng.normal(size=(3000, WIDTH))).astype(np.float32)
    in_base(table, rows(range(1000), data[:1000]))
    table.create_index("vector", "ivf_flat", num_partitions=4)
    for at in range(0, 3000, 500):
        table.upsert(rows(range(at, at + 500), data[at : at + 500]))
        if at < 2500:
            table.flush()
    for query in (1e4 + rng.normal(size=(5, WIDTH))).astype(np.float32):
        expected = nearest_ids(table, query, 10)
        assert found_ids(table.search(query).nprobes(4).to_arrow()) == expected


# --- recall ------------------------------------------------------------------------------------


def measure_recall(tmp_path: Path, count: int, width: int, partitions: int) -> tuple[float, float]:
    """Recall@10 without and with refine: 30% updated and 10% deleted in front of the base."""
    rng = np.random.default_rng(13)
    centres = rng.normal(size=(100, width)).astype(np.float32)
    data = clustered(rng, centres, count, 0.3)
    table = penstock.connect(tmp_path).create_table(
        "t", schema(width), primary_key="id", regions=penstock.bucket("id", 2)
    )
    in_base(table, rows(range(count), data))
    table.create_index(
        "vector", "ivf_pq", num_partitions=partitions, num_sub_vectors=width // 4, sample_rate=64
    )
    touched = rng.permutation(count)[: 4 * count // 10]
    for number, part in enumerate(np.array_split(touched, 3)):
        updated, deleted = np.split(part, [3 * len(part) // 4])
        table.upsert(rows(updated, clustered(rng, centres, len(updated), 0.3)))
        table.delete(keys=deleted.tolist())
        if number < 2:
            table.flush()
    live = table.to_arrow()
    ids = live.column("id").to_numpy()
    vectors = live.column("vector").combine_chunks().flatten().to_numpy().reshape(-1, width)
    plain = refined = 0
    queries = clustered(rng, centres, 50, 0.3)
    for query in queries:
        truth = set(ids[np.argpartition(exact_distances(query, vectors, "l2"), 10)[:10]].tolist())
        for refine in (None, 40):
            asked = table.search(query).select(["id"])
            got = found_ids((asked if refine is None else asked.refine(refine)).to_arrow())
            assert len(got) == 10
            assert set(got) <= set(ids.tolist())
            if refine is None:
                plain += len(truth & set(got))
            else:
                refined += len(truth & set(got))
    return plain / (10 * len(queries)), refined / (10 * len(queries))


def test_recall_of_100_000_rows_with_many_updated_and_deleted(tmp_path: Path) -> None:
    plain, refined = measure_recall(tmp_path, 100_000, 64, 128)
    assert plain >= 0.95
    assert refined >= 0.99


def test_searches_while_rows_stream_in_are_never_short_nor_doubled(tmp_path: Path) -> None:
    table = layered(tmp_path, "ivf_pq", "l2")
    rng = np.random.default_rng(14)
    for step in range(30):
        at = int(rng.integers(0, 1600))
        table.upsert(rows(range(at, at + 20), rng.normal(size=(20, WIDTH)).astype(np.float32)))
        table.delete(keys=[at + 3, at + 4])
        if step % 10 == 9:
            table.flush()
        query = rng.normal(size=WIDTH).astype(np.float32)
        asked = table.search(query).nprobes(8).refine(100).to_arrow()
        assert found_ids(asked) == nearest_ids(table, query, 10)
