"""Damaged files: what Milvus' reader refuses, or crashes on, is a clear error here."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.packed.fixtures import FIXTURES, pattern
from tests.packed.mock_cipher import MockCipher

from penstock.errors import Corruption
from penstock.packed.reader import PackedReader
from penstock.storage.open import open_store

EXPECTED: dict[str, str] = json.loads((FIXTURES / "bad" / "EXPECTED.json").read_text())
STRICTER = {
    "meta_size_wrong_but_fits": "by the footer",
    "dir_crc_0x_prefix": "8 hexadecimal digits",
    "dup_names_in_dir_last_bad": "twice",
    "entry_float_size": "not a whole number",
}
"""Accepted by Milvus, and refused here: no writer makes such files, so they are damaged."""

META: dict[str, Any] = {"build_id": 42, "index_type": "bitmap"}
OTHER_META: dict[str, Any] = {"meta_empty_bytes": {}, "meta_dup_keys": {"a": 2}}


def everything(reader: PackedReader) -> dict[str, bytes]:
    return {name: bytes(reader.read(name)) for name in reader.names()}


def sources(name: str) -> list[Callable[[], PackedReader]]:
    path = FIXTURES / "bad" / f"{name}.v3"
    store = open_store("memory://")
    store.put("bad.v3", path.read_bytes())
    return [
        lambda: PackedReader.open(path, keys=MockCipher()),
        lambda: PackedReader.open(path.read_bytes(), keys=MockCipher()),
        lambda: PackedReader.from_store(store, "bad.v3", keys=MockCipher()),
    ]


def test_there_is_a_verdict_on_every_bad_file() -> None:
    assert set(EXPECTED) == {path.stem for path in (FIXTURES / "bad").glob("*.v3")}


@pytest.mark.parametrize("name", EXPECTED)
def test_bad_file(name: str) -> None:
    accepted = EXPECTED[name].startswith("ACCEPTED") and name not in STRICTER
    for opened in sources(name):
        if not accepted:
            with pytest.raises(Corruption, match=STRICTER.get(name)) as caught, opened() as r:
                everything(r)
            assert ".v3" in str(caught.value) or "in memory" in str(caught.value)
            continue
        with opened() as reader:
            assert everything(reader) == {"data": pattern(256)}
            if name == "meta_json_array":
                assert bytes(reader.read("__meta__")) == b"[1,2]"
                with pytest.raises(Corruption, match="no object of keys and values"):
                    _ = reader.meta
            else:
                assert reader.meta == OTHER_META.get(name, META)
