"""miles' own code from conversion to train_one_step, on live Megatron-Core.

``reference DTYPE FILE`` and ``wiring`` on one process; ``compare DTYPE CP FILE`` on DP x CP, with
miles' policy loss in float32 and a custom loss in float64, as in ``slime_worker.py``.
"""

import os
import sys
import types
from pathlib import Path

import megatron_framework
import tiny_gpt
import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron_framework import (
    AGGREGATIONS,
    DIVISOR,
    ENTROPY,
    EPS,
    GLOBAL_BATCH,
    KL,
    PER_PROMPT,
    expected,
    flags_of,
)

HOOK = "megatron_lossagg.integrations.miles.carry_weights"
BOUND = {torch.float32: 5e-6, torch.float64: 1e-12}


def arguments(**given):
    """Return the arguments that the path reads, by default miles'."""
    defaults = {
        "adv_estimator": "grpo",
        "advantage_estimator": "grpo",
        "allgather_cp": False,
        "allow_partial_train_step": False,
        "balance_by_flops": False,
        "balance_data": False,
        "calculate_per_token_loss": False,
        "check_for_nan_in_loss_and_grad": True,
        "ci_test": False,
        "compress_ratios": None,
        "custom_convert_samples_to_train_data_path": None,
        "custom_megatron_before_train_step_hook_path": None,
        "custom_megatron_init_path": None,
        "custom_pg_loss_reducer_function_path": None,
        "custom_reward_post_process_path": None,
        "custom_tis_function_path": None,
        "data_pad_size_multiplier": 1,
        "debug_disable_optimizer": False,
        "decoder_seq_length": None,
        "delay_split_train_data_by_dp": False,
        "dumper_enable": False,
        "dumper_fwd_bwd": None,
        "enable_mtp_training": False,
        "enable_witness": False,
        "entropy_coef": ENTROPY,
        "eps_clip": EPS,
        "eps_clip_c": None,
        "eps_clip_high": EPS,
        "get_mismatch_metrics": False,
        "global_batch_size": GLOBAL_BATCH,
        "grpo_std_normalization": False,
        "indep_dp": False,
        "kl_loss_coef": KL,
        "kl_loss_type": "k3",
        "log_probs_chunk_size": -1,
        "loss_type": "policy_loss",
        "max_tokens_per_gpu": 1000,
        "micro_batch_size": 1,
        "multi_lora": False,
        "n_samples_per_prompt": PER_PROMPT,
        "object_store_backend": "ray",
        "observe_training_entropy": False,
        "qkv_format": "thd",
        "recompute_loss_function": False,
        "reward_key": None,
        "rewards_normalization": False,
        "rollout_temperature": 1.0,
        "save_local_weight_checksum": False,
        "seq_length": 64,
        "skip_actor_forward_only": False,
        "train_backend": "megatron",
        "true_on_policy_mode": False,
        "use_dynamic_batch_size": True,
        "use_dynamic_global_batch_size": False,
        "use_kl_loss": True,
        "use_opsm": False,
        "use_rollout_logprobs": False,
        "use_tis": False,
        "use_unbiased_kl": False,
    }
    return types.SimpleNamespace(**{**defaults, **given})


def load():
    """Import miles."""
    megatron_framework.load("miles")
    from sglang.srt.debug_utils.dumper import DumperConfig  # a stand-in: nothing is dumped

    DumperConfig._kv_pairs_to_dict = staticmethod(lambda pairs: {})


def start(cp_size, dtype):
    """Start torch.distributed and make miles' parallel state from Megatron's groups."""
    from megatron.training import global_vars
    from miles.backends.megatron_utils.parallel import create_megatron_parallel_state
    from miles.backends.training_utils.parallel import set_parallel_state
    from miles.utils import object_store
    from miles.utils.ft_utils.process_group_utils import GroupInfo

    tiny_gpt.start(cp=cp_size, dtype=dtype)
    args = arguments()
    global_vars.set_args(args)
    object_store.init_instance(args)
    alone = GroupInfo(rank=0, size=1, group=None)
    set_parallel_state(create_megatron_parallel_state(alone))


def samples():
    """Return the rollout batch as miles' samples."""
    from miles.utils.types import Sample

    for index, one in enumerate(megatron_framework.make_samples()):
        is_split = one["rollout"] in megatron_framework.SPLIT
        yield Sample(
            group_index=one["prompt"],
            index=100 + index,
            rollout_id=one["rollout"] if is_split else None,
            tokens=one["tokens"].tolist(),
            response_length=one["response"],
            reward=0.0,
            loss_mask=one["mask"],
            status=Sample.Status.COMPLETED,
        )


def converted(args):
    """Convert the samples as the rollout manager does, a process without torch.distributed."""
    from miles.ray.rollout.train_data_conversion import convert_samples_to_train_data
    from miles.utils.misc import load_function

    hook = load_function(args.custom_convert_samples_to_train_data_path)
    return convert_samples_to_train_data(
        args,
        list(samples()),
        metadata={},
        custom_convert_samples_to_train_data_func=hook,
        custom_reward_post_process_func=None,
    )


def rollout_refs(args, data):
    """Split converted data as the rollout manager does."""
    from miles.ray.rollout.train_data_conversion import split_train_data_by_dp

    config = {
        "dp_size": mpu.get_data_parallel_world_size(),
        "cp_size": mpu.get_context_parallel_world_size(),
        "vpp_size": 1,
        "microbatch_group_size_per_vp_stage": None,
    }
    return split_train_data_by_dp(args, dict(data), config)


def rollout_data(args, converted_data):
    """Receive this rank's data as the actor does; log-probabilities and advantages are given."""
    from miles.backends.training_utils.cp_utils import slice_log_prob_with_cp
    from miles.backends.training_utils.data import get_rollout_data

    refs = rollout_refs(args, converted_data)
    inner = refs[mpu.get_data_parallel_rank()].inner
    partition, denominators = inner["partition"], inner["rollout_mask_sums"]
    data, _ = get_rollout_data(args, refs)
    whole = megatron_framework.make_samples()
    for key, name in (("advantages", "advantage"), ("log_probs", "old"), ("ref_log_probs", "ref")):
        lengths = zip(partition, data["total_lengths"], data["response_lengths"], strict=True)
        data[key] = [
            slice_log_prob_with_cp(whole[one][name], total, n) for one, total, n in lengths
        ]
    # miles' float32 denominators are exact to 6e-8; the bound of float64 is 1e-12.
    assert data["rollout_mask_sums"].dtype == torch.float32
    data["rollout_mask_sums"] = torch.tensor(denominators, dtype=torch.get_default_dtype())
    return data


def custom_loss(args, batch, logits, sum_of_sample_mean):
    """Compute miles' policy loss in float64: its own asserts float32 logits."""
    from miles.backends.training_utils.cp_utils import slice_with_cp

    return megatron_framework.custom_loss(args, batch, logits, sum_of_sample_mean, slice_with_cp)


def run(chunk, args, data):
    """Run every step of the batch; yield its loss as logged, its gradients and its M."""
    from megatron.training import global_vars
    from miles.backends.megatron_utils.model import train_one_step
    from miles.backends.training_utils.data import get_data_iterator, get_num_rollouts

    global_vars.set_args(args)
    iterator, num_microbatches = get_data_iterator(args, [chunk], data)
    rollouts = get_num_rollouts(args, data, len(num_microbatches))
    for step, (m, g) in enumerate(zip(num_microbatches, rollouts, strict=True)):
        optimizer = megatron_framework.Recorder(chunk)
        metrics, _, _ = train_one_step(
            args,
            0,
            step,
            iterator,
            [chunk],
            optimizer,
            megatron_framework.Scheduler(),
            m,
            g,
            witness_info=None,
            attempt=0,
        )
        yield metrics["loss"], optimizer.grads, m


def check_case(chunk, name, args, data, saved, aggregations, bound):
    """Compare one batch's steps with the oracle, gradient and logged loss."""
    data = rollout_data(args, data)
    whole = megatron_framework.make_samples()
    errors, counts = [], []
    for step, (loss, grads, m) in enumerate(run(chunk, args, data)):
        members = [n for n, one in enumerate(whole) if one["rollout"] // GLOBAL_BATCH == step]
        want, want_grads = expected(saved, members, aggregations)
        errors.append(megatron_framework.difference(chunk, grads, want_grads))
        assert errors[-1] < bound, (name, errors)
        loss_bound = 10 * BOUND[torch.get_default_dtype()]
        assert abs(loss - want) < loss_bound * abs(want), (name, loss, want)
        counts.append(m)
    assert len(counts) == megatron_framework.ROLLOUTS // GLOBAL_BATCH
    line = (
        f"miles {megatron_framework.layout_name()} M {counts} {name:38} gradient {max(errors):.1e}"
    )
    megatron_framework.report(line)


def cases():
    """Yield a name, the arguments and the aggregations of the policy term and the rest."""
    default = [AGGREGATIONS["sample_mean"]] * 2
    yield "miles' default", {}, default
    for module in ("miles", "slime"):
        reducer = {
            "custom_pg_loss_reducer_function_path": f"megatron_lossagg.integrations.{module}.constant_40"  # noqa: E501
        }
        aggregations = [{"mode": "constant", "divisor": DIVISOR}, default[0]]
        yield f"{module}.constant_40, policy loss", reducer, aggregations
    for name, keywords in AGGREGATIONS.items():
        if name != "microbatch_token_mean":  # refused
            more = {**flags_of(keywords), "custom_convert_samples_to_train_data_path": HOOK}
            yield name, more, [keywords] * 2


def compare(dtype, cp_size, path):
    """Run every case in this layout."""
    data = {name: converted(arguments(**given)) for name, given, _ in cases()}
    start(cp_size, dtype)
    chunk = tiny_gpt.wrapped(tiny_gpt.config_of())
    saved = torch.load(path)
    base, bound = {}, BOUND[dtype]
    if dtype == torch.float64:
        base = {"loss_type": "custom_loss", "custom_loss_function_path": "miles_worker.custom_loss"}
    elif cp_size == 1:
        base = {"true_on_policy_mode": True}
    else:
        # Megatron-Core's fused cross entropy rounds the gradient of logits to bfloat16. Without
        # it, in true-on-policy mode, miles fails where a rank holds one token of a response.
        bound = 5e-3
    for most_tokens in (1000, 1):
        for name, given, aggregations in cases():
            args = arguments(**base, **given, max_tokens_per_gpu=most_tokens)
            check_case(chunk, name, args, data[name], saved, aggregations, bound)
    megatron_framework.report("MILES equals the oracle")


def wiring():
    """The hooks through miles' own loader and parser, its schedule's edges, its FSDP actor."""
    import pytest
    from megatron.training.arguments import parse_args
    from miles.ray.rollout.train_data_conversion import convert_samples_to_train_data
    from miles.utils.arguments import get_miles_extra_args_provider
    from miles.utils.dp_schedule import build_dp_schedule
    from miles.utils.misc import load_function

    with pytest.raises(AttributeError, match=r"at its last dot, write .*miles\.carry_weights"):
        load_function("megatron_lossagg.integrations.miles:carry_weights")
    check = load_function("megatron_lossagg.integrations.miles.check")
    sys.argv = ["train.py", "--rollout-batch-size", "4"]
    parsed = parse_args(get_miles_extra_args_provider(None), ignore_unknown_args=True)
    check(parsed)  # none of miles' own arguments looks like one of ours
    parsed.loss_aggregation, parsed.custom_convert_samples_to_train_data_path = "token_mean", HOOK
    check(parsed)

    # Steps are those of build_dp_schedule, a smaller last one included.
    hook = load_function(HOOK)
    more = {"custom_convert_samples_to_train_data_path": HOOK, "loss_aggregation": "token_mean"}
    for partial in (False, True):
        args = arguments(**more, global_batch_size=5, allow_partial_train_step=partial)
        data = hook(args, list(samples()))
        stock = convert_samples_to_train_data(args, list(samples()), {}, None, None)
        config = {"dp_size": 1, "cp_size": 1, "vpp_size": 1}
        config["microbatch_group_size_per_vp_stage"] = None
        (sequences,), (microbatches,), num_microbatches, rollouts = build_dp_schedule(
            args,
            config,
            [len(tokens) for tokens in data["tokens"]],
            global_batch_size=5,
            rollout_indices=data["rollout_ids"],
        )
        assert len(rollouts) == 1 + partial
        own, seen = iter(microbatches), set()
        for m, g in zip(num_microbatches, rollouts, strict=True):
            members = [sequences[sequence] for _ in range(m) for sequence in next(own)]
            active = sum(sum(data["loss_masks"][sequence]) for sequence in members)
            for sequence in members:
                is_active = any(data["loss_masks"][sequence])
                want = active / g if is_active else 1
                assert abs(data["rollout_mask_sums"][sequence] - want) < 1e-12 * want, (
                    sequence,
                    partial,
                )
            seen.update(members)
        for sequence in {*range(len(data["tokens"]))} - seen:
            assert data["rollout_mask_sums"][sequence] == stock["rollout_mask_sums"][sequence]
    # Why FSDP is refused: its actor asks get_batch for other fields.
    source = Path(
        os.environ["FRAMEWORKS_DIR"], "miles/miles/backends/fsdp_utils/actor.py"
    ).read_text()
    assert "get_batch(" in source
    assert "rollout_mask_sums" not in source
    print("WIRING of miles holds")


def main():
    action, *rest = sys.argv[1:]
    if action == "reference":
        dtype, path = rest
        tiny_gpt.start(dtype=getattr(torch, dtype))
        megatron_framework.reference(path)
        dist.destroy_process_group()
        return
    import pytest

    load()
    with pytest.MonkeyPatch.context() as monkey:
        megatron_framework.object_store_in_process(monkey)
        if action == "wiring":
            wiring()
            return
        dtype, cp_size, path = rest
        torch.set_default_dtype(getattr(torch, dtype))
        compare(getattr(torch, dtype), int(cp_size), path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
