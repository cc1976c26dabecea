"""What one reader keeps of texts between searches, and which of their rows are live in a view.

Kept, each with a limit: the base's index as far as it was read; the texts of generations and of
base fragments that the index does not cover, tokenised once with the index's own tokenizer; the
index of each MemTable that has none of its own. Generations that do not fit are read through the
index they were flushed with, or else tokenised for every query. Which ones these are depends on
sizes only, so that a search never drives out what the next one needs.

Scores must be those of the merged table, so statistics count live rows only. A `Standing` says of
every source which rows are live, how many documents and tokens these have, and answers for a term
how many of them have it. What the base's index and the generations decide is worked out once; rows
in memory are a small correction; and while nothing is written the whole of it is used again.

Invariant: a `Standing` is only used for a view of the same base version, generations and rows.
"""

from __future__ import annotations

import itertools
import json
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.errors import InvalidInput
from penstock.index.base import SYSTEM_INDEX_PREFIX, IndexSpec, load_index_specs
from penstock.index.text import VOCABULARY_LIMIT, TextAnalyzer, TextIndex
from penstock.index.text_block import build_block
from penstock.memwal.cache import ByteCache, FewCache
from penstock.memwal.fragments import contents
from penstock.memwal.index_choice import chosen_index
from penstock.memwal.memtable import MemTable
from penstock.memwal.sources import FreshSource, GenerationSource, MemTableSource, StaleView
from penstock.memwal.text_group import GroupText, Placed, TextGroups
from penstock.memwal.text_parts import (
    BlockText,
    GrowingText,
    IndexedText,
    Numbers,
    StreamedText,
    TextPart,
    Texts,
    fragment_row_ids,
    fragment_texts,
    generation_texts,
    open_index,
)

if TYPE_CHECKING:
    from penstock.memwal.view import View

TEXT_CACHE_BYTES = 256 << 20
"""Tokenised generations and fragments, once for those by themselves and once for groups."""
INDEX_CACHE_BYTES = 1024 << 20
"""Indexes of the base and of generations, with the postings read from them."""
COUNTED_CACHE_BYTES = 128 << 20
"""Which rows of an index are live, a byte each."""
_POSTINGS_CACHE_BYTES = 64 << 20
_STANDINGS = 4
_KNOWN = 64
_GUESSED_ROW_BYTES = 256
_NOT_TOKENIZER = ("block_size", "document_granularity", "lance_tokenizer")


@dataclass(frozen=True, slots=True, eq=False)
class TextColumn:
    """A column with a full-text index, as of a state of that index."""

    name: str
    field_id: int
    spec: IndexSpec
    tokenizer: str
    """The parameters that decide the terms of a text, as text."""
    key: Hashable
    text: IndexedText
    encoder: TextIndex

    @property
    def with_positions(self) -> bool:
        return self.text.index.with_positions

    @property
    def nbytes(self) -> int:
        return self.text.nbytes


class TextMemory:
    """One for each reader. Safe for many threads."""

    def __init__(self) -> None:
        self._blocks: ByteCache[BlockText] = ByteCache(TEXT_CACHE_BYTES, "texts")
        self._groups = TextGroups(TEXT_CACHE_BYTES)
        self._columns: ByteCache[TextColumn] = ByteCache(INDEX_CACHE_BYTES, "text indexes")
        self._large: ByteCache[IndexedText | StreamedText] = ByteCache(
            INDEX_CACHE_BYTES, "text indexes"
        )
        self._described: FewCache[dict[str, tuple[str, Hashable]]] = FewCache(_KNOWN)
        self._analyzers: FewCache[TextAnalyzer] = FewCache(_KNOWN)
        self._sizes: FewCache[list[int]] = FewCache(1 << 16)
        self._growing: weakref.WeakKeyDictionary[MemTable, GrowingTexts] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()
        self.standings: FewCache[Any] = FewCache(_STANDINGS)
        self.counted: ByteCache[Any] = ByteCache(COUNTED_CACHE_BYTES, "text counts")
        """What `text_standing` worked out for base versions and generations."""

    # --- columns ---

    def columns(self, view: View) -> list[str]:
        """The columns that have a full-text index."""
        return [name for name in view.shape.schema.names if name in self._indexes(view)]

    def column(self, view: View, name: str) -> TextColumn:
        if name not in view.shape.schema.names:
            raise InvalidInput(
                f"no column {name!r}; the table has {', '.join(view.shape.schema.names)}"
            )
        found = self._indexes(view).get(name)
        if found is None:
            raise InvalidInput(
                f"column {name!r} has no full-text index; columns that have one: "
                f"{', '.join(self.columns(view)) or 'none'}; create one with "
                f'create_index({name!r}, "fts")'
            )
        field_id = view.shape.field_ids[name]
        key = (field_id, *found, name)
        return self._columns.get(key, lambda: self._open(view, name, field_id, key))

    def _indexes(self, view: View) -> dict[str, tuple[str, Hashable]]:
        """Of each column with an index the name of that and its segments.

        A segment may keep its name and cover fewer fragments, after a column was rewritten.
        """

        def describe() -> dict[str, tuple[str, Hashable]]:
            found: dict[str, dict[str, Hashable]] = {}
            for index in view.base.dataset.describe_indices():
                fields = list(index.field_names)
                if index.name.startswith(SYSTEM_INDEX_PREFIX) or len(fields) != 1:
                    continue
                if index.type_url.endswith("InvertedIndexDetails"):
                    segments = tuple(
                        (str(segment.uuid), frozenset(segment.fragment_ids))
                        for segment in index.segments
                    )
                    found.setdefault(fields[0], {})[index.name] = segments
            chosen = {
                column: chosen_index(view.base.details, view.shape.field_ids[column], list(by_name))
                for column, by_name in found.items()
                if column in view.shape.field_ids
            }
            return {column: (name, found[column][name]) for column, name in chosen.items()}

        return self._described.get(view.base.version, describe)

    def _open(self, view: View, name: str, field_id: int, key: Any) -> TextColumn:
        dataset = view.base.dataset
        (spec,) = load_index_specs(dataset, [key[1]])
        tokenizer = tokenizer_of(spec.text or {})
        index = open_index(dataset, spec.name, _POSTINGS_CACHE_BYTES)
        encoder = TextIndex(spec, self._analyzer(tokenizer, spec))
        return TextColumn(name, field_id, spec, tokenizer, key, IndexedText(index), encoder)

    def _analyzer(self, tokenizer: str, spec: IndexSpec) -> TextAnalyzer:
        for turn in itertools.count():
            known = self._analyzers.get((tokenizer, turn), lambda: TextAnalyzer(spec.text or {}))
            if known.vocabulary_size <= VOCABULARY_LIMIT:
                return known
        raise AssertionError("unreachable")

    # --- sources ---

    def state(self, source: FreshSource) -> Hashable:
        """What tells the rows of a source from those of any other, or of its own later."""
        if isinstance(source, GenerationSource):
            return (source.region_id, source.path)
        return (self._texts_of(source.memtable).serial, source.rows)

    def memtable(self, view: View, source: MemTableSource, column: TextColumn) -> TextPart:
        memtable = source.memtable
        live = memtable.indexes.by_name.get(column.spec.name)
        if (
            isinstance(live, TextIndex)
            and live.column == column.name
            and memtable.shape.field_ids.get(column.name) == column.field_id
            and tokenizer_of(live.params) == column.tokenizer
            and memtable.fully_indexed
            and len(live) >= source.rows
        ):
            return GrowingText(live, source.rows)
        return GrowingText(self._texts_of(memtable).index(view, source, column), source.rows)

    def _texts_of(self, memtable: MemTable) -> GrowingTexts:
        with self._lock:
            known = self._growing.get(memtable)
            if known is None:
                known = self._growing[memtable] = GrowingTexts()
            return known

    def stored(
        self, view: View, column: TextColumn, fragments: Sequence[Any]
    ) -> list[Placed | IndexedText | StreamedText]:
        """The texts of the view's generations, in order, and then of fragments of the base."""
        generations = [s for s in view.sources if isinstance(s, GenerationSource)]
        items = [_of_generation(view, source, column) for source in generations]
        items += [_of_fragment(view, fragment, column) for fragment in fragments]
        left_bytes = [self._blocks.limit_bytes]
        kept: dict[str, dict[Hashable, Callable[[], BlockText | None]]] = {}
        sized = [(self._size(item)[0], number) for number, item in enumerate(items)]
        for size_bytes, number in sorted(sized):
            if size_bytes > left_bytes[0]:
                break
            left_bytes[0] -= size_bytes
            item = items[number]
            load = partial(self._fitting, item, column, left_bytes)
            kept.setdefault(item.kind, {})[item.key] = load
        found: dict[Hashable, Placed] = {}
        for kind, loads in kept.items():
            group_key = (kind, column.field_id, column.tokenizer)
            in_order = {item.key: loads[item.key] for item in items if item.key in loads}
            found.update(self._groups.placed(group_key, in_order))
        for key, placed in found.items():
            if isinstance(placed.text, GroupText):
                self._blocks.discard(key)
        return [
            found.get(item.key) or self._large.get(item.key, partial(_opened, item, column))
            for item in items
        ]

    def _size(self, item: _Stored) -> list[int]:
        return self._sizes.get(item.key, lambda: [item.rows * _GUESSED_ROW_BYTES])

    def _fitting(
        self, item: _Stored, column: TextColumn, left_bytes: list[int]
    ) -> BlockText | None:
        """A block that was thought to fit, unless it turns out that it does not."""
        guessed_bytes = self._size(item)[0]
        block = self._block(item, column)
        left_bytes[0] += guessed_bytes - self._size(item)[0]
        return None if left_bytes[0] < 0 else block

    def _block(self, item: _Stored, column: TextColumn) -> BlockText | None:
        """The texts of something, or None if they turn out too large to be kept."""

        def make() -> BlockText:
            limit_bytes = self._blocks.limit_bytes
            numbers = item.numbers()
            rows = item.rows if numbers is None else len(numbers)
            block = build_block(column.encoder, rows, item.read(), limit_bytes=limit_bytes)
            if block is None:
                self._size(item)[0] = limit_bytes + 1
                raise _TooLargeError
            self._size(item)[0] = block.nbytes
            return BlockText(block, numbers)

        try:
            return self._blocks.get(item.key, make)
        except _TooLargeError:
            return None


_serials = itertools.count()


class _TooLargeError(Exception):
    """A block that does not fit in the cache."""


class GrowingTexts:
    """The texts of one MemTable that has no index of its own, as far as searches have asked."""

    def __init__(self) -> None:
        self.serial = next(_serials)
        self._lock = threading.Lock()
        self._indexes: dict[Hashable, TextIndex] = {}

    def index(self, view: View, source: MemTableSource, column: TextColumn) -> TextIndex:
        key = (column.field_id, column.tokenizer)
        with self._lock:
            index = self._indexes.get(key)
            if index is None:
                index = self._indexes[key] = TextIndex(column.spec, column.encoder.analyzer)
            if len(index) < source.rows:
                added = source.memtable.table(source.rows, first=len(index))
                texts = [
                    view.shape.align(batch).column(column.name) for batch in added.to_batches()
                ]
                index.append(index.encode(pa.concat_arrays(texts)), len(index))
        return index


@dataclass(frozen=True, slots=True, eq=False)
class _Stored:
    """Something whose texts can be read again and again."""

    key: Hashable
    rows: int
    read: Callable[[], Texts]
    numbers: Callable[[], Numbers | None]
    generation: GenerationSource | None

    @property
    def kind(self) -> str:
        return "fragment" if self.generation is None else "generation"


def _of_generation(view: View, source: GenerationSource, column: TextColumn) -> _Stored:
    key = (source.region_id, source.path, column.field_id, column.tokenizer)
    rows = sum(fragment.physical_rows for fragment in source.dataset.get_fragments())
    shape = view.shape
    return _Stored(
        key, rows, lambda: generation_texts(shape, source, column.name), lambda: None, source
    )


def _of_fragment(view: View, fragment: Any, column: TextColumn) -> _Stored:
    dataset = view.base.dataset
    return _Stored(
        (contents(fragment), column.field_id, column.tokenizer),
        fragment.count_rows(),
        lambda: fragment_texts(dataset, fragment, column.name),
        lambda: fragment_row_ids(dataset, fragment),
        None,
    )


def _opened(item: _Stored, column: TextColumn) -> IndexedText | StreamedText:
    """Texts that are not kept: by the generation's own index if it can answer."""
    if item.generation is not None:
        dataset = item.generation.dataset
        try:
            (spec,) = load_index_specs(dataset, [column.spec.name])
            same = item.generation.field_id(spec.column) == column.field_id
            if same and tokenizer_of(spec.text or {}) == column.tokenizer:
                return IndexedText(open_index(dataset, spec.name, _POSTINGS_CACHE_BYTES))
        except InvalidInput:
            pass  # it was flushed without this index, or with one of another format
        except (OSError, ValueError) as error:
            raise StaleView(f"generation {item.generation.path} cannot be read: {error}") from error
    streamed = StreamedText(column.encoder, item.rows, item.read)
    streamed.numbers = item.numbers()
    return streamed


def tokenizer_of(params: Any) -> str:
    kept = {name: value for name, value in params.items() if name not in _NOT_TOKENIZER}
    return json.dumps(kept, sort_keys=True, default=str)
