"""Damage on the disk: it is noticed, named with a remedy, and never made worse.

Reads of a damaged table change nothing. Half an entry, an entry that lost its end and one that
lost its rows are told from good ones, whatever they still look like to an Arrow reader.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.refusals import GOOD, SCHEMA, refuses, snapshot

import penstock
from penstock import Corruption, NotATable
from penstock.memwal import names
from penstock.memwal.wal import decode_entry
from penstock.table import Table


@pytest.fixture
def db(tmp_path: Path) -> penstock.Database:
    return penstock.connect(tmp_path / "lake")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture
def table(db: penstock.Database) -> Iterator[Table]:
    made = db.create_table("docs", SCHEMA, primary_key="id")
    made.upsert([GOOD])
    yield made
    made.close()


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


def region_of(table: Table) -> tuple[uuid.UUID, Path]:
    (state,) = table.status().regions
    return state.region_id, Path(table.uri) / names.region_dir(state.region_id)


def read_and_write(db: penstock.Database) -> list[Callable[[], Any]]:
    """Every way into a table, each through a handle of its own."""

    def write() -> None:
        handle = db.open_table("docs")
        with handle.writer() as writer:
            writer.upsert([GOOD])

    return [
        lambda: db.open_table("docs").to_arrow(),
        lambda: db.open_table("docs").count(),
        lambda: db.open_table("docs").get(1),
        write,
    ]


MANIFEST_DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "random bytes": lambda data: np.random.default_rng(3).bytes(len(data)),
    "empty": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "another version inside": lambda data: b"\x08\x07" + data[2:],
}


@pytest.mark.parametrize("damage", list(MANIFEST_DAMAGE))
def test_a_damaged_region_manifest(
    db: penstock.Database, table: Table, path: Path, damage: str
) -> None:
    table.close()
    region_id, directory = region_of(table)
    manifest = directory / "manifest" / f"{names.bitrev(1)}.binpb"
    manifest.write_bytes(MANIFEST_DAMAGE[damage](manifest.read_bytes()))
    for act in read_and_write(db):
        with refuses(path, Corruption, str(region_id), "manifest", "restore"):
            act()


def test_a_manifest_of_another_region(db: penstock.Database, table: Table, path: Path) -> None:
    """A manifest that was copied to the wrong place names a region that is not its own."""
    table.close()
    region_id, directory = region_of(table)
    manifest = directory / "manifest" / f"{names.bitrev(1)}.binpb"
    data = manifest.read_bytes()
    assert region_id.bytes in data
    manifest.write_bytes(data.replace(region_id.bytes, uuid.uuid4().bytes))
    for act in read_and_write(db):
        with refuses(path, Corruption, str(region_id), "restore"):
            act()


def test_a_damaged_hint_is_only_a_hint(db: penstock.Database, table: Table) -> None:
    _, directory = region_of(table)
    for hint in (b"", b"{", b'{"version": "x"}', b'{"version": 999}', b"[]", b"null"):
        (directory / "manifest" / "version_hint.json").write_bytes(hint)
        assert db.open_table("docs").get(1) == GOOD


def without_trailer(data: bytes) -> bytes:
    """Cut off exactly what follows the Arrow stream."""
    return data[: data.rindex(b"PSTKWAL1")]


def without_rows(data: bytes) -> bytes:
    """Only the schema is left: a valid Arrow stream, and an empty one."""
    return data[: 8 + int.from_bytes(data[4:8], "little")]


WAL_DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a bit in the rows": lambda data: flip(data, len(data) // 2),
    "a bit in the schema": lambda data: flip(data, 60),
    "a bit in the checksum": lambda data: flip(data, len(data) - 8),
    "a bit in the trailer's mark": lambda data: flip(data, len(data) - 30),
    "a bit in the write id": lambda data: flip(data, len(data) - 20),
    "half of it": lambda data: data[: len(data) // 2],
    "half of the trailer": lambda data: data[:-16],
    "no trailer": without_trailer,
    "no rows": without_rows,
    "no rows but an end": lambda data: without_rows(data) + b"\xff\xff\xff\xff\x00\x00\x00\x00",
    "nothing": lambda data: b"",
    "no Arrow at all": lambda data: b"The quick brown fox jumps over the lazy dog. " * 9,
    "zeros": lambda data: bytes(len(data)),
    "random bytes": lambda data: np.random.default_rng(4).bytes(len(data)),
}


@pytest.mark.parametrize("damage", list(WAL_DAMAGE))
def test_a_damaged_wal_entry(db: penstock.Database, table: Table, path: Path, damage: str) -> None:
    table.upsert([{**GOOD, "id": 2}])
    table.close()
    region_id, directory = region_of(table)
    entry = directory / "wal" / f"{names.bitrev(1)}.arrow"
    entry.write_bytes(WAL_DAMAGE[damage](entry.read_bytes()))
    for act in read_and_write(db)[:3]:
        with refuses(path, Corruption, names.wal_key(region_id, 1), "restore"):
            act()
    # A writer claims before it reads: the epoch rises, but no row is lost or made up.
    kept = entry.read_bytes()
    with pytest.raises(Corruption, match="restore"):
        read_and_write(db)[3]()
    assert entry.read_bytes() == kept
    assert not list(directory.glob("*_gen_*"))


def test_no_damage_of_one_byte_and_no_cut_goes_unnoticed(table: Table) -> None:
    _, directory = region_of(table)
    data = (directory / "wal" / f"{names.bitrev(1)}.arrow").read_bytes()
    assert decode_entry(data, 1, "the entry").batches[0].num_rows == 1
    padding = range(len(data) - 4, len(data))  # behind the checksum; its bytes mean nothing
    for at in range(len(data)):
        if at not in padding:
            with pytest.raises(Corruption, match="the entry"):
                decode_entry(flip(data, at), 1, "the entry")
        with pytest.raises(Corruption, match="the entry"):
            decode_entry(data[:at], 1, "the entry")


def test_a_missing_wal_entry(db: penstock.Database, table: Table, path: Path) -> None:
    for number in (2, 3):
        table.upsert([{**GOOD, "id": number}])
    table.close()
    _, directory = region_of(table)
    handle = db.open_table("docs")
    handle.upsert([{**GOOD, "id": 4}])
    handle.close()
    (directory / "wal" / f"{names.bitrev(2)}.arrow").unlink()
    with pytest.raises(Corruption, match=r"2.*(missing|restore)"), table.writer() as writer:
        writer.upsert([GOOD])
    assert not list(directory.glob("*_gen_*"))


def test_a_missing_generation(db: penstock.Database, table: Table, path: Path) -> None:
    table.flush()
    table.close()
    _, directory = region_of(table)
    (generation,) = directory.glob("*_gen_1")
    shutil.rmtree(generation)
    for act in read_and_write(db)[:3]:
        with refuses(path, Corruption, generation.name, "Restore"):
            act()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'{"table_id": 5}', b'{"table_id": "x"}', b"\xff\xfe"]
)
def test_a_damaged_table_id(
    db: penstock.Database, table: Table, path: Path, content: bytes
) -> None:
    """Reading needs no table id; writing does, and must not make up another."""
    table.close()
    (Path(table.uri) / "_penstock" / "table.json").write_bytes(content)
    reads = read_and_write(db)
    before = snapshot(path)
    assert reads[1]() == 1
    assert reads[2]() == GOOD
    assert snapshot(path) == before
    with refuses(path, Corruption, "table.json", "restore"):
        reads[3]()


def test_a_damaged_base_manifest(db: penstock.Database, table: Table, path: Path) -> None:
    table.close()
    newest = min((Path(table.uri) / "_versions").glob("*.manifest"))
    newest.write_bytes(newest.read_bytes()[:-10])
    with refuses(path, NotATable, "docs.lance"):
        db.open_table("docs")


def test_reading_writes_nothing(db: penstock.Database, table: Table, path: Path) -> None:
    table.upsert([{**GOOD, "id": 2}])
    table.flush()
    table.upsert([{**GOOD, "id": 3}])
    before = snapshot(path)
    for handle in (table, db.open_table("docs")):
        assert handle.count() == handle.to_arrow().num_rows == 3
        assert handle.get(2) == {**GOOD, "id": 2}
        assert handle.get(99) is None
        assert handle.get_many([1, 3, 99]).num_rows == 2
        assert handle.status().regions[0].wal_lag_entries == 1
        assert str(handle.status())
    assert snapshot(path) == before
