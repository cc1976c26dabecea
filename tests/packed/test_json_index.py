"""The json kind: golden files byte for byte, every reason for having no value, every inner kind."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.packed.fixtures import spec
from tests.packed.memory_entries import MemoryEntries, golden_entries

from penstock.errors import Corruption, InvalidInput
from penstock.packed.indexes import build_index, load_index
from penstock.packed.indexes.base import PackedIndex
from penstock.packed.indexes.json_path import NON_EXIST, NULL_ROWS, OTHER_TYPE
from penstock.packed.indexes.json_values import BATCH_ROWS, pointer

TYPES = {"int64": pa.int64(), "double": pa.float64()}


def written(index: PackedIndex, *, described: bool = True) -> MemoryEntries:
    entries = MemoryEntries()
    index.write(entries, described=described)
    return entries


def rows(index: PackedIndex, op: str, value: Any = None) -> list[int]:
    found = list(index.query(op, value))
    assert index.count(op, value) == len(found)
    return found


# --- golden files --------------------------------------------------------------------------

GOLDEN = ["s_json_int64_allexist", "s_json_int64_nonexist", "b_json_double_nonexist"]


def masked(name: str, entries: dict[str, bytes]) -> dict[str, bytes]:
    """Entries without the struct padding of sorted 64-bit numbers, which is not initialised."""
    if not name.startswith("s_"):
        return entries
    records = np.frombuffer(entries["index_data"], [("value", "<i8"), ("row", "<i4"), ("", "V4")])
    return {**entries, "index_data": str(records[["value", "row"]].tolist()).encode()}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_files_are_read_and_written_again(name: str) -> None:
    golden, known = golden_entries(name), spec(name)
    texts = [
        "{}" if row in known["non_exist"] else json.dumps({"a": value})
        for row, value in enumerate(known["values"])
    ]
    nullable = {"nullable": True} if known.get("nullable") else {}
    built = build_index(
        "json",
        pa.array(texts),
        path="/a",
        value_type=TYPES[known["type"]],
        inner=known["index"],
        **nullable,
    )
    again = written(built, described=False)
    assert masked(name, again.entries) == masked(name, golden.entries)
    assert list(again.entries) == list(golden.entries)
    assert again.meta == golden.meta

    read = load_index(golden, TYPES[known["type"]])
    everything = set(range(len(texts)))
    assert rows(read, "not_exists") == known["non_exist"]
    assert set(rows(read, "exists")) == everything - set(known["non_exist"])
    for row, value in enumerate(known["values"]):
        assert row in rows(read, "is_null") if value is None else row in rows(read, "=", value)
    with pytest.raises(InvalidInput, match="does not answer"):
        read.query("is_json_null")


# --- states and types ----------------------------------------------------------------------

# What a document may have at the path, as written, and as which value each type takes it.
SMALL = {"1": 1, "1.0": 1, "-0": 0, "-0.0": 0}
INTEGERS = {**SMALL, "1e3": 1000, "9007199254740993": 2**53 + 1, "9223372036854775807": 2**63 - 1}
NUMBERS = {**INTEGERS, "1.5": 1.5, "-2e-3": -0.002, "9223372036854775808": 2.0**63}
TOO_LARGE = ["1e400", "-1e999", "1" + "0" * 400, "7" * 5000]
STRINGS = ['"x"', '""', r'"\u00e9\n\ud83d\ude00"', '"1"', '"true"', '"x\\u0000y"', '"é"']
NO_TEXT = [r'"\ud800"', r'"a\udc00b"']
OTHERS = ["true", "false", "{}", "[]", '{"a": 1}', "[1]", *NO_TEXT]
TAKEN: dict[str, dict[str, Any]] = {
    "int64": INTEGERS,
    "int8": SMALL,
    "double": {text: float(value) for text, value in NUMBERS.items()},
    "string": {text: json.loads(text) for text in STRINGS},
    "bool": {"true": True, "false": False},
}
EVERY_VALUE = ["null", *NUMBERS, *TOO_LARGE, *STRINGS, *OTHERS]


@pytest.mark.parametrize("type_name", TAKEN)
def test_which_values_a_type_takes_and_why_a_row_has_none(type_name: str) -> None:
    documents = [None, "{}", " [1] ", '"a"', "null", '{"b": {"a": 1}}', '{"A": 1}']
    missing = [1, 2, 3, 4, 5, 6]
    documents += [f'{{"x": [{{}}], "a": {value}, "b": 2}}' for value in EVERY_VALUE]
    taken = TAKEN[type_name]
    by_row = dict(enumerate(EVERY_VALUE, start=len(documents) - len(EVERY_VALUE)))
    for array in (pa.array(documents), pa.array([d and d.encode() for d in documents])):
        index = build_index("json", array, path="/a", value_type=type_name)
        for each in (index, load_index(written(index))):
            assert rows(each, "exists") == sorted(by_row)
            assert rows(each, "not_exists") == missing
            assert rows(each, "is_json_null") == [r for r, v in by_row.items() if v == "null"]
            assert rows(each, "is_other_type") == [
                r for r, v in by_row.items() if v != "null" and v not in taken
            ]
            assert rows(each, "is_not_null") == [r for r, v in by_row.items() if v in taken]
            for value in taken.values():
                same = [r for r, v in by_row.items() if v in taken and taken[v] == value]
                assert rows(each, "=", value) == same
    # A file without our description still tells whether the path is there.
    plain = load_index(written(index, described=False), index.value_type)
    assert rows(plain, "exists") == sorted(by_row)
    assert rows(plain, "not_exists") == [0, *missing]


def test_paths() -> None:
    document = {
        "a": {"b": [10, {"c": 11}], "0": 12, "": 13, "x/y": 14, "m~n": 15, "~1": 16},
        "é": 17,
        "": 18,
        "a.b": 19,
    }
    texts = pa.array([json.dumps(document), '{"a": 1, "a": {"0": 20}}', "21"])
    expected: dict[str, list[int | None]] = {
        "/a/b/0": [10, None, None],
        "/a/b/1/c": [11, None, None],
        "/a/0": [12, 20, None],
        "/a/": [13, None, None],
        "/a/x~1y": [14, None, None],
        "/a/m~0n": [15, None, None],
        "/a/~01": [16, None, None],
        "/é": [17, None, None],
        "/": [18, None, None],
        "/a.b": [19, None, None],
        "": [None, None, 21],
        "/a/b/2": [None] * 3,
        "/a/b/-": [None] * 3,
        "/a/b/00": [None] * 3,
        "/a/b/-1": [None] * 3,
        "/a/b/99999999999999999999": [None] * 3,
        "/a/b/1/c/d": [None] * 3,
    }
    for path, values in expected.items():
        index = build_index("json", texts, path=path, value_type=pa.int64(), inner="stlsort")
        for row, value in enumerate(values):
            found = [] if value is None else rows(index, "=", value)
            assert (row in found) == (value is not None), path
    assert pointer(["a", "x/y", 0, "m~n"]) == "/a/x~1y/0/m~0n"
    for bad in ("a.b", "$.a", "/a~2", "/" * 65, "/" + "a" * 5000):
        with pytest.raises(InvalidInput, match=r"path|pointer"):
            build_index("json", texts, path=bad, value_type="int64")


def test_what_is_no_json_is_named() -> None:
    good = '{"a": 1}'
    bad = ["", " ", "{", "{}{}", "{} x", "nul", '{"a": NaN}', "[Infinity]", "'a'", '{"a":1,}']
    bad += ["[" * 100_000, '{"a": 01}', '"\t"', "\ufeff{}"]
    many = [good] * (BATCH_ROWS + 1)
    for text in bad:
        with pytest.raises(InvalidInput, match="row 1 is no JSON"):
            build_index("json", pa.array([good, text]), path="/a", value_type="int64")
    with pytest.raises(InvalidInput, match=f"row {BATCH_ROWS + 1} is no JSON"):
        build_index("json", pa.array([*many, "{"]), path="/a", value_type="int64")
    with pytest.raises(InvalidInput, match="row 1 is no JSON"):
        build_index("json", pa.array([b"{}", b'"\xff"']), path="/a", value_type="int64")
    for options in (
        {"path": "/a"},
        {"value_type": "int64"},
        {"path": "/a", "value_type": "nonsense"},
        {"path": "/a", "value_type": pa.list_(pa.int64())},
        {"path": "/a", "value_type": "int64", "inner": "json"},
        {"path": "/a", "value_type": "int64", "inner": "bitmap", "what": 1},
    ):
        with pytest.raises(InvalidInput):
            build_index("json", pa.array([good]), **options)
    with pytest.raises(InvalidInput, match="takes JSON"):
        build_index("json", pa.array([1]), path="/a", value_type="int64")


# --- every inner kind answers as it would over the values ----------------------------------

INNER = {
    pa.int64(): ["stlsort", "bitmap", "hybrid", "inverted"],
    pa.float64(): ["stlsort", "bitmap", "hybrid", "inverted"],
    pa.bool_(): ["stlsort", "bitmap", "hybrid"],
    pa.string(): ["stlsort", "bitmap", "hybrid", "marisa", "inverted", "ngram"],
}
VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int64(): st.integers(-3, 3),
    pa.float64(): st.sampled_from([-1.5, 0.0, 1.0, 1e300, 5e-324]),
    pa.bool_(): st.booleans(),
    pa.string(): st.text("ab%é", max_size=3),
}
CASES = [(value_type, inner) for value_type, kinds in INNER.items() for inner in kinds]
NOTHING, OTHER = object(), object()


@given(data=st.data())
@settings(max_examples=10, deadline=None)
@pytest.mark.parametrize(("value_type", "inner"), CASES, ids=lambda each: str(each))
def test_inner_kinds_answer_about_the_values(
    value_type: pa.DataType, inner: str, data: st.DataObject
) -> None:
    drawn = data.draw(
        st.lists(st.none() | st.sampled_from([NOTHING, OTHER]) | VALUES[value_type], max_size=20)
    )
    texts = [
        json.dumps({} if v is NOTHING else {"v": [{"deep": [1, 2]} if v is OTHER else v]})
        for v in drawn
    ]
    values = [None if v in (NOTHING, OTHER) else v for v in drawn]
    index = build_index(
        "json", pa.array(texts, pa.string()), path="/v/0", value_type=value_type, inner=inner
    )
    asked = data.draw(st.lists(VALUES[value_type], min_size=1, max_size=3))
    for each in (index, load_index(written(index))):
        assert each.rows == len(texts)
        assert rows(each, "not_exists") == [r for r, v in enumerate(drawn) if v is NOTHING]
        assert rows(each, "is_other_type") == [r for r, v in enumerate(drawn) if v is OTHER]
        assert rows(each, "is_null") == [r for r, v in enumerate(values) if v is None]
        if inner == "ngram":
            continue
        present = [(r, v) for r, v in enumerate(values) if v is not None]
        assert rows(each, "in", asked) == [r for r, v in present if v in asked]
        assert rows(each, "not_in", asked) == [r for r, v in present if v not in asked]
        assert rows(each, ">=", asked[0]) == [r for r, v in present if v >= asked[0]]
    description = written(index).meta["penstock"]
    assert (description["path"], description["inner"]) == ("/v/0", inner)


def test_a_million_documents() -> None:
    """Every tenth row is missing, null, or of another type in turn; the others have a number."""
    count = 1_000_000
    odd = ["{}", '{"a":null}', '{"a":"x"}', None]
    documents = [odd[n // 10 % 4] if n % 10 == 3 else f'{{"a":{n % 700}}}' for n in range(count)]
    index = build_index("json", pa.array(documents), path="/a", value_type="int64")
    numbers = np.arange(count)
    there = numbers % 10 != 3
    for each in (index, load_index(written(index))):
        for op, value, wanted in (
            ("=", 77, there & (numbers % 700 == 77)),
            ("<", 5, there & (numbers % 700 < 5)),
            ("not_in", [1, 2], there & ~np.isin(numbers % 700, [1, 2])),
            ("is_null", None, ~there),
            ("not_exists", None, ~there & (numbers // 10 % 4 == 0)),
            ("is_json_null", None, ~there & (numbers // 10 % 4 == 1)),
            ("is_other_type", None, ~there & (numbers // 10 % 4 == 2)),
        ):
            found = np.frombuffer(each.query(op, value).to_array(), np.uint32)
            assert np.array_equal(found, np.flatnonzero(wanted)), op


def test_a_column_of_arrows_json_type() -> None:
    texts = pa.array(['{"a": 2.5}', None, "{}"])
    for array in (
        pa.ExtensionArray.from_storage(pa.json_(), texts),
        pa.chunked_array([texts[:1], texts[1:]]),
        texts.cast(pa.large_string()),
        texts.cast(pa.string_view()),
    ):
        index = build_index("json", array, path=["a"], value_type=pa.float32())
        assert rows(index, "<", math.inf) == [0]
        assert rows(index, "not_exists") == [2]
    assert build_index("json", pa.array([], pa.string()), path="", value_type="bool").rows == 0


# --- damage --------------------------------------------------------------------------------


def test_damaged_entries_are_named() -> None:
    texts = pa.array(['{"a": 1}', None, "{}", '{"a": null}', '{"a": "x"}'])
    good = written(build_index("json", texts, path="/a", value_type="int64", inner="stlsort"))

    def listing(*numbers: int) -> bytes:
        return np.array(numbers, "<u8").tobytes()

    described = good.meta["penstock"]
    bad = {
        "disagree": good.replaced(**{NON_EXIST: None}),
        "has_non_exist and": good.with_meta(has_non_exist=1),
        "ascending": good.replaced(**{NON_EXIST: listing(2, 1)}),
        "elsewhere": good.replaced(**{NON_EXIST: listing(0, 1)}),
        "not there at all": good.replaced(**{NON_EXIST: listing(1, 5)}),
        "too high": good.replaced(**{NON_EXIST: listing(1, 2**40)}),
        NULL_ROWS: good.replaced(**{NULL_ROWS: listing(3)}),
        OTHER_TYPE: good.replaced(**{OTHER_TYPE: listing(2)}),
        "no array": good.replaced(**{OTHER_TYPE: b"1"}),
        "no kind": good.with_meta(penstock={**described, "inner": "json"}),
        "its path": good.with_meta(penstock={**described, "path": 3}),
    }
    for why, entries in bad.items():
        with pytest.raises(Corruption, match=why):
            load_index(entries)
