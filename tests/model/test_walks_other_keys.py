"""A table and a dict, side by side through random steps: a key of two columns, and none at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.model.handle import ChildProcess
from tests.model.machine import WALK_STEPS, walk
from tests.model.questions import VARIANTS

WALKS = 3


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["composite", "no_key"])
def test_a_table_is_a_dict(tmp_path: Path, kind: str) -> None:
    child = ChildProcess(tmp_path / "errors.txt")
    try:
        made = walk(VARIANTS[kind], tmp_path / "lake", child, walks=WALKS)
    finally:
        child.stop()
    assert made.total() >= WALKS * WALK_STEPS
