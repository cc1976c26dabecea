"""Writers, readers and every job of maintenance on one table at once, for a minute and more."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.crash.crowd import Outcome, run_crowd

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


def check(outcome: Outcome) -> None:
    for role in ("write", "read", "merge", "compact", "index", "snap", "collect"):
        assert outcome.work[role] > 0, f"{role} found nothing to do: {outcome}"
    for kind in ("scan", "get_many", "vector", "text", "word", "hybrid", "filter", "pinned"):
        assert outcome.judged[kind] > 0, f"nobody asked for {kind}: {outcome}"


@pytest.mark.parametrize("stable", [True, False], ids=["stable row ids", "addresses"])
def test_everybody_at_once_for_a_minute(tmp_path: Path, stable: bool) -> None:
    check(run_crowd(tmp_path, seconds=60, seed=1 + stable, stable_row_ids=stable))


@pytest.mark.parametrize("seed", range(3))
def test_everybody_at_once_while_some_are_killed(tmp_path: Path, seed: int) -> None:
    check(run_crowd(tmp_path, seconds=60, seed=10 + seed, kills=8, stable_row_ids=seed != 2))
