"""A writer on S3 dies by SIGKILL, at any moment; nothing it acknowledged is lost."""

from __future__ import annotations

from pathlib import Path

from tests.crash.processes import Place, some_kills, survive_kills
from tests.s3_server import S3Server


def test_eight_kills_on_s3(s3: S3Server, tmp_path: Path) -> None:
    place = Place(s3.uri("kills"), s3.storage_options)
    survive_kills(place, tmp_path, some_kills(8, seed=2), seed=2)
