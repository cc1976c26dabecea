"""Hundreds of kills: at random moments, and just before and after each durable step."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.crash.processes import Place, Step, some_kills, survive_kills
from tests.s3_server import S3Server

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("seed", range(3))
def test_fifty_kills_on_local_disk(tmp_path: Path, seed: int) -> None:
    survive_kills(Place(str(tmp_path / "lake")), tmp_path, some_kills(50, seed), seed=seed)


@pytest.mark.parametrize("seed", range(3))
def test_thirty_kills_on_s3(s3: S3Server, tmp_path: Path, seed: int) -> None:
    place = Place(s3.uri("kills"), s3.storage_options)
    survive_kills(place, tmp_path, some_kills(30, seed), seed=seed)


def test_a_kill_at_every_durable_step(tmp_path: Path) -> None:
    kills = [Step(number, before) for number in range(1, 31) for before in (True, False)]
    survive_kills(Place(str(tmp_path / "lake")), tmp_path, kills, seed=9)
