"""Whether everything that readers of a crowded table were told was true when they were told it.

A call changes rows of one or more parts, and what it does to a part is atomic. The calls of one
writer on one part follow each other, so whatever is read of its keys there must be what they were
behind some number of calls: no fewer than were acknowledged when the read began, no more than were
begun when it ended, and no fewer than the same reader has seen before. Between parts, and between
writers, there is no such order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from tests.crash.crowd_events import RETAIN_SECONDS, Count, Event, Pinned, Read, Write
from tests.crash.crowd_rows import IDS, KEYS, PARTS, WRITERS, Seen, codes_of, distances

_CLOCK_SECONDS = 0.05
"""Files have the time of the kernel's last tick."""

Group = tuple[int, int]
"""Writer and part."""


class _History:
    """What the keys of a writer in a part were behind each of its calls."""

    def __init__(self, writer: int, part: int, writes: Iterable[Write]) -> None:
        self.codes = codes_of(writer, part)
        self.writes: list[Write] = []
        place = {int(code): n for n, code in enumerate(self.codes)}
        states = [np.ones(len(self.codes), dtype=np.int64)]
        began, ended = [], []
        for one in writes:
            mine = [place[int(code)] for code in one.codes if int(code) in place]
            if not mine:
                continue
            state = states[-1].copy()
            state[mine] = 0 if one.deletes else one.call
            states.append(state)
            self.writes.append(one)
            began.append(one.began)
            ended.append(one.ended)
        self.states = np.array(states)
        self._began, self._ended = np.array(began), np.array(ended)

    def calls(self, began: float, ended: float) -> tuple[int, int]:
        """How many calls a read must have seen that began and ended then, and how many it may."""
        least = int(np.searchsorted(self._ended, began, side="right"))
        return least, int(np.searchsorted(self._began, ended, side="right"))

    def fitting(self, read: Read, least: int, most: int) -> int | None:
        """The first number of calls in that range behind which the read was right."""
        asked = np.isin(self.codes, read.asked)
        if not asked.any():
            return least
        first, last = read.calls
        wanted = self.states[least : most + 1, asked]
        wanted = np.where((wanted >= first) & (wanted <= last), wanted, 0)
        right = (wanted == read.seen[self.codes[asked]]).all(axis=1)
        return least + int(np.argmax(right)) if right.any() else None


@dataclass(slots=True)
class Judge:
    events: Sequence[Event]
    histories: dict[Group, _History] = field(init=False)
    judged: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        writes: dict[int, list[Write]] = defaultdict(list)
        for event in self.events:
            if isinstance(event, Write):
                writes[event.writer].append(event)
        self.histories = {
            (writer, part): _History(writer, part, sorted(writes[writer], key=lambda w: w.call))
            for writer in range(WRITERS)
            for part in range(PARTS)
        }

    @property
    def last(self) -> Seen:
        """What the table holds when all calls have returned."""
        seen = np.zeros(KEYS, dtype=np.int64)
        for history in self.histories.values():
            seen[history.codes] = history.states[-1]
        return seen

    def judge(self) -> None:
        reads: dict[tuple[str, str], list[Read]] = defaultdict(list)
        for event in self.events:
            if isinstance(event, Read):
                reads[event.reader, event.stamp].append(event)
                self.judged[event.kind] += 1
            elif isinstance(event, Count):
                self._count(event)
                self.judged["count"] += 1
            elif isinstance(event, Pinned):
                self._pinned(event)
        for one_after_the_other in reads.values():
            known = dict.fromkeys(self.histories, 0)
            for read in sorted(one_after_the_other, key=lambda read: read.began):
                if read.nearest is not None and int(np.count_nonzero(read.seen)) >= read.nearest:
                    self._nearest(read, known)
                else:
                    self._complete(read, known)

    def _complete(self, read: Read, known: dict[Group, int]) -> None:
        """Every row that was asked for was found."""
        for group, history in self.histories.items():
            least, most = history.calls(read.began, read.ended)
            least = max(known[group], least if read.stamp == "now" else 0)
            found = history.fitting(read, least, most)
            if found is None:
                raise AssertionError(self._account(read, group, least, most))
            known[group] = found

    def _nearest(self, read: Read, known: dict[Group, int]) -> None:
        """Rows that were found were there, and nearer ones that were there all the time, too."""
        codes = np.flatnonzero(read.seen)
        farthest = distances(codes, read.seen[codes]).max()
        for group, history in self.histories.items():
            least, most = history.calls(read.began, read.ended)
            least = max(known[group], least)
            states = history.states[least : most + 1]
            seen = read.seen[history.codes]
            legal = (states == seen).any(axis=0) | (seen == 0)
            steady = (states == states[0]).all(axis=0) & (states[0] != 0) & (seen == 0)
            nearer = distances(history.codes, states[0]) < farthest * (1 - 1e-5)
            if not legal.all() or (steady & nearer).any():
                raise AssertionError(self._account(read, group, least, most))

    def _count(self, count: Count) -> None:
        fewest = most = 0
        for history in self.histories.values():
            first, last = history.calls(count.began, count.ended)
            rows = np.count_nonzero(history.states[first : last + 1], axis=1)
            fewest, most = fewest + int(rows.min()), most + int(rows.max())
        assert fewest <= count.rows <= most, f"{count}, but there were {fewest} to {most}"

    def _pinned(self, pinned: Pinned) -> None:
        for ended, seen in zip(pinned.ended, pinned.seen, strict=True):
            if seen is None:
                late = ended - pinned.known
                assert late > RETAIN_SECONDS - _CLOCK_SECONDS, f"refused after {late:.3f} s"
                self.judged["refused"] += 1
        first, again = pinned.seen
        if first is None or again is None:
            return
        self.judged["pinned"] += 1
        changed = np.flatnonzero(first != again)
        assert not len(changed), (
            f"a version changed: keys {changed.tolist()} were of calls {first[changed].tolist()} "
            f"and then of {again[changed].tolist()}, {pinned.ended[0] - pinned.known:.3f} and "
            f"{pinned.ended[1] - pinned.known:.3f} s after it was the newest"
        )

    def _account(self, read: Read, group: Group, least: int, most: int) -> str:
        history = self.histories[group]
        states = history.states[least : most + 1]
        odd = [
            f"id {code % IDS}: found {seen or None}, was {sorted(set(was.tolist()))}"
            for code, seen, was in zip(
                history.codes.tolist(), read.seen[history.codes].tolist(), states.T, strict=True
            )
            if code in read.asked and not (was == seen).all()
        ]
        made = [f"{w.call}, {w.kind}" for w in history.writes[max(least - 1, 0) : most]]
        return (
            f"{read.reader}, {read.kind} ({read.stamp}) from {read.began:.4f} to {read.ended:.4f}: "
            f"what it found of writer {group[0]} in part {group[1]} was not there behind any of "
            f"its calls {least} to {most}; rows of calls {read.calls} were asked for. "
            + "; ".join([*odd, *made])
        )


def assert_equal(found: Seen, expected: Seen, what: str) -> None:
    odd: npt.NDArray[np.int64] = np.flatnonzero(found != expected)
    pairs = [
        f"part {code // IDS} id {code % IDS}: {found[code]} for {expected[code]}"
        for code in odd.tolist()
    ]
    assert not pairs, f"{what}: {'; '.join(pairs)}"
