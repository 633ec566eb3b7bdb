"""Arguments of slime and miles, and a rollout batch as their actors receive it."""

from argparse import Namespace

import framework_step
import torch
from megatron.core import mpu

from megatron_lossagg import Aggregation
from megatron_lossagg.verify.drivers.driver import draw

ROLLOUTS, GLOBAL_BATCH, PER_PROMPT = 8, 4, 2
BELOW_ONE = {"sample_sum without empty": Aggregation("sample_sum", count_empty=False)}
"""With fully masked rollouts, V < G: d_s = V / G. token_sum of the others is below 1 too."""


def arguments(framework, **given):
    """Return the framework's own defaults, and what makes its loss that of the reference."""
    ours = {
        "advantage_estimator": "grpo",
        "decoder_seq_length": None,
        "entropy_coef": framework_step.ENTROPY,
        "eps_clip_c": framework_step.DUAL_CLIP,
        "global_batch_size": GLOBAL_BATCH,
        "kl_loss_coef": framework_step.KL,
        "kl_loss_type": "k3",
        "max_tokens_per_gpu": 1000,
        "micro_batch_size": 1,
        "n_samples_per_prompt": PER_PROMPT,
        "rewards_normalization": False,
        "seq_length": 64,
        "use_dynamic_batch_size": True,
        "use_kl_loss": True,
    }
    return Namespace(**{**vars(framework.parsed), **ours, **given})


def rollout_data(framework, args, converted):
    """Receive this rank's data as the actor does; returns it, and each step's (places, M's).

    Log-probabilities and advantages are given. ``places``: (data-parallel rank, microbatch) of
    each sequence.
    """
    parallelism = {
        "dp_size": mpu.get_data_parallel_world_size(),
        "cp_size": mpu.get_context_parallel_world_size(),
        "vpp_size": 1,
    }
    refs = framework.split(args, converted, parallelism)
    shards = [ref.inner for ref in refs]
    own, steps = shards[mpu.get_data_parallel_rank()], []
    for rank, shard in enumerate(shards):
        microbatches = iter(shard["micro_batch_indices"])
        for step, m in enumerate(shard["num_microbatches"]):
            if rank == 0:
                steps.append(({}, []))
            places, counts = steps[step]
            counts.append(m)
            for index in range(m):
                for sequence in next(microbatches):
                    places[shard["partition"][sequence]] = (rank, index)
    # The frameworks' float32 denominators are exact to 6e-8; the bound of float64 is 1e-12.
    dtype, partition = torch.get_default_dtype(), list(own["partition"])
    denominators = torch.as_tensor(own["rollout_mask_sums"], dtype=dtype)
    data = framework.received(args, refs)
    assert data["rollout_mask_sums"].dtype == torch.float32
    data["rollout_mask_sums"] = denominators
    drawn, slice_with_cp = draw(), framework.cp_utils.slice_log_prob_with_cp
    names = {"advantages": "advantages", "log_probs": "old_log_probs"}
    for key, name in {**names, "ref_log_probs": "ref_log_probs"}.items():
        lengths = zip(partition, data["total_lengths"], data["response_lengths"], strict=True)
        data[key] = [
            slice_with_cp(getattr(drawn[one], name).to(dtype), total, n)
            for one, total, n in lengths
        ]
    return data, steps
