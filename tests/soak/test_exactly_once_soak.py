"""Two streams of 200,000 changes each, whose driver is killed five times."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.spark import exactly_once

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("seed", [1, 2])
def test_200_000_changes_and_five_kills(tmp_path: Path, seed: int) -> None:
    exactly_once.check(tmp_path, files=40, rows_per_file=5_000, kills=5, seed=seed)
