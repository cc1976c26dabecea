"""The texts of many small sources in one block.

Asking a dozen blocks for a term costs more in calls than in work. A `GroupText` is one block with
the rows of several sources one after the other, so a term is one search for all of them.

A group has every row of its members, superseded ones too: which rows count is told by the view
that searches, so one group serves views of any moment, even those that do not have all of its
members. Sources that come later stay by themselves until there are many; then the smallest blocks
and groups become one, so that a row is copied a few times only, however many sources there were.

Invariants
- A group is only used for a view that has at least half of its rows.
- Groups that no search used lately go first where all of them exceed the limit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.index.text_block import TextBlock, block_of_rows, merge_blocks
from penstock.memwal.text_parts import BlockText, Numbers

MOST_RUNS = 3
"""So many blocks and groups of one kind are asked one by one."""
_WORTH = 2


class GroupText(BlockText):
    """Several sources, whose rows follow each other."""

    def __init__(
        self,
        kind: Hashable,
        block: TextBlock,
        numbers: Numbers | None,
        members: Mapping[Hashable, slice],
    ) -> None:
        super().__init__(block, numbers)
        self.kind = kind
        self.members = members

    def of(self, wanted: set[Hashable]) -> GroupText:
        """The members that are wanted."""
        if wanted.issuperset(self.members):
            return self
        kept = np.zeros(len(self.lengths), dtype=np.bool_)
        members: dict[Hashable, slice] = {}
        first = 0
        for key, rows in self.members.items():
            if key in wanted:
                kept[rows] = True
                members[key] = slice(first, first + rows.stop - rows.start)
                first = members[key].stop
        numbers = None if self.numbers is None else self.numbers[kept]
        return GroupText(self.kind, block_of_rows(self.block, kept), numbers, members)


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A source among the rows of a block or a group."""

    text: BlockText | GroupText
    rows: slice


class TextGroups:
    """The groups of one reader. Safe for many threads."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._groups: list[GroupText] = []
        self._lock = threading.Lock()

    def placed(
        self, kind: Hashable, load: Mapping[Hashable, Callable[[], BlockText | None]]
    ) -> dict[Hashable, Placed]:
        """Where each of these sources is; without those that cannot be loaded.

        `kind` says what can be in one group.
        """
        with self._lock:
            groups, left = self._useful(kind, set(load))
            loose = {key: block for key in load if key in left and (block := load[key]())}
            if len(groups) + len(loose) > MOST_RUNS:
                merged = _merged(kind, groups, loose, set(load))
                if merged is not None:
                    groups = [group for group in groups if not _within(group, merged, load)]
                    groups.append(merged)
            self._keep(groups)
        found: dict[Hashable, Placed] = {}
        for group in groups:
            for key, rows in group.members.items():
                if key in load:
                    found.setdefault(key, Placed(group, rows))
        for key, block in loose.items():
            found.setdefault(key, Placed(block, slice(0, len(block.lengths))))
        return found

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self._groups)

    def _useful(
        self, kind: Hashable, wanted: set[Hashable]
    ) -> tuple[list[GroupText], set[Hashable]]:
        """Groups that are mostly about what is wanted, and what none of them has."""
        found: list[GroupText] = []
        left = set(wanted)
        for group in self._groups:
            if group.kind == kind:
                rows = sum(at.stop - at.start for key, at in group.members.items() if key in left)
                if rows and 2 * rows >= len(group.lengths):
                    found.append(group)
                    left.difference_update(group.members)
        return found, left

    def _keep(self, used: Sequence[GroupText]) -> None:
        others = [group for group in self._groups if group not in used]
        left_bytes = self.limit_bytes - sum(group.nbytes for group in used)
        kept = list(used)
        for group in others:
            left_bytes -= group.nbytes
            # What is in a newer group as well is of no use any more.
            if left_bytes >= 0 and not any(_covers(one, group) for one in used):
                kept.append(group)
        self._groups = kept


def _covers(group: GroupText, other: GroupText) -> bool:
    return group.kind == other.kind and group.members.keys() >= other.members.keys()


def _within(group: GroupText, merged: GroupText, wanted: Mapping[Hashable, object]) -> bool:
    """Whether all that is wanted of a group is in another."""
    return all(key in merged.members for key in group.members if key in wanted)


def _merged(
    kind: Hashable,
    groups: Sequence[GroupText],
    loose: Mapping[Hashable, BlockText],
    wanted: set[Hashable],
) -> GroupText | None:
    """The smallest ones as a new group, and the larger ones where that doubles at most."""
    every: list[GroupText] = list(groups)
    for key, block in loose.items():
        alone = {key: slice(0, len(block.lengths))}
        every.append(GroupText(kind, block.block, block.numbers, alone))
    analyzer = every[-1].block.analyzer
    same = [group for group in every if group.block.analyzer is analyzer]
    same.sort(key=lambda group: len(group.lengths))
    least = max(len(every) - MOST_RUNS + 1, 2)
    chosen: list[GroupText] = []
    rows = 0
    for group in same:
        if len(chosen) >= least and len(group.lengths) > _WORTH * rows:
            break
        chosen.append(group)
        rows += len(group.lengths)
    if len(chosen) < 2:
        return None
    members: dict[Hashable, slice] = {}
    parts: list[GroupText] = []
    first = 0
    for group in chosen:
        part = group.of(wanted - members.keys())
        for key, at in part.members.items():
            members[key] = slice(first + at.start, first + at.stop)
        first += len(part.lengths)
        parts.append(part)
    numbers = None
    if parts[0].numbers is not None:
        numbers = np.concatenate([part.numbers for part in parts if part.numbers is not None])
    return GroupText(kind, merge_blocks([part.block for part in parts]), numbers, members)
