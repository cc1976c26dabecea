"""What reads that trust a snapshot must show: the base, and the generations the snapshot names.

An eventual read sees the newest version of the base and, in front of it, the generations that the
snapshot in it names and that it has not merged. So three things are kept here as plain dicts: the
rows of the base, of each region the generations that the last snapshot named with their rows, and
how far each region was merged. A version of the table always shows what an eventual read showed
when it was the newest; some are remembered, with the generations they stand on.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tests.model.questions import Key, Row

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
    rows: dict[Key, Row]
    needs: frozenset[GenerationId]


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

    def remember(self, version: int) -> None:
        """Keep what the newest version shows; the oldest ones stay, for they are the test."""
        needs = frozenset(generation.id for generation in self.in_front)
        self.remembered = self.remembered[: MAX_REMEMBERED - 1]
        self.remembered.append(Remembered(version, self.rows, needs))

    def spared(self) -> set[GenerationId]:
        """Generations that some remembered version stands on."""
        return {needed for version in self.remembered for needed in version.needs}

    def forget(self, removed: Iterable[GenerationId]) -> list[Remembered]:
        """Drop the versions that have lost something, and return them."""
        gone = set(removed)
        lost = [version for version in self.remembered if version.needs & gone]
        self.remembered = [version for version in self.remembered if not version.needs & gone]
        return lost


def after(rows: Mapping[Key, Row], changes: Changes) -> dict[Key, Row]:
    merged = {**rows, **changes}
    return {key: row for key, row in merged.items() if row is not None}
