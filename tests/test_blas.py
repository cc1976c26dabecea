"""Our matrix products leave the BLAS threads of the program alone."""

from __future__ import annotations

import threading

from threadpoolctl import ThreadpoolController, threadpool_limits

from penstock.blas import one_thread


def blas_threads() -> list[int]:
    found = ThreadpoolController().select(user_api="blas").info()
    return [library["num_threads"] for library in found]


def test_blas_has_one_thread_while_any_product_runs_and_then_what_it_had() -> None:
    inside, leave = threading.Event(), threading.Event()

    def product() -> None:
        with one_thread():
            inside.set()
            assert leave.wait(30)

    with threadpool_limits(3, user_api="blas"):
        chosen = blas_threads()
        assert chosen
        assert set(chosen) != {1}
        other = threading.Thread(target=product)
        other.start()
        assert inside.wait(30)
        with one_thread():
            assert set(blas_threads()) == {1}
        assert set(blas_threads()) == {1}
        leave.set()
        other.join()
        assert blas_threads() == chosen
