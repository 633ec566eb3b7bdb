"""The startup probe on live Megatron-Core: each layout passes the checks of ``probe_worker.py``."""

import pytest
from check_runner import checks_of
from conftest import TESTS, early, fork_server, launched
from probe_cases import LAYOUTS

WORKER = TESTS / "loop" / "probe_worker.py"
CASES = [(layout.world_size, name) for name, layout in LAYOUTS.items()]


@early
def printed_by_two():
    return launched("loop/probe_worker.py", processes=2, timeout=1800).splitlines()


@early
def printed_by_four():
    return launched("loop/probe_worker.py", processes=4, timeout=1800).splitlines()


@pytest.fixture
def printed(request, launches):
    """Return a function from a number of processes to the lines that the worker printed.

    Tests of two ranks alone launch no four: releases before 0.15 lack what those use.
    """
    names = {2: "printed_by_two", 4: "printed_by_four"}
    return lambda processes: request.getfixturevalue(names[processes])


@pytest.mark.parametrize(("processes", "layout"), CASES, ids=str)
def test_stock_megatron_passes_and_is_left_unchanged(printed, processes, layout):
    """And, on the same layout, each fault that is put into it is caught."""
    assert f"PASSED on {layout}" in printed(processes)


@pytest.mark.parametrize("check", checks_of(WORKER))
def test_the_probe(printed, check):
    lines = printed(2) + printed(4)
    assert lines.count(f"PASSED check_{check}") == len(CASES)


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
