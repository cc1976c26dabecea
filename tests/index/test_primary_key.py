"""Keys are declared, compared, encoded and stored exactly as Lance does it."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lance.file import LanceFileReader

from penstock.errors import InvalidInput, ObjectNotFound
from penstock.index.primary_key import (
    PAGE_ROWS,
    SUPPORTED_KEY_TYPES,
    PkIndexReader,
    encode_key,
    encode_keys,
    key_array,
    mark_primary_key,
    newest_rows,
    primary_key_columns,
    python_keys,
    write_pk_index,
)

SCHEMA = pa.schema(
    [pa.field("price", pa.float64()), pa.field("id", pa.int64()), pa.field("tenant", pa.string())]
)


def keys_of_type(key_type: pa.DataType, rows: int, distinct: int) -> pa.Array:
    """Keys drawn from few distinct values, some at the type's limits, some with odd bytes."""
    random = np.random.default_rng(7)
    drawn = random.integers(0, distinct, rows)
    if pa.types.is_boolean(key_type):
        return pa.array(drawn % 2 == 0)
    if pa.types.is_integer(key_type):
        limits = np.iinfo(key_type.to_pandas_dtype())
        pool = [limits.min, limits.max, 0, 1, *range(2, min(distinct, limits.max))]
        return pa.array([pool[i % len(pool)] for i in drawn], key_type)
    if "string" in str(key_type):
        return pa.array(["" if i == 0 else f"é\x00{'x' * (i % 11)}{i}" for i in drawn], key_type)
    return pa.array([b"" if i == 0 else b"\x00\xff" * (i % 5) + b"%d" % i for i in drawn], key_type)


def generation_by_lance(uri: Path, columns: list[pa.Array]) -> Path:
    """Have Lance write and flush one generation whose keys are these columns' rows."""
    names = [f"k{i}" for i in range(len(columns))]
    fields = [pa.field(name, column.type) for name, column in zip(names, columns, strict=True)]
    schema = mark_primary_key(pa.schema([*fields, pa.field("v", pa.int64())]), names)
    rows = pa.table([*columns, pa.array(np.arange(len(columns[0])))], schema=schema)
    dataset = lance.write_dataset(rows.slice(0, 1), str(uri))
    dataset.initialize_mem_wal(unsharded=True)
    writer = dataset.mem_wal_writer(str(uuid.uuid4()))
    writer.put(rows)
    writer.close()
    (generation,) = uri.glob("_mem_wal/*/*_gen_1")
    return generation


def sidecar(generation: Path, name: str) -> tuple[pa.Table, Any]:
    reader = LanceFileReader(str(generation / "_pk_index" / f"{name}.lance"))
    return reader.read_all().to_table(), reader.metadata()


def test_a_key_is_declared_in_the_schema_and_survives_lance(tmp_path: Path) -> None:
    single = mark_primary_key(SCHEMA, ["id"])
    assert primary_key_columns(single) == ("id",)
    assert single.field("id").metadata == {b"lance-schema:unenforced-primary-key": b"true"}
    composite = mark_primary_key(single, ["tenant", "id"])
    stored = lance.write_dataset(composite.empty_table(), str(tmp_path / "t")).schema
    assert primary_key_columns(stored) == ("tenant", "id")
    assert [field.nullable for field in stored] == [True, False, False]
    assert primary_key_columns(mark_primary_key(stored, [])) == ()


@pytest.mark.parametrize("columns", [["price"], ["id", "id"], ["missing"], "id"])
def test_what_cannot_be_a_key_is_refused(columns: list[str]) -> None:
    with pytest.raises(InvalidInput):
        mark_primary_key(SCHEMA, columns)


key_rows = st.lists(
    st.tuples(
        st.none() | st.text(alphabet="a\x00é", max_size=4),
        st.none() | st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 2),
        st.none() | st.binary(max_size=3),
        st.none() | st.integers(0, 2**64 - 1),
        st.none() | st.booleans(),
    ),
    min_size=1,
    max_size=12,
)
KEY_TYPES = [pa.string(), pa.int64(), pa.large_binary(), pa.uint64(), pa.bool_()]


@given(key_rows, st.integers(0, 3))
def test_composite_keys_sort_and_compare_as_their_tuples(
    rows: list[tuple[Any, ...]], skipped: int
) -> None:
    def order(row: tuple[Any, ...]) -> list[Any]:
        text = None if row[0] is None else row[0].encode()
        return [(value is not None, value) for value in (text, *row[1:])]

    many = rows * (1 + 64 // len(rows))  # long enough for the vectorised way
    columns = [
        pa.array(values, key_type)[skipped:]
        for values, key_type in zip(zip(*many, strict=True), KEY_TYPES, strict=True)
    ]
    encoded = encode_keys(columns).to_pylist()
    assert encoded == [encode_key(row, KEY_TYPES) for row in many[skipped:]]
    distinct = sorted(set(rows), key=order)
    in_order = [encode_key(row, KEY_TYPES) for row in distinct]
    assert in_order == sorted(set(in_order))


@given(st.lists(st.integers(0, 9), max_size=80), st.sampled_from([pa.int32(), pa.string()]))
def test_the_newest_row_of_a_key_is_its_last(drawn: list[int], key_type: pa.DataType) -> None:
    keys = pa.array(drawn, pa.int32()).cast(key_type)
    last = {key: row for row, key in enumerate(drawn)}
    assert np.flatnonzero(newest_rows(keys)).tolist() == sorted(last.values())
    by_key = dict(zip(python_keys(keys), range(len(keys)), strict=True))
    assert list(by_key.values()) == list(last.values())


@pytest.mark.parametrize("key_type", [*SUPPORTED_KEY_TYPES, "composite"], ids=str)
def test_the_sidecar_is_the_one_lance_writes(tmp_path: Path, key_type: pa.DataType | str) -> None:
    if key_type == "composite":
        columns = [keys_of_type(KEY_TYPES[0], 300, 5), keys_of_type(pa.int64(), 300, 40)]
    else:
        columns = [keys_of_type(key_type, 300, 90)]
    theirs = generation_by_lance(tmp_path / "table", columns)
    batch = pa.record_batch(columns, names=[f"k{i}" for i in range(len(columns))])
    ours = tmp_path / "ours"
    write_pk_index(str(ours), key_array(batch, batch.schema.names))
    for name in ("page_data", "page_lookup"):
        our_table, our_file = sidecar(ours, name)
        lance_table, lance_file = sidecar(theirs, name)
        assert our_table.equals(lance_table)
        assert our_file.schema.equals(lance_file.schema, check_metadata=True)
        assert our_file.major_version == lance_file.major_version
        assert our_file.minor_version == lance_file.minor_version


@settings(max_examples=8, deadline=None)
@given(st.sampled_from([pa.int64(), pa.uint16(), pa.string(), pa.binary()]), st.integers(1, 9000))
def test_the_reader_finds_every_row_of_a_key_across_pages(
    tmp_path_factory: pytest.TempPathFactory, key_type: pa.DataType, distinct: int
) -> None:
    keys = keys_of_type(key_type, 2 * PAGE_ROWS + 17, distinct)
    uri = str(tmp_path_factory.mktemp("generation"))
    write_pk_index(uri, keys)
    rows_of: dict[Any, list[int]] = {}
    for row, key in enumerate(keys.to_pylist()):
        rows_of.setdefault(key, []).append(row)
    reader = PkIndexReader(uri, cached_pages=1)
    for key in list(rows_of)[:5]:
        assert reader.lookup(key).tolist() == rows_of[key]
    absent = [f"no{i}" for i in range(3)] if pa.types.is_string(key_type) else []
    absent = [60001, 60002] if pa.types.is_integer(key_type) else absent
    asked = pa.array([*rows_of, *absent], key_type)
    expected = [rows_of[key][-1] if key in rows_of else -1 for key in asked.to_pylist()]
    assert reader.newest_many(asked).tolist() == expected
    assert reader.contains_many(asked).tolist() == [row >= 0 for row in expected]


def test_many_threads_may_ask_one_reader(tmp_path: Path) -> None:
    keys = pa.array(np.arange(20 * PAGE_ROWS))
    write_pk_index(str(tmp_path), keys)
    for _ in range(5):
        reader = PkIndexReader(str(tmp_path), cached_pages=2)

        def ask(number: int, reader: PkIndexReader = reader) -> bool:
            if number % 4 == 0:
                return bool(reader.keys_by_row().equals(keys))
            return bool(reader.contains_many(keys[number * PAGE_ROWS :][:10]).all())

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(ask, range(20)))


def test_a_sidecar_on_s3_and_one_that_is_missing(s3: Any, tmp_path: Path) -> None:
    uri = s3.uri("generation")
    write_pk_index(uri, pa.array([3, 1, 3]), s3.storage_options)
    reader = PkIndexReader(uri, s3.storage_options)
    assert reader.lookup(3).tolist() == [0, 2]
    assert reader.contains_many(pa.array([2, 1])).tolist() == [False, True]
    with pytest.raises(ObjectNotFound, match="no readable primary-key index"):
        PkIndexReader(str(tmp_path / "nothing"))
    with pytest.raises(InvalidInput, match="null"):
        write_pk_index(str(tmp_path), pa.array([1, None]))
