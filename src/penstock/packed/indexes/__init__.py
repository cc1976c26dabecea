"""The kinds of packed index, and how a file says which one it holds.

`build_index` makes an index of an Arrow array, `load_index` reads one from a file. Our own files
say in their meta what they hold. Milvus leaves kind and type to the schema of its collection: the
kind is then told by which entries and meta keys there are, and the type must be given.

Early descriptions of the format have the small facts of an index in an entry of its own, such as
`SORT_INDEX_META`, and entry names in capitals. Files like that are read as if they were new ones
(`_Renamed`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import pyarrow as pa

from penstock.errors import Corruption, InvalidInput
from penstock.packed.entries import EntryReader
from penstock.packed.indexes.base import DESCRIPTION, IndexKind, PackedIndex

_MODULES = {
    "bitmap": ("bitmap", "BitmapKind"),
    "fmindex": ("fm", "FmKind"),
    "hybrid": ("hybrid", "HybridKind"),
    "inverted": ("inverted", "InvertedKind"),
    "json": ("json_path", "JsonKind"),
    "marisa": ("marisa", "MarisaKind"),
    "ngram": ("ngram", "NgramKind"),
    "rtree": ("rtree", "RtreeKind"),
    "stlsort": ("stlsort", "StlSortKind"),
}
_SEED_META = (
    "SORT_INDEX_META",
    "BITMAP_INDEX_META",
    "STRING_SORT_META",
    "TANTIVY_META",
    "RTREE_META",
    "HYBRID_INDEX_META",
)
_SEED_NAMES = {
    "BITMAP_INDEX_DATA": "bitmap_index_data",
    "MARISA_TRIE_INDEX": "marisa_trie_index",
    "MARISA_STR_IDS": "marisa_trie_str_ids",
}
_TEXT_KINDS = ("marisa", "ngram", "fmindex")


class _Kinds(Mapping[str, IndexKind]):
    """The kinds by name, each loaded when it is first asked for."""

    def __init__(self) -> None:
        self._loaded: dict[str, IndexKind] = {}

    def __getitem__(self, name: str) -> IndexKind:
        if name not in self._loaded:
            module, kind = _MODULES[name]
            self._loaded[name] = getattr(import_module(f"{__name__}.{module}"), kind)()
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


KINDS: Mapping[str, IndexKind] = _Kinds()


def build_index(kind: str, array: pa.Array | pa.ChunkedArray, **options: Any) -> PackedIndex:
    """Index every row of an array, nulls included.

    Kinds: `stlsort`, `bitmap`, `hybrid`, `marisa`, `inverted`, `ngram`, `rtree`, and `json` with
    `path=` for values inside JSON text. Options depend on the kind.
    """
    if kind not in KINDS:
        raise InvalidInput(f"unknown kind of index {kind!r}; there are: {', '.join(KINDS)}")
    if isinstance(array, pa.ChunkedArray):
        try:
            array = array.combine_chunks()
        except pa.ArrowInvalid as error:
            raise InvalidInput(
                f"a {kind} index takes what fits one array of {array.type}: {error}"
            ) from error
    if not isinstance(array, pa.Array):
        raise InvalidInput(f"an index is built from an Arrow array, not {type(array).__name__}")
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    try:
        return KINDS[kind].build(array, **options)
    except TypeError as error:
        if "unexpected keyword argument" in str(error) or "required keyword" in str(error):
            raise InvalidInput(f"options of a {kind} index: {error}") from error
        raise


def load_index(
    reader: EntryReader, value_type: pa.DataType | None = None, *, kind: str | None = None
) -> PackedIndex:
    """The index in a file; `value_type` and `kind` where the file does not say it itself."""
    reader = _as_new(reader)
    described = reader.meta.get(DESCRIPTION)
    said = described if isinstance(described, Mapping) else {}
    chosen = kind or said.get("kind") or kind_of(reader)
    if chosen not in KINDS:
        raise Corruption(f"the file holds an index of a kind that is not known: {chosen!r}")
    if value_type is not None or "type" not in said:
        return KINDS[chosen].load(reader, value_type or _implied_type(reader, chosen))
    try:
        return KINDS[chosen].load(reader, _said_type(said))
    except InvalidInput as error:
        raise Corruption(f"the file says of itself what cannot be: {error}") from error


def kind_of(reader: EntryReader) -> str:
    """Which kind of index the entries and the meta are those of."""
    meta, names = reader.meta, set(reader.names())
    if "has_non_exist" in meta:
        return "json"
    if isinstance(meta.get("index_type"), int):
        return "hybrid"
    return inner_kind_of(reader, names)


def inner_kind_of(reader: EntryReader, names: set[str] | None = None) -> str:
    """The same, of the index inside a `json` or `hybrid` one."""
    names = set(reader.names()) if names is None else names
    for name, kind in (
        ("bitmap_index_data", "bitmap"),
        ("index_file.bgi", "rtree"),
        ("fm_index.bin", "fmindex"),
        ("marisa_trie_index", "marisa"),
        ("ngram_avg_row_size", "ngram"),
        ("index_data", "stlsort"),
    ):
        if name in names:
            return kind
    if "file_names" in reader.meta:
        return "inverted"
    raise Corruption(
        f"no index is made of the entries {sorted(names)[:10]}; read them by name, or say which "
        "kind of index it is"
    )


def _said_type(said: Mapping[str, Any]) -> pa.DataType:
    text = str(said["type"])
    try:
        if text.startswith("timestamp[") and "tz=" in text:
            unit, zone = text.removeprefix("timestamp[").removesuffix("]").split(", tz=")
            return pa.timestamp(unit, zone)
        return pa.type_for_alias(text)
    except (ValueError, KeyError) as error:
        raise Corruption(f"the meta names a type that is not known: {text!r}") from error


def _implied_type(reader: EntryReader, kind: str) -> pa.DataType:
    if kind in _TEXT_KINDS or (kind in ("stlsort", "hybrid", "json") and "version" in reader.meta):
        return pa.string()
    if kind == "rtree":
        return pa.binary()
    raise InvalidInput(
        f"the file holds a {kind} index and does not say of which type; give value_type="
    )


# --- files as they were once described -------------------------------------------------------


def _as_new(reader: EntryReader) -> EntryReader:
    there = set(reader.names())
    return _Renamed(reader) if there & {*_SEED_META, *_SEED_NAMES} else reader


class _Renamed:
    """A file of the early description, as if it were written today."""

    def __init__(self, reader: EntryReader) -> None:
        self._reader = reader
        self._old = {_SEED_NAMES.get(name, name): name for name in reader.names()}
        self._meta = {k: v for k, v in reader.meta.items() if k != "index_type"}
        for name in _SEED_META:
            if self._old.pop(name, None) is None:
                continue
            try:
                said = json.loads(bytes(reader.read(name)))
            except ValueError as error:
                raise Corruption(f"entry {name!r} is not JSON: {error}") from error
            if not isinstance(said, dict):
                raise Corruption(f"entry {name!r} must be a JSON object")
            self._meta |= said

    @property
    def meta(self) -> Mapping[str, Any]:
        return self._meta

    def names(self) -> Sequence[str]:
        return list(self._old)

    def size(self, name: str) -> int:
        return self._reader.size(self._old.get(name, name))

    def read(self, name: str) -> memoryview:
        return self._reader.read(self._old.get(name, name))

    def read_to_file(self, name: str, path: str | os.PathLike[str]) -> None:
        self._reader.read_to_file(self._old.get(name, name), path)

    def read_to_files(self, paths: Mapping[str, str | os.PathLike[str]]) -> None:
        self._reader.read_to_files({self._old.get(n, n): path for n, path in paths.items()})

    def stream(self, name: str) -> Iterator[memoryview]:
        return self._reader.stream(self._old.get(name, name))
