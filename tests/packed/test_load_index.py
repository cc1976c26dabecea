"""Loading an index from nothing but its file: which kind it is, and files as once described."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from tests.packed.fixtures import golden, names, spec
from tests.packed.memory_entries import MemoryEntries

from penstock.errors import Corruption, InvalidInput
from penstock.packed import PackedReader, build_index, load_index
from penstock.packed.indexes import kind_of

TYPES = {"float": "float32", "double": "float64"}
INDEXES = [name for prefix in "sbmrf" for name in names(prefix)]
META_ENTRIES = {
    "s_int64_n12_nulls": ("SORT_INDEX_META", {}),
    "ss_mixed": ("STRING_SORT_META", {}),
    "b_string_n60_nullable": ("BITMAP_INDEX_META", {"bitmap_index_data": "BITMAP_INDEX_DATA"}),
    "r_n40_nulls": ("RTREE_META", {}),
    "s_hybrid_int64": ("HYBRID_INDEX_META", {}),
    "m_small": (
        None,
        {"marisa_trie_index": "MARISA_TRIE_INDEX", "marisa_trie_str_ids": "MARISA_STR_IDS"},
    ),
}


def kind_in(said: dict[str, Any]) -> str:
    if "non_exist" in said:
        return "json"
    return "hybrid" if "hybrid_index_type" in said else str(said["index"])


def type_in(said: dict[str, Any]) -> pa.DataType | None:
    named = said.get("type")
    return None if named is None else pa.type_for_alias(TYPES.get(named, named))


@pytest.mark.parametrize("name", INDEXES)
def test_a_golden_file_says_by_its_entries_which_kind_it_is(name: str) -> None:
    said = spec(name)
    with PackedReader.open(golden(name)) as reader:
        assert kind_of(reader) == kind_in(said)
        if type_in(said) not in (None, pa.string()) and "hybrid" not in name:
            with pytest.raises(InvalidInput, match="value_type="):
                load_index(reader)
        index = load_index(reader, type_in(said))
    values = said.get("boxes", said.get("values"))
    assert index.kind == kind_in(said)
    assert index.rows == len(values)
    assert list(index.query("is_null")) == [r for r, v in enumerate(values) if v is None]


def as_once_described(
    entries: MemoryEntries, meta_entry: str | None, renamed: dict[str, str]
) -> Any:
    """The same index, its small facts in an entry of their own and its names in capitals."""
    old = MemoryEntries()
    if meta_entry is not None:
        old.write_entry(meta_entry, json.dumps(dict(entries.meta)).encode())
    for name in entries.names():
        old.write_entry(renamed.get(name, name), bytes(entries.read(name)))
    old.put_meta("index_type", "stlsort")
    old.put_meta("build_id", 12345)
    return old


@pytest.mark.parametrize("name", META_ENTRIES)
def test_files_as_the_first_description_has_them_are_read(name: str) -> None:
    said = spec(name)
    meta_entry, renamed = META_ENTRIES[name]
    written = MemoryEntries()
    with PackedReader.open(golden(name)) as reader:
        index = load_index(reader, type_in(said))
    index.write(written, described=False)
    older = load_index(as_once_described(written, meta_entry, renamed), type_in(said))
    again = MemoryEntries()
    older.write(again, described=False)
    assert type(older) is type(index)
    assert (again.entries, again.meta) == (written.entries, written.meta)


@pytest.mark.parametrize("kind", ["inverted", "ngram", "json"])
def test_indexes_over_tantivy_are_read_from_such_files_too(kind: str) -> None:
    texts = pa.array(["river", None, "lake", "river"])
    if kind == "json":
        documents = pa.array(['{"a": "river"}', "{}", '{"a": "lake"}', '{"a": "river"}'])
        index = build_index(kind, documents, path="/a", value_type="string", inner="inverted")
    else:
        index = build_index(kind, texts)
    written = MemoryEntries()
    index.write(written)
    older = load_index(as_once_described(written, "TANTIVY_META", {}))
    assert older.kind == kind
    assert list(older.query("=", "river")) == [0, 3]
    assert list(older.query("is_null")) == [1]


def test_what_is_no_index_is_refused() -> None:
    for entries, meta in (({}, {}), ({"data": b"x"}, {}), ({"SORT_INDEX_META": b"no"}, {})):
        written = MemoryEntries()
        for name, data in entries.items():
            written.write_entry(name, data)
        for key, value in meta.items():
            written.put_meta(key, value)
        with pytest.raises(Corruption):
            load_index(written, pa.int64())
