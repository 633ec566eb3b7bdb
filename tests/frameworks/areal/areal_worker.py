"""AReaL's own Megatron engine on a CPU, from a checkout, with or without our subclass.

Real: ``MegatronPPOActor`` and ``MegatronLMEngine`` with ``ppo_update``, ``train_lm`` and
``train_batch``, AReaL's mini-batches, microbatches, packing and padding, its split and gather over
context parallelism, log-probabilities, losses, loss weights and statistics, its dispatch of
trajectories to data-parallel ranks, and Megatron-Core's schedule, DDP and finalize. Not real: what
loads the model (a tiny GPT), the optimizer, AReaL's remote calls, and NCCL: what torch makes of its
reduce-scatter on gloo fails in a subgroup.

``areal_worker.py CHECKOUT REFERENCE CP TP PP BOUND CASE ...``; a case is
``aggregation/terms/batching/how``. Batching: a number of microbatches, or ``tokens``. How:

- ``ours``, and ``steps``: two optimizer steps of the batch;
- ``local``: ours with a count of this rank only put in;
- ``areal``: AReaL's own weights; ``per_token`` with that loss scaling, against DP CP times the
  gradient; ``m2po`` with that loss, and a difference from the first such case.

It prints the largest relative error of a gradient; values are checked to BOUND if it is ours.
Every step is weighed; of the policy loss the weights are compared with loops over tokens.
"""

import io
import os
import sys
from contextlib import redirect_stdout
from itertools import chain
from types import SimpleNamespace

import areal_first  # before AReaL and Megatron-Core
import framework_step
import pytest
import tiny_gpt
import torch
import torch.distributed as dist
from areal.api.cli_args import MicroBatchSpec, PPOActorConfig, TrainEngineConfig
from areal.engine import megatron_engine
from areal.infra.controller.train_controller import _dispatch_tensors
from areal.utils import stats_tracker
from megatron.core import parallel_state
from ranks import leave, of_ranks
from torch.distributed.nn import functional

import megatron_lossagg.cpu as cpu
from megatron_lossagg.errors import ContractError, PlanError
from megatron_lossagg.integrations import areal, weigh_rl
from megatron_lossagg.verify.drivers.areal import around, reduce_scattered

REFERENCE, *SIZES, BOUND = sys.argv[2:7]
CASES, BOUND = sys.argv[7:], float(BOUND)
CP, TP, PP = map(int, SIZES)
DP = int(os.environ["WORLD_SIZE"]) // (CP * TP * PP)
assert megatron_engine.__file__.startswith(areal_first.CHECKOUT)
OURS = ("ours", "steps", "local")
WEIGHED = {}
"""The terms of the last step, on rank 0."""
M2 = 0.02
"""M2PO's threshold, at which some of the drawn tokens are dropped."""


def column(sequences, name, width):
    """Stack a value of each response's tokens where the logit is that predicts it."""
    made = torch.zeros(len(sequences), width, dtype=torch.float64)
    for row, one in zip(made, sequences, strict=True):
        end = len(one["tokens"]) - 1
        row[end - one["response"] : end] = torch.as_tensor(one[name], dtype=torch.float64)
    return made


def trajectories(terms):
    """Return AReaL's list of the step: of each prompt its sequences, padded to the longest."""
    prompts = {}
    for one in framework_step.samples():
        prompts.setdefault(one["uid"], []).append(one)
    made = []
    for sequences in prompts.values():
        lengths = torch.tensor([len(one["tokens"]) for one in sequences])
        width = int(lengths.max())
        data = {
            "input_ids": torch.zeros(len(sequences), width, dtype=torch.long),
            "attention_mask": (torch.arange(width) < lengths[:, None]).long(),
            "loss_mask": column(sequences, "mask", width),
        }
        for row, one in zip(data["input_ids"], sequences, strict=True):
            row[: len(one["tokens"])] = torch.tensor(one["tokens"])
        if terms == "nll":  # LMEngine rolls it
            data["loss_mask"] = data["loss_mask"].roll(1, dims=-1).long()
        else:
            old = column(sequences, "old", width)  # the behavior's are M2PO's only
            data |= {"logprobs": column(sequences, "ref", width), "prox_logp": old}
            data["advantages"] = column(sequences, "advantage", width)
            data |= dict.fromkeys(("tot_rewards", "kl_rewards"), torch.zeros_like(old))
            data["rewards"] = torch.zeros(len(sequences), dtype=torch.float64)
        made.append(data)
    return made


def engine_of(terms, batching, how, chunk, after_step):
    """Return AReaL's engine around a wrapped model; ``after_step`` runs for each optimizer step."""
    is_ours = how in OURS
    spec = MicroBatchSpec(max_tokens_per_mb=64)
    if batching != "tokens":
        spec = MicroBatchSpec(n_mbs=int(batching))
    if terms == "nll":
        cls = areal.LossAggregationLM if is_ours else megatron_engine.MegatronLMEngine
        config = TrainEngineConfig(mb_spec=spec)
    else:
        cls = areal.LossAggregationActor if is_ours else areal.WeighedActor
        config = PPOActorConfig(mb_spec=spec, ppo_n_minibatches=1 + (how == "steps"))
        config.eps_clip, config.c_clip = framework_step.CLIP, framework_step.DUAL_CLIP
        config.m2_threshold = M2 if how == "m2po" else None
    engine = around(cls(config), chunk)
    engine.optimizer.step = lambda: after_step(engine) or (True, 1.0, None)
    return engine


def train(chunk, case, terms, batching, how, after_step=lambda engine: None):
    """Run a step of AReaL's engine; returns its statistics."""
    os.environ.update(areal._variables(framework_step.CASES[case]))
    engine = engine_of(terms, batching, how, chunk, after_step)
    splits, _ = _dispatch_tensors(trajectories(terms), DP)
    mine = splits[parallel_state.get_data_parallel_rank()]
    (engine.train_lm if terms == "nll" else engine.ppo_update)(mine)
    return stats_tracker.export_all(reduce_group=parallel_state.get_data_parallel_group())


def of_this_rank(scales):
    """Return a count of this rank's tokens only, in place of all ranks'."""

    def wrong(engine, data, *arguments):
        tokens = data["loss_mask"].sum().double()
        total = tokens.clone()
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return scales(engine, data, *arguments) * tokens / total

    return wrong


def error_of_steps(chunk, case, batching):
    """Train two optimizer steps; return the larger error, each step counted by itself."""
    numbers = {tuple(one["tokens"]): one["number"] for one in framework_step.samples()}
    raw, errors, trained = torch.load(REFERENCE), [], []
    right = areal._scales

    def noting(engine, data, *arguments):
        lengths = data["attention_mask"].sum(-1).tolist()
        rows = zip(data["input_ids"].tolist(), lengths, strict=True)
        trained.append([numbers[tuple(row[:length])] for row, length in rows])
        return right(engine, data, *arguments)

    def after_step(engine):
        members = of_ranks(trained[-1], parallel_state.get_data_parallel_group())
        wanted = {"pg": framework_step.CASES[case]}
        members = list(chain(*members))
        _, grads = framework_step.expected(raw, wanted, by="number", members=members)
        errors.append(framework_step.worst_error(chunk, grads))

    areal._scales = noting
    train(chunk, case, "pg", batching, "steps", after_step)
    areal._scales = right
    assert len(errors) == 2
    return max(errors)


def difference(chunk, first):
    """Return the largest relative difference of a gradient from the first call's."""
    shards = [(one.name, one.parameter.main_grad.clone()) for one in cpu.named_shards([chunk])]
    if not first:
        first.update(shards)
    return max(((grad - first[name]).norm() / first[name].norm()).item() for name, grad in shards)


def check_value(stats, terms, value):
    """The loss that AReaL logs is the one that is trained."""
    name = "sft/loss_aggregation" if terms == "nll" else "ppo_actor/update/actor_loss"
    got = stats[f"{name}/avg"]
    bound = 1e-6 if terms == "nll" else BOUND  # ours is logged in float32
    assert abs(got - value) <= bound * abs(value), (got, value)


def error_of(named, chunks, saved, first):
    """Train one case; return its error, or its difference for M2PO."""
    case, terms, batching, how = named.split("/")
    chunk = chunks[how == "per_token"]
    if how == "steps":
        return error_of_steps(chunk, case, batching)
    right, (value, grads) = areal._scales, saved[case, terms]
    if how == "local":
        areal._scales = of_this_rank(right)
    stats = train(chunk, case, terms, batching, how)
    areal._scales = right
    if how == "ours" and parallel_state.is_pipeline_last_stage():
        check_value(stats, terms, value)
    if terms == "pg" and how in ("ours", "areal", "per_token") and dist.get_rank() == 0:
        mode = framework_step.CASES[case if how == "ours" else "token_mean"]
        factor = DP * CP if how == "per_token" else 1.0
        wanted = framework_step.tokens_and_weights(mode, factor=factor)
        framework_step.assert_weighed(WEIGHED["pg_loss"], wanted)
        step, is_ours = WEIGHED["pg_loss"], how == "ours"
        assert bool(step.unheard) == (PP > 1), step.verdict
        if not step.unheard:
            framework_step.assert_named(step, mode, is_ours=is_ours, factor=factor)
        elif mode.mode == "sample_mean" and mode.count_empty:  # AReaL reduces no loss of those
            assert step.trains is None
            assert "times sample_mean, if B counts no sample of 1 of " in step.verdict
            assert any(one.startswith("or sample_mean, if B counts") for one in step.hints)
        print(f"{named}: weighed", flush=True)
    if how == "m2po":
        return difference(chunk, first)
    return framework_step.worst_error(chunk, grads, DP * CP if how == "per_token" else 1.0)


def check_that_the_variable_weighs(chunk):
    """Its process's first step, and no other one."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setenv("LOSSAGG_WEIGH", "1")
        for _ in range(2):
            train(chunk, "token_mean", "pg", "3", "areal")
    wanted = [1] if dist.get_rank() == 0 else []
    assert [printed.getvalue().count("verdict: trains token_mean")][: len(wanted)] == wanted


def main():
    functional._AllGather.backward = staticmethod(reduce_scattered)  # of the gather over CP
    saved = framework_step.expected_cases(REFERENCE)
    tiny_gpt.start(cp=CP, tp=TP, pp=PP)
    chunks = [tiny_gpt.wrapped(tiny_gpt.config_of(per_token=one)) for one in (False, True)]
    first = {}
    stock = megatron_engine.get_forward_backward_func
    check_that_the_variable_weighs(chunks[0])
    report = lambda step, _, term: WEIGHED.update({term: step})  # noqa: E731
    weigh_rl.install("areal", steps=1000, report=report)
    heard = megatron_engine.get_forward_backward_func
    for named in CASES:
        is_of_policy = "/pg/" in named  # SFT is not weighed
        megatron_engine.get_forward_backward_func = heard if is_of_policy else stock
        error = torch.tensor(error_of(named, chunks, saved, first))
        dist.all_reduce(error, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(f"{named}: {error:.1e}", flush=True)
    with pytest.raises(ContractError, match="got calculate_per_token_loss=True"):
        train(chunks[True], "token_mean", "pg", "1", "ours")
    megatron_engine.get_forward_backward_func = heard
    with pytest.raises(ContractError, match="losses no one of ppo_actor_loss_fn reduced"):
        train(chunks[False], "token_mean", "nll", "1", "areal")
    engine = SimpleNamespace(model=[chunks[False]])
    data = {"loss_mask": torch.tensor([[1, 0, 2]]), "attention_mask": torch.ones(1, 3)}
    with pytest.raises(PlanError, match="got loss_mask with values other than 0 and 1"):
        areal._scales(engine, data, None, lambda data: data["loss_mask"].count_nonzero())


if __name__ == "__main__":
    main()
    leave()
