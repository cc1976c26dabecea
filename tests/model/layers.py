"""What reads that trust a snapshot must show: the base, and the generations the snapshot names.

An eventual read sees the newest version of the base and, in front of it, the generations that the
snapshot in it names and that it has not merged. So three things are kept here as plain dicts: the
rows of the base, of each region the generations that the last snapshot named with their rows, and
how far each region was merged. A version of the table always shows what an eventual read showed
when it was the newest; some are remembered, with their columns and the generations they stand on.
Those that are pinned have a tag, and clean-up must keep them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from tests.model.questions import Columns, Key, Row

MAX_REMEMBERED = 4

GenerationId = tuple[uuid.UUID, int]
Changes = Mapping[Key, Row | None]
"""The newest row of each key, None where it was deleted."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A flushed generation that a snapshot names."""

    region_id: uuid.UUID
    spec_id: int
    number: int
    rows: Changes

    @property
    def id(self) -> GenerationId:
        return self.region_id, self.number


@dataclass(frozen=True, slots=True)
class Remembered:
    """A version of the table, what it shows, and the generations without which it cannot."""

    version: int
    columns: Columns
    rows: dict[Key, Row]
    needs: frozenset[GenerationId]
    tag: str | None = None


@dataclass(slots=True)
class Layers:
    base: dict[Key, Row] = field(default_factory=dict)
    named: list[Generation] = field(default_factory=list)
    merged: dict[uuid.UUID, int] = field(default_factory=dict)
    remembered: list[Remembered] = field(default_factory=list)

    @property
    def in_front(self) -> list[Generation]:
        """What the snapshot names and the base does not have, oldest first."""
        ahead = [g for g in self.named if g.number > self.merged.get(g.region_id, 0)]
        return sorted(ahead, key=lambda g: (g.spec_id, g.region_id, g.number))

    @property
    def rows(self) -> dict[Key, Row]:
        """What an eventual read shows."""
        shown = dict(self.base)
        for generation in self.in_front:
            shown = after(shown, generation.rows)
        return shown

    def merge(self, region_id: uuid.UUID, through: int, changes: Changes) -> None:
        self.base = after(self.base, changes)
        self.merged[region_id] = through

    def reshape(self, change: Callable[[Row], Row]) -> None:
        """The columns have changed, in all rows; what is remembered has those of its time."""
        self.base = {key: change(row) for key, row in self.base.items()}
        self.named = [replace(g, rows=reshaped(g.rows, change)) for g in self.named]

    def remember(self, version: int, columns: Columns, tag: str | None) -> list[Remembered]:
        """Keep what the newest version shows; returns what makes room for it.

        The oldest ones stay, for they are the test.
        """
        needs = frozenset(generation.id for generation in self.in_front)
        dropped = self.remembered[MAX_REMEMBERED - 1 :]
        self.remembered = self.remembered[: MAX_REMEMBERED - 1]
        self.remembered.append(Remembered(version, columns, self.rows, needs, tag))
        return dropped

    def spared(self) -> set[GenerationId]:
        """Generations that some remembered version stands on."""
        return {needed for version in self.remembered for needed in version.needs}

    def forget(self, lost: Callable[[Remembered], bool]) -> list[Remembered]:
        """Drop the versions that have lost something, and return them."""
        gone = [version for version in self.remembered if lost(version)]
        self.remembered = [version for version in self.remembered if version not in gone]
        return gone


def reshaped(changes: Changes, change: Callable[[Row], Row]) -> dict[Key, Row | None]:
    return {key: None if row is None else change(row) for key, row in changes.items()}


def after(rows: Mapping[Key, Row], changes: Changes) -> dict[Key, Row]:
    merged = {**rows, **changes}
    return {key: row for key, row in merged.items() if row is not None}
