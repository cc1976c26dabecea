"""A hundred thousand steps of a table and a dict side by side; each run takes other ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.model.machine import walk
from tests.model.questions import VARIANTS

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]

STEPS = 100_000
PARTS = 5


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", sorted(VARIANTS))
def test_a_table_stays_a_dict(tmp_path: Path, kind: str, part: int) -> None:
    steps = STEPS // (len(VARIANTS) * PARTS)
    walk(VARIANTS[kind], tmp_path, steps=steps, reproducible=False)
