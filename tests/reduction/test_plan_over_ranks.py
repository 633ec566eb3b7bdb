"""Each ``check_`` of the workers passes on three ranks that plan together."""

import pytest
from check_runner import assert_passed, checks_of
from conftest import TESTS, early, ended

WORKERS = (
    "reduction/plan_worker.py",
    "reduction/plan_refusals_worker.py",
    "loop/buffer_worker.py",
)
CHECKS = [(worker, check) for worker in WORKERS for check in checks_of(TESTS / worker)]


@early
def each_worker():
    """Return how each worker ended."""
    return {worker: ended(worker, processes=3, timeout=120) for worker in WORKERS}


@pytest.mark.parametrize(("worker", "check"), CHECKS)
def test_over_three_ranks(each_worker, worker, check):
    assert_passed(check, each_worker[worker])
