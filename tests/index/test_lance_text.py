"""What we read in Lance's full-text index files is what Lance indexed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lance.file import LanceFileReader
from tests.s3_server import S3Server

from penstock.errors import Corruption, InvalidInput, ObjectNotFound
from penstock.index.fst import Fst
from penstock.index.lance_postings import Blobs, decode_postings
from penstock.index.lance_text import LanceTextIndex

PLAIN: dict[str, Any] = {
    "base_tokenizer": "whitespace",
    "stem": False,
    "remove_stop_words": False,
    "lower_case": False,
    "ascii_folding": False,
    "max_token_length": None,
}


def zipf_documents(rng: np.random.Generator, count: int, longest: int = 20) -> list[str]:
    return [
        " ".join(f"w{word}" for word in np.minimum(rng.zipf(1.3, rng.integers(1, longest)), 500))
        for _ in range(count)
    ]


def rows_of(first_id: int, texts: list[str | None] | list[str]) -> pa.Table:
    ids = np.arange(first_id, first_id + len(texts))
    return pa.table({"id": ids, "body": pa.array(texts, pa.string())})


def texts_by_row_id(dataset: lance.LanceDataset) -> dict[int, str | None]:
    table = dataset.to_table(columns=["body"], with_row_id=True)
    row_ids, texts = table["_rowid"].to_pylist(), table["body"].to_pylist()
    return dict(zip(row_ids, texts, strict=True))


def places_of(texts: dict[int, str | None]) -> dict[str, dict[int, list[int]]]:
    places: dict[str, dict[int, list[int]]] = {}
    for row_id, text in texts.items():
        for place, term in enumerate((text or "").split()):
            places.setdefault(term, {}).setdefault(row_id, []).append(place)
    return places


def read_places(
    index: LanceTextIndex, term: str, live: np.ndarray[Any, Any] | None = None
) -> dict[int, list[int]]:
    hits = index.postings(term, positions=True)
    assert hits.positions is not None
    assert hits.bounds is not None
    return {
        int(index.row_ids(np.array([row]))[0]): hits.positions[
            hits.bounds[i] : hits.bounds[i + 1]
        ].tolist()
        for i, row in enumerate(hits.rows.tolist())
        if live is None or live[row]
    }


def stored_fsts(dataset: lance.LanceDataset) -> list[bytes]:
    files = sorted(Path(dataset.uri).glob("_indices/*/part_*_tokens.lance"))
    return [
        LanceFileReader(str(file)).read_all().to_table()["_token_fst_bytes"][0].as_py()
        for file in files
    ]


# --- the term dictionary ---


def test_every_term_of_every_alphabet_is_found_and_no_other(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    alphabets = [range(33, 127), range(0xC0, 0x180), range(0x4E00, 0x4F00), range(0x1F600, 0x1F640)]
    terms = {
        "".join(map(chr, rng.choice(alphabets[rng.integers(4)], rng.integers(1, 9))))
        for _ in range(6000)
    }
    terms |= {chr(code) for code in range(0x100, 0x2000) if chr(code).isalpha()}
    dataset = lance.write_dataset(rows_of(0, [" ".join(sorted(terms))]), tmp_path / "t")
    dataset.create_scalar_index("body", "INVERTED", **PLAIN)
    (data,) = stored_fsts(dataset)

    fst = Fst(data)
    items = list(fst.items())
    assert [term for term, _ in items] == sorted(term.encode() for term in terms)
    assert sorted(value for _, value in items) == list(range(len(fst)))
    assert all(fst.get(term) == value for term, value in items)
    near = {term + "~" for term in terms} | {term[:-1] for term in terms}
    assert all(fst.get(term.encode()) is None for term in near - terms)


def test_a_damaged_dictionary_is_refused(tmp_path: Path) -> None:
    dataset = lance.write_dataset(rows_of(0, ["cold rivers run"]), tmp_path / "t")
    dataset.create_scalar_index("body", "INVERTED")
    (data,) = stored_fsts(dataset)
    for place in range(len(data)):
        damaged = data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]
        with pytest.raises(Corruption):
            Fst(damaged)
    with pytest.raises(Corruption, match="too few"):
        Fst(data[:20])


# --- posting blocks ---


def packed(values: list[int], width: int) -> bytes:
    lanes = [0] * 4
    for i, value in enumerate(values):
        lanes[i % 4] |= value << (i // 4 * width)
    words = [lane >> (32 * word) & 0xFFFFFFFF for word in range(width) for lane in lanes]
    return bytes([width]) + np.array(words, dtype="<u4").tobytes()


def varints(values: list[int]) -> bytes:
    encoded = b""
    for value in values:
        while value >= 0x80:
            encoded += bytes([value & 0x7F | 0x80])
            value >>= 7
        encoded += bytes([value])
    return encoded


def posting_list(documents: list[int], frequencies: list[int]) -> pa.Array:
    blocks = []
    for start in range(0, len(documents), 128):
        block, counts = documents[start : start + 128], frequencies[start : start + 128]
        steps = [0] + [b - a for a, b in pairwise(block)]
        if len(block) < 128:
            blocks.append(b"\0" * 4 + varints([block[0], *steps[1:]]) + varints(counts))
            continue
        first = np.uint32(block[0]).tobytes()
        widths = [max(values).bit_length() for values in (steps, counts)]
        blocks.append(b"\0" * 4 + first + packed(steps, widths[0]) + packed(counts, widths[1]))
    return pa.array(blocks, pa.large_binary())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 700),
    st.integers(0, 22),
    st.integers(0, 31),
    st.integers(0, 2**32),
)
def test_blocks_of_any_width_decode(
    length: int, step_bits: int, frequency_bits: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    steps = rng.integers(1, 2 ** rng.integers(0, step_bits + 1, length) + 1)
    documents = np.cumsum(steps).tolist()
    frequencies = rng.integers(0, 2 ** rng.integers(0, frequency_bits + 1, length)).tolist()
    stored = posting_list(documents, frequencies)
    ((read, counts),) = decode_postings(Blobs(stored), [length], "t")
    assert read.tolist() == documents
    assert counts.tolist() == frequencies
    if length:
        with pytest.raises(Corruption):
            decode_postings(Blobs(stored), [length + 1], "t")


# --- whole indexes ---


def test_postings_of_all_segments_and_partitions(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    texts: list[str | None] = [*zipf_documents(rng, 3000), None, "", "Été 日本 w1"]
    texts[7] = " ".join(["w1"] * 3000 + ["w2"] * 700)
    dataset = lance.write_dataset(rows_of(0, texts), tmp_path / "t", max_rows_per_file=700)
    dataset.create_scalar_index("body", "INVERTED", with_position=True, **PLAIN)
    for first_id, merged in ((4000, 0), (5000, 1)):
        batch = rows_of(first_id, zipf_documents(rng, 400))
        dataset = lance.write_dataset(batch, tmp_path / "t", mode="append")
        dataset.optimize.optimize_indices(num_indices_to_merge=merged)
    dataset = lance.dataset(tmp_path / "t")

    index = LanceTextIndex.open(dataset, "body_idx")
    current = texts_by_row_id(dataset)
    expected = places_of(current)
    lengths = {row_id: len((text or "").split()) for row_id, text in current.items()}
    documents = {row_id: length for row_id, length in lengths.items() if length}
    assert index.statistics() == (len(documents), sum(documents.values()))
    assert index.fragments() == {part.fragment_id for part in dataset.get_fragments()}
    assert index.live_rows(dataset).all()
    assert dict(zip(index.row_ids(), index.document_lengths(), strict=True)) == documents
    asked = np.array([*lengths, 1 << 60], dtype=np.uint64)
    assert index.document_lengths(asked).tolist() == [*lengths.values(), 0]
    for term, places in expected.items():
        assert index.document_frequency(term) == len(places)
        assert read_places(index, term) == places
        plain = index.postings(term)
        assert (np.diff(plain.rows) > 0).all()
        assert (
            plain.frequencies.tolist() == index.postings(term, positions=True).frequencies.tolist()
        )
    assert len(index.postings("absent").rows) == index.document_frequency("absent") == 0


@pytest.mark.parametrize("stable_row_ids", [True, False])
def test_only_the_newest_text_of_a_row_is_live(tmp_path: Path, stable_row_ids: bool) -> None:
    rng = np.random.default_rng(6)
    path = tmp_path / "t"
    dataset = lance.write_dataset(
        rows_of(0, zipf_documents(rng, 900)),
        path,
        max_rows_per_file=300,
        enable_stable_row_ids=stable_row_ids,
    )
    dataset.create_scalar_index("body", "INVERTED", with_position=True, **PLAIN)

    def check() -> None:
        dataset = lance.dataset(path)
        index = LanceTextIndex.open(dataset, "body_idx")
        live = index.live_rows(dataset)
        covered = index.fragments()
        parts = [part for part in dataset.get_fragments() if part.fragment_id in covered]
        table = dataset.scanner(columns=["body"], with_row_id=True, fragments=parts).to_table()
        texts = dict(zip(table["_rowid"].to_pylist(), table["body"].to_pylist(), strict=True))
        expected = places_of(texts)
        assert int(live.sum()) == len(texts)
        for term in ("w1", "w2", "w9", "w100"):
            assert read_places(index, term, live) == expected.get(term, {})

    def upsert(first: int, last: int) -> None:
        merge = lance.dataset(path).merge_insert("id")
        merge.when_matched_update_all().when_not_matched_insert_all().execute(
            rows_of(first, zipf_documents(rng, last - first))
        )
        check()

    def optimize(merged: int) -> None:
        lance.dataset(path).optimize.optimize_indices(num_indices_to_merge=merged)
        check()

    check()
    upsert(100, 250)
    optimize(0)
    upsert(200, 240)
    lance.dataset(path).delete("id % 7 = 0")
    check()
    optimize(1)
    lance.dataset(path).delete("id < 300")
    check()
    upsert(880, 920)
    optimize(9)
    upsert(890, 900)
    optimize(0)
    lance.dataset(path).optimize.compact_files()
    check()


def test_memory_stays_below_the_limit(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    dataset = lance.write_dataset(rows_of(0, zipf_documents(rng, 2000)), tmp_path / "t")
    dataset.create_scalar_index("body", "INVERTED", **PLAIN)
    index = LanceTextIndex.open(dataset, "body_idx", cache_bytes=40_000)
    index.document_lengths()
    index.document_frequency("w1")
    held = index.nbytes
    for term in [f"w{number}" for number in range(1, 100)] * 2:
        index.postings(term)
        assert index.nbytes - held <= 40_000
    assert index.nbytes > held
    assert index.postings("w99") is index.postings("w99")


def test_an_index_on_s3(s3: S3Server) -> None:
    uri = s3.uri("text")
    dataset = lance.write_dataset(
        rows_of(0, ["cold rivers", "warm rivers"]), uri, storage_options=s3.storage_options
    )
    dataset.create_scalar_index("body", "INVERTED", **PLAIN)
    index = LanceTextIndex.open(dataset, "body_idx", s3.storage_options)
    assert index.postings("rivers").rows.tolist() == [0, 1]
    assert index.live_rows(dataset).tolist() == [True, True]


def test_an_empty_index(tmp_path: Path) -> None:
    dataset = lance.write_dataset(rows_of(0, [None, ""]), tmp_path / "t")
    dataset.create_scalar_index("body", "INVERTED", with_position=True)
    index = LanceTextIndex.open(dataset, "body_idx")
    assert index.statistics() == (0, 0)
    assert len(index.postings("w", positions=True).rows) == 0
    assert index.live_rows(dataset).tolist() == []
    assert index.document_lengths(np.array([3], dtype=np.uint64)).tolist() == [0]


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    dataset = lance.write_dataset(rows_of(0, ["cold rivers"] * 3), tmp_path / "t")
    dataset.create_scalar_index("id", "BTREE")
    dataset.create_scalar_index("body", "INVERTED", block_size=256)
    with pytest.raises(InvalidInput, match="no full-text index 'other'"):
        LanceTextIndex.open(dataset, "other")
    with pytest.raises(InvalidInput, match="no full-text index 'id_idx'"):
        LanceTextIndex.open(dataset, "id_idx")
    with pytest.raises(InvalidInput, match="block_size=128"):
        LanceTextIndex.open(dataset, "body_idx")

    dataset.create_scalar_index("body", "INVERTED", replace=True)
    index = LanceTextIndex.open(dataset, "body_idx")
    with pytest.raises(InvalidInput, match="with_position=True"):
        index.postings("cold", positions=True)
    for file in Path(dataset.uri).glob("_indices/*/part_0_invert.lance"):
        file.unlink()
    with pytest.raises(ObjectNotFound, match=r"part_0_invert\.lance is gone"):
        index.postings("cold")
