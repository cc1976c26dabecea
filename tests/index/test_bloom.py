"""The bloom filter is Lance's, bit for bit, and never loses a key."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.index.test_primary_key import generation_by_lance, keys_of_type

from penstock.errors import Corruption, InvalidInput
from penstock.index.bloom import BloomFilter, lance_written_hashes, pk_hashes
from penstock.index.primary_key import SUPPORTED_KEY_TYPES
from penstock.index.siphash import siphash13


def test_siphash_matches_a_published_vector() -> None:
    # The empty message hashed by Rust's DefaultHasher::new().finish().
    assert siphash13(b"") == 15130871412783076140


@pytest.mark.parametrize("key_type", [*SUPPORTED_KEY_TYPES, "composite"], ids=str)
def test_the_filter_is_the_one_lance_writes(tmp_path: Path, key_type: pa.DataType | str) -> None:
    if key_type == "composite":
        columns = [keys_of_type(t, 300, 60) for t in (pa.string(), pa.int64(), pa.binary())]
    else:
        columns = [keys_of_type(key_type, 300, 200)]
    theirs = (generation_by_lance(tmp_path / "t", columns) / "bloom_filter.bin").read_bytes()
    hashes = lance_written_hashes(columns)
    if key_type in (pa.int32(), pa.int64(), pa.string(), pa.binary(), "composite"):
        assert hashes is None
        hashes = pk_hashes(columns)
    assert hashes is not None
    assert BloomFilter.from_hashes(hashes).to_bytes() == theirs
    assert BloomFilter.from_bytes(theirs).may_contain(columns).all()
    assert BloomFilter.from_hashes(pk_hashes(columns)).may_contain(columns).all()


@given(
    st.lists(st.tuples(st.none() | st.text(), st.integers(0, 255), st.binary()), min_size=1),
    st.integers(1, 20),
)
def test_a_row_hashes_the_same_alone_and_among_others(
    rows: list[tuple[str | None, int, bytes]], repeat: int
) -> None:
    types = (pa.string(), pa.uint8(), pa.large_binary())
    columns = [
        pa.array(list(values) * repeat, value_type)
        for values, value_type in zip(zip(*rows, strict=True), types, strict=True)
    ]
    together = pk_hashes(columns)
    alone = [pk_hashes([column[i : i + 1] for column in columns])[0] for i in range(len(rows))]
    assert together.tolist() == alone * repeat


@given(st.lists(st.integers(0, 2**64 - 1)), st.lists(st.integers(0, 2**64 - 1)))
def test_what_was_inserted_is_found(first: list[int], second: list[int]) -> None:
    hashes = [np.array(part, dtype=np.uint64) for part in (first, second)]
    bloom = BloomFilter.from_hashes(hashes[0])
    bloom.insert(hashes[1])
    again = BloomFilter.from_bytes(bloom.to_bytes())
    assert again.contains(np.concatenate(hashes)).all()


def test_few_absent_keys_pass_however_many_are_in() -> None:
    for count in (1_000, 40_000):
        bloom = BloomFilter.from_hashes(pk_hashes([pa.array(np.arange(count))]))
        absent = pk_hashes([pa.array(np.arange(10**9, 10**9 + 50_000))])
        assert bloom.contains(absent).mean() < 0.002


def test_bytes_that_are_no_filter_are_refused() -> None:
    for data in (b"", b"x" * 33):
        with pytest.raises(Corruption):
            BloomFilter.from_bytes(data)
    with pytest.raises(InvalidInput):
        BloomFilter().insert(np.arange(3))


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=200, unique=True))
def test_a_key_alone_is_answered_as_among_many(numbers: list[int]) -> None:
    hashes = np.array(numbers, dtype=np.uint64)
    bloom = BloomFilter.from_hashes(hashes[::2])
    together = bloom.contains(hashes).tolist()
    assert [bool(bloom.contains(hashes[at : at + 1])[0]) for at in range(len(hashes))] == together
