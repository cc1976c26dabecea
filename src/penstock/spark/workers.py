"""What every Python process of Spark should do once.

Spark collects garbage after each task, and goes through all that was ever imported: some 30 ms in a
process with Lance. What is there when the first task begins stays anyway, so it is set aside.
"""

from __future__ import annotations

import gc
from functools import cache


@cache
def calm() -> None:
    """Let collections pass over everything that is there already."""
    gc.collect()
    gc.freeze()
