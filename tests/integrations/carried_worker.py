"""slime's and miles' own code from conversion to train_one_step, on live Megatron-Core.

``carried_worker.py slime|miles wiring``, or ``... DTYPE CP FILE`` on DP x CP: float32 with the
framework's policy loss (it asserts float32 logits), float64 with a custom loss that goes through
everything else. FILE: of ``framework_step.py``. ``FRAMEWORKS_DIR`` has the checkouts that
``tools/fetch_frameworks.sh`` makes; their code runs as it is. Stood in for are a device (a CPU),
what serves rollouts and triton, none of which the training path computes with, and the object
store, which is Ray's.
"""

import datetime
import os
import sys
from argparse import Namespace
from pathlib import Path

import framework_step
import pytest
import stand_ins
import tiny_gpt  # installs the stand-ins of megatron_lossagg.cpu
import torch
import torch._dynamo
import torch.distributed as dist
from megatron.core import mpu, parallel_state
from written_frameworks import kl_losses

import megatron_lossagg.cpu as cpu
import megatron_lossagg.cpu.training as cpu_training
from megatron_lossagg import Aggregation
from megatron_lossagg.errors import LossAggregationError, PlanError
from megatron_lossagg.integrations import miles as miles_hooks
from megatron_lossagg.integrations import slime as slime_hooks
from megatron_lossagg.integrations._rollout_mask_sums import REDUCER
from megatron_lossagg.verify.frameworks import miles, slime_and_miles
from megatron_lossagg.verify.frameworks.drawn_step import aggregations, draw

ROLLOUTS, GLOBAL_BATCH, PER_PROMPT = 8, 4, 2
BOUND = {torch.float32: 5e-6, torch.float64: 1e-12}
BY_MICROBATCH = Aggregation("microbatch_token_mean")


def load(name):
    """Put checkouts on the path, and import Megatron-LM's training package."""
    folder = Path(os.environ["FRAMEWORKS_DIR"])
    sys.path += [str(folder / name), str(folder / "Megatron-LM")]
    stand_ins.install(stand_ins.SERVING)
    torch._dynamo.config.disable = True  # compiling takes a minute and changes no number
    cpu_training.install_training()
    import megatron.training
    import ray

    assert megatron.training.__file__.startswith(str(folder))
    ray.put = ray.get = lambda value, **_: value


class Slime:
    """slime's functions; its weights are carried in the actor."""

    hooks, aggregations = slime_hooks.HOOKS, {**aggregations(), BY_MICROBATCH.mode: BY_MICROBATCH}

    def __init__(self):
        from slime.utils import accelerator
        from slime.utils.accelerator.torch_accelerator import TorchAccelerator

        class CPUAccelerator(TorchAccelerator):
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

        accelerator.set_accelerator(CPUAccelerator())
        from slime.backends.megatron_utils import cp_utils
        from slime.utils.misc import load_function

        self.cp_utils, self.load_function = cp_utils, load_function
        self.parsed = slime_and_miles.arguments(self.hooks)

    def start(self, args):
        pass

    def manager(self, args):
        """Return a rollout manager without Ray."""
        from slime.ray.rollout import RolloutManager

        manager = object.__new__(RolloutManager.__ray_metadata__.modified_class)
        manager.args = args
        manager.custom_convert_samples_to_train_data_func = None
        manager.custom_reward_post_process_func = None
        return manager

    def converted(self, args):
        from slime.utils.types import Sample

        return self.manager(args)._convert_samples_to_train_data(
            slime_and_miles.make_samples(draw(), Sample)
        )

    def split(self, args, data, parallelism):
        manager = self.manager(args)
        manager.train_parallel_config = {**parallelism, "microbatch_group_size_per_vp_stage": 1}
        return manager._split_train_data_by_dp(data)

    def received(self, args, refs):
        from slime.backends.megatron_utils.actor import MegatronTrainRayActor

        actor = object.__new__(MegatronTrainRayActor)
        actor.args = args
        return actor._get_rollout_data(refs)

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
        # A denominator below 1: V < G in the second step.
        below = Aggregation("sample_sum", count_empty=False)
        args = arguments(self, **slime_and_miles.args_with_weights(self.hooks, below))
        with pytest.raises(PlanError, match="raises a denominator below 1 to 1"):
            self.carry(args, rollout_data(self, args, self.converted(args))[0])
        # slime swallows what it does not know, ours and misspelled hooks among it.
        from megatron.training.arguments import parse_args
        from slime.utils.arguments import get_slime_extra_args_provider

        sys.argv = ["train.py", "--rollout-batch-size", "4", "--loss-aggregation", "constant"]
        parsed = parse_args(get_slime_extra_args_provider(None), ignore_unknown_args=True)
        assert not hasattr(parsed, "loss_aggregation")
        for name, value in (
            ("loss_agregation", "constant"),
            ("rollout_data_postproces_path", self.hooks.carry_path),
        ):
            with pytest.raises(LossAggregationError, match=f"got {name}"):
                slime_hooks.check(Namespace(**{**vars(parsed), name: value}))

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

    hooks, aggregations = miles_hooks.HOOKS, aggregations()

    def __init__(self):
        from miles.backends.training_utils import cp_utils
        from miles.utils.misc import load_function

        self.cp_utils, self.load_function = cp_utils, load_function
        self.parsed = slime_and_miles.arguments(self.hooks)

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
        # Why FSDP is refused: its actor asks get_batch for other fields.
        actor = Path(os.environ["FRAMEWORKS_DIR"], "miles/miles/backends/fsdp_utils/actor.py")
        assert "get_batch(" in actor.read_text()
        assert "rollout_mask_sums" not in actor.read_text()


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


def custom_loss(args, batch, logits, sum_of_sample_mean):
    """Compute the policy loss of both frameworks in float64, as a custom loss of theirs."""
    targets = []
    for tokens, n in zip(batch["unconcat_tokens"], batch["response_lengths"], strict=True):
        target = torch.cat([tokens[1:], tokens.new_full((1,), -1)])
        target[: len(tokens) - n - 1] = -1
        targets.append(FRAMEWORK.cp_utils.slice_with_cp(target, -1))
    target = torch.cat(targets)
    is_response = target >= 0
    log_p = torch.log_softmax(logits[0, : len(target)][is_response], -1)
    log_probs = log_p.gather(1, target[is_response][:, None])[:, 0]
    given = {"old": torch.cat(batch["log_probs"]), "advantage": torch.cat(batch["advantages"])}
    policy = framework_step.policy_loss(log_probs, given)
    kl = kl_losses(log_probs, torch.cat(batch["ref_log_probs"]))
    entropy = -(log_p.exp() * log_p).sum(-1)
    if getattr(args, REDUCER) is None:
        pg_loss = sum_of_sample_mean(policy)
    else:
        reducer = FRAMEWORK.load_function(getattr(args, REDUCER))
        lengths = batch["total_lengths"], batch["response_lengths"]
        pg_loss = reducer(*lengths, batch["loss_masks"], args.calculate_per_token_loss)(policy)
    rest = framework_step.KL * kl - framework_step.ENTROPY * entropy
    loss = pg_loss + sum_of_sample_mean(rest) + 0 * logits.sum()
    return loss, {"loss": loss.clone().detach()}


class Recorder:
    """An optimizer that keeps the reduced gradients and changes no weight."""

    param_groups = ()

    def __init__(self, model):
        self.model = model

    def zero_grad(self):
        pass

    def step(self):
        shards = cpu.named_shards([self.model])
        self.grads = {shard.name: shard.parameter.main_grad.clone() for shard in shards}
        return True, 0.0, 0


class Scheduler:
    """A learning-rate scheduler that counts."""

    def step(self, increment):
        self.increment = increment


def cases(framework):
    """Return the arguments of each case, and the aggregations of the policy term and the rest."""
    default = framework.aggregations["sample_mean"]
    made = {"the default": ({}, default, default)}
    constant = framework.aggregations["constant"]
    made["constant_40"] = ({REDUCER: f"{framework.hooks.module}.constant_40"}, constant, default)
    for name, chosen in framework.aggregations.items():
        made[name] = (slime_and_miles.args_with_weights(framework.hooks, chosen), chosen, chosen)
    return made


def compare(framework, dtype, cp_size, path):
    """Run every case in this layout: gradient and logged loss of each step."""
    base = {}
    if dtype == torch.float64:
        base = {"loss_type": "custom_loss", "custom_loss_function_path": "__main__.custom_loss"}
    converted = {
        name: framework.converted(arguments(framework, **given))
        for name, (given, *_) in cases(framework).items()
    }
    tiny_gpt.start(cp=cp_size, dtype=dtype)
    framework.start(arguments(framework, **base))
    from megatron.training import global_vars

    chunk, saved = tiny_gpt.wrapped(tiny_gpt.config_of()), torch.load(path)
    bound = BOUND[dtype]
    if framework.hooks.name == "miles" and dtype == torch.float32 and cp_size > 1:
        # Megatron-Core's fused cross entropy rounds the gradient of logits to bfloat16. Without
        # it, in true-on-policy mode, miles fails where a rank holds one token of a response.
        bound = 5e-3
    for most_tokens in (1000, 1):  # all of a rank's sequences in one microbatch, or each in its own
        for name, (given, policy, rest) in cases(framework).items():
            args = arguments(framework, **base, **given, max_tokens_per_gpu=most_tokens)
            data, steps = rollout_data(framework, args, converted[name])
            framework.carry(args, data)
            global_vars.set_args(args)
            iterator, *counts = framework.iterator(args, chunk, data)
            errors = []
            terms = {"pg": policy, "kl": rest, "entropy": rest}
            for number, (m, g) in enumerate(zip(*counts, strict=True)):
                optimizer, places = Recorder(chunk), steps[number][0]
                metrics = framework.train_one_step(
                    args, 0, number, iterator, [chunk], optimizer, Scheduler(), m, g
                )
                loss, grads = framework_step.expected(
                    saved,
                    terms,
                    by="rollout",
                    members=sorted(places),
                    places=places,
                    microbatches=steps[number][1],
                )
                errors.append(difference(optimizer.grads, grads))
                assert errors[-1] < bound, (name, errors)
                assert metrics["loss"] == pytest.approx(loss, rel=10 * BOUND[dtype]), name
            assert len(errors) == ROLLOUTS // GLOBAL_BATCH
            if dist.get_rank() == 0:
                print(f"CASE {name}, M {counts[0]}: gradient {max(errors):.1e}", flush=True)
    if framework.hooks.name == "slime":
        framework.check_logged_rollouts()


def difference(got, want):
    """Return the relative error of a whole gradient, by parameter name."""
    squares = sum(
        torch.stack([(got[name].double() - grad).square().sum(), grad.square().sum()])
        for name, grad in want.items()
    )
    assert squares[1] > 0
    return (squares[0] / squares[1]).sqrt().item()


def wiring(framework):
    """The hooks through the framework's own loader and parser."""
    with pytest.raises(AttributeError, match=r"at its last dot, write .*\.carry_weights"):
        framework.load_function(f"{framework.hooks.module}:carry_weights")
    check = framework.load_function(f"{framework.hooks.module}.check")
    check(framework.parsed)  # none of the framework's own arguments looks like one of ours
    check(
        arguments(
            framework,
            **slime_and_miles.args_with_weights(framework.hooks, Aggregation("token_mean")),
        )
    )
    framework.wiring()
    print(f"WIRING of {framework.hooks.name} holds")


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    load(name)
    FRAMEWORK = {"slime": Slime, "miles": Miles}[name]()
    if rest == ["wiring"]:
        wiring(FRAMEWORK)
    else:
        dtype, cp_size, path = rest
        torch.set_default_dtype(getattr(torch, dtype))
        compare(FRAMEWORK, getattr(torch, dtype), int(cp_size), path)
    if dist.is_initialized():
        dist.destroy_process_group()
