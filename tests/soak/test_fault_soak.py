"""Every fault at every single call of the write path, and many storms of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.failures.script import FAULTS, calls_made, check_storm, check_strikes

from penstock.storage.faults import Call, Fault

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Call]:
    return calls_made(tmp_path_factory.mktemp("dry"))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.value.replace(" ", "_"))
def test_each_fault_at_each_call(tmp_path: Path, fault: Fault, calls: Sequence[Call]) -> None:
    check_strikes(tmp_path, fault, calls, first=1, stride=1)


@pytest.mark.parametrize("seed", range(100, 200))
def test_many_storms(tmp_path: Path, seed: int) -> None:
    check_storm(tmp_path, seed)
