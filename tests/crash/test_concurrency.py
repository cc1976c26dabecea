"""Writers, readers and every job of maintenance on one table at once, for ten seconds.

`make soak` does it for longer, and more often (`tests/soak/test_concurrency_soak.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.crash.crowd import run_crowd


@pytest.mark.timeout(240)
def test_everybody_at_once(tmp_path: Path) -> None:
    """One of those who maintain the table is killed, somewhere in the middle."""
    outcome = run_crowd(tmp_path, seconds=10, seed=4, kills=1)
    for role in ("write", "read", "merge", "compact", "index", "snap", "collect"):
        assert outcome.work[role] > 0, f"{role} found nothing to do: {outcome}"
