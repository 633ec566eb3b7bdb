"""examples/pairs.py trains DPO over all pairs of the step, and GSPO, as loops over tokens do."""

import pytest
from check_runner import checks_of
from conftest import TESTS, early, launched

WORKER = "examples/pairs_worker.py"


@early
def printed_at_dp_2():
    return launched(WORKER, 1, processes=2)


@early
def printed_at_cp_2():
    return launched(WORKER, 2, processes=2)


@pytest.mark.parametrize("check", checks_of(TESTS / WORKER))
def test_at_dp_2_in_both_loss_scalings(printed_at_dp_2, check):
    assert f"PASSED check_{check}" in printed_at_dp_2.splitlines()


@pytest.mark.parametrize("check", checks_of(TESTS / WORKER))
def test_at_cp_2_in_both_loss_scalings(printed_at_cp_2, check):
    assert f"PASSED check_{check}" in printed_at_cp_2.splitlines()
