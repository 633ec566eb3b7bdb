"""Each ``check_`` of the workers passes on three ranks that plan together."""

import pytest
from check_runner import checks_of
from conftest import TESTS, early, launched

WORKERS = (
    "reduction/plan_worker.py",
    "reduction/plan_refusals_worker.py",
    "loop/buffer_worker.py",
)
CHECKS = [(worker, check) for worker in WORKERS for check in checks_of(TESTS / worker)]


@early
def printed():
    """Return the lines of each worker."""
    return {worker: launched(worker, processes=3, timeout=120).splitlines() for worker in WORKERS}


@pytest.mark.parametrize(("worker", "check"), CHECKS)
def test_over_three_ranks(printed, worker, check):
    assert f"PASSED check_{check}" in printed[worker]
