"""NeMo-RL's own trainer and Megatron worker on a CPU, from a checkout with or without our patch.

``nemo_rl_worker.py plan CHECKOUT FILE LOSS/MODE ...``, as in ``nemo_rl_cases.py``, one process:
the real ``grpo_train`` until it calls ``policy.train``, and a reference in float64 for each
optimizer step.
``nemo_rl_worker.py train CHECKOUT FILE CP HOW CASE ...``, HOW one of padded, dynamic, packed and
a case ``loss/mode/sequences of a microbatch``: the real ``_shard_for_train`` of the policy
and ``train`` of its Megatron worker, with ``process_global_batch``, microbatches, packing,
``LossPostProcessor``, ``ClippedPGLossFn`` and the gather over context parallelism, on
Megatron-Core's schedule, DDP and finalize; the policy's split steps (``begin_train_step``, two
``train_microbatch``, ``finish_train_step``); and the value worker's ``train``. It prints the
largest relative error of a gradient.
``nemo_rl_worker.py weigh CHECKOUT FILE CP HOW CASE ...``, a case ``loss/mode/size``, mode ``stock``
or one of ours: the policy worker's ``train``, weighed.
``nemo_rl_worker.py losses CHECKOUT -``: ``ClippedPGLossFn`` with each of ``OPTIONS``,
``NLLLossFn``, ``MseValueLossFn`` and ``DistillationLossFn``, by themselves and in the integration.

Not real: Ray, generation and environments (rollouts are given), log-probabilities of the old and
the reference policy, the model (a tiny GPT instead of one that Megatron-Bridge loads), the
optimizer, which records gradients and changes nothing.
"""

import contextlib
import io
import pickle
import sys

import framework_step
import imports_nemo_rl  # noqa: F401  first
import pytest
import tiny_gpt
import torch
import torch.distributed as dist
from drawn_step import Step
from megatron.core import parallel_state
from nemo_rl.algorithms.loss.interfaces import LossType
from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_cases import (
    LANGUAGE_MODEL,
    LOSSES,
    MODES,
    PROMPTS,
    SAMPLES,
    SEQUENCES_PER_STEP,
    TEACHERS_TOKENS,
    config,
    drawn,
    loss_of,
    reference_steps,
    with_value_head,
)
from nemo_rl_functions import losses_of
from nemo_rl_trainer import Nothing, train_data

from megatron_lossagg import Aggregation
from megatron_lossagg.integrations.nemo_rl import aggregated
from megatron_lossagg.verify.drivers import nemo_rl as driver
from megatron_lossagg.verify.drivers.nemo_rl import sharded, worker_module
from megatron_lossagg.verify.step_data import VOCABULARY

WHAT, _, FILE, *OTHERS = sys.argv[1:]
OPTIONS = {
    "token": {},
    "token, KL, dual clip, TIS": {
        "ratio_clip_c": 3.0,
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 1.1,
    },
    "sequence": {"token_level_loss": False},
    "GSPO": {"token_level_loss": False, "sequence_level_importance_ratios": True},
}
NUM_METRICS = {"nll": 3, "value": 9, "KL": 2}
"""Of the losses but GRPO's, which has 16."""
FOLLOW = ("loss", "kl_penalty")
"""Metrics that the aggregation changes."""
MULTIPLIED = "sampling_importance_ratio"
"""Of GSPO: its [b, 1] weights times a [b] mask make [b, b]; one by one, as of packed sequences, b
is 1."""


def losses():
    """Compare each loss with itself under its alias, and its other metrics under ``constant``."""
    own_losses = {
        name: ClippedPGLossFn(ClippedPGLossConfig(**options)) for name, options in OPTIONS.items()
    }
    for name, own in (own_losses | {loss: LOSSES[loss] for loss in NUM_METRICS}).items():
        alias = Aggregation(f"nemo-rl:token_level_loss={own.loss_type is LossType.TOKEN_LEVEL}")
        step, num_excluded = Step(), int(name != "GSPO")
        stock = losses_of(own, step, num_excluded=num_excluded)
        for aggregation in (alias, Aggregation("constant", divisor=40)):
            ours = losses_of(aggregated(own, aggregation), step, num_excluded=num_excluded)
            for one, other, mb in zip(ours, stock, step.microbatches, strict=True):
                metrics, wanted = dict(one[1]), dict(other[1])
                assert len(wanted) >= NUM_METRICS.get(name, 16)
                if name == "GSPO":
                    wanted[MULTIPLIED] /= len(mb.sequences)
                if aggregation is alias:
                    got, want = (torch.autograd.grad(x[0], mb.log_probs)[0] for x in (one, other))
                    assert want.norm() > 1e-3
                    assert torch.allclose(got, want, rtol=1e-6, atol=1e-10)
                    assert metrics["loss"] == pytest.approx(one[0].item(), rel=1e-6)
                else:
                    for each in FOLLOW:
                        metrics.pop(each, None)
                        wanted.pop(each, None)
                assert metrics == pytest.approx(wanted, rel=1e-6, abs=1e-12), name
        print(f"{name}: loss, gradient and metrics are NeMo-RL's own", flush=True)


def plan():
    saved = {}
    for case in OTHERS:
        loss, mode = case.split("/")
        data = train_data(loss_of("token", mode))
        if "loss_weights" in data:
            assert data["loss_weights"].dtype == torch.float64
            assert data["loss_weights"].shape == (PROMPTS * SAMPLES,)
        data, shape = dict(data), data["input_ids"].shape
        data["returns"], data["values"] = drawn(103, *shape), 0.5 * drawn(104, *shape)
        teacher = drawn(105, *shape, VOCABULARY).topk(TEACHERS_TOKENS)
        data["teacher_topk_logits"], data["teacher_topk_indices"] = teacher
        saved[case] = data, []
    tiny_gpt.start()
    for case, (data, steps) in saved.items():
        loss, mode = case.split("/")
        steps += reference_steps(loss, data, MODES[mode])
    torch.save(saved, FILE)


class Recorder(Nothing):
    """In place of the optimizer: keeps each step's largest gradient error."""

    def __init__(self, chunk, steps):
        self.chunk, self.steps, self.errors = chunk, iter(steps), []
        self.grad_norms_by_group, self.param_groups = {}, [{}]

    def step(self):
        _, grads = next(self.steps)
        self.errors.append(framework_step.worst_error(self.chunk, grads))
        return True, 0.0, 0


def worker_of(kind, data, how, size, chunk, steps):
    """Return a worker around the model, this rank's part of the batch, and the optimizer."""
    dp_size = parallel_state.get_data_parallel_world_size()
    policy_config = config().policy
    for name, enabled in (("sequence_packing", "packed"), ("dynamic_batching", "dynamic")):
        policy_config[name] |= {"enabled": how == enabled, "train_mb_tokens": size}
    cp = parallel_state.get_context_parallel_world_size()
    policy_config["megatron_cfg"]["context_parallel_size"] = cp
    ddp = policy_config["megatron_cfg"]["distributed_data_parallel_config"]
    ddp["overlap_grad_reduce"] = False  # as this model is wrapped
    shards = sharded(BatchedDataDict(data), policy_config, dp_size, SEQUENCES_PER_STEP)
    optimizer = Recorder(chunk, steps)
    worker = driver.worker_of(kind, chunk, policy_config, optimizer)
    return worker, shards[parallel_state.get_data_parallel_rank()], optimizer


def report(case, optimizer, microbatches):
    worst = torch.tensor(max(optimizer.errors))
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    assert next(optimizer.steps, None) is None
    if dist.get_rank() == 0:
        print(f"{case}: {worst.item():.1e}, {microbatches} microbatches", flush=True)


CHUNKS = (8, 4)
"""Sequences of each call of a split step."""


def split_steps(worker, data, how, loss_fn, size):
    """Train as the single controller does: each step in two calls; returns the last's metrics."""
    data, rank = BatchedDataDict(data), parallel_state.get_data_parallel_rank()
    start = 0
    while start < data.size:
        worker.begin_train_step(loss_fn, gbs=SEQUENCES_PER_STEP, mbs=size)
        for number in CHUNKS:
            chunk = data.slice(start, start + number)
            shards = sharded(chunk, worker.cfg, worker.dp_size, number)
            worker.train_microbatch(shards[rank])
            start += number
        metrics = worker.finish_train_step()
    return metrics


def train():
    cp, how, *cases = OTHERS
    saved = torch.load(FILE, weights_only=False)
    policy = worker_module()
    tiny_gpt.start(cp=int(cp))
    for case in cases:
        loss, mode, size = case.split("/")
        tiny_gpt.gpt, kind = LANGUAGE_MODEL, policy.MegatronPolicyWorkerImpl
        if loss == "value":
            from nemo_rl.models.value.workers import megatron_value_worker as module

            for name in ("get_pg_collection", "logical_and_across_model_parallel_group",
                         "reduce_max_stat_across_model_parallel_group"):  # fmt: skip
                setattr(module, name, getattr(policy, name))
            tiny_gpt.gpt, kind = with_value_head, module.MegatronValueWorkerImpl
        chunk = tiny_gpt.wrapped(tiny_gpt.config_of(per_token=True))
        data, steps = saved[f"{loss}/{mode}"]
        worker, shard, optimizer = worker_of(kind, data, how, int(size), chunk, steps)
        loss_fn = loss_of(loss, mode)
        if loss.startswith("split"):
            metrics = split_steps(worker, data, how, loss_fn, int(size))
            wanted = steps[-1][0]
        else:
            metrics = worker.train(shard, loss_fn, gbs=SEQUENCES_PER_STEP, mbs=int(size))
            wanted = sum(total for total, _ in steps) / len(steps)
        got = metrics["global_loss"].double().sum().item()
        assert abs(got - wanted) < 1e-5 * abs(wanted), (case, got, wanted)
        report(case, optimizer, len(metrics["all_mb_metrics"]["loss"]))


class Unchanged(Recorder):
    """In place of the optimizer: changes nothing."""

    def step(self):
        return True, 0.0, 0


def by_hand(data, mode):
    """Return the tokens and a token's weight of each sequence, for each optimizer step."""
    mask = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).int()
    steps = []
    for start in range(0, len(mask), SEQUENCES_PER_STEP):
        rows = mask[start : start + SEQUENCES_PER_STEP]
        samples = int((data["sample_mask"][start : start + SEQUENCES_PER_STEP] != 0).sum())
        counts = rows.sum(-1).tolist()
        weight = {
            "token": lambda n, counts=counts: 1 / sum(counts),
            "sequence": lambda n, samples=samples: 1 / samples / n,
            "sample_mean": lambda n, samples=samples: 1 / samples / n,
            "constant": lambda n, samples=samples: 1 / samples / 40,
        }[mode]
        steps.append([(n, weight(n)) for n in counts if n])
    return steps


def check_that_the_variable_weighs(kind, data, how, size):
    """A loss function that arrives in a worker lets its first step be weighed, and no other one."""
    chunk = tiny_gpt.wrapped(tiny_gpt.config_of(per_token=True))
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setenv("LOSSAGG_WEIGH", "1")
        sent = pickle.dumps(aggregated(LOSSES["token"], None))
        for _ in range(2):
            worker, shard, _ = worker_of(kind, data, how, size, chunk, [])
            worker.optimizer = Unchanged(chunk, [])
            worker.train(shard, pickle.loads(sent), gbs=SEQUENCES_PER_STEP, mbs=size)
    if dist.get_rank() == 0:
        assert printed.getvalue().count("term actor_loss") == 1, printed.getvalue()
        assert "verdict: trains token_mean" in printed.getvalue()


def weigh():
    cp, how, *cases = OTHERS
    saved = torch.load(FILE, weights_only=False)
    data, _ = next(iter(saved.values()))
    policy = worker_module()
    tiny_gpt.start(cp=int(cp))
    from megatron_lossagg.integrations import weigh_rl

    size = int(cases[0].split("/")[-1])
    check_that_the_variable_weighs(policy.MegatronPolicyWorkerImpl, data, how, size)
    found = {}
    weigh_rl.install(
        "nemo-rl",
        steps=1000,
        report=lambda step, _, term: found.setdefault(term, []).append(step),
    )
    for case in cases:
        loss, mode, size = case.split("/")
        found.clear()
        chunk = tiny_gpt.wrapped(tiny_gpt.config_of(per_token=True))
        kind = policy.MegatronPolicyWorkerImpl
        worker, shard, _ = worker_of(kind, data, how, int(size), chunk, [])
        worker.optimizer = Unchanged(chunk, [])
        loss_fn = LOSSES[loss] if mode == "stock" else loss_of(loss, mode)
        worker.train(shard, loss_fn, gbs=SEQUENCES_PER_STEP, mbs=int(size))
        if dist.get_rank() == 0:
            assert found.keys() == {"actor_loss", "kl"}, (case, [*found])
            for steps in found.values():
                wanted = by_hand(data, loss if mode == "stock" else mode)
                for step, want in zip(steps, wanted, strict=True):
                    framework_step.assert_weighed(step, want, tolerance=1e-7)
            print(f"{case}: weighed, {found['actor_loss'][0].verdict}", flush=True)


if __name__ == "__main__":
    functions = (plan, train, weigh, losses)
    {function.__name__: function for function in functions}[WHAT]()
    if dist.is_initialized():
        dist.destroy_process_group()
