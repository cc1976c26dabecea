"""A table and a dict, side by side through random steps: tables with a key of one column."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.model.machine import walk
from tests.model.questions import VARIANTS

STEPS = 500


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["int", "string"])
def test_a_table_is_a_dict(tmp_path: Path, kind: str) -> None:
    walk(VARIANTS[kind], tmp_path, steps=STEPS)
