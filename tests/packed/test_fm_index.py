"""The fmindex, which is read: its text comes back, damage does not get through."""

from __future__ import annotations

from random import Random

import pyarrow as pa
import pytest
from tests.packed.fixtures import names, spec
from tests.packed.memory_entries import MemoryEntries, golden_entries
from tests.packed.texts import assert_answers, questions

from penstock.errors import Corruption, InvalidInput
from penstock.packed.indexes.fm import DATA, NULL_BITMAP, FmKind

KIND = FmKind()
GOLDEN = names("f_")


@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_file_gives_back_its_text_and_answers(name: str) -> None:
    values = spec(name)["values"]
    index = KIND.load(golden_entries(name), pa.string())
    assert index.values().to_pylist() == values
    for one, pattern in ((values[0], "%an%a"), (values[3], "line _5%"), ("中", "__")):
        assert_answers(index, values, questions(one, values[1], pattern))


@pytest.mark.parametrize("name", GOLDEN)
def test_damage_is_refused_or_harmless(name: str) -> None:
    golden, values = golden_entries(name), spec(name)["values"]
    random = Random(1)
    refused = 0
    for turn in range(600):
        data = bytearray(golden.entries[DATA])
        if turn % 3 == 0:
            data = data[: random.randrange(len(data))]
        else:
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        try:
            index = KIND.load(golden.replaced(**{DATA: bytes(data)}), pa.string())
        except Corruption:
            refused += 1
        else:
            assert index.values().to_pylist() == values
    assert refused > 580


def test_damaged_nulls_and_meta_are_refused() -> None:
    golden = golden_entries("f_small")
    for bad in (b"", b"\x10\x00", b"\x11"):
        with pytest.raises(Corruption, match=NULL_BITMAP):
            KIND.load(golden.replaced(**{NULL_BITMAP: bad}), pa.string())
    with pytest.raises(Corruption, match="total_rows"):
        KIND.load(golden.with_meta(total_rows=7), pa.string())
    with pytest.raises(Corruption, match="no entry"):
        KIND.load(golden.replaced(**{DATA: None}), pa.string())


def test_it_is_not_made() -> None:
    with pytest.raises(InvalidInput, match="only read"):
        KIND.build(pa.array(["a"]))
    with pytest.raises(InvalidInput, match="only read"):
        KIND.load(golden_entries("f_small"), pa.string()).write(MemoryEntries())
