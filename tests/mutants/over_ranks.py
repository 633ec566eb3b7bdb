"""What mutants run against on several ranks, one test for ``run.py`` to name; pytest collects none.

The ranks are forked from this process: a launch per mutant would import torch anew each time. So
are mutmut's processes, which is why the workers that ``run.py`` names in ``PRELOADED`` are imported
here, with Megatron-Core.
"""

import functools
import gc
import importlib
import json
import os
import runpy
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
from faults import FILES, rows_of
from forked_ranks import fork_ranks
from mutmut.state import state

from megatron_lossagg import Aggregation, cpu
from megatron_lossagg.guards import GUARDS
from megatron_lossagg.record.step_record import read_record

PRELOADED = "LOSSAGG_MUTANTS_PRELOADED"
TESTS = Path(__file__).resolve().parents[1]
SECONDS = 300
LAYOUTS = (
    {"dp": 2},
    {"dp": 2, "average_in_collective": True},
    {"cp": 2, "microbatches": 2},
    {"cp": 2, "packing": "local"},
    {"tp": 2},
    {"pp": 2},
    {"pp": 2, "vpp": 2, "microbatches": 4},
)


RANKS = {
    "loop/step_counts_worker": 4,
    "loop/hybrid_engine_worker": 4,
    "guards/agreement_worker": 3,
}
"""Of a worker that takes more than two."""


def preload(workers):
    """Import workers before any fork, the stand-ins for CUDA before Megatron-Core."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of torch and Megatron-Core
        cpu.install()
        # those of weigh/ are built for their number of ranks
        for worker in (one for one in workers if not one.startswith("weigh/")):
            importlib.import_module(Path(worker).name)


preload(filter(None, os.environ.get(PRELOADED, "").split(",")))


def on_ranks(work, processes=2):
    """Fork ranks; when one fails, end the others. What they hit counts as hit here."""
    gc.collect()  # a test's process group in a cycle, whose threads no rank is forked from
    with tempfile.TemporaryDirectory() as folder:

        def work_and_tell():
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # pytest's are files of its own
            warnings.resetwarnings()  # which pytest makes errors
            work()
            hit = Path(folder, os.environ["RANK"])
            hit.write_text(json.dumps(sorted(state()._stats)))

        printed = Path(folder, "printed")
        ended = fork_ranks(
            work_and_tell,
            processes=processes,
            outputs=[(printed, printed)] * processes,
            environment={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            timeout=SECONDS,
        )
        for hit in Path(folder).glob("[0-9]"):
            state()._stats |= set(json.loads(hit.read_text()))
        assert not any(ended.statuses), printed.read_text()[-8000:]
        failed = [line for line in printed.read_text().splitlines() if line.startswith("FAILED ")]
        assert not failed  # of a worker that goes on after one


WORKERS = sorted(
    str(path.relative_to(TESTS).with_suffix(""))
    for folder in ("reduction", "guards", "loop", "weigh")
    for path in TESTS.glob(f"{folder}/*_worker.py")
)


@pytest.mark.parametrize("worker", WORKERS)
def test_checks_of(worker):
    """Run a worker's checks."""
    preload([worker])
    path = str(TESTS / f"{worker}.py")

    def work():
        sys.argv = [path]
        runpy.run_path(path, run_name="__main__")

    on_ranks(work, RANKS.get(worker, 2))


CLASSES = {guard.__name__ for guard in GUARDS}
BEFORE = "before"
"""Of the refusals before a step, all together."""


@pytest.mark.parametrize("guard", [*sorted(CLASSES), BEFORE])
def test_faults_of(guard):
    """Run the programs that a guard refuses."""
    preload(["guards/guard_worker"])
    every = rows_of(*FILES)
    rows = [row for row in every if (row.guard if row.guard in CLASSES else BEFORE) == guard]
    on_ranks(functools.partial(importlib.import_module("guard_worker").main, rows))


def test_records(monkeypatch, tmp_path):
    """Data- and context-parallel ranks write the same record; the worker's checks pass."""
    monkeypatch.setattr(sys, "argv", ["record_worker.py", str(tmp_path)])
    preload(["record/record_worker"])
    on_ranks(importlib.import_module("record_worker").main)
    for name in ("loop-sample_mean", "loop-weights", "hook-sample_mean", "resumed"):
        one, other = (read_record(tmp_path / f"{layout}-{name}.jsonl") for layout in ("DP2", "CP2"))
        assert list(one) == list(other) == [1, 2, 3, 4, 5, 6]
        for first, second in zip(one.values(), other.values(), strict=True):
            assert first.weights == second.weights
            assert first.weight_sum == pytest.approx(second.weight_sum, rel=1e-14)
            assert first.weight_sum <= first.weight_expected


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients(layout):
    train(layout, second=Aggregation("token_mean"))


def test_gradients_under_the_hook():
    """A framework has one term."""
    train({"pp": 2, "vpp": 3, "microbatches": 4, "hooked": True}, second=None)


def train(layout, *, second):
    """Compare the gradient with the reference's in both loss scalings."""
    cpu.install()  # before the first import of Megatron-Core, and that before the forks
    import megatron_lossagg.verify.verdict  # noqa: F401
    from megatron_lossagg.verify.cases import Case
    from megatron_lossagg.verify.job import Job
    from megatron_lossagg.verify.parallelism import Parallelism

    constant = Case(aggregation=Aggregation("constant", divisor=40.0), second=second)
    cases = (Case(aggregation=Aggregation("token_mean")), constant)
    job = Job(layouts=[Parallelism(**layout)], cases=cases)

    def work():
        verdicts = [verdict for event in job.run() for verdict in event.get("verdicts", ())]
        assert len(verdicts) == job.num_verdicts
        assert all(verdict["passed"] for verdict in verdicts)

    on_ranks(work)
