"""The startup probe on live Megatron-Core: each layout of ``probe_worker.py`` passes its checks."""

import re

import pytest
from conftest import TESTS, early, fork_server, launched
from probe_cases import LAYOUTS, MEGATRON_LM_LAYOUTS, REPEATS

CASES = [(processes, layout) for processes, layouts in LAYOUTS.items() for layout in layouts]
CONFIRMED = (
    r"K = (M DP CP|N) confirmed through DDP, schedule, finalize: measured \d+ at the probe's own "
    r"[MN] = \d+ \(\d\.\d+ s\)$"
)
MEGATRON_LM_CASES = [case for case in CASES if case[1] in MEGATRON_LM_LAYOUTS]
FAULTS = {
    "drop_m": "average",
    "times_cp": "both",
    "ddp_averages": "both",
    "second_step_doubled": "both",
    "experts_doubled": "both",
    "finalize_not_called": "both",
    "finalize_does_not_divide": "per_token",
    "num_tokens_over_dp_only": "per_token",
    "flipped": "both",
}


@early
def printed_by_two():
    return launched("megatron/probe_worker.py", processes=2, timeout=1800).splitlines()


@early
def printed_by_four():
    return launched("megatron/probe_worker.py", processes=4, timeout=1800).splitlines()


@pytest.fixture
def printed(request, launches):
    """Return a function from a number of processes to the lines that the worker printed.

    Tests of two ranks alone launch no four: releases before 0.15 lack what those use.
    """
    names = {2: "printed_by_two", 4: "printed_by_four"}
    return lambda processes: request.getfixturevalue(names[processes])


def of(lines, layout, kind):
    return [line for line in lines if line.startswith(f"{layout}: {kind}")]


@pytest.mark.parametrize(("processes", "layout"), CASES, ids=lambda value: str(value))
def test_stock_megatron_passes_and_is_left_unchanged(printed, processes, layout):
    lines = printed(processes)
    assert of(lines, layout, "PASSED")
    stock = of(lines, layout, "STOCK")
    assert len(stock) == (4 if "instances" in layout else 15)
    for line in stock:
        assert re.search(CONFIRMED, line), line


@pytest.mark.parametrize(("processes", "layout"), MEGATRON_LM_CASES, ids=str)
def test_the_config_of_megatron_lm_passes_and_is_left_unchanged(printed, processes, layout):
    """Both loss scalings, five sets of DDP options, three dtypes; every option of the
    config set.
    """
    lines = of(printed(processes), layout, "MEGATRON-LM average")
    lines += of(printed(processes), layout, "MEGATRON-LM per_token")
    assert len(lines) == 2 * 5 * 3
    for line in lines:
        assert re.search(CONFIRMED, line), line


def test_the_probe_is_quick(printed):
    """The worker bounds each by 10 s, for a busy machine; ``pytest -s`` prints the largest."""
    seconds = [
        float(found[1])
        for processes in LAYOUTS
        for line in printed(processes)
        if (found := re.search(r"STOCK .*\((\d+\.\d\d) s\)$", line))
    ]
    print(f"\n{len(seconds)} probes of stock Megatron-Core, {max(seconds):.2f} s at most")
    assert len(seconds) == 10 * 15 + 4


@pytest.mark.parametrize("fault", FAULTS)
def test_a_patched_megatron_is_caught_every_time(printed, fault):
    """In each repeat where the fault changes a number; ``probe_worker.py`` has where that is."""
    verdicts = verdicts_of(printed, CASES, "FAULT", fault)
    assert len(verdicts) == 2 * len(CASES)
    caught = loss_scalings_caught(verdicts)
    assert caught == ({"average", "per_token"} if FAULTS[fault] == "both" else {FAULTS[fault]})


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "experts_doubled"])
def test_a_patched_megatron_is_caught_under_the_config_of_megatron_lm(printed, fault):
    verdicts = verdicts_of(printed, MEGATRON_LM_CASES, "MEGATRON-LM FAULT", fault)
    caught = loss_scalings_caught(verdicts)
    assert len(verdicts) == 2 * len(MEGATRON_LM_CASES)
    assert caught == ({"average", "per_token"} if FAULTS[fault] == "both" else {FAULTS[fault]})


def verdicts_of(printed, cases, kind, fault):
    """Return the worker's lines about a fault, with the loss scaling: one per layout and loss
    scaling.
    """
    return [
        (found[1], found[2])
        for processes, layout in cases
        for line in of(printed(processes), layout, kind)
        if (found := re.match(rf"{re.escape(layout)}: {kind} (\S+), {fault}: (.*)", line))
    ]


def loss_scalings_caught(verdicts):
    """Return the loss scalings in which the fault changes a number; every repeat must be caught."""
    loss_scalings = set()
    for loss_scaling, verdict in verdicts:
        if not verdict.startswith("changes no number"):
            assert verdict.startswith(f"{REPEATS} of {REPEATS} caught: rank"), verdict
            loss_scalings.add(loss_scaling)
    return loss_scalings


def test_gradients_that_are_reduced_twice_are_caught(printed_by_four):
    (line,) = of(printed_by_four, "DP2xPP2", "TWICE")
    assert "expected K = N = " in line


def test_what_cannot_be_measured_is_reported_as_read(printed_by_two):
    lines = printed_by_two
    found = [line.split(": ")[1] for line in of(lines, "DP2", "READ")]
    of_parts = [f"READ nothing, {part}" for part in ("finalize", "DDP", "schedule")]
    assert found == ["READ finalize", *of_parts]


def test_every_fault_that_is_put_in_is_expected_here(printed_by_two):
    found = [re.search(r": FAULT \w+, (\w+): ", line) for line in printed_by_two]
    assert {match[1] for match in found if match} == {*FAULTS}


ALONE = ("finalize", "schedule")


@early
def ended_alone():
    """Return how each run in which one rank fails alone ended, by itself within the time limit."""
    worker = str(TESTS / "megatron" / "probe_worker.py")
    return {
        where: fork_server().launch([worker, "alone", where], processes=2, timeout=300)
        for where in ALONE
    }


@pytest.mark.parametrize("where", ALONE)
def test_a_rank_that_fails_alone_ends_the_run_with_its_reason(ended_alone, where):
    done = ended_alone[where]
    assert done.returncode != 0
    assert f"the startup probe failed on rank 1 in the {where}" in done.stderr, done.stderr[-4000:]
    assert "KeyError: 'no such table'" in done.stderr
    assert "--no-loss-aggregation-probe" in done.stderr
