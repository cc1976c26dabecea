"""Matrix products on the thread that asks for them.

A BLAS library shares a large product out to threads of its own, which wait for the next one by
turning in circles. Where cores are few, or others need them, that costs several times what it
gains: our products take a millisecond, and run side by side on threads of ours already. So for as
long as one of them runs BLAS has one thread, and what the program had chosen is put back after.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np  # noqa: F401  its BLAS has to be loaded to be found
from threadpoolctl import ThreadpoolController

_lock = threading.Lock()
_inside = 0
_chosen: list[int] = []


@contextmanager
def one_thread() -> Iterator[None]:
    """BLAS has one thread as long as anybody is inside."""
    global _inside, _chosen
    with _lock:
        _inside += 1
        if _inside == 1:
            _chosen = [library.get_num_threads() for library in _libraries()]
            _set([1] * len(_chosen))
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _set(_chosen)


def _set(threads: list[int]) -> None:
    for library, count in zip(_libraries(), threads, strict=True):
        # The thread that asked first would be the only one to be listened to.
        library.clear_controlling_thread(force=True)
        library.set_num_threads(count)
        library.clear_controlling_thread(force=True)


@cache
def _libraries() -> list[Any]:
    """The OpenBLAS of NumPy's own packages, whose threads serve the whole process."""
    found = ThreadpoolController().select(internal_api="openblas").lib_controllers
    return [library for library in found if library.threading_layer == "pthreads"]
