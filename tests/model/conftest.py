"""Walks of a few rows: their generations are adopted by the base table as large ones would be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.memwal import adopt


@pytest.fixture(autouse=True, scope="session")
def small_generations_are_adopted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adopt, "ADOPTED_ROWS", 4)
        patch.setattr(adopt, "DEAD_SHARE", 0.5)
        yield
