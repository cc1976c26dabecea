"""Benchmarks: programs that print figures, never tests. Run them as `python -m bench.<name>`."""

import os

os.environ.setdefault("LANCE_LOG", "error")
