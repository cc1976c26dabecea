"""A writer on local disk dies by SIGKILL, at any moment; nothing it acknowledged is lost."""

from __future__ import annotations

from pathlib import Path

from tests.crash.processes import Place, some_kills, survive_kills


def test_twelve_kills_on_local_disk(tmp_path: Path) -> None:
    survive_kills(Place(str(tmp_path / "lake")), tmp_path, some_kills(12, seed=1), seed=1)
