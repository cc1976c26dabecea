"""The parent's side: children that are kept warm, what they say, and how they are killed."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.crash.ledger import PRIMARY_KEY, SCHEMA, Call, Ledger
from tests.failures.chains import check_chains

import penstock
from penstock.storage.open import open_store
from penstock.table import Table

PROJECT = Path(__file__).parents[2]


class Child:
    """One `tests.crash.child`, started now, and given its job when it is wanted."""

    def __init__(self, errors: Path) -> None:
        self._errors = errors
        with errors.open("ab") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.crash.child"],
                cwd=PROJECT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
            )

    def tell(self, job: Mapping[str, Any] | str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise AssertionError(self._last_words()) from None

    def line(self) -> dict[str, Any] | None:
        """What it says next, or None when it has ended; half a line does not count."""
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        return json.loads(text) if text.endswith("\n") else None

    def lines(self) -> list[dict[str, Any]]:
        """All it still says, to its end."""
        said = []
        while (line := self.line()) is not None:
            said.append(line)
        return said

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    def ended(self) -> int:
        """Its exit status, when it has ended by itself or by a kill."""
        status = self._process.wait()
        assert status in (0, -signal.SIGKILL), self._last_words()
        return status

    def _last_words(self) -> str:
        return f"child {self._process.pid} ended early:\n{self._errors.read_text()[-4000:]}"

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


class Nursery:
    """Starts a child before it is needed, because importing takes longer than a round."""

    def __init__(self, directory: Path, warm: int = 1) -> None:
        self._errors = directory / "children.txt"
        self._children: list[Child] = []
        self._waiting = [self._start() for _ in range(warm)]

    def take(self) -> Child:
        self._waiting.append(self._start())
        return self._waiting.pop(0)

    def _start(self) -> Child:
        child = Child(self._errors)
        self._children.append(child)
        return child

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in self._children:
            child.stop()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a table is, for this process and for its children."""

    uri: str
    storage_options: dict[str, str] | None = None

    def create(self, *, keyed: bool = True, parts: bool = True, **writer_defaults: Any) -> None:
        penstock.connect(self.uri, self.storage_options).create_table(
            "t",
            SCHEMA,
            primary_key=PRIMARY_KEY if keyed else None,
            regions=penstock.identity("part") if parts else None,
            writer_defaults=writer_defaults,
        )

    def open(self) -> Table:
        """A handle that knows nothing but what is stored."""
        return penstock.connect(self.uri, self.storage_options).open_table("t")

    def job(self, mode: str, **details: Any) -> dict[str, Any]:
        return {
            "mode": mode,
            "uri": self.uri,
            "storage_options": self.storage_options,
            **details,
        }

    def epochs(self) -> dict[str, int]:
        return {str(r.region_id): r.writer_epoch for r in self.open().status().regions}

    def check_chains(self) -> None:
        check_chains(open_store(self.uri, self.storage_options).child("t.lance"))


def call_of(line: Mapping[str, Any]) -> Call:
    return Call(line["number"], {(part, i): value for part, i, value in line["changes"]})


@dataclass(frozen=True, slots=True)
class Step:
    """A child's n-th durable step, at which it kills itself: just before it or just after."""

    number: int
    before: bool


def some_kills(count: int, seed: int) -> list[Step | None]:
    """Half of them at random moments (None), half at one of the first durable steps."""
    draw = random.Random(seed)
    return [
        Step(draw.randint(1, 40), draw.random() < 0.5) if kill % 2 else None
        for kill in range(count)
    ]


def survive_kills(
    place: Place, directory: Path, kills: Sequence[Step | None], *, seed: int
) -> None:
    """Kill a child in the middle of writing, again and again, and hold the table against its word.

    All children write to one table, so each also recovers what the one before it left.
    """
    draw = random.Random(seed)
    ledger = Ledger()
    place.create(max_memtable_rows=24)
    first_call, acknowledged = 1, 0
    epochs = place.epochs()
    with Nursery(directory) as nursery:
        for step in kills:
            child = nursery.take()
            job = place.job("crash", seed=draw.randrange(1 << 30), first_call=first_call)
            if step is not None:
                job |= {"die_at": step.number, "die_before": step.before}
            child.tell(job)
            said = listen_and_kill(child, draw) if step is None else []
            said += child.lines()
            assert child.ended() == -signal.SIGKILL
            begun = {line["number"]: call_of(line) for line in said if line["kind"] == "begin"}
            first_call = max([first_call, *begun]) + 1
            finished = [line["number"] for line in said if line["kind"] == "ack"]
            acknowledged += len(finished)
            for number in finished:
                ledger.acknowledged(begun.pop(number))
            for call in begun.values():
                ledger.in_doubt(call)
            ledger.settle(place.open().to_arrow())
            now = place.epochs()
            assert all(now[region] >= epoch for region, epoch in epochs.items())
            assert not finished or sum(now.values()) > sum(epochs.values())
            epochs = now
    assert acknowledged > len(kills)
    place.check_chains()
    # What is left is an ordinary table: all of it can be flushed, and every row stays.
    table = place.open()
    table.flush(recover=True)
    table.close()
    ledger.settle(place.open().to_arrow())


def listen_and_kill(child: Child, draw: random.Random) -> list[dict[str, Any]]:
    """Let a child say a few things, and kill it somewhere in the middle of the next."""
    said = []
    for _ in range(draw.randint(0, 60)):
        line = child.line()
        if line is None:
            child.ended()
        assert line is not None, "the child ended before it was killed"
        said.append(line)
    time.sleep(draw.uniform(0, 0.03))
    child.kill()
    return said
