"""MoE and MTP losses that follow the mode: by gradient, on Megatron-Core's own models.

``follow_worker.py``, one launch: stock's side losses times the sum of the mode's weights, which
loops over sequences give; with a loss scale, and with scale functions of the user's own.
"""

import pytest
from conftest import RELEASE, early, launched, new_folder
from ranks import rows_of

from megatron_lossagg.verify.job import LOSS_SCALINGS, Job, write_job
from megatron_lossagg.verify.parallelism import Parallelism

SHARDED = {"moe": True, "float32": True, "megatron_fsdp": "optim_grads_params"}
FOLLOWED = {
    "MoE-DP2": Parallelism(dp=2, moe=True),
    "MoE-PP2": Parallelism(pp=2, moe=True),
    "MoE-CP2": Parallelism(cp=2, moe=True),
    "MoE-TP2-SP": Parallelism(tp=2, ep=2, sequence_parallel=True, moe=True),
    "MoE-FSDP-DP2": Parallelism(dp=2, **SHARDED),
    "MoE-FSDP-CP2": Parallelism(cp=2, **{**SHARDED, "megatron_fsdp": "optim"}),
    "MTP-DP2": Parallelism(dp=2, mtp=True, float32=True),
    "MTP-CP2": Parallelism(cp=2, mtp=True, float32=True),
}
MODES = ["constant", "sample_mean", "token_mean"]
HOWS = ["", ", loss scale", ", own scale"]
pytestmark = pytest.mark.skipif(RELEASE < (0, 19), reason="needs megatron-core 0.19")


@early
def followed():
    job = Job(layouts=list(FOLLOWED.values()), cases=())
    write_job(job, file := new_folder() / "job")
    out = launched("megatron/follow_worker.py", file, processes=job.world_size)
    found = rows_of(out)
    return {(one["layout"], one["loss_scaling"]): one["ranks"] for one in found}


@pytest.mark.parametrize("loss_scaling", LOSS_SCALINGS)
@pytest.mark.parametrize("name", FOLLOWED)
def test_a_side_loss_is_stocks_times_the_sum_of_weights(followed, name, loss_scaling):
    for found in followed[str(FOLLOWED[name]), loss_scaling]:
        assert found["there"]
        assert found["left"]
        assert found["wanted"]["constant"] > 1.1
        assert found["wanted"]["sample_mean"] < 0.9
        for mode in MODES:
            for how in HOWS:
                assert found[f"{mode}{how}"] < 1e-6, f"{mode}{how}"


@pytest.mark.parametrize("loss_scaling", LOSS_SCALINGS)
@pytest.mark.parametrize("name", FOLLOWED)
def test_a_scaled_mode_scales_the_whole_gradient_with_side_losses(followed, name, loss_scaling):
    for found in followed[str(FOLLOWED[name]), loss_scaling]:
        assert found["main"] > 1e-3
        assert found["whole"] < 1e-6
