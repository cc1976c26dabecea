"""Where the files of a table's MemWAL live, and how they are named.

Positions and versions are written as 64 binary digits, reversed, so that consecutive objects
fall into different partitions of an object store. All keys are relative to the table's root.
"""

from __future__ import annotations

import re
import uuid

MEM_WAL = "_mem_wal"
PRIVATE = "_penstock"
"""Penstock's own side files; nothing but regions may live directly under `_mem_wal/`."""

GAPS = f"{PRIVATE}/gaps"
"""Says of a version that is kept that the one after it was removed."""

MAX_POSITION = 2**64 - 1
_GENERATION_DIR = re.compile(r"^[0-9a-f]{8}_gen_([0-9]+)$")
_UNFINISHED = re.compile(r"^\.tmp|#[0-9]+$")


def bitrev(number: int) -> str:
    """The 64 binary digits of `number`, least significant first: 5 is `1010` and sixty zeros."""
    if not 0 <= number <= MAX_POSITION:
        raise ValueError(f"{number} does not fit into 64 bits")
    return f"{number:064b}"[::-1]


def from_bitrev(digits: str) -> int | None:
    """The number behind a bit-reversed name, or None if it is not one."""
    if len(digits) != 64 or digits.strip("01"):
        return None
    return int(digits[::-1], 2)


def region_dir(region_id: uuid.UUID) -> str:
    return f"{MEM_WAL}/{region_id}"


def manifest_key(region_id: uuid.UUID, version: int) -> str:
    return f"{MEM_WAL}/{region_id}/manifest/{bitrev(version)}.binpb"


def manifest_hint_key(region_id: uuid.UUID) -> str:
    return f"{MEM_WAL}/{region_id}/manifest/version_hint.json"


def wal_key(region_id: uuid.UUID, position: int) -> str:
    return f"{MEM_WAL}/{region_id}/wal/{bitrev(position)}.arrow"


def gap_key(version: int) -> str:
    return f"{GAPS}/{version}"


def generation_name(hex8: str, generation: int) -> str:
    return f"{hex8}_gen_{generation}"


def generation_of(name: str) -> int | None:
    """The generation a directory name stands for, or None if it is no generation."""
    match = _GENERATION_DIR.match(name)
    return int(match.group(1)) if match else None


def is_unfinished(name: str) -> bool:
    """Whether a file is one that is being written: of ours, or of Lance on a local disk."""
    return _UNFINISHED.search(name) is not None
