"""AReaL's own Megatron engine on a CPU, from a checkout, with or without our subclass.

Real: ``MegatronPPOActor`` and ``MegatronLMEngine`` with ``ppo_update``, ``train_lm`` and
``train_batch``, AReaL's mini-batches, microbatches, packing and padding, its split and gather over
context parallelism, log-probabilities, losses, loss weights and statistics, its dispatch of
trajectories to data-parallel ranks, and Megatron-Core's schedule, DDP and finalize. Not real: what
loads the model (a tiny GPT), the optimizer, and AReaL's remote calls.

``areal_worker.py REFERENCE CHECKOUT CP TP PP BOUND CASE ...``; a case is
``aggregation/terms/batching/how``. Batching: a number of microbatches, or ``tokens``. How: ``ours``;
``areal``, AReaL without us; ``local``, ours with a count of this rank only put in. It prints the
largest relative error of a gradient; values are checked to BOUND if it is ours.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # inductor needs a compiler
REFERENCE, CHECKOUT, *SIZES, BOUND = sys.argv[1:7]
CASES, BOUND = sys.argv[7:], float(BOUND)
CP, TP, PP = map(int, SIZES)
DP = int(os.environ["WORLD_SIZE"]) // (CP * TP * PP)
sys.path.insert(0, CHECKOUT)
sys.path.append(str(Path(__file__).resolve().parents[2] / ".venv-frameworks"))

import stand_ins  # noqa: E402
import tiny_gpt  # noqa: E402  before the frameworks: it lets Megatron-Core run on a CPU

stand_ins.install(stand_ins.RAY, stand_ins.HYDRA, stand_ins.DATA, stand_ins.AREAL)

import framework_step  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from areal.api.cli_args import MicroBatchSpec, PPOActorConfig, TrainEngineConfig  # noqa: E402
from areal.engine import megatron_engine  # noqa: E402
from areal.infra.controller.train_controller import _dispatch_tensors  # noqa: E402
from areal.utils import logging, stats_tracker  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

from megatron_lossagg.integrations import areal  # noqa: E402

assert megatron_engine.__file__.startswith(CHECKOUT)


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
            old = column(sequences, "old", width)
            data |= {"logprobs": old, "prox_logp": old.clone()}
            data["advantages"] = column(sequences, "advantage", width)
            data |= dict.fromkeys(("tot_rewards", "kl_rewards"), torch.zeros_like(old))
            data["rewards"] = torch.zeros(len(sequences), dtype=torch.float64)
        made.append(data)
    return made


def engine_of(terms, batching, how, chunk):
    """Return AReaL's engine around a wrapped model."""
    is_ours = how != "areal"
    spec = MicroBatchSpec(max_tokens_per_mb=64)
    if batching != "tokens":
        spec = MicroBatchSpec(n_mbs=int(batching))
    if terms == "nll":
        cls = areal.LossAggregationLM if is_ours else megatron_engine.MegatronLMEngine
        config = TrainEngineConfig(mb_spec=spec)
    else:
        cls = areal.LossAggregationActor if is_ours else megatron_engine.MegatronPPOActor
        config = PPOActorConfig(mb_spec=spec, ppo_n_minibatches=1)
        config.eps_clip, config.c_clip = framework_step.CLIP, framework_step.DUAL_CLIP
    engine = cls(config)
    engine.model, engine.device = megatron_engine._MegatronModelList([chunk]), "cpu"
    engine.parallel_strategy = SimpleNamespace(
        tensor_parallel_size=TP, pipeline_parallel_size=PP, context_parallel_size=CP
    )
    engine.process_group_initialized = True
    engine.logger = logging.getLogger("areal_worker")
    engine.optimizer = SimpleNamespace(
        zero_grad=lambda: None,
        step=lambda: (True, 1.0, None),
        param_groups=[{"lr": 0.0}],
        get_loss_scale=lambda: torch.ones(()),
    )
    return engine


def train(chunk, case, terms, batching, how):
    """Run a step of AReaL's engine; returns its statistics."""
    os.environ.update(areal._variables(framework_step.CASES[case]))
    engine = engine_of(terms, batching, how, chunk)
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


def main():
    saved = framework_step.expected_cases(REFERENCE)
    tiny_gpt.start(cp=CP, tp=TP, pp=PP)
    chunk = tiny_gpt.wrapped(tiny_gpt.config_of())
    right = areal._scales
    for named in CASES:
        case, terms, batching, how = named.split("/")
        areal._scales = of_this_rank(right) if how == "local" else right
        stats = train(chunk, case, terms, batching, how)
        value, grads = saved[case, terms]
        error = torch.tensor(framework_step.worst_error(chunk, grads))
        dist.all_reduce(error, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(f"{named}: {error:.1e}", flush=True)
        if how == "ours" and parallel_state.is_pipeline_last_stage():
            name = "sft/loss_aggregation" if terms == "nll" else "ppo_actor/update/actor_loss"
            got = stats[f"{name}/avg"]
            assert abs(got - value) <= max(BOUND, 1e-6) * abs(value), (got, value)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
