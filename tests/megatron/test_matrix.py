"""Splits combined as in a real run, and the losses that Megatron-Core adds to the main one.

Side losses: at equal layout and loss scaling stock Megatron's loss_func and this package's leave
the same bits in every gradient buffer (``matrix_worker.py``, one launch). Combinations: the
gradient is the reference's (``megatron_lossagg.verify``, one launch per world size).
"""

from importlib.util import find_spec

import pytest
from conftest import RELEASE, early, launched, new_folder, proven
from ranks import rows_of

from megatron_lossagg import Aggregation
from megatron_lossagg.verify.cases import Case
from megatron_lossagg.verify.job import LOSS_SCALINGS, Job, write_job
from megatron_lossagg.verify.parallelism import Parallelism

# Megatron-Core trains no experts on TP 2 without sequence parallelism.
SIDE = {
    "MoE-DP2": Parallelism(dp=2, moe=True),
    "MoE-EP2xDP2": Parallelism(dp=2, ep=2, moe=True),
    "MoE-CP2": Parallelism(cp=2, moe=True),
    "MoE-TP2-SP": Parallelism(tp=2, ep=2, sequence_parallel=True, moe=True),
    "MoE-PP2": Parallelism(pp=2, moe=True),
    "MTP-DP2": Parallelism(dp=2, mtp=True, float32=True),
    "MTP-CP2": Parallelism(cp=2, mtp=True, float32=True),
}
if RELEASE < (0, 16):  # packs no sequences under multi-token prediction
    SIDE = {name: layout for name, layout in SIDE.items() if not layout.mtp}
# Before 0.15 stock divides by a microbatch's tokens even where there are none, and is NaN.
SIDE_LOSS_SCALINGS = LOSS_SCALINGS if RELEASE >= (0, 15) else ("per_token",)
WHOLE = [
    (name, loss_scaling)
    for name, layout in SIDE.items()
    for loss_scaling in SIDE_LOSS_SCALINGS
    if loss_scaling == "per_token" or layout.cp == 1
]
CASES = (
    Case(aggregation=Aggregation("token_mean")),
    Case(aggregation=Aggregation("prompt_mean")),
    Case(aggregation=Aggregation("constant", divisor=40.0)),
)
COMBINED = {
    "TP2-SPxCP2xPP2": Parallelism(tp=2, cp=2, pp=2, sequence_parallel=True),
    "DP2xCP2xPP2": Parallelism(dp=2, cp=2, pp=2),
    "DP2xCP2xPP2xVPP2": Parallelism(dp=2, cp=2, pp=2, vpp=2, microbatches=4),
    "MoE-EP2xCP2xTP2-SP": Parallelism(cp=2, tp=2, ep=2, sequence_parallel=True, moe=True),
    "DP4-2-optimizer-instances": Parallelism(
        dp=4, distributed_optimizer=True, optimizer_instances=2
    ),
    "overlap-and-distributed-optimizer": Parallelism(
        dp=2, cp=2, overlap_grad_reduce=True, distributed_optimizer=True
    ),
    "recompute-CP2xTP2": Parallelism(cp=2, tp=2, recompute=True),
    "MTP-DP2xCP2": Parallelism(dp=2, cp=2, mtp=True, float32=True),
    "MTP-PP2xCP2": Parallelism(pp=2, cp=2, mtp=True, float32=True),
    "MTP-TP2-SPxCP2": Parallelism(tp=2, cp=2, sequence_parallel=True, mtp=True, float32=True),
}
if find_spec("einops") is None:  # Megatron-Core makes the groups of instances with it
    COMBINED = {n: layout for n, layout in COMBINED.items() if layout.optimizer_instances == 1}


@early
def side():
    """Return what every rank found, by layout, loss scaling and whether tokens were rejected."""
    job = Job(layouts=list(SIDE.values()), cases=())
    write_job(job, file := new_folder() / "job")
    out = launched("megatron/matrix_worker.py", "side", file, processes=job.world_size)
    comparisons = rows_of(out)
    return {(c["layout"], c["loss_scaling"], c["rejected"]): c["ranks"] for c in comparisons}


@pytest.mark.parametrize("loss_scaling", SIDE_LOSS_SCALINGS)
@pytest.mark.parametrize("name", SIDE)
def test_side_losses_come_out_bit_for_bit_as_without_this_package(side, name, loss_scaling):
    for found in side[str(SIDE[name]), loss_scaling, False]:
        assert found["there"]
        assert found["stock_twice"]
        assert found["token_mean"]
        assert found["sample_mean"]


@pytest.mark.parametrize("loss_scaling", SIDE_LOSS_SCALINGS)
@pytest.mark.parametrize("name", SIDE)
def test_rejected_tokens_do_not_scale_side_losses(side, name, loss_scaling):
    for found in side[str(SIDE[name]), loss_scaling, True]:
        assert found["there"]
        assert found["token_mean"]
        assert found["sample_mean"]


@pytest.mark.parametrize(("name", "loss_scaling"), WHOLE)
def test_main_and_side_losses_add_up_as_in_stock_where_stock_has_the_mode(side, name, loss_scaling):
    """token_mean per token; microbatch_token_mean in the average loss scaling at CP 1."""
    for found in side[str(SIDE[name]), loss_scaling, False]:
        assert found["main"] > 1e-3
        assert found["whole"] < SIDE[name].tolerance


@early
def combined_over_four_ranks():
    return proven([layout for layout in COMBINED.values() if layout.world_size == 4], CASES)


@early
def combined_over_eight_ranks():
    return proven([layout for layout in COMBINED.values() if layout.world_size == 8], CASES)


@pytest.mark.parametrize("loss_scaling", LOSS_SCALINGS)
@pytest.mark.parametrize("case", list(map(str, CASES)))
@pytest.mark.parametrize("name", COMBINED)
def test_splits_combined_train_the_configured_loss(
    combined_over_four_ranks, combined_over_eight_ranks, name, case, loss_scaling
):
    layout = COMBINED[name]
    verdicts = combined_over_four_ranks | combined_over_eight_ranks
    verdict = verdicts[str(layout), case, loss_scaling]
    assert verdict["gradient_error"] < layout.tolerance, verdict["explanation"]
    assert verdict["loss_error"] < layout.tolerance, verdict["explanation"]
    assert verdict["weight_sum_error"] < 1e-6  # computed in float32
