"""Names of objects: bit-reversed numbers, and nothing that is not one of ours."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.memwal import names


@given(st.integers(0, 2**64 - 1))
def test_a_number_and_its_name_are_one_to_one(number: int) -> None:
    name = names.bitrev(number)
    assert len(name) == 64
    assert names.from_bitrev(name) == number


def test_names_are_those_of_the_format() -> None:
    region = uuid.UUID("6b1c0e9e-5f7a-4b52-9d2e-0a4e6c1f9d33")
    five = "1010" + "0" * 60
    assert names.bitrev(5) == "101" + "0" * 61
    assert names.from_bitrev(five) == 5
    assert names.wal_key(region, 5) == f"_mem_wal/{region}/wal/{five}.arrow"
    assert names.manifest_key(region, 5) == f"_mem_wal/{region}/manifest/{five}.binpb"
    assert names.generation_of(names.generation_name("0a1b2c3d", 12)) == 12


@pytest.mark.parametrize("text", ["", "1" * 63, "1" * 65, "2" + "0" * 63, "x" * 64])
def test_other_names_are_not_numbers(text: str) -> None:
    assert names.from_bitrev(text) is None
    assert names.generation_of(text) is None


@pytest.mark.parametrize("number", [-1, 2**64])
def test_numbers_beyond_64_bits_have_no_name(number: int) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        names.bitrev(number)
