"""slime's own code from conversion to train_one_step, on live Megatron-Core.

``reference DTYPE FILE`` and ``wiring`` on one process; ``compare DTYPE CP FILE`` on DP x CP, in
float32 with slime's policy loss (it asserts float32 logits), in float64 with a custom loss that
goes through everything else.
"""

import datetime
import sys
import types

import megatron_framework
import tiny_gpt
import torch
import torch.distributed as dist
from megatron.core import mpu, parallel_state
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

from megatron_lossagg.errors import LossAggregationError, PlanError

HOOK = "megatron_lossagg.integrations.slime.carry_weights"
BOUND = {torch.float32: 5e-6, torch.float64: 1e-12}


def load():
    """Import slime, on a CPU accelerator of its own registry."""
    megatron_framework.load("slime")
    from slime.utils import accelerator
    from slime.utils.accelerator.torch_accelerator import TorchAccelerator

    class Framework(TorchAccelerator):
        name = device_type = "cpu"
        communication_backend_name = "gloo"

        def _module(self):
            return torch.cpu

        def is_available(self):
            return True

        def device(self, index=None):
            return torch.device("cpu")

        def current_device(self):
            return "cpu"

        def mem_get_info(self, device=None):
            return (1 << 40, 1 << 40)

        def memory_allocated(self, device=None):
            return 0

        memory_reserved = memory_allocated

    accelerator.set_accelerator(Framework())


def arguments(**given):
    """Return the arguments that the path reads, by default slime's."""
    defaults = {
        "custom_megatron_before_train_step_hook_path": None,
        "rollout_top_p": 1.0,
        "save_debug_train_data": None,
        "data_pad_size_multiplier": 1,
        "allgather_cp": False,
        "enable_mtp_training": False,
        "seq_length": 64,
        "micro_batch_size": 1,
        "decoder_seq_length": None,
        "check_for_nan_in_loss_and_grad": True,
        "ci_test": False,
        "calculate_per_token_loss": False,
        "loss_type": "policy_loss",
        "recompute_loss_function": False,
        "use_rollout_logprobs": False,
        "log_probs_chunk_size": -1,
        "rollout_temperature": 1.0,
        "entropy_coef": ENTROPY,
        "use_opsm": False,
        "advantage_estimator": "grpo",
        "rewards_normalization": False,
        "eps_clip": EPS,
        "eps_clip_high": EPS,
        "eps_clip_c": None,
        "get_mismatch_metrics": False,
        "use_tis": False,
        "custom_pg_loss_reducer_function_path": None,
        "use_kl_loss": True,
        "use_unbiased_kl": False,
        "kl_loss_type": "k3",
        "kl_loss_coef": KL,
        "n_samples_per_prompt": PER_PROMPT,
        "global_batch_size": GLOBAL_BATCH,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 1000,
        "balance_data": False,
        "balance_by_flops": False,
        "reward_key": None,
        "rollout_data_postprocess_path": None,
        "custom_megatron_init_path": None,
        "data_source_path": "slime.rollout.data_source.RolloutDataSourceWithBuffer",
        "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
        "load_debug_rollout_data_subsample": None,
        "log_multi_turn": False,
        "log_passrate": False,
        "log_correct_samples": False,
        "rollout_batch_size": 4,
        "wandb_always_use_train_step": False,
        "use_wandb": False,
        "use_tensorboard": False,
    }
    return types.SimpleNamespace(**{**defaults, **given})


def rollout_refs(args):
    """Convert and split the samples with the rollout manager's own methods."""
    from slime.ray.rollout import RolloutManager
    from slime.utils.types import Sample

    samples = []
    for index, one in enumerate(megatron_framework.make_samples()):
        is_split = one["rollout"] in megatron_framework.SPLIT
        samples.append(
            Sample(
                group_index=one["prompt"],
                index=index,
                rollout_id=one["rollout"] if is_split else None,
                tokens=one["tokens"].tolist(),
                response_length=one["response"],
                reward=0.0,
                loss_mask=one["mask"],
                status=Sample.Status.COMPLETED,
            )
        )
    own = RolloutManager.__ray_metadata__.modified_class
    manager = object.__new__(own)
    manager.args = args
    manager.custom_convert_samples_to_train_data_func = None
    manager.custom_reward_post_process_func = None
    manager.train_parallel_config = {
        "dp_size": mpu.get_data_parallel_world_size(),
        "cp_size": mpu.get_context_parallel_world_size(),
        "vpp_size": 1,
        "microbatch_group_size_per_vp_stage": 1,
    }
    return manager._split_train_data_by_dp(manager._convert_samples_to_train_data(samples))


def rollout_data(args):
    """Receive this rank's data as the actor does; log-probabilities and advantages are given."""
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

    actor = object.__new__(MegatronTrainRayActor)
    actor.args = args
    data = actor._get_rollout_data(rollout_refs(args))
    whole = megatron_framework.make_samples()
    own = [whole[number] for number in data["partition"]]
    for key, name in (("advantages", "advantage"), ("log_probs", "old"), ("ref_log_probs", "ref")):
        lengths = zip(own, data["total_lengths"], data["response_lengths"], strict=True)
        data[key] = [slice_log_prob_with_cp(one[name], total, n) for one, total, n in lengths]
    # slime's float32 denominators are exact to 6e-8; the bound of float64 is 1e-12.
    data["rollout_mask_sums"] = data["rollout_mask_sums"].to(torch.get_default_dtype())
    return data


def custom_loss(args, batch, logits, sum_of_sample_mean):
    """Compute slime's policy loss in float64: its own asserts float32 logits."""
    from slime.backends.megatron_utils.cp_utils import slice_with_cp

    return megatron_framework.custom_loss(args, batch, logits, sum_of_sample_mean, slice_with_cp)


def wrapped():
    """Wrap the model whose weights the reference has."""
    return tiny_gpt.wrapped(tiny_gpt.config_of())


def run(chunk, args, data):
    """Run every step of the batch; yield its loss as logged, its gradients and its M."""
    from megatron.training import global_vars
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.model import train_one_step

    global_vars.set_args(args)
    iterator = get_data_iterator(data)
    per_step = zip(data["num_microbatches"], data["global_batch_sizes"], strict=True)
    for step, (m, rollouts) in enumerate(per_step):
        optimizer = megatron_framework.Recorder(chunk)
        metrics, _ = train_one_step(
            args, 0, step, iterator, [chunk], optimizer, megatron_framework.Scheduler(), m, rollouts
        )
        yield metrics["loss"], optimizer.grads, m


def places_of(args):
    """Return, per step, (data-parallel rank, microbatch) of each sample, and M of each rank."""
    steps = []
    for rank, data in enumerate(rollout_refs(args)):
        microbatches = iter(data.inner["micro_batch_indices"])
        for step, m in enumerate(data.inner["num_microbatches"]):
            while len(steps) <= step:
                steps.append(({}, []))
            places, microbatch_counts = steps[step]
            microbatch_counts.append(m)
            for index in range(m):
                for sequence in next(microbatches):
                    places[data.inner["partition"][sequence]] = (rank, index)
    return steps


def check_case(chunk, name, args, saved, aggregations):
    """Compare one batch's steps with the oracle, gradient and logged loss; return M."""
    from slime.utils.misc import load_function

    bound = BOUND[torch.get_default_dtype()]
    data = rollout_data(args)
    if args.rollout_data_postprocess_path:
        load_function(args.rollout_data_postprocess_path)(args, 0, data)
    places = places_of(args)
    errors, counts = [], []
    for (loss, grads, m), (place, microbatches) in zip(run(chunk, args, data), places, strict=True):
        want, want_grads = expected(
            saved, sorted(place), aggregations, places=place, microbatches=microbatches
        )
        errors.append(megatron_framework.difference(chunk, grads, want_grads))
        loss_error = abs(loss - want) / abs(want)
        assert errors[-1] < bound, (name, errors)
        assert loss_error < 10 * bound, (name, loss, want)
        counts.append(m)
    line = (
        f"slime {megatron_framework.layout_name()} M {counts} {name:38} gradient {max(errors):.1e}"
    )
    megatron_framework.report(line)


def compare(path, monkey):
    """Run every case in this layout."""
    chunk = wrapped()
    saved = torch.load(path)
    is_double = torch.get_default_dtype() == torch.float64
    base = {"loss_type": "custom_loss", "custom_loss_function_path": "slime_worker.custom_loss"}
    base = base if is_double else {}
    default = [AGGREGATIONS["sample_mean"]] * 2
    for most_tokens in (1000, 1):  # all of a rank's sequences in one microbatch, or each in its own
        given = {**base, "max_tokens_per_gpu": most_tokens}
        check_case(chunk, "slime's default", arguments(**given), saved, default)
        reducer = "megatron_lossagg.integrations.slime.constant_40"
        args = arguments(**given, custom_pg_loss_reducer_function_path=reducer)
        aggregations = [{"mode": "constant", "divisor": DIVISOR}, default[0]]
        check_case(chunk, "constant_40 of the policy loss", args, saved, aggregations)
        for name, keywords in AGGREGATIONS.items():
            args = arguments(**given, **flags_of(keywords), rollout_data_postprocess_path=HOOK)
            check_case(chunk, name, args, saved, [keywords] * 2)
    check_refusals()
    check_logged_rollouts(monkey)
    megatron_framework.report("SLIME equals the oracle")


def check_refusals():
    """A denominator below 1 is refused by every rank, whoever has it: V < G in the second step."""
    import pytest
    from slime.utils.misc import load_function

    args = arguments(loss_aggregation="sample_sum", loss_aggregation_count_empty=False)
    with pytest.raises(PlanError, match="raises a denominator below 1 to 1"):
        load_function(HOOK)(args, 0, rollout_data(args))


def check_logged_rollouts(monkey):
    """What slime logs of a rollout batch is weighted too: sum of w m x, averaged over steps."""
    from slime.observability import train_metric_utils
    from slime.utils.misc import load_function

    logged = []
    gather = train_metric_utils.gather_log_data
    monkey.setattr(train_metric_utils.logging_utils, "log", lambda *_, **__: None)
    monkey.setattr(
        train_metric_utils, "gather_log_data", lambda *given: logged.append(gather(*given))
    )
    args = arguments(**flags_of(AGGREGATIONS["constant"]), rollout_data_postprocess_path=HOOK)
    data = rollout_data(args)
    for hook in (None, HOOK):
        if hook:
            load_function(hook)(args, 0, data)
        train_metric_utils.log_rollout_data(0, args, data)
    if dist.get_rank():
        return
    samples = megatron_framework.make_samples()
    sums = [
        sum(float(x) * m for x, m in zip(one["old"], one["mask"], strict=True)) for one in samples
    ]
    counts = {}
    for one in samples:
        counts[one["rollout"]] = counts.get(one["rollout"], 0) + sum(one["mask"])
    mean = sum(
        value / max(counts[one["rollout"]], 1) for value, one in zip(sums, samples, strict=True)
    )
    stock, ours = (one["rollout/log_probs"] for one in logged)
    assert abs(stock - mean / megatron_framework.ROLLOUTS) < 1e-5 * abs(stock)
    assert abs(ours - sum(sums) / DIVISOR / megatron_framework.ROLLOUTS) < 1e-5 * abs(ours)
    megatron_framework.report(
        f"slime logs rollout/log_probs {stock:.4f}, with constant_40 {ours:.4f}"
    )


def wiring():
    """The hooks through slime's own loader, parser and groups that it destroys and rebuilds."""
    import pytest
    from megatron.training.arguments import parse_args
    from slime.utils import reloadable_process_group as reloadable
    from slime.utils.arguments import get_slime_extra_args_provider
    from slime.utils.distributed_utils import init_gloo_group
    from slime.utils.misc import load_function

    # slime's actor: patch, WORLD, register, Megatron's groups.
    reloadable.monkey_patch_torch_dist()
    dist.init_process_group("gloo")
    init_gloo_group()
    reloadable.register_default_process_group(datetime.timedelta(minutes=1))
    parallel_state.initialize_model_parallel()
    group = mpu.get_data_parallel_group(with_context_parallel=False)
    assert isinstance(group, reloadable.ReloadableProcessGroup)
    args = arguments(**flags_of(AGGREGATIONS["token_mean"]), rollout_data_postprocess_path=HOOK)
    carried = []
    for _ in range(2):
        data = rollout_data(args)
        load_function(HOOK)(args, 0, data)
        carried.append(data["rollout_mask_sums"])
        reloadable.destroy_process_groups()
        reloadable.reload_process_groups()
    assert torch.equal(*carried)
    first = data["loss_masks"][data["micro_batch_indices"][0][0]]
    assert first.any()
    active = sum(
        sum(one["mask"])
        for one in megatron_framework.make_samples()
        if one["rollout"] < megatron_framework.GLOBAL_BATCH
    )
    assert carried[0][data["micro_batch_indices"][0][0]] == active / GLOBAL_BATCH

    with pytest.raises(AttributeError, match=r"at its last dot, write .*slime\.carry_weights"):
        load_function("megatron_lossagg.integrations.slime:carry_weights")
    check = load_function("megatron_lossagg.integrations.slime.check")
    # slime swallows what it does not know, ours and misspelled hooks among it.
    needed, typo = ["--rollout-batch-size", "4"], "--rollout-data-postproces-path"
    sys.argv = ["train.py", *needed, "--loss-aggregation", "constant", typo, HOOK]
    parsed = parse_args(get_slime_extra_args_provider(None), ignore_unknown_args=True)
    assert not hasattr(parsed, "loss_aggregation")
    assert parsed.rollout_data_postprocess_path is None
    check(parsed)  # none of slime's own arguments looks like one of ours
    for name, value in (("loss_agregation", "constant"), ("rollout_data_postproces_path", HOOK)):
        setattr(parsed, name, value)
        with pytest.raises(LossAggregationError, match=f"got {name}"):
            check(parsed)
        delattr(parsed, name)
    megatron_framework.report("WIRING of slime holds")


def main():
    action, *rest = sys.argv[1:]
    if action == "reference":
        dtype, path = rest
        tiny_gpt.start(dtype=getattr(torch, dtype))
        megatron_framework.reference(path)
    else:
        import pytest

        load()
        with pytest.MonkeyPatch.context() as monkey:
            megatron_framework.object_store_in_process(monkey)
            if action == "wiring":
                wiring()
            else:
                dtype, cp_size, path = rest
                tiny_gpt.start(cp=int(cp_size), dtype=getattr(torch, dtype))
                compare(path, monkey)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
