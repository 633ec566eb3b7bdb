"""What mutants of the aggregator, its step and outputs run against; pytest does not collect it."""

import aggregator_worker
import own_loop_worker
import pytest
from mutant_forks import on_two_ranks

import megatron_lossagg.verify.verdict  # noqa: F401  before the forks
from megatron_lossagg import Aggregation
from megatron_lossagg.verify.cases import Case
from megatron_lossagg.verify.job import Job
from megatron_lossagg.verify.parallelism import Parallelism

LAYOUTS = (
    Parallelism(dp=2),
    Parallelism(dp=2, average_in_collective=True),
    Parallelism(cp=2, microbatches=2),
    Parallelism(tp=2),
    Parallelism(pp=2),
    Parallelism(pp=2, vpp=2, microbatches=4),
)
CASES = (
    Case(aggregation=Aggregation("token_mean")),
    Case(aggregation=Aggregation("constant", divisor=40.0), second=Aggregation("token_mean")),
)


def test_the_checks_of_the_aggregator_worker_hold():
    on_two_ranks(aggregator_worker.main)


def test_the_checks_of_the_own_loop_worker_hold():
    on_two_ranks(own_loop_worker.main)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_gradient_is_the_references_in_both_loss_scalings(layout):
    job = Job(layouts=[layout], cases=CASES)

    def work():
        verdicts = [verdict for event in job.run() for verdict in event.get("verdicts", ())]
        assert len(verdicts) == job.num_verdicts
        assert all(verdict["passed"] for verdict in verdicts)

    on_two_ranks(work)
