"""A hundred thousand steps of a table and a dict side by side; each run takes other ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.model.handle import ChildProcess
from tests.model.machine import WALK_STEPS, walk
from tests.model.questions import VARIANTS

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]

STEPS = 100_000
PARTS = 5
WALKS = STEPS // (len(VARIANTS) * PARTS * WALK_STEPS)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", sorted(VARIANTS))
def test_a_table_stays_a_dict(tmp_path: Path, kind: str, part: int) -> None:
    child = ChildProcess(tmp_path / "errors.txt")
    try:
        made = walk(VARIANTS[kind], tmp_path / "lake", child, walks=WALKS, reproducible=False)
    finally:
        child.stop()
    assert made.total() >= WALKS * WALK_STEPS
