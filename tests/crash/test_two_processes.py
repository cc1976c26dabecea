"""Two processes want one region: each epoch has one owner, and nothing acknowledged is lost."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.crash.child import SHARED_ID
from tests.crash.processes import Child, Nursery, Place
from tests.s3_server import S3Server

CALLS_EACH = 1_000_000
"""Call numbers of one process start here times its own number."""


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "local":
        return Place(str(tmp_path / "lake"))
    s3: S3Server = request.getfixturevalue("s3")
    return Place(s3.uri("fight"), s3.storage_options)


def run_together(
    place: Place, directory: Path, mode: str, *, processes: int = 2, **details: Any
) -> list[list[dict[str, Any]]]:
    """Give several children the same kind of job at the same time; what each of them said."""
    with Nursery(directory, warm=processes - 1) as nursery, ThreadPoolExecutor(processes) as pool:
        children = [nursery.take() for _ in range(processes)]
        for number, child in enumerate(children):
            first_call = (number + 1) * CALLS_EACH
            child.tell(place.job(mode, seed=number, first_call=first_call, **details))
        for child in children:
            assert child.line() == {"kind": "ready"}
        for child in children:
            child.tell("go")
        said = list(pool.map(Child.lines, children))
        assert [child.ended() for child in children] == [0] * processes
        return said


def numbers(said: list[dict[str, Any]], kind: str) -> set[int]:
    return {line["number"] for line in said if line["kind"] == kind}


def test_duel_for_a_region(place: Place, tmp_path: Path) -> None:
    place.create(parts=False, max_memtable_rows=32)
    claims = 25 if place.storage_options is None else 10
    said = run_together(place, tmp_path, "duel", claims=claims)

    owners: dict[int, set[int]] = defaultdict(set)
    acknowledged: dict[int, int] = {}
    for process, lines in enumerate(said):
        for line in lines:
            if line["kind"] == "epoch":
                owners[line["epoch"]].add(process)
                acknowledged[line["number"]] = line["epoch"]
    assert all(len(processes) == 1 for processes in owners.values()), owners
    assert {process for (process,) in owners.values()} == {0, 1}, "both were meant to win at times"

    told = [line["message"] for lines in said for line in lines if line["kind"] == "fenced"]
    assert told, "they were meant to meet"
    for message in told:
        assert "epoch" in message
        assert "open a new writer" in message

    rows = {row["id"]: row["value"] for row in place.open().to_arrow().to_pylist()}
    lost = [number for number in acknowledged if rows.get(number) != f"call {number}"]
    assert not lost
    begun = set().union(*(numbers(lines, "begin") for lines in said))
    assert rows.keys() - {SHARED_ID} <= begun
    # Of the row that all wrote, the last one is there: of the highest epoch, or of a call of
    # unknown fate.
    newest = max(acknowledged, key=lambda number: (acknowledged[number], number))
    unknown = {f"call {number}" for number in begun - acknowledged.keys()}
    assert rows[SHARED_ID] in {f"call {newest}", *unknown}
    assert max(place.epochs().values()) >= max(owners)
    place.check_chains()


@pytest.mark.parametrize("keyed", [True, False], ids=["with a key", "without a key"])
def test_sharing_a_region(place: Place, tmp_path: Path, keyed: bool) -> None:
    place.create(keyed=keyed, parts=False, max_memtable_rows=64)
    calls = 40
    said = run_together(place, tmp_path, "share", calls=calls)
    for lines in said:
        assert len(numbers(lines, "ack")) == calls
    # Each row once: none lost, and none written again by the claim that followed.
    made = set().union(*(numbers(lines, "ack") for lines in said))
    expected = [3 * number + n for number in made for n in range(3)]
    assert sorted(place.open().to_arrow().column("id").to_pylist()) == sorted(expected)
    (epoch,) = place.epochs().values()
    assert epoch > 2, "they were meant to take the region from each other"
    place.check_chains()
