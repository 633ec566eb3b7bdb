"""NeMo-RL's own trainer and Megatron worker on a CPU, from a checkout with or without our patch.

``nemo_rl_worker.py plan CHECKOUT FILE LOSS/MODE ...``, of ``LOSSES`` and ``MODES``, one process:
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
the reference policy, the model (a tiny GPT instead of one that is loaded), the
optimizer, which records gradients and changes nothing.
"""

import contextlib
import io
import math
import os
import pickle
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import framework_step
import imports_nemo_rl  # noqa: F401  first
import pytest
import tiny_gpt
import torch
import torch.distributed as dist
from drawn_step import Step
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from nemo_rl.algorithms.loss.interfaces import LossType
from nemo_rl.algorithms.loss.loss_functions import (
    ClippedPGLossConfig,
    ClippedPGLossFn,
    DistillationLossConfig,
    DistillationLossFn,
    MseValueLossConfig,
    MseValueLossFn,
    NLLLossFn,
)
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_functions import losses_of
from ranks import leave

import megatron_lossagg.cpu as cpu
from megatron_lossagg import Aggregation
from megatron_lossagg.integrations.nemo_rl import aggregated
from megatron_lossagg.verify import reference_loss
from megatron_lossagg.verify.cases import reference_options
from megatron_lossagg.verify.drivers import nemo_rl as driver
from megatron_lossagg.verify.drivers.nemo_rl import sharded, worker_module
from megatron_lossagg.verify.step_data import VOCABULARY

PROMPTS, SAMPLES, SEQUENCES_PER_STEP = 6, 4, 12
KL = 0.1
CLIP_OF_VALUES = 0.3
FORWARD_KL, TEACHERS_TOKENS = 0.3, 3
"""A mixed KL's part of KL(teacher | student), and the tokens that a teacher gives."""
MODES = {
    "token_mean": Aggregation("token_mean"),
    "sample_mean": Aggregation("sample_mean"),
    "constant": Aggregation("constant", divisor=40),
    "sample_sum": Aggregation("sample_sum"),
    "all prompts": Aggregation("prompt_mean"),
    "prompts with tokens": Aggregation("prompt_mean", count_empty=False),
}
LOSSES = {
    "token": ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=KL)),
    "sequence": ClippedPGLossFn(
        ClippedPGLossConfig(token_level_loss=False, reference_policy_kl_penalty=KL)
    ),
    "nll": NLLLossFn(),
    "value": MseValueLossFn(MseValueLossConfig(scale=0.7, cliprange=CLIP_OF_VALUES)),
    "split": ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=KL)),
    "split nll": NLLLossFn(),
    "KL": DistillationLossFn(DistillationLossConfig(mixed_kl_weight=FORWARD_KL)),
    "KL with a rest": DistillationLossFn(
        DistillationLossConfig(mixed_kl_weight=FORWARD_KL, zero_outside_topk=True)
    ),
}


def loss_of(loss, mode):
    options = {"weights_in_data": "prompts" in mode, "split_steps": loss.startswith("split")}
    return aggregated(LOSSES[loss], MODES[mode], **options)


def config(generation=None):
    """Return NeMo-RL's own configuration of GRPO on Megatron."""
    from nemo_rl.algorithms.grpo import MasterConfig
    from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
    from omegaconf import OmegaConf

    register_omegaconf_resolvers()
    file = Path(os.environ["FRAMEWORKS_DIR"], "NeMo-RL/examples/configs/grpo_math_1B_megatron.yaml")
    made = MasterConfig(**OmegaConf.to_container(load_config(file), resolve=True))
    made.grpo.num_prompts_per_step, made.grpo.num_generations_per_prompt = PROMPTS, SAMPLES
    made.grpo.overlong_filtering, made.grpo.max_num_steps = True, 1
    made.policy["train_global_batch_size"] = SEQUENCES_PER_STEP
    made.policy["make_sequence_length_divisible_by"] = 4
    return made


def drawn(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


class ValueHead(torch.nn.Linear):
    """In place of the one that is loaded: a value for each token."""

    def __init__(self):
        super().__init__(16, 1, bias=False)
        self.weight.data = drawn(7, 1, 16)

    def forward(self, hidden, weight=None, runtime_gather_output=None):
        return super().forward(hidden), None


def with_value_head(*arguments):
    model = LANGUAGE_MODEL(*arguments)
    model.output_layer = ValueHead()
    return model


LANGUAGE_MODEL = tiny_gpt.gpt


def token_losses(loss, data, sequence, out):
    """Return the losses of a sequence's tokens but the first one, in float64."""
    tokens = data["input_ids"][sequence, : data["input_lengths"][sequence]]

    def of(name):
        return data[name][sequence, 1 : len(tokens)].double()

    if loss == "value":
        values = out[:-1, 0]
        clipped = values.clamp(of("values") - CLIP_OF_VALUES, of("values") + CLIP_OF_VALUES)
        errors = [(value - of("returns")) ** 2 for value in (values, clipped)]
        return 0.35 * torch.maximum(*errors)
    if loss.startswith("KL"):
        teacher = [data[f"teacher_topk_{name}"][sequence] for name in ("logits", "indices")]
        return [kl_of(loss, out[t], *(one[t] for one in teacher)) for t in range(len(tokens) - 1)]
    x = torch.log_softmax(out[:-1], -1).gather(1, tokens[1:, None])[:, 0]
    if loss.endswith("nll"):
        return -x
    ratio, a = (x - of("prev_logprobs")).exp(), of("advantages")
    d = of("reference_policy_logprobs") - x
    kl = (d.exp() - 1 - d) * (x - x.detach()).exp()
    return torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2)) + KL * kl


def kl_of(loss, logits, teacher_logits, indices):
    """Return both KL of a token, of the tokens that the teacher gives; others have e**-100."""
    others = set(range(len(logits))) - set(indices.tolist()) if "rest" in loss else ()
    log_q = (teacher_logits - teacher_logits.logsumexp(0)).tolist()
    taken = logits if "rest" in loss else logits[indices]
    log_p = {v: logits[v] - taken.logsumexp(0) for v in [*indices.tolist(), *others]}
    both = 0
    for v, q in zip(indices.tolist(), log_q, strict=True):
        weight = FORWARD_KL * math.exp(q) - (1 - FORWARD_KL) * log_p[v].exp()
        both = both + weight * (q - log_p[v])
    for v in others:
        both = both + (1 - FORWARD_KL) * log_p[v].exp() * (log_p[v] + 100)
    return both


def reference_steps(loss, data, aggregation):
    """Return the loss and the gradients by name of each optimizer step, in float64."""
    make = with_value_head if loss == "value" else LANGUAGE_MODEL
    model = make(tiny_gpt.config_of(), get_gpt_layer_local_spec())
    named = {shard.name: shard.parameter for shard in cpu.named_shards([model])}
    steps = []
    for start in range(0, PROMPTS * SAMPLES, SEQUENCES_PER_STEP):
        sequences = []
        for number in range(start, start + SEQUENCES_PER_STEP):
            if not data["sample_mask"][number]:
                continue
            tokens = data["input_ids"][number, : data["input_lengths"][number]]
            out = model(tokens[None], torch.arange(len(tokens))[None], None)[0]
            mask = data["token_mask"][number, 1 : len(tokens)].int().tolist()
            ids = {"sample": number, "prompt": number // SAMPLES}
            x = list(token_losses(loss, data, number, out))
            sequences.append({"x": x, "counted": mask, "trained": mask, **ids})
        total = reference_loss.step_loss(
            aggregation.mode, sequences, **reference_options(aggregation, ())
        )
        grads = torch.autograd.grad(total, list(named.values()))
        steps.append((total.item(), dict(zip(named, grads, strict=True))))
    return steps


MASKED_PROMPT, EMPTY_PROMPT = 2, 4
"""A prompt whose sample_mask is 0 everywhere, and one with no active tokens."""
TRUNCATED = (1, 18)
"""Sequences whose sample_mask becomes 0, as too long ones."""


def prompts():
    """Return the data loader's batch: one user message per prompt."""
    lengths = [2 + number % 3 for number in range(PROMPTS)]
    logs = [
        [{"role": "user", "content": "", "token_ids": torch.arange(n) + number + 1}]
        for number, n in enumerate(lengths)
    ]
    counted = torch.ones(PROMPTS)
    counted[MASKED_PROMPT] = 0
    return BatchedDataDict(
        message_log=logs,
        length=torch.tensor(lengths),
        loss_multiplier=counted,
        extra_env_info=[None] * PROMPTS,
        idx=list(range(PROMPTS)),
        task_name=["task"] * PROMPTS,
    )


def rollouts(*, input_batch, **_):
    """In place of generation and environments: answers, rewards, and which were truncated."""
    rewards = []
    for sequence, log in enumerate(input_batch["message_log"]):
        length = 1 + (7 * sequence + sequence // 5) % 6
        tokens = torch.arange(length) * 3 % 11 + sequence % 5
        answer = {"role": "assistant", "content": "", "token_ids": tokens}
        if sequence // SAMPLES == EMPTY_PROMPT:
            answer["role"] = "environment"
        else:
            answer["generation_logprobs"] = (-2 + 0.1 * drawn(sequence, length)).float()
        log.append(answer)
        rewards.append((sequence * sequence) % 7 / 7.0)
    truncated = torch.zeros(len(rewards), dtype=torch.bool)
    truncated[list(TRUNCATED)] = True
    input_batch["total_reward"], input_batch["truncated"] = torch.tensor(rewards), truncated
    return input_batch, defaultdict(float)


class Trained(Exception):  # noqa: N818
    """Ends ``grpo_train`` after its call of the policy's ``train``."""


class Nothing:
    """A logger, a checkpointer, a generation: every method returns None."""

    weight_synchronizer = None

    def __getattr__(self, name):
        if name == "requires_kv_scale_sync":
            raise AttributeError(name)
        return lambda *_, **__: None


class Policy(Nothing):
    """In place of the policy: fixed log-probabilities; ``train`` keeps what it is given."""

    def get_logprobs(self, data, **_):
        return {"logprobs": -2 + 0.2 * drawn(101, *data["input_ids"].shape)}

    def get_reference_policy_logprobs(self, data, **_):
        return {"reference_logprobs": -2 + 0.2 * drawn(102, *data["input_ids"].shape)}

    def train(self, data, loss_fn, **_):
        self.data, self.loss_fn = data, loss_fn
        raise Trained


def train_data(loss_fn):
    """Run NeMo-RL's trainer until it trains; return the batch for the policy."""
    from nemo_rl.algorithms import grpo

    grpo.run_multi_turn_rollout = rollouts
    grpo.refit_policy_generation = lambda *_, **__: {}
    grpo.should_use_async_rollouts = lambda _: False
    policy, batches, tokenizer = Policy(), [prompts()], SimpleNamespace(pad_token_id=0)
    state = grpo._initial_grpo_save_state()
    try:
        grpo.grpo_train(
            policy, Nothing(), batches, None, tokenizer, loss_fn, {}, None, Nothing(), Nothing(),
            state, config(),
        )  # fmt: skip
    except Trained:
        assert policy.loss_fn is loss_fn
    return policy.data


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
        leave()
