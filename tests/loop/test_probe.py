"""The startup probe on live Megatron-Core: each layout passes the checks of ``probe_worker.py``."""

import pytest
from check_runner import assert_passed, checks_of
from conftest import TESTS, early, ended, fork_server
from probe_cases import LAYOUTS

WORKER = TESTS / "loop" / "probe_worker.py"
OF_TWO = [name for name, layout in LAYOUTS.items() if layout.world_size == 2]
OF_FOUR = [name for name, layout in LAYOUTS.items() if layout.world_size == 4]
CHECKS = checks_of(WORKER)


# Two launches: releases before 0.15 lack what the layouts of four ranks use.
@early
def two_ranks():
    return ended("loop/probe_worker.py", processes=2, timeout=1800)


@early
def four_ranks():
    return ended("loop/probe_worker.py", processes=4, timeout=1800)


@pytest.mark.parametrize("layout", OF_TWO)
def test_stock_megatron_passes_on_two_ranks_and_is_left_unchanged(two_ranks, layout):
    """And, on the same layout, each fault that is put into it is caught."""
    assert f"PASSED on {layout}" in two_ranks.stdout.splitlines()


@pytest.mark.parametrize("layout", OF_FOUR)
def test_stock_megatron_passes_on_four_ranks_and_is_left_unchanged(four_ranks, layout):
    """And, on the same layout, each fault that is put into it is caught."""
    assert f"PASSED on {layout}" in four_ranks.stdout.splitlines()


@pytest.mark.parametrize("check", CHECKS)
def test_the_probe_on_two_ranks(two_ranks, check):
    assert_passed(check, two_ranks)


@pytest.mark.parametrize("check", CHECKS)
def test_the_probe_on_four_ranks(four_ranks, check):
    assert_passed(check, four_ranks)


ALONE = ("finalize", "schedule")


@early
def ended_alone():
    """Return how each run ended in which only one rank fails, within the time limit."""
    return {
        where: fork_server().launch([str(WORKER), "alone", where], processes=2, timeout=300)
        for where in ALONE
    }


@pytest.mark.parametrize("where", ALONE)
def test_a_rank_that_fails_alone_ends_the_run_with_its_reason(ended_alone, where):
    done = ended_alone[where]
    assert done.returncode != 0
    assert f"the startup probe failed on rank 1 in the {where}" in done.stderr, done.stderr[-4000:]
    assert "KeyError: 'no such table'" in done.stderr
    assert "--no-loss-aggregation-probe" in done.stderr
