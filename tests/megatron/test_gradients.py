"""On real Megatron-Core every layout trains the reference's gradient.

All layouts of one world size are proven in one launch of ``megatron_lossagg.verify``, but for
unpacked sequences: their padding makes the reference three times as large. The data with every
degenerate sequence is its ``sequences.py``, the reference ``reference_loss.py``.
"""

import pytest
from conftest import early, launched, proven
from test_matrix import CASES as THREE

from megatron_lossagg.contract.scaling import LOSS_SCALINGS
from megatron_lossagg.verify.cases import CASES
from megatron_lossagg.verify.parallelism import Parallelism

SPLITS = {
    "DP2": {"dp": 2},
    "DP3": {"dp": 3},
    "CP2": {"cp": 2},
    "DP2xCP2": {"dp": 2, "cp": 2},
    "PP2xCP2": {"pp": 2, "cp": 2},
}
"""With M = 3 every case is trained."""
WITH_1_AND_4 = ("DP3", "DP2xCP2", "PP2xCP2")
"""With M = 1 and 4 the cases of ``REACHED``; DP 2 and CP 2 are parts of these."""
# Who holds which tokens: a mode reaches a layout through weights only, token weights through it.
LAYOUTS = {
    "CP4": {"cp": 4, "microbatches": 5},
    "PP2": {"pp": 2},
    "local": {"cp": 2, "packing": "local"},
    "bshd": {"cp": 2, "packing": "bshd"},
    "gathered": {"cp": 2, "packing": "gathered"},
    "gathered-DP2xCP2": {"dp": 2, "cp": 2, "packing": "gathered"},
    "contiguous": {"cp": 2, "cp_partition": "contiguous"},
    "contiguous-CP4": {"cp": 4, "cp_partition": "contiguous"},
    "contiguous-gathered": {"cp": 2, "cp_partition": "contiguous", "packing": "gathered"},
    "contiguous-local": {"cp": 2, "cp_partition": "contiguous", "packing": "local"},
    "contiguous-bshd": {"cp": 2, "cp_partition": "contiguous", "packing": "bshd"},
    "contiguous-bshd-CP4": {"cp": 4, "cp_partition": "contiguous", "packing": "bshd"},
}
# What comes before or after the loss, which knows no mode: of the modes three stand for all.
AROUND_THE_LOSS = {
    "TP2": {"tp": 2},
    "TP2-SP": {"tp": 2, "sequence_parallel": True},
    "PP2xVPP2": {"pp": 2, "vpp": 2, "microbatches": 4},
    "distributed-optimizer": {"cp": 2, "distributed_optimizer": True},
    "average-in-collective": {"dp": 2, "average_in_collective": True},
    "overlap-grad-reduce": {"dp": 2, "overlap_grad_reduce": True},
    "recompute": {"cp": 2, "recompute": True},
    "float32": {"dp": 2, "cp": 2, "float32": True},
    "float32-TP2-SP": {"tp": 2, "cp": 2, "sequence_parallel": True, "float32": True},
}
SOME = (*THREE, *(case for case in CASES if case.aggregation.count != "mask"))
REACHED = (
    *SOME,
    *(
        case
        for case in CASES
        if str(case) in ("microbatch_token_mean", "own_weights", "sample_mean, sequence_weight")
    ),
)
UNEVEN = Parallelism(dp=2, microbatches=(3, 5))
SPLIT_CASES = [
    *((split, 3, str(case)) for split in SPLITS for case in CASES),
    *((split, m, str(case)) for split in WITH_1_AND_4 for m in (1, 4) for case in REACHED),
]
"""Split, M and case."""


def layout_of(sizes, **more):
    return Parallelism(**{**sizes, **more})


def proven_of(layouts, world_size, cases=CASES, *, unpacked=False):
    """Prove those of ``layouts`` that have ``world_size`` ranks and are or are not unpacked."""
    wanted = [
        layout
        for layout in layouts
        if layout.world_size == world_size and (layout.packing == "bshd") == unpacked
    ]
    return proven(wanted, cases)


def verdicts_of_splits(world_size):
    every = [layout_of(sizes, microbatches=3) for sizes in SPLITS.values()]
    some = [layout_of(SPLITS[name], microbatches=m) for name in WITH_1_AND_4 for m in (1, 4)]
    return proven_of(every, world_size) | proven_of([*some, UNEVEN], world_size, REACHED)


def verdicts_of(world_size):
    return (
        verdicts_of_splits(world_size)
        | proven_of(map(layout_of, LAYOUTS.values()), world_size, SOME)
        | proven_of(map(layout_of, AROUND_THE_LOSS.values()), world_size, THREE)
    )


@early
def verdicts_of_four_ranks():
    return verdicts_of(4)


@early
def verdicts_of_two_ranks():
    return verdicts_of(2)


@early
def verdicts_of_three_ranks():
    return verdicts_of_splits(3)


@early
def verdicts_of_unpacked_sequences():
    unpacked = [*map(layout_of, LAYOUTS.values())]
    return proven_of(unpacked, 2, SOME, unpacked=True) | proven_of(unpacked, 4, SOME, unpacked=True)


@pytest.fixture(scope="module")
def verdicts(
    verdicts_of_four_ranks,
    verdicts_of_two_ranks,
    verdicts_of_three_ranks,
    verdicts_of_unpacked_sequences,
):
    """Return every verdict of this file's layouts, by layout, case and loss scaling."""
    return (
        verdicts_of_four_ranks
        | verdicts_of_two_ranks
        | verdicts_of_three_ranks
        | verdicts_of_unpacked_sequences
    )


@pytest.mark.parametrize("loss_scaling", LOSS_SCALINGS)
@pytest.mark.parametrize(("split", "microbatches", "case"), SPLIT_CASES)
def test_the_gradient_is_that_of_the_configured_loss(
    verdicts, split, case, microbatches, loss_scaling
):
    layout = layout_of(SPLITS[split], microbatches=microbatches)
    verdict = verdicts[str(layout), case, loss_scaling]
    assert verdict["gradient_error"] < 1e-12, verdict["explanation"]
    assert verdict["loss_error"] < 1e-12, verdict["explanation"]
    assert verdict["weight_sum_error"] < 1e-6  # computed in float32


@pytest.mark.parametrize(
    ("name", "case", "loss_scaling"),
    [
        *((n, str(c), s) for n in LAYOUTS for c in SOME for s in LOSS_SCALINGS),
        *((n, str(c), s) for n in AROUND_THE_LOSS for c in THREE for s in LOSS_SCALINGS),
    ],
)
def test_other_layouts_and_reductions_train_the_configured_loss(verdicts, name, case, loss_scaling):
    layout = layout_of({**LAYOUTS, **AROUND_THE_LOSS}[name])
    verdict = verdicts[str(layout), case, loss_scaling]
    bound = 1e-5 if layout.float32 else 1e-12
    assert verdict["gradient_error"] < bound, verdict["explanation"]
    assert verdict["loss_error"] < bound, verdict["explanation"]


@pytest.mark.parametrize("loss_scaling", LOSS_SCALINGS)
@pytest.mark.parametrize("case", list(map(str, REACHED)))
def test_ranks_with_3_and_5_microbatches_train_and_log_the_configured_loss(
    verdicts, case, loss_scaling
):
    verdict = verdicts[str(UNEVEN), case, loss_scaling]
    assert verdict["gradient_error"] < 1e-12
    assert verdict["loss_error"] < 1e-12
    assert verdict["weight_sum_error"] < 1e-6


@early
def parity():
    return launched("megatron/parity_worker.py", processes=4)


def test_stock_megatron_is_untouched_and_equals_token_mean_per_token(parity):
    assert parity.count("PARITY bit for bit, token_mean within 1e-12") == 2, parity


@pytest.mark.parametrize("loss_scaling", LOSS_SCALINGS)
def test_a_loss_scale_multiplies_the_gradient_exactly_and_not_the_report(parity, loss_scaling):
    assert f"SCALED by 1024 exactly, {loss_scaling}" in parity, parity
