"""slime's and miles' own functions from conversion to train_one_step.

:mod:`slime_miles_worker` runs them, on a rollout batch as their actors receive it.
"""

import datetime
import os
import sys
from argparse import Namespace
from pathlib import Path

import framework_step
import pytest
import torch
import torch.distributed as dist
from megatron.core import mpu, parallel_state

from megatron_lossagg import Aggregation
from megatron_lossagg.errors import LossAggregationError
from megatron_lossagg.integrations import miles as miles_hooks
from megatron_lossagg.integrations import slime as slime_hooks
from megatron_lossagg.verify.drivers import miles, slime, slime_and_miles
from megatron_lossagg.verify.drivers.driver import aggregations, draw

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


BY_MICROBATCH = Aggregation("microbatch_token_mean")


class Slime:
    """slime's functions; its weights are carried in the actor."""

    hooks = slime_hooks.HOOKS

    def __init__(self):
        self.aggregations = {**aggregations(), **BELOW_ONE, BY_MICROBATCH.mode: BY_MICROBATCH}
        slime.use_cpu()
        from slime.backends.megatron_utils import cp_utils
        from slime.utils.misc import load_function

        self.cp_utils, self.load_function = cp_utils, load_function
        self.parsed = slime_and_miles.parsed(self.hooks)

    def start(self, args):
        pass

    def converted(self, args):
        from slime.utils.types import Sample

        return slime.manager(args)._convert_samples_to_train_data(
            slime_and_miles.make_samples(draw(), Sample)
        )

    def split(self, args, data, parallelism):
        manager = slime.manager(args)
        manager.train_parallel_config = {**parallelism, "microbatch_group_size_per_vp_stage": 1}
        return manager._split_train_data_by_dp(data)

    def received(self, args, refs):
        return slime.received(args, refs)

    def carry(self, args, data):
        if args.rollout_data_postprocess_path:
            self.load_function(args.rollout_data_postprocess_path)(args, 0, data)

    def iterator(self, args, chunk, data):
        from slime.backends.megatron_utils.data import get_data_iterator

        return get_data_iterator(data), data["num_microbatches"], data["global_batch_sizes"]

    def train_one_step(self, *given):
        from slime.backends.megatron_utils.model import train_one_step

        return train_one_step(*given)[0]

    def wiring(self):
        """Groups that slime destroys and rebuilds; flags that it does not know; a refusal."""
        from slime.utils import reloadable_process_group as reloadable
        from slime.utils.distributed_utils import init_gloo_group

        # slime's actor: patch, WORLD, register, Megatron's groups.
        reloadable.monkey_patch_torch_dist()
        dist.init_process_group("gloo")
        init_gloo_group()
        reloadable.register_default_process_group(datetime.timedelta(minutes=1))
        parallel_state.initialize_model_parallel()
        group = mpu.get_data_parallel_group(with_context_parallel=False)
        assert isinstance(group, reloadable.ReloadableProcessGroup)
        args = arguments(
            self, **slime_and_miles.args_with_weights(self.hooks, Aggregation("token_mean"))
        )
        active = sum(sum(one.mask) for one in draw() if one.sample < GLOBAL_BATCH)
        for _ in range(2):
            data, _ = rollout_data(self, args, self.converted(args))
            self.carry(args, data)
            first = data["micro_batch_indices"][0][0]
            assert data["loss_masks"][first].any()
            assert data["rollout_mask_sums"][first] == active / GLOBAL_BATCH
            reloadable.destroy_process_groups()
            reloadable.reload_process_groups()
        # slime swallows what it does not know: our flags, and a misspelled hook.
        from megatron.training.arguments import parse_args
        from slime.utils.arguments import get_slime_extra_args_provider

        sys.argv = ["train.py", "--rollout-batch-size", "4", "--loss-aggregation", "constant"]
        parsed = parse_args(get_slime_extra_args_provider(None), ignore_unknown_args=True)
        assert not hasattr(parsed, "loss_aggregation")
        with pytest.raises(LossAggregationError, match="got loss_agregation"):
            slime_hooks.check(Namespace(**{**vars(parsed), "loss_agregation": "constant"}))
        misspelled = slime_and_miles.args_with_weights(self.hooks, Aggregation("token_mean"))
        misspelled["rollout_data_postproces_path"] = misspelled.pop(self.hooks.carry_argument)
        args = arguments(self, **misspelled)
        assert args.rollout_data_postprocess_path is None  # slime's default
        slime_hooks.check(args)
        with pytest.raises(LossAggregationError, match="None did not call carry_weights"):
            self.carry(args, rollout_data(self, args, self.converted(args))[0])

    def check_logged_rollouts(self):
        """What slime logs of a rollout batch is weighted too: sum of w m x, averaged over steps."""
        from slime.observability import train_metric_utils

        logged, gather = [], train_metric_utils.gather_log_data
        train_metric_utils.logging_utils.log = lambda *_, **__: None
        train_metric_utils.gather_log_data = lambda *given: logged.append(gather(*given))
        for aggregation in ("sample_mean", "constant"):  # the first one is slime's own
            chosen = self.aggregations[aggregation]
            args = arguments(self, **slime_and_miles.args_with_weights(self.hooks, chosen))
            data, _ = rollout_data(self, args, self.converted(args))
            if aggregation == "constant":
                self.carry(args, data)
            train_metric_utils.log_rollout_data(0, args, data)
        if dist.get_rank():
            return
        sums, counts = [0.0] * ROLLOUTS, [0] * ROLLOUTS
        for one in draw():
            sums[one.sample] += float(one.old_log_probs @ torch.tensor(one.mask).double())
            counts[one.sample] += sum(one.mask)
        mean = sum(total / max(n, 1) for total, n in zip(sums, counts, strict=True)) / ROLLOUTS
        wanted = [mean, sum(sums) / framework_step.L / ROLLOUTS]
        assert [one["rollout/log_probs"] for one in logged] == pytest.approx(wanted, rel=1e-5)


class Miles:
    """miles' functions; its weights are carried in the rollout manager."""

    hooks, aggregations = miles_hooks.HOOKS, {**aggregations(), **BELOW_ONE}

    def __init__(self):
        from miles.backends.training_utils import cp_utils
        from miles.utils.misc import load_function

        self.cp_utils, self.load_function = cp_utils, load_function
        self.parsed = slime_and_miles.parsed(self.hooks)

    def start(self, args):
        from miles.utils import object_store

        object_store.init_instance(args)
        miles.take(args)
        if args.loss_type == "policy_loss" and mpu.get_context_parallel_world_size() == 1:
            self.parsed.true_on_policy_mode = True

    def converted(self, args):
        from miles.ray.rollout.train_data_conversion import convert_samples_to_train_data
        from miles.utils.types import Sample

        hook = self.load_function(args.custom_convert_samples_to_train_data_path)
        samples = slime_and_miles.make_samples(draw(), Sample)
        return convert_samples_to_train_data(args, samples, {}, hook, None)

    def split(self, args, data, parallelism):
        from miles.ray.rollout.train_data_conversion import split_train_data_by_dp

        parallelism = {**parallelism, "microbatch_group_size_per_vp_stage": None}
        return split_train_data_by_dp(args, dict(data), parallelism)

    def received(self, args, refs):
        from miles.backends.training_utils.data import get_rollout_data

        return get_rollout_data(args, refs)[0]

    def carry(self, args, data):
        pass

    def iterator(self, args, chunk, data):
        from miles.backends.training_utils.data import get_data_iterator, get_num_rollouts

        iterator, num_microbatches = get_data_iterator(args, [chunk], data)
        return iterator, num_microbatches, get_num_rollouts(args, data, len(num_microbatches))

    def train_one_step(self, *given):
        from miles.backends.megatron_utils.model import train_one_step

        return train_one_step(*given, witness_info=None, attempt=0)[0]

    def wiring(self):
        """Steps are those of build_dp_schedule, a smaller last one included; FSDP's actor."""
        from miles.utils.dp_schedule import build_dp_schedule

        for partial in (False, True):
            given = {"global_batch_size": 5, "allow_partial_train_step": partial}
            stock = self.converted(arguments(self, **given))
            given |= slime_and_miles.args_with_weights(self.hooks, Aggregation("token_mean"))
            data = self.converted(arguments(self, **given))
            config = {"dp_size": 1, "cp_size": 1, "vpp_size": 1}
            (sequences,), (microbatches,), num_microbatches, rollouts = build_dp_schedule(
                arguments(self, **given),
                {**config, "microbatch_group_size_per_vp_stage": None},
                [len(tokens) for tokens in data["tokens"]],
                global_batch_size=5,
                rollout_indices=data["rollout_ids"],
            )
            assert len(rollouts) == 1 + partial
            own, wanted = iter(microbatches), list(stock["rollout_mask_sums"])
            for m, g in zip(num_microbatches, rollouts, strict=True):
                members = [sequences[sequence] for _ in range(m) for sequence in next(own)]
                active = sum(sum(data["loss_masks"][sequence]) for sequence in members)
                for sequence in members:
                    wanted[sequence] = active / g if any(data["loss_masks"][sequence]) else 1
            assert data["rollout_mask_sums"] == pytest.approx(wanted, rel=1e-12)
        self.reduces_without_megatrons_arguments()
        # Why FSDP is refused: its actor asks get_batch for other fields.
        actor = Path(os.environ["FRAMEWORKS_DIR"], "miles/miles/backends/fsdp_utils/actor.py")
        assert "get_batch(" in actor.read_text()
        assert "rollout_mask_sums" not in actor.read_text()

    def reduces_without_megatrons_arguments(self):
        """The reducer at CP 2 where Megatron-LM is imported and its arguments are not set."""
        from megatron.training import global_vars
        from miles.backends.training_utils import parallel
        from miles.utils.ft_utils.process_group_utils import GroupInfo

        with pytest.raises(AssertionError, match="args is not initialized"):
            global_vars.get_args()
        one = GroupInfo(rank=0, size=1, group=None)
        groups = dict.fromkeys(
            ("intra_dp", "intra_dp_cp", "tp", "pp", "ep", "etp", "indep_dp"), one
        )
        masks = [torch.tensor([1, 0, 1]), torch.tensor([1, 1])]
        lengths, total = ([5, 4], [3, 2]), 0.0
        for rank in range(2):
            cp = GroupInfo(rank=rank, size=2, group=None)
            parallel.set_parallel_state(parallel.ParallelState(cp=cp, **groups))
            whole = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0])]
            held = [
                self.cp_utils.slice_log_prob_with_cp(*one)
                for one in zip(whole, *lengths, strict=True)
            ]
            total += miles_hooks.constant_10(*lengths, masks, False)(torch.cat(held)).item()
        assert total == pytest.approx((1 + 3 + 4 + 5) / 10)
        parallel.set_parallel_state(None)
