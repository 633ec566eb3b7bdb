"""examples/pairs.py, and a step of two terms: each is what loops over tokens give.

In both loss scalings.
"""

import pytest
from check_runner import assert_passed, checks_of
from conftest import TESTS, early, ended

PAIRS, SECOND_TERM = "examples/pairs_worker.py", "examples/second_term_worker.py"
CHECKS = [(worker, check) for worker in (PAIRS, SECOND_TERM) for check in checks_of(TESTS / worker)]


def ended_at(cp):
    return {worker: ended(worker, cp, processes=2) for worker in (PAIRS, SECOND_TERM)}


@early
def ended_at_dp_2():
    return ended_at(1)


@early
def ended_at_cp_2():
    return ended_at(2)


@pytest.mark.parametrize(("worker", "check"), CHECKS)
def test_at_dp_2_it_is_the_loss_by_hand(ended_at_dp_2, worker, check):
    assert_passed(check, ended_at_dp_2[worker])


@pytest.mark.parametrize(("worker", "check"), CHECKS)
def test_at_cp_2_it_is_the_loss_by_hand(ended_at_cp_2, worker, check):
    assert_passed(check, ended_at_cp_2[worker])
