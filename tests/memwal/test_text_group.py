"""Groups of texts: the same postings as every source by itself, whatever became of the others."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pyarrow as pa
import pytest

from penstock.index.base import IndexSpec
from penstock.index.text import TextIndex
from penstock.index.text_block import build_block
from penstock.memwal.text_group import MOST_RUNS, GroupText, Placed, TextGroups
from penstock.memwal.text_parts import BlockText

WORDS = [f"w{number}" for number in range(12)]


class Sources:
    """Small sources of random texts, some of them empty, which may be read once only."""

    def __init__(self, with_positions: bool, numbered: bool) -> None:
        params = {"base_tokenizer": "simple", "with_position": with_positions}
        self.encoder = TextIndex(IndexSpec("body_idx", "fts", "body", text=params))
        self.random = np.random.default_rng(5)
        self.numbered = numbered
        self.blocks: dict[Hashable, BlockText] = {}
        self.loaded: list[Hashable] = []

    def add(self, key: Hashable, rows: int) -> None:
        texts = [
            " ".join(self.random.choice(WORDS, int(self.random.integers(0, 6))))
            for _ in range(rows)
        ]
        batches = [(pa.array(texts, pa.string()), np.arange(rows))] if rows else []
        block = build_block(self.encoder, rows, batches)
        assert block is not None
        numbers = self.random.integers(0, 1 << 40, rows).astype(np.uint64)
        self.blocks[key] = BlockText(block, numbers if self.numbered else None)

    def load(self, key: Hashable) -> BlockText:
        self.loaded.append(key)
        return self.blocks[key]

    def placed(self, groups: TextGroups, keys: list[Hashable]) -> dict[Hashable, Placed]:
        return groups.placed("generation", {key: lambda key=key: self.load(key) for key in keys})

    def check(self, placed: dict[Hashable, Placed], keys: list[Hashable], places: bool) -> None:
        assert set(placed) == set(keys)
        for key, found in placed.items():
            alone, rows = self.blocks[key], found.rows
            assert np.array_equal(found.text.lengths[rows], alone.lengths)
            if alone.numbers is not None:
                assert found.text.numbers is not None
                assert np.array_equal(found.text.numbers[rows], alone.numbers)
            for term in [*WORDS, "absent"]:
                (ours,) = found.text.postings([term], 7, places)
                (expected,) = alone.postings([term], 7 + rows.start, places)
                if expected is None:
                    assert ours is None or not _inside(ours.rows, rows).any()
                    continue
                assert ours is not None
                here = _inside(ours.rows, rows)
                assert np.array_equal(ours.rows[here], expected.rows)
                assert np.array_equal(ours.frequencies[here], expected.frequencies)
                if places:
                    assert ours.positions is not None
                    assert expected.positions is not None
                    spots = ours.positions[np.repeat(here, ours.frequencies)]
                    assert np.array_equal(spots, expected.positions)


def _inside(rows: np.ndarray, among: slice) -> np.ndarray:
    return (rows >= 7 + among.start) & (rows < 7 + among.stop)


@pytest.mark.parametrize("with_positions", [False, True])
@pytest.mark.parametrize("numbered", [False, True])
def test_sources_come_and_go_and_every_view_finds_its_own(
    with_positions: bool, numbered: bool
) -> None:
    sources = Sources(with_positions, numbered)
    groups = TextGroups(1 << 30)
    views: list[list[Hashable]] = []
    present: list[Hashable] = []
    for number in range(40):
        sources.add(number, int(sources.random.integers(0, 60)) if number % 9 else 0)
        present.append(number)
        if number % 7 == 6:  # the oldest are merged into the base
            del present[: len(present) * 2 // 3]
        views.append(list(present))
        sources.check(sources.placed(groups, present), present, with_positions)
        older = views[int(sources.random.integers(len(views)))]
        sources.check(sources.placed(groups, older), older, with_positions)


def test_few_blocks_are_asked_and_a_block_in_a_group_is_not_loaded_again() -> None:
    sources = Sources(with_positions=True, numbered=False)
    groups = TextGroups(1 << 30)
    keys: list[Hashable] = []
    for number in range(64):
        sources.add(number, 20)
        keys.append(number)
        placed = sources.placed(groups, keys)
        assert len({id(found.text) for found in placed.values()}) <= MOST_RUNS
    # Those that are by themselves are asked for anew each time, and are few.
    assert len(sources.loaded) <= 64 * MOST_RUNS
    assert groups.nbytes < 4 * sum(block.nbytes for block in sources.blocks.values())


def test_groups_stay_below_their_limit_but_for_those_in_use() -> None:
    sources = Sources(with_positions=False, numbered=False)
    groups = TextGroups(0)
    for first in (0, 10, 20):
        keys: list[Hashable] = list(range(first, first + 10))
        for key in keys:
            sources.add(key, 30)
        placed = sources.placed(groups, keys)
        (group,) = {id(found.text): found.text for found in placed.values()}.values()
        assert isinstance(group, GroupText)
        assert groups.nbytes == group.nbytes
