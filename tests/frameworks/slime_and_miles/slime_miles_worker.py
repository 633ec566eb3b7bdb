"""slime's and miles' own code from conversion to train_one_step, on live Megatron-Core.

``slime_miles_worker.py slime|miles wiring``, or ``... DTYPE CP FILE`` on DP x CP: float32 with the
framework's policy loss (it asserts float32 logits), float64 with a custom loss that goes through
everything else. FILE: of ``framework_step.py``. ``FRAMEWORKS_DIR`` has the checkouts that
``tools/fetch_frameworks.sh`` makes; their code runs as it is. Stood in for are a device (a CPU),
what serves rollouts and triton, none of which the training path computes with, and the object
store, which is Ray's.
"""

import importlib
import os
import sys
from pathlib import Path

import framework_step
import pytest
import stand_ins
import tiny_gpt  # installs the stand-ins of megatron_lossagg.cpu
import torch
import torch._dynamo
import torch.distributed as dist
from ranks import leave
from slime_miles_functions import (
    GLOBAL_BATCH,
    ROLLOUTS,
    Miles,
    Slime,
    arguments,
    rollout_data,
)

import megatron_lossagg.cpu as cpu
import megatron_lossagg.cpu.training as cpu_training
from megatron_lossagg import Aggregation
from megatron_lossagg.integrations import weigh_rollouts
from megatron_lossagg.integrations._rollouts import REDUCER
from megatron_lossagg.verify.drivers import slime_and_miles

BOUND = {torch.float32: 5e-6, torch.float64: 1e-12}


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
    kl = framework_step.kl_losses(log_probs, torch.cat(batch["ref_log_probs"]))
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
    weighed = {}
    weighing = weigh_rollouts.install(
        framework.hooks.name,
        steps=1000,
        reducer=f"{framework.hooks.module}.constant_40",
        report=lambda step, _, term: weighed.update({term: step}),
    )
    for most_tokens in (1000, 1):  # all of a rank's sequences in one microbatch, or each in its own
        of_size = {"max_tokens_per_gpu": most_tokens, "recompute_loss_function": most_tokens == 1}
        for name, (given, policy, rest) in cases(framework).items():
            args = arguments(framework, **base, **given, **of_size)
            data, steps = rollout_data(framework, args, converted[name])
            if args.custom_megatron_init_path:
                framework.load_function(args.custom_megatron_init_path)(args)
            framework.carry(args, data)
            global_vars.set_args(args)
            iterator, *counts = framework.iterator(args, chunk, data)
            errors = []
            terms = {"pg": policy, "kl": rest, "entropy": rest}
            named = {"loss": (rest, 1.0)}  # of custom_loss
            if dtype == torch.float32:
                named = {"entropy_loss": (rest, -framework_step.ENTROPY)}
                named["kl_loss"] = (rest, framework_step.KL)
            if dtype == torch.float32 or getattr(args, REDUCER) is None:
                named["pg_loss"] = (policy, 1.0)
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
                if dist.get_rank() == 0:
                    assert_weighed(weighed, named, *steps[number])
                errors.append(difference(optimizer.grads, grads))
                assert errors[-1] < bound, (name, errors)
                assert metrics["loss"] == pytest.approx(loss, rel=10 * BOUND[dtype]), name
            assert len(errors) == ROLLOUTS // GLOBAL_BATCH
            if dist.get_rank() == 0:
                print(f"CASE {name}, M {counts[0]}: gradient {max(errors):.1e}", flush=True)
    assert weighing.num_steps == 2 * 2 * len(cases(framework))
    if framework.hooks.name == "slime":
        framework.check_logged_rollouts()


def assert_weighed(terms, aggregations, places, microbatches):
    """Compare what was weighed of each term with its aggregation's weights by the reference."""
    step = framework_step.samples()
    for name, (aggregation, coefficient) in aggregations.items():
        wanted = {}
        by_hand = framework_step.weights(
            aggregation,
            by="rollout",
            members=sorted(places),
            places=places,
            microbatches=microbatches,
        )
        for number, weight in by_hand.items():
            n = sum(step[number]["mask"])
            wanted.setdefault(places[number], []).append((n, coefficient * weight))
        found = {}
        for one in terms[name].sequences:
            place = found.setdefault((one.dp_rank, one.microbatch), [])
            place.append((one.tokens, one.weight_sum / one.tokens))
            assert one.weight_max == pytest.approx(one.weight_min, rel=1e-5)
        assert found.keys() == wanted.keys()
        for place, its in wanted.items():
            for got, want in zip(sorted(found[place]), sorted(its), strict=True):
                assert got == pytest.approx(want, rel=1e-5), (name, place)


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
    model = importlib.import_module(f"{framework.hooks.name}.backends.megatron_utils.model")
    stock = model.get_forward_backward_func
    path = framework.hooks.weigh_path
    framework.load_function(path)(arguments(framework, custom_megatron_init_path=path))
    assert model.get_forward_backward_func is not stock
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
        leave()
