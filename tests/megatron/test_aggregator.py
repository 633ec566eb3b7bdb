"""Each ``check_`` of the three workers passes on live Megatron-Core, on two or on four ranks."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
from check_runner import checks_of
from conftest import early, launched

CHECKS = checks_of(Path(__file__).parent / "aggregator_worker.py")
CHECKS_OF_LOOPS = checks_of(Path(__file__).parent / "own_loop_worker.py")
CHECKS_OF_COUNTS = checks_of(Path(__file__).parent / "step_counts_worker.py")


@early
def output():
    return launched("megatron/aggregator_worker.py", processes=2)


@early
def output_of_loops():
    return launched("megatron/own_loop_worker.py", processes=2)


@early
def output_of_counts():
    return launched("megatron/step_counts_worker.py", processes=4)


@pytest.mark.parametrize("check", CHECKS)
def test_the_aggregator(output, check):
    assert f"PASSED check_{check}" in output.splitlines()


@pytest.mark.parametrize("check", CHECKS_OF_LOOPS)
def test_a_loop_of_ones_own(output_of_loops, check):
    assert f"PASSED check_{check}" in output_of_loops.splitlines()


@pytest.mark.parametrize("check", CHECKS_OF_COUNTS)
def test_the_counts_of_a_step(output_of_counts, check):
    assert f"PASSED check_{check}" in output_of_counts.splitlines()


def test_the_ranks_ran_the_megatron_core_that_this_process_has(output):
    """``versions.py`` puts another release before the installed one."""
    (ran,) = re.findall(r"^RAN megatron-core ([\w.]+)", output, re.MULTILINE)
    assert ran == version("megatron-core")
