"""Every fault a store can have, at the calls the write path makes to it; `make soak` takes each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.failures.script import FAULTS, calls_made, check_storm, check_strikes

from penstock.storage.faults import Call, Fault

STRIDE = 5


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Call]:
    return calls_made(tmp_path_factory.mktemp("dry"))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.value.replace(" ", "_"))
def test_one_fault_at_one_call_in_five(tmp_path: Path, fault: Fault, calls: Sequence[Call]) -> None:
    check_strikes(tmp_path, fault, calls, first=1 + FAULTS.index(fault) % STRIDE, stride=STRIDE)


@pytest.mark.parametrize("seed", range(6))
def test_a_storm_of_faults(tmp_path: Path, seed: int) -> None:
    check_storm(tmp_path, seed)
