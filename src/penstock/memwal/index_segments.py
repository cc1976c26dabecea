"""The segments that the base table's indexes consist of, as one version of the table has them.

A segment covers some fragments: their rows are found by it. It may hold entries for rows of others,
which it covered once, or was built from before they were lost on the way to its commit. How much
that matters depends on the kind of index. Lance takes the vectors of each segment only for rows of
the fragments which that segment covers. Its text and scalar indexes look rows up by id or address
in all segments alike, whichever covers them now: there an entry with an older value of a row is
taken for true as soon as any segment covers the row. `Ages` says when that can come to pass.

A table compacted with its index remap deferred has, besides, segments with addresses of rows that
have moved, and a system index that tells where to. They are `unmapped`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import lance
from lance.bitmap import Bitmap
from lance.dataset import Index as LanceIndex
from lance.fragment import LanceFragment

from penstock.index.base import SYSTEM_INDEX_PREFIX
from penstock.memwal.row_versions import FIRST_DETACHED
from penstock.memwal.table_versions import last_fragment_id, version_exists
from penstock.storage.objects import ObjectStore

FRAGMENT_REUSE = "__lance_frag_reuse"
_VECTOR_TYPE = "VectorIndexDetails"
_TEXT_TYPE = "InvertedIndexDetails"
_CREATED_AT = "_row_created_at_version"


@dataclass(frozen=True, slots=True)
class Segment:
    uuid: str
    version: int
    """The version of the table that it was built from."""
    fragments: frozenset[int]
    """Those it covers that are still there."""
    unmapped: bool = False


@dataclass(frozen=True, slots=True)
class BaseIndex:
    name: str
    is_vector: bool
    fields: tuple[int, ...]
    segments: tuple[Segment, ...]

    @property
    def covered(self) -> frozenset[int]:
        return frozenset().union(*(segment.fragments for segment in self.segments))


@dataclass(frozen=True, slots=True)
class BaseIndexes:
    """The indexes of one version of the base table."""

    dataset: lance.LanceDataset
    fragments: Mapping[int, LanceFragment]
    by_name: dict[str, BaseIndex]
    reuse: str | None
    """The system index that tells where rows have moved to."""

    @classmethod
    def of(cls, dataset: lance.LanceDataset) -> BaseIndexes:
        fragments = {part.fragment_id: part for part in dataset.get_fragments()}
        described = {index.name: index for index in dataset.describe_indices()}
        reuse, moved, moved_at = None, frozenset[int](), -1
        if FRAGMENT_REUSE in described:
            (segment,) = described[FRAGMENT_REUSE].segments
            reuse, moved = str(segment.uuid), frozenset(segment.fragment_ids)
            moved_at = segment.dataset_version_at_last_update
        found = {}
        for name, index in described.items():
            if name.startswith(SYSTEM_INDEX_PREFIX):
                continue
            segments = []
            for segment in index.segments:
                covered = frozenset(segment.fragment_ids) & fragments.keys()
                version = segment.dataset_version_at_last_update
                unmapped = version <= moved_at and not covered.isdisjoint(moved)
                segments.append(Segment(str(segment.uuid), version, covered, unmapped))
            is_vector = index.type_url.endswith(_VECTOR_TYPE)
            found[name] = BaseIndex(name, is_vector, tuple(index.fields), tuple(segments))
        return cls(dataset, fragments, found, reuse)

    def rows(self, numbers: frozenset[int]) -> int:
        return sum(self.fragments[number].count_rows() for number in numbers)

    def contents(self, number: int, fields: Sequence[int]) -> str:
        """What columns of a fragment are made of; another text if their values may be others."""
        stored = self.fragments[number].metadata.to_json()
        wanted = set(fields)
        files = [file["path"] for file in stored["files"] if wanted.intersection(file["fields"])]
        return json.dumps([files, stored.get("overlays") or []], sort_keys=True)


class Ages:
    """Which rows were there already when a segment was built."""

    def __init__(self, store: ObjectStore, indexes: BaseIndexes) -> None:
        self._store = store
        self._indexes = indexes
        self._oldest_row = cache(self._find_oldest_row)
        self._last_fragment = cache(self._find_last_fragment)

    def may_hold(self, index: BaseIndex, segment: Segment, number: int) -> bool:
        """Whether a segment may have entries that matter for rows of a fragment it does not cover.

        That is so if somebody has updated rows, which keep stable ids, or rewritten a column in
        place, or compacted fragments that were indexed with others that were not. Merged rows are
        new, and are in new fragments.
        """
        if index.is_vector:
            return False
        if self._indexes.dataset.has_stable_row_ids:
            # A row keeps its id, and the version it was created in, wherever it moves.
            return self._oldest_row(number) <= segment.version
        last = self._last_fragment(segment.version)
        if last is not None:
            return number <= last
        # That version was cleaned up. A fragment that came after it has a higher number than any
        # that is covered, and all columns in one file unless one was rewritten.
        stored = self._indexes.fragments[number].metadata.to_json()
        at_first = set(stored["files"][0]["fields"])
        rewritten = bool(stored.get("overlays")) or not at_first.issuperset(index.fields)
        return rewritten or number < max(index.covered, default=-1)

    def _find_oldest_row(self, number: int) -> int:
        """The lowest version that a row of a fragment was created in; 0 if it is not known."""
        fragment = self._indexes.fragments[number]
        scanner = self._indexes.dataset.scanner(columns=[_CREATED_AT], fragments=[fragment])
        oldest = FIRST_DETACHED
        for batch in scanner.to_batches():
            column = batch.column(_CREATED_AT)
            if column.null_count:
                return 0
            versions = column.to_numpy()
            if len(versions):
                oldest = min(oldest, int(versions.min()))
        return oldest

    def _find_last_fragment(self, version: int) -> int | None:
        if not version_exists(self._store, version):
            return None
        return last_fragment_id(self._store, version)


def is_searched(described: Any) -> bool:
    """Whether searches use an index; others are for filters. `described` is Lance's word for it."""
    return str(described.type_url).endswith((_VECTOR_TYPE, _TEXT_TYPE))


def to_remove(name: str, uuid: str) -> LanceIndex:
    """A segment as Lance wants it named to take it out of a version."""
    return LanceIndex(
        uuid=uuid,
        name=name,
        fields=[],
        dataset_version=0,
        fragment_ids=Bitmap(),
        index_version=0,
    )
