"""Each ``check_`` of the workers passes on two and on three ranks that plan together."""

import pytest
from check_runner import checks_of
from conftest import TESTS, early, launched

WORKERS = (
    "reduction/plan_worker.py",
    "reduction/plan_refusals_worker.py",
    "loop/buffer_worker.py",
)
CHECKS = [(worker, check) for worker in WORKERS for check in checks_of(TESTS / worker)]


def printed_by(processes):
    """Return the lines of each worker."""
    return {
        worker: launched(worker, processes=processes, timeout=120).splitlines()
        for worker in WORKERS
    }


@early
def printed_by_two():
    return printed_by(2)


@early
def printed_by_three():
    return printed_by(3)


@pytest.mark.parametrize(("worker", "check"), CHECKS)
def test_over_two_ranks(printed_by_two, worker, check):
    assert f"PASSED check_{check}" in printed_by_two[worker]


@pytest.mark.parametrize(("worker", "check"), CHECKS)
def test_over_three_ranks(printed_by_three, worker, check):
    assert f"PASSED check_{check}" in printed_by_three[worker]
