"""The frame of a packed file, byte for byte, and what a directory may not say."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.packed.fixtures import contents, golden, names, pack, spec
from tests.packed.mock_cipher import MockCipher

from penstock.errors import Corruption, InvalidInput
from penstock.packed.crc import combine, crc32c
from penstock.packed.layout import (
    META,
    Directory,
    EntryInfo,
    Footer,
    canonical_json,
    decode_directory,
    decode_footer,
    directory_digest,
    encode_directory,
    encode_footer,
    slice_label,
)

WHERE = "shelf.v3"


def taken_apart(data: bytes) -> tuple[Footer, Directory]:
    footer = decode_footer(data[-32:], len(data), WHERE)
    text = data[len(data) - 32 - footer.directory_bytes : len(data) - 32]
    return footer, decode_directory(text, footer, len(data), WHERE)


@pytest.mark.parametrize("name", names(""))
def test_every_golden_directory_and_footer_is_encoded_as_it_was_written(name: str) -> None:
    data = golden(name)
    footer, directory = taken_apart(data)
    text = encode_directory(directory)
    assert text + encode_footer(footer.meta_bytes, len(text)) == data[-32 - len(text) :]
    assert directory.entries[-1].name == META


@pytest.mark.parametrize("name", [*names("c"), *names("e")])
def test_the_tests_own_packing_gives_the_golden_files(name: str) -> None:
    described = spec(name)
    encrypted = described.get("encrypt")
    cipher = MockCipher(encrypted["key"], encrypted["ez_id"]) if encrypted else None
    meta = canonical_json(described.get("meta", {}))
    slice_size = encrypted["slice_size"] if encrypted else 0
    assert pack(contents(described), meta, cipher, slice_size) == golden(name)


texts = st.text(max_size=12).filter(lambda name: name != META)


@given(
    entries=st.dictionaries(texts, st.binary(max_size=9000), max_size=6),
    meta=st.binary(max_size=5000),
    encrypted=st.booleans(),
)
def test_a_directory_survives_the_way_to_bytes_and_back(
    entries: dict[str, bytes], meta: bytes, encrypted: bool
) -> None:
    data = pack(entries, meta, MockCipher() if encrypted else None)
    footer, directory = taken_apart(data)
    assert encode_directory(directory) == data[-32 - footer.directory_bytes : -32]
    found = {e.name: (e.size, e.crc32) for e in directory.entries}
    assert found == {n: (len(d), crc32c(d)) for n, d in [*entries.items(), (META, meta)]}
    assert (directory.encryption is not None) == encrypted


def lied(change: Any, *, encrypted: bool = False) -> None:
    """Decode the directory of a sound file after `change` was made to its JSON."""
    entries = {"a": b"x" * 5000, "b": b"y" * 100, "empty": b""}
    data = pack(entries, b"{}", MockCipher() if encrypted else None)
    footer, _ = taken_apart(data)
    table = json.loads(data[-32 - footer.directory_bytes : -32])
    change(table, table["entries"])
    text = json.dumps(table).encode()
    file_bytes = len(data) - footer.directory_bytes + len(text)
    decode_directory(text, Footer(footer.meta_bytes, len(text)), file_bytes, WHERE)


def test_lies_of_a_plain_directory_are_found() -> None:
    lied(lambda table, entries: entries.reverse())
    lied(lambda table, entries: table.update(unknown={"deep": [1]}))
    for change, said in [
        (lambda t, e: e[1].update(offset=4999), "'a' and 'b' share bytes"),
        (lambda t, e: e[1].update(size=103), "data has only 5102 bytes"),
        (lambda t, e: e[1].update(offset=1 << 62), "data has only 5102 bytes"),
        (lambda t, e: e[1].update(offset=1 << 63), "not a whole number of 63 bits"),
        (lambda t, e: e[2].update(offset=6000), "data has only 5102 bytes"),
        (lambda t, e: e[1].update(size=True), "not a whole number"),
        (lambda t, e: e[1].update(name="a"), "lists 'a' twice"),
        (lambda t, e: e[1].update(name=None), "has no name"),
        (lambda t, e: e[1].update(name="\ud800"), "has no name"),
        (lambda t, e: e[1].update(crc32="123456789"), "8 hexadecimal digits"),
        (lambda t, e: e[1].update(crc32=" 1234567"), "8 hexadecimal digits"),
        (lambda t, e: e[3].update(size=1), "2 by the footer"),
        (lambda t, e: e.pop(), "does not list __meta__"),
        (lambda t, e: e.append(7), "is no mapping"),
        (lambda t, e: t.update(entries={}), "no list of entries"),
        (lambda t, e: t.update(__edek__=None), "must be text"),
        (lambda t, e: t.update(more=float("nan")), "is not JSON"),
    ]:
        with pytest.raises(Corruption, match=said) as caught:
            lied(change)
        assert WHERE in str(caught.value)
        assert "restore it from a copy or write it again" in str(caught.value)


def test_lies_of_an_encrypted_directory_are_found() -> None:
    lied(lambda table, entries: entries.reverse(), encrypted=True)
    for change, said in [
        (lambda t, e: e[0]["slices"].pop(), "does not list the 2 slices"),
        (lambda t, e: e[0]["slices"].append(e[0]["slices"][0]), "does not list the 2 slices"),
        (lambda t, e: e[0]["slices"].reverse(), "is too short"),
        (lambda t, e: e[0].update(slices=[1, 2]), "is no mapping"),
        (lambda t, e: e[0].update(slices={"0": 1, "1": 2}), "does not list"),
        (lambda t, e: e[0].update(original_size=1 << 62), "does not list"),
        (lambda t, e: e[1]["slices"][0].update(offset=0), "share bytes"),
        (lambda t, e: e[0]["slices"][1].update(offset=0), "'a' and 'a' share bytes"),
        (lambda t, e: e[2].update(slices=[{"offset": 0, "size": 4}]), "list the 0 slices"),
        (lambda t, e: t.update(slice_size=4096.0), "not a whole number"),
        (lambda t, e: t.pop("__edek__"), "not a whole number"),
    ]:
        with pytest.raises(Corruption, match=said):
            lied(change, encrypted=True)


def test_json_that_would_exhaust_the_reader_is_refused() -> None:
    footer = Footer(0, 1 << 20)
    for text in (b"[" * (1 << 20), b'{"entries":' * (1 << 16), b"1" * (1 << 20), b'"\xff"'):
        with pytest.raises(Corruption, match="is not JSON"):
            decode_directory(text, footer, 1 << 30, WHERE)


def test_footers_that_cannot_be() -> None:
    assert encode_footer(1, 2) == struct.pack("<H22xII", 3, 1, 2)
    with pytest.raises(InvalidInput, match="32 bits"):
        encode_footer(1 << 32, 2)
    for meta_bytes, directory_bytes, said in [
        (0, 0, "no bytes"),
        (10, 1 << 31, "do not fit"),
        (1 << 31, 10, "do not fit"),
        (50, 11, "do not fit"),
    ]:
        with pytest.raises(Corruption, match=said):
            decode_footer(encode_footer(meta_bytes, directory_bytes), 100, WHERE)
    assert decode_footer(encode_footer(50, 10), 100, WHERE) == Footer(50, 10)
    with pytest.raises(Corruption, match="more than the"):
        decode_footer(encode_footer(0, 65 << 20), 1 << 40, WHERE)


def test_what_json_cannot_hold_is_the_callers_mistake() -> None:
    for value in ({"a": float("inf")}, {"a": "\ud800"}, {"a": object()}, {1: 2, "b": 3}):
        with pytest.raises(InvalidInput, match="cannot be written as JSON"):
            canonical_json(value)


def test_labels_and_digest_tell_everything_apart() -> None:
    labels = [
        slice_label(name, number, digest)
        for name in ("", "a", "a\0", "ab", META)
        for number in (0, 1, 256, 1 << 40)
        for digest in (b"", b"b", b"\0")
    ]
    assert len(set(labels)) == len(labels)

    entries = taken_apart(golden("e03_multi_entries_exact_slice_and_empty"))[1].entries
    plain = directory_digest(entries, 5, 4096, "1")
    assert plain == directory_digest(entries[:-1], 5, 4096, "1")
    changed = [
        directory_digest(entries, 6, 4096, "1"),
        directory_digest(entries, 5, 8192, "1"),
        directory_digest(entries, 5, 4096, "2"),
        directory_digest(entries[1:], 5, 4096, "1"),
        directory_digest((entries[1], entries[0], *entries[2:]), 5, 4096, "1"),
        *(
            directory_digest((*entries[:i], other, *entries[i + 1 :]), 5, 4096, "1")
            for i, e in enumerate(entries[:-1])
            for other in (
                EntryInfo(e.name + "x", e.size, e.crc32, e.slices),
                EntryInfo(e.name, e.size + 1, e.crc32, e.slices),
                EntryInfo(e.name, e.size, e.crc32 ^ 1, e.slices),
                EntryInfo(e.name, e.size, e.crc32, e.slices[1:] if e.slices else e.slices * 2),
            )
            if other != e
        ),
    ]
    assert len({plain, *changed}) == 1 + len(changed)


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_crcs_of_stretches_join_to_the_crc_of_the_whole(parts: list[bytes]) -> None:
    joined = 0
    for part in parts:
        joined = combine(joined, crc32c(part), len(part))
    assert joined == crc32c(b"".join(parts))
    assert crc32c(b"123456789") == 0xE3069283
