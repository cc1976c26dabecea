"""Rows of a table that a crowd uses: each follows from its key and the call that wrote it.

Every key belongs to one writer, and a writer numbers its calls. So of every row that somebody finds
it can be said whether all of it is what that call wrote, and the calls of one writer have an order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

PARTS = 4
"""Each is a region of its own."""
WRITERS = 4
IDS = 80
KEYS = PARTS * IDS
WIDTH = 8
EVERYTHING = 10 * KEYS
SCHEMA = pa.schema(
    [
        pa.field("part", pa.int32(), nullable=False),
        pa.field("id", pa.int64(), nullable=False),
        pa.field("call", pa.int64()),
        pa.field("text", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), WIDTH)),
        pa.field("checksum", pa.int64()),
    ]
)
QUERY = np.full(WIDTH, 0.25, np.float32)
EVERY_WORD = "river"

Codes = npt.NDArray[np.int64]
"""Keys as one number each: part * IDS + id."""
Seen = npt.NDArray[np.int64]
"""Of each key the call that wrote its row; 0 where there is none."""


def writer_of(codes: Codes) -> Codes:
    return codes % WRITERS


def codes_of(writer: int, part: int) -> Codes:
    """The keys that a writer has in a part."""
    return np.arange(part * IDS + writer, (part + 1) * IDS, WRITERS, dtype=np.int64)


def key_of(code: int) -> tuple[int, int]:
    return divmod(int(code), IDS)


def rows(codes: Codes, call: int | Codes) -> pa.RecordBatch:
    codes = np.asarray(codes, dtype=np.int64)
    calls = np.broadcast_to(np.asarray(call, dtype=np.int64), codes.shape)
    return pa.RecordBatch.from_arrays(
        [
            pa.array((codes // IDS).astype(np.int32)),
            pa.array(codes % IDS),
            pa.array(calls),
            pa.array([text(*pair) for pair in zip(codes.tolist(), calls.tolist(), strict=True)]),
            pa.FixedSizeListArray.from_arrays(pa.array(vectors(codes, calls).ravel()), WIDTH),
            pa.array(checksums(codes, calls)),
        ],
        schema=SCHEMA,
    )


def text(code: int, call: int) -> str:
    return f"{EVERY_WORD} {group_word(code % WRITERS, code // IDS)} {call_word(code, call)}"


def group_word(writer: int, part: int) -> str:
    return f"group{writer}of{part}"


def call_word(code: int, call: int) -> str:
    return f"call{call}by{code % WRITERS}"


def vectors(codes: Codes, calls: Codes) -> npt.NDArray[np.float32]:
    places = np.arange(1, WIDTH + 1, dtype=np.int64)
    drawn = (codes[:, None] * 7919 + calls[:, None] * 104_729) * places * places % 1009
    return drawn.astype(np.float32) / np.float32(1009)


def checksums(codes: Codes, calls: Codes) -> Codes:
    return (codes * 1_000_003 + calls * 7_368_787) % 1_000_000_007


def distances(codes: Codes, calls: Codes) -> npt.NDArray[np.float64]:
    away = vectors(codes, calls).astype(np.float64) - QUERY
    squared: npt.NDArray[np.float64] = np.square(away).sum(axis=1)
    return squared


def seen_in(found: pa.Table) -> Seen:
    """Which call wrote each row that was found: every key once, and every row whole."""
    part, identity, calls, checks = (
        found[name].to_numpy() for name in ("part", "id", "call", "checksum")
    )
    codes = part.astype(np.int64) * IDS + identity
    times, often = np.unique(codes, return_counts=True)
    assert len(times) == len(codes), f"keys that are there twice: {times[often > 1].tolist()}"
    expected = rows(codes, calls)
    wrong = checks != checksums(codes, calls)
    wrong |= ~np.asarray(pa.compute.equal(found["text"], expected["text"]))
    flat = found["vector"].combine_chunks().flatten().to_numpy().reshape(-1, WIDTH)
    wrong |= (flat != vectors(codes, calls)).any(axis=1)
    assert not wrong.any(), f"rows of no call: {found.take(np.flatnonzero(wrong)).to_pylist()}"
    seen = np.zeros(KEYS, dtype=np.int64)
    seen[codes] = calls
    return seen


def values_of(code: int, call: int) -> dict[str, Any]:
    """What `update` has to set for a row to be of that call."""
    (row,) = rows(np.array([code]), call).to_pylist()
    return {
        "call": row["call"],
        "text": f"'{row['text']}'",
        "vector": row["vector"],
        "checksum": row["checksum"],
    }


def where(codes: Sequence[int]) -> str:
    """A condition for keys of one part."""
    part = int(codes[0]) // IDS
    return f"part = {part} AND id IN ({', '.join(str(int(code) % IDS) for code in codes)})"
