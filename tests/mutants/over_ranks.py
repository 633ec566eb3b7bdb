"""What mutants run against on two ranks, one test for ``run.py`` to name; pytest collects none.

The ranks are forked from this process: a launch per mutant would import torch anew each time.
"""

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

import pytest
from fork_server import fork_ranks
from mutmut.state import state

from megatron_lossagg import Aggregation, cpu
from megatron_lossagg.record.step_record import read_record

SECONDS = 90
LAYOUTS = (
    {"dp": 2},
    {"dp": 2, "average_in_collective": True},
    {"cp": 2, "microbatches": 2},
    {"tp": 2},
    {"pp": 2},
    {"pp": 2, "vpp": 2, "microbatches": 4},
)


def on_two_ranks(work):
    """Fork two ranks; when one fails, end the other. What they hit counts as hit here."""
    with tempfile.TemporaryDirectory() as folder:

        def work_and_tell():
            work()
            hit = Path(folder, os.environ["RANK"])
            hit.write_text(json.dumps(sorted(state()._stats)))

        ended = fork_ranks(
            work_and_tell,
            processes=2,
            outputs=[(Path(folder, "printed"), Path(folder, "printed"))] * 2,
            environment={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            timeout=SECONDS,
        )
        for hit in Path(folder).glob("[01]"):
            state()._stats |= set(json.loads(hit.read_text()))
        assert not any(ended.statuses), Path(folder, "printed").read_text()[-8000:]


TESTS = Path(__file__).resolve().parents[1]
WORKERS = sorted(
    str(path.relative_to(TESTS).with_suffix(""))
    for folder in ("reduction", "guards", "loop")
    for path in TESTS.glob(f"{folder}/*_worker.py")
)


@pytest.mark.parametrize("worker", WORKERS)
def test_checks_of(worker):
    """Run the checks of a worker, which its own ``main`` does."""
    on_two_ranks(importlib.import_module(Path(worker).name).main)


def test_records(monkeypatch, tmp_path):
    """Data- and context-parallel ranks write the same record; the worker's checks pass."""
    monkeypatch.setattr(sys, "argv", ["record_worker.py", str(tmp_path)])
    on_two_ranks(importlib.import_module("record_worker").main)
    for name in ("loop-sample_mean", "loop-weights", "hook-sample_mean", "resumed"):
        one, other = (read_record(tmp_path / f"{layout}-{name}.jsonl") for layout in ("DP2", "CP2"))
        assert list(one) == list(other) == [1, 2, 3, 4, 5, 6]
        for first, second in zip(one.values(), other.values(), strict=True):
            assert first.weights == second.weights
            assert first.weight_sum == pytest.approx(second.weight_sum, rel=1e-14)
            assert first.weight_sum <= first.weight_expected


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients(layout):
    """The gradient is the reference's in both loss scalings."""
    cpu.install()  # before the first import of Megatron-Core, and that before the forks
    import megatron_lossagg.verify.verdict  # noqa: F401
    from megatron_lossagg.verify.cases import Case
    from megatron_lossagg.verify.job import Job
    from megatron_lossagg.verify.parallelism import Parallelism

    token_mean, constant = Aggregation("token_mean"), Aggregation("constant", divisor=40.0)
    cases = (Case(aggregation=token_mean), Case(aggregation=constant, second=token_mean))
    job = Job(layouts=[Parallelism(**layout)], cases=cases)

    def work():
        verdicts = [verdict for event in job.run() for verdict in event.get("verdicts", ())]
        assert len(verdicts) == job.num_verdicts
        assert all(verdict["passed"] for verdict in verdicts)

    on_two_ranks(work)
