"""What tests share: real stores of every kind, and a quiet Lance."""

from __future__ import annotations

import os

os.environ.setdefault("LANCE_LOG", "error")

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.s3_server import S3Server

from penstock.storage.objects import ObjectStore
from penstock.storage.open import open_store


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running S3 server: `s3.uri("name")` is a fresh location, `s3.storage_options` opens it."""
    server = S3Server().start(tmp_path_factory.mktemp("s3") / "log.txt")
    yield server
    server.stop()


@pytest.fixture(params=["local", "memory", "s3"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """An empty store of each kind in turn."""
    if request.param == "local":
        return open_store(tmp_path / "store")
    if request.param == "memory":
        return open_store("memory://")
    server: S3Server = request.getfixturevalue("s3")
    return open_store(server.uri("any"), server.storage_options)
