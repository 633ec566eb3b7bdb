"""examples/pairs.py, and a step of two terms: each is what loops over tokens give.

In both loss scalings.
"""

import pytest
from check_runner import checks_of
from conftest import TESTS, early, launched

PAIRS, SECOND_TERM = "examples/pairs_worker.py", "examples/second_term_worker.py"
CHECKS = [(worker, check) for worker in (PAIRS, SECOND_TERM) for check in checks_of(TESTS / worker)]


def printed_at(cp):
    return {worker: launched(worker, cp, processes=2) for worker in (PAIRS, SECOND_TERM)}


@early
def printed_at_dp_2():
    return printed_at(1)


@early
def printed_at_cp_2():
    return printed_at(2)


@pytest.mark.parametrize(("worker", "check"), CHECKS)
def test_at_dp_2_it_is_the_loss_by_hand(printed_at_dp_2, worker, check):
    assert f"PASSED check_{check}" in printed_at_dp_2[worker].splitlines()


@pytest.mark.parametrize(("worker", "check"), CHECKS)
def test_at_cp_2_it_is_the_loss_by_hand(printed_at_cp_2, worker, check):
    assert f"PASSED check_{check}" in printed_at_cp_2[worker].splitlines()
