"""Through the schedule hook, a framework's loop that knows nothing of us trains the configured
loss.

The framework's side of the gradient cases is in ``megatron_lossagg.verify.train_step``: a
loss_func that returns a masked sum, as Megatron-LM's does; tensor-parallel ranks but the first
read no data.
Each ``check_`` of the three workers is a test by its name.
"""

import pytest
from conftest import each_check, early, proven

from megatron_lossagg.contract.scaling import LOSS_SCALINGS
from megatron_lossagg.verify.cases import CASES
from megatron_lossagg.verify.parallelism import Parallelism

# The hook knows nothing of a mode: one with ids, one that counts microbatches, one with neither,
# and what else it passes on: token weights, groups, weights of sequences.
# `lossagg verify --hooked` runs all of them, on any layout.
CASES = [
    case
    for case in CASES
    if str(case)
    in (
        "prompt_mean",
        "sample_mean, count_empty=False",
        "microbatch_token_mean",
        "token_mean, count=weights",
        "balanced",
        "own_weights",
        "sample_mean, sequence_weight",
    )
]
LAYOUTS = {
    "DP2xCP2": {"dp": 2, "cp": 2, "microbatches": 3},
    "PP2xCP2": {"pp": 2, "cp": 2, "microbatches": 1},
    "TP2-SP": {"tp": 2, "sequence_parallel": True},
    "PP2xVPP3": {"pp": 2, "vpp": 3, "microbatches": 4},
    "distributed-optimizer": {"cp": 2, "distributed_optimizer": True},
    "local": {"cp": 2, "packing": "local"},
    # With the zigzag layout its gradient was off by 79 percent, silently.
    "contiguous-local": {"cp": 2, "cp_partition": "contiguous", "packing": "local"},
    "uneven-M": {"dp": 2, "microbatches": (3, 5)},
}


def hooked_verdicts(world_size):
    layouts = [Parallelism(**sizes, hooked=True) for sizes in LAYOUTS.values()]
    return proven([layout for layout in layouts if layout.world_size == world_size], CASES)


@early
def hooked_verdicts_of_two_ranks():
    return hooked_verdicts(2)


@early
def hooked_verdicts_of_four_ranks():
    return hooked_verdicts(4)


@pytest.fixture(scope="module")
def verdicts(hooked_verdicts_of_two_ranks, hooked_verdicts_of_four_ranks):
    return hooked_verdicts_of_two_ranks | hooked_verdicts_of_four_ranks


@pytest.mark.parametrize(
    ("case", "loss_scaling"),
    [(str(case), scaling) for case in CASES for scaling in LOSS_SCALINGS],
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_hooked_framework_trains_and_reports_the_configured_loss(
    verdicts, name, case, loss_scaling
):
    verdict = verdicts[str(Parallelism(**LAYOUTS[name], hooked=True)), case, loss_scaling]
    assert verdict["gradient_error"] < 1e-12, verdict["explanation"]
    if name != "uneven-M":  # reported values assume one M
        assert verdict["loss_error"] < 1e-12, verdict["explanation"]


output, test_the_hook = each_check("loop/schedule_worker.py", processes=2)
output_of_refusals, test_the_hook_refuses = each_check(
    "loop/schedule_refusals_worker.py", processes=2
)
output_of_comparison, test_the_hook_compares = each_check(
    "loop/schedule_comparison_worker.py", processes=2
)
