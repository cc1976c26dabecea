"""Lookups: the newest row of a key, found without opening what cannot have it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

import penstock
from penstock.errors import Corruption, InvalidInput
from penstock.index.primary_key import mark_primary_key
from penstock.memwal.base_table import BaseTable
from penstock.memwal.ingest import keys_to_arrays
from penstock.memwal.lookup import get_many, plan_lookup
from penstock.memwal.sources import GenerationSource
from penstock.memwal.view import View
from penstock.storage.faults import FaultStore
from penstock.storage.local import LocalStore
from penstock.storage.seams import Seams
from penstock.table import Table

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("value", pa.string()),
        ("vector", pa.list_(pa.float32(), 2)),
    ]
)


def row(key: int, value: str) -> dict[str, Any]:
    return {"id": key, "value": value, "vector": [float(key), 0.5]}


def layered(tmp_path: Path, regions: Any = None) -> Table:
    """Keys 0 to 9 in the base, 3 to 5 in generation 1, 5 and 6 in generation 2, 6 and 7 in memory.

    Of these 4 was deleted in generation 2 and 8 in memory.
    """
    uri = tmp_path / "t.lance"
    rows = pa.Table.from_pylist([row(n, "base") for n in range(10)], SCHEMA)
    lance.write_dataset(rows.cast(mark_primary_key(SCHEMA, ["id"])), str(uri))
    table = penstock.connect(tmp_path).open_table("t", adopt=True)
    if regions is not None:
        table.set_regions(regions)
    table.upsert([row(n, "one") for n in (3, 4, 5)])
    table.flush()
    table.upsert([row(n, "two") for n in (5, 6)])
    table.delete(keys=[4])
    table.flush()
    table.upsert([row(n, "memory") for n in (6, 7)])
    table.delete(keys=[8])
    return table


LAYERED = {0: "base", 3: "one", 4: None, 5: "two", 6: "memory", 7: "memory", 8: None, 9: "base"}


def another_process(table: Table) -> Table:
    """A handle that has read nothing yet."""
    return penstock.connect(Path(table.uri).parent).open_table("t")


def view_of(table: Table) -> View:
    return table._reader.view(table._region_writers())


def generations(table: Table) -> dict[int, GenerationSource]:
    """The generations as the handle keeps them between reads."""
    sources = view_of(table).sources
    return {s.generation: s for s in sources if isinstance(s, GenerationSource)}


def was_opened(source: GenerationSource) -> bool:
    return source._reader is not None or source._dataset is not None


def test_the_newest_row_wins_and_deleted_ones_are_gone(tmp_path: Path) -> None:
    table = layered(tmp_path)
    for reader in (table, another_process(table)):
        for key, value in LAYERED.items():
            assert reader.get(key) == (None if value is None else row(key, value))
        found = reader.get_many([*LAYERED, 77, 0, 0]).to_pylist()
        alive = {key: row(key, value) for key, value in LAYERED.items() if value is not None}
        assert {each["id"]: each for each in found} == alive
        assert len(found) == len(alive)


def test_the_plan_is_drawn_as_in_the_specification(tmp_path: Path) -> None:
    table = layered(tmp_path)
    [region] = view_of(table).regions
    name = f"region_{region.manifest.region_id}"
    assert table.explain_get([5]) == "\n".join(
        [
            "CoalesceFirstExec: return_first_non_null",
            f"  BloomFilterGuardExec: bf[{name}][gen=3]",
            f"    TakeLastExec: {name}[gen=3], filter=[id = 5]",
            f"  BloomFilterGuardExec: bf[{name}][gen=2]",
            f"    TakeLastExec: {name}[gen=2], filter=[id = 5]",
            f"  BloomFilterGuardExec: bf[{name}][gen=1]",
            f"    TakeLastExec: {name}[gen=1], filter=[id = 5]",
            "  TakeLastExec: base_table[gen=0], filter=[id = 5]",
        ]
    )
    lines = table.explain_get([5, 6, 5, 9, 8], analyze=True).splitlines()
    rows = [int(line.split("rows=")[1].split()[0]) for line in lines]
    # 6 and the deleted 8 are in memory, 5 in generation 2, 9 in the base; nobody is left to ask
    # generation 1 for but 9, which its filter rules out.
    assert rows == [3, 1, 1, 1, 1, 0, 0, 1]
    assert "filter=[id IN (6, 5, 9, … 4 keys)]" in lines[-1]


def test_only_regions_that_can_hold_a_key_are_asked(tmp_path: Path) -> None:
    table = layered(tmp_path, penstock.bucket("id", 4))
    regions = {str(region.manifest.region_id) for region in view_of(table).regions}
    assert len(regions) > 1

    def asked(*keys: int) -> set[str]:
        plan = table.explain_get(list(keys))
        return {region for region in regions if region in plan}

    for key in LAYERED:
        assert len(asked(key)) <= 1
    assert asked(3) | asked(4) | asked(5) | asked(6) | asked(7) | asked(8) == regions
    assert asked(3, 4, 5, 6, 7, 8) == regions
    assert asked(5, 5) == asked(5)
    for key, value in LAYERED.items():
        assert table.get(key) == (None if value is None else row(key, value))


def test_other_regions_are_not_even_asked_whether_they_changed(tmp_path: Path) -> None:
    table = layered(tmp_path, penstock.bucket("id", 4))
    regions = {str(region.manifest.region_id) for region in view_of(table).regions}
    seams = Seams()
    store = FaultStore(LocalStore(table.uri), seams.clock, seams.entropy)
    reader = Table("t", BaseTable(store, None, seams))

    def asked(*keys: int) -> set[str]:
        """The regions of which the store was asked for anything."""
        store.reset_log()
        found = reader.get_many(list(keys)).num_rows
        assert found == sum(LAYERED[key] is not None for key in keys)
        return {region for region in regions for call in store.log if region in call.key}

    assert asked(7) == regions, "what they stand for is not known yet"
    for key in LAYERED:
        assert len(asked(key)) <= 1
    assert asked(*LAYERED) == regions
    table.upsert([row(7, "changed"), row(0, "changed")])
    assert reader.get(7) == row(7, "changed")
    assert reader.get(0) == row(0, "changed")


def test_a_generation_whose_filter_says_no_is_not_opened(tmp_path: Path) -> None:
    reader = another_process(layered(tmp_path))
    assert reader.get(0) == row(0, "base")
    assert reader.get_many([0, 1, 2, 9]).num_rows == 4
    for source in generations(reader).values():
        assert source.bloom is not None
        assert not was_opened(source)
    assert reader.get(3) == row(3, "one")
    assert was_opened(generations(reader)[1])
    assert not was_opened(generations(reader)[2])


def test_a_key_that_was_found_dead_or_alive_is_not_asked_for_again(tmp_path: Path) -> None:
    reader = another_process(layered(tmp_path))
    assert reader.get(7) == row(7, "memory")
    assert reader.get(8) is None
    assert not any(source._bloom_read for source in generations(reader).values())
    assert reader.get(4) is None
    assert was_opened(generations(reader)[2])
    assert not generations(reader)[1]._bloom_read


def test_keys_in_memory_are_not_asked_of_a_filter(tmp_path: Path) -> None:
    reader = another_process(layered(tmp_path))
    assert reader.count() == 8
    for key, value in LAYERED.items():
        assert reader.get(key) == (None if value is None else row(key, value))
    assert reader.get_many(list(LAYERED)).num_rows == 6
    assert not any(source._bloom_read for source in generations(reader).values())


def test_a_filter_may_be_missing_but_not_damaged(tmp_path: Path) -> None:
    table = layered(tmp_path)
    for source in generations(table).values():
        Path(source.uri, "bloom_filter.bin").unlink()
    reader = another_process(table)
    for key, value in LAYERED.items():
        assert reader.get(key) == (None if value is None else row(key, value))
    for source in generations(table).values():
        Path(source.uri, "bloom_filter.bin").write_bytes(b"half a block")
    with pytest.raises(Corruption, match=r"bloom_filter\.bin is damaged.*remove it"):
        another_process(table).get(0)


def test_a_view_finds_what_was_there_when_it_was_taken(tmp_path: Path) -> None:
    table = layered(tmp_path)
    view = view_of(table)
    table.upsert([row(n, "later") for n in (0, 6, 7, 8, 50)])

    def found(*keys: int) -> dict[int, str]:
        rows = get_many(view, keys_to_arrays(list(keys), view.shape)).to_pylist()
        return {each["id"]: each["value"] for each in rows}

    assert found(6) == {6: "memory"}
    assert found(8) == {}
    assert found(0, 6, 7, 8, 50) == {0: "base", 6: "memory", 7: "memory"}


def test_what_cannot_be_a_key_is_refused(tmp_path: Path) -> None:
    table = layered(tmp_path)
    for keys, said in (
        (["five"], "key column 'id' is int64"),
        ([5, None], "has a null"),
        ([2.5], "does not fit"),
        (5, r"write \[5\]"),
    ):
        for ask in (table.get_many, table.explain_get):
            with pytest.raises(InvalidInput, match=said):
                ask(keys)
    assert table.get_many([]).num_rows == 0
    assert table.get_many(key for key in (5, 6)).num_rows == 2


KEYS: dict[str, tuple[pa.Schema, Any]] = {
    "integers": (pa.schema([("id", pa.int32())]), lambda n: {"id": n}),
    "unsigned": (pa.schema([("id", pa.uint64())]), lambda n: {"id": 2**64 - 1 - n}),
    "strings": (pa.schema([("name", pa.string())]), lambda n: {"name": f"ü{n}" if n else ""}),
    "composite": (
        pa.schema([("tenant", pa.string()), ("id", pa.int64())]),
        lambda n: {"tenant": f"o'{n % 7}", "id": n // 7 - 50},
    ),
}


@pytest.mark.parametrize("kind", KEYS)
def test_a_thousand_keys_of_every_kind_and_layer(tmp_path: Path, kind: str) -> None:
    keys, key_of = KEYS[kind]
    schema = keys.append(pa.field("value", pa.string()))
    table = penstock.connect(tmp_path).create_table(
        "t", schema, primary_key=keys.names, regions=penstock.bucket(keys.names[0], 3)
    )
    dice = random.Random(kind)
    model: dict[int, str] = {}
    for layer in range(4):
        changed = dice.sample(range(1500), 600)
        model |= {n: f"{layer}/{n}" for n in changed}
        table.upsert([{**key_of(n), "value": model[n]} for n in changed])
        gone = dice.sample(range(1500), 150)
        table.delete(keys=[key_of(n) for n in gone])
        for n in gone:
            model.pop(n, None)
        if layer < 3:
            table.flush()
    asked = [dice.randrange(1600) for _ in range(1000)]
    expected = sorted(f"{model[n]}" for n in set(asked) if n in model)
    for reader in (table, another_process(table)):
        found = reader.get_many([key_of(n) for n in asked])
        assert found.schema.equals(reader.schema)
        assert sorted(found.column("value").to_pylist()) == expected
        for n in asked[:20]:
            value = model.get(n)
            one = key_of(n) if len(keys.names) > 1 else next(iter(key_of(n).values()))
            answer = reader.get(one)
            assert answer == (None if value is None else {**key_of(n), "value": value})
        view = view_of(reader)
        plan = plan_lookup(view, keys_to_arrays([key_of(n) for n in asked], view.shape))
        rows = [value for chunk in plan.stream() for value in chunk.rows["value"].to_pylist()]
        assert sorted(rows) == expected


def test_composite_keys_are_written_as_tuples(tmp_path: Path) -> None:
    keys, key_of = KEYS["composite"]
    table = penstock.connect(tmp_path).create_table("t", keys, primary_key=keys.names)
    table.upsert([key_of(n) for n in range(3)])
    assert "filter=[tenant = 'o''1' AND id = -50]" in table.explain_get([("o'1", -50)])
    two = table.explain_get([("o'1", -50), ("o'2", -50)])
    assert "filter=[(tenant, id) IN (('o''1', -50), ('o''2', -50))]" in two
