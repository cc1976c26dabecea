"""Time and chance under control, and retries that end."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidInput
from penstock.storage.clock import SimulatedClock, SystemClock
from penstock.storage.entropy import Entropy, SeededEntropy, SystemEntropy
from penstock.storage.retry import Backoff


def test_a_simulated_wall_clock_jumps_and_its_monotonic_one_never_falls() -> None:
    clock = SimulatedClock(start_ms=1_000)
    clock.sleep_ms(250)
    clock.advance(0.5)
    assert (clock.now_ms(), clock.monotonic_ms()) == (1_250, 250.5)
    clock.jump_wall(-900)
    assert (clock.now_ms(), clock.monotonic_ms()) == (350, 250.5)
    clock.jump_wall(3_600_000)
    assert (clock.now_ms(), clock.monotonic_ms()) == (3_600_350, 250.5)
    with pytest.raises(InvalidInput, match="jump_wall"):
        clock.advance(-1)


def test_the_system_clock_passes() -> None:
    clock = SystemClock()
    wall, started = clock.now_ms(), clock.monotonic_ms()
    clock.sleep_ms(5)
    assert clock.monotonic_ms() - started >= 5
    assert abs(clock.now_ms() - wall) < 60_000
    assert wall > 1_700_000_000_000


@pytest.mark.parametrize("entropy", [SystemEntropy(), SeededEntropy(9)])
def test_draws_have_their_shape(entropy: Entropy) -> None:
    assert len(entropy.token_bytes(12)) == 12
    assert entropy.uuid4().version == 4
    assert len(entropy.hex8()) == 8
    assert int(entropy.hex8(), 16) >= 0
    drawn = [entropy.uniform(-2.0, 3.0) for _ in range(2_000)]
    assert all(-2.0 <= value <= 3.0 for value in drawn)
    assert 0.2 < sum(drawn) / len(drawn) < 0.8


FORKED = """
import os
from penstock.storage.entropy import SystemEntropy
entropy = SystemEntropy()
entropy.hex8()
child = os.fork()
if child:
    os.waitpid(child, 0)
os.write(1, entropy.token_bytes(16))
os._exit(0)
"""


def test_a_seed_repeats_itself_and_a_fork_does_not() -> None:
    def draws(entropy: Entropy) -> list[object]:
        return [entropy.uuid4(), entropy.hex8(), entropy.uniform(0, 1), entropy.token_bytes(3)]

    assert draws(SeededEntropy(4)) == draws(SeededEntropy(4)) != draws(SeededEntropy(5))

    command = [sys.executable, "-c", FORKED]  # Lance warns of forks: an error here
    drawn = subprocess.run(command, check=True, timeout=30, capture_output=True).stdout
    assert len(drawn) == 32
    assert drawn[:16] != drawn[16:]


@given(
    attempts=st.integers(1, 70),
    base_ms=st.floats(0, 500),
    more_ms=st.floats(0, 5_000),
    seed=st.integers(),
)
def test_retries_are_bounded_in_number_and_in_pause(
    attempts: int, base_ms: float, more_ms: float, seed: int
) -> None:
    backoff = Backoff(attempts, base_ms, base_ms + more_ms)
    clock, last_ms = SimulatedClock(), 0.0
    for expected, attempt in enumerate(backoff.pauses(clock, SeededEntropy(seed))):
        assert attempt == expected
        paused_ms, last_ms = clock.monotonic_ms() - last_ms, clock.monotonic_ms()
        assert paused_ms <= min(backoff.max_ms, base_ms * 2**attempt) + 1e-6
        assert attempt or not paused_ms
    assert attempt == attempts - 1


def test_a_backoff_that_makes_no_sense_is_refused() -> None:
    for wrong in ((0, 1, 1), (1, -1, 1), (1, 2, 1)):
        with pytest.raises(InvalidInput):
            Backoff(*wrong)
