"""What the tests of bad input and of damage share: one good row, and `refuses`.

`refuses` compares every file of the database before and after, and asks of the message that it
names the object and a way out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock import PenstockError

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64()),
        pa.field("name", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), 3)),
        pa.field("price", pa.float64(), nullable=False),
        pa.field("at", pa.timestamp("us")),
        pa.field("ratio", pa.float32()),
        pa.field("sizes", pa.list_(pa.int32())),
        pa.field("place", pa.struct([("x", pa.int16())])),
    ]
)
GOOD: dict[str, Any] = {
    "id": 1,
    "name": "one",
    "vector": [1.0, 2.0, 3.0],
    "price": 1.5,
    "at": None,
    "ratio": 0.5,
    "sizes": [1, 2],
    "place": {"x": 7},
}


def snapshot(path: Path) -> dict[str, str]:
    """Every file below a directory, with a digest of its bytes."""
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


@contextmanager
def refuses(path: Path, kind: type[PenstockError], *words: str) -> Iterator[None]:
    """The block fails with exactly this kind of error, says the words, and changes no file."""
    before = snapshot(path)
    with pytest.raises(PenstockError) as caught:
        yield
    assert type(caught.value) is kind, f"{type(caught.value).__name__}: {caught.value}"
    message = str(caught.value)
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"
    assert snapshot(path) == before
