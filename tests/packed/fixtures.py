"""Golden files of the packed format: what was written, from what, and how damage is judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parents[1] / "data" / "packed_v3"


def golden(name: str) -> bytes:
    return (FIXTURES / f"{name}.v3").read_bytes()


def spec(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIXTURES / "specs" / f"{name}.json").read_text())
    return found


def names(prefix: str) -> list[str]:
    """Golden files whose names begin so, sorted."""
    return sorted(path.stem for path in FIXTURES.glob(f"{prefix}*.v3"))


def pattern(size: int) -> bytes:
    return (bytes(range(256)) * (size // 256 + 1))[:size]
