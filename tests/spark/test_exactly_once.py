"""Streams count once, though their driver is killed and their tasks fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.spark import exactly_once


@pytest.mark.timeout(600)
def test_two_streams_whose_driver_is_killed(tmp_path: Path, java: None) -> None:
    exactly_once.check(tmp_path, files=12, rows_per_file=1_000, kills=1, seed=7)
