"""The startup probe on live Megatron-Core: each layout of ``probe_worker.py`` holds its laws."""

import re
import time
from pathlib import Path

import pytest
from conftest import TESTS, launched, worker_path

from megatron_lossagg.cpu import launch

SOURCE = (Path(__file__).parent / "probe_worker.py").read_text()
LAYOUTS = {
    2: ["DP2", "CP2", "PP2", "PP2xVPP2", "TP2", "EP2"],
    4: ["DP2xCP2", "DP2xPP2", "CP2xPP2xVPP2", "DP2xTP2", "DP4xEP2, 2 optimizer instances"],
}
CASES = [(processes, layout) for processes, layouts in LAYOUTS.items() for layout in layouts]
FAULTS = {
    "drop_m": "average",
    "times_cp": "both",
    "ddp_averages": "both",
    "experts_doubled": "both",
    "finalize_not_called": "both",
    "finalize_does_not_divide": "per-token",
    "num_tokens_over_dp_only": "per-token",
    "flipped": "both",
}


@pytest.fixture(scope="module")
def said():
    """Function of a number of processes: what the worker said about its layouts."""
    cache = {}

    def lines(processes):
        if processes not in cache:
            cache[processes] = "this launch failed in an earlier test"
            cache[processes] = launched("probe_worker.py", processes=processes).splitlines()
        assert isinstance(cache[processes], list), cache[processes]
        return cache[processes]

    return lines


def of(lines, layout, kind):
    return [line for line in lines if line.startswith(f"{layout}: {kind}")]


@pytest.mark.parametrize(("processes", "layout"), CASES, ids=lambda value: str(value))
def test_stock_megatron_passes_and_nothing_of_it_moves(said, processes, layout):
    lines = said(processes)
    assert of(lines, layout, "HELD")
    stock = of(lines, layout, "STOCK")
    assert len(stock) == (4 if "instances" in layout else 15)
    for line in stock:
        assert re.search(r"K = \d+ measured through DDP, schedule, finalize \(\d\.\d+ s\)$", line)


def test_the_probe_is_quick(said):
    """The worker bounds each by 10 s, for a busy machine; see the largest with ``pytest -s``."""
    seconds = [
        float(found[1])
        for processes in LAYOUTS
        for line in said(processes)
        if (found := re.search(r"STOCK .*\((\d+\.\d\d) s\)$", line))
    ]
    print(f"\n{len(seconds)} probes of stock Megatron-Core, {max(seconds):.2f} s at most")
    assert len(seconds) == 10 * 15 + 4


@pytest.mark.parametrize("fault", FAULTS)
def test_a_patched_megatron_is_caught_every_time(said, fault):
    """Where the fault changes a number, 20 of 20; ``probe_worker.py`` says where that is."""
    caught = []
    for processes, layout in CASES:
        for regime in ("average", "per-token"):
            (line,) = of(said(processes), layout, f"FAULT {regime}, {fault}:")
            if "changes no number" not in line:
                assert "20 of 20 caught: rank" in line
                caught.append((layout, regime))
    regimes = {regime for _, regime in caught}
    assert regimes == ({"average", "per-token"} if FAULTS[fault] == "both" else {FAULTS[fault]})


def test_what_cannot_be_measured_is_said_to_be_read(said):
    lines = said(2)
    assert [line.split()[2] for line in of(lines, "DP2", "READ")] == ["finalize:", "DDP:", "all:"]


def test_the_layouts_and_faults_here_are_the_workers():
    assert all(f'"{layout}": ' in SOURCE for _, layout in CASES)
    table = SOURCE[SOURCE.index("FAULTS = {") :]
    assert re.findall(r'^    "(\w+)": \(', table[: table.index("\n}\n")], re.MULTILINE) == [*FAULTS]


@pytest.mark.parametrize("where", ["finalize", "schedule"])
def test_a_rank_that_fails_alone_ends_the_run_with_its_reason(where):
    start = time.monotonic()
    done = launch(
        [str(TESTS / "probe_worker.py"), "alone", where],
        processes=2,
        timeout=120,
        env={"PYTHONPATH": worker_path()},
    )
    assert done.returncode != 0
    assert f"the startup probe failed on rank 1 in the {where}" in done.stderr, done.stderr[-4000:]
    assert "KeyError: 'no such table'" in done.stderr
    assert "--no-loss-aggregation-probe" in done.stderr
    assert time.monotonic() - start < 100
