"""NeMo-RL's losses and configuration, our aggregations, and each step's reference in float64."""

import math
import os
from pathlib import Path

import imports_nemo_rl  # noqa: F401  first
import tiny_gpt
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from nemo_rl.algorithms.loss.loss_functions import (
    ClippedPGLossConfig,
    ClippedPGLossFn,
    DistillationLossConfig,
    DistillationLossFn,
    MseValueLossConfig,
    MseValueLossFn,
    NLLLossFn,
)

import megatron_lossagg.cpu as cpu
from megatron_lossagg import Aggregation
from megatron_lossagg.integrations.nemo_rl import aggregated
from megatron_lossagg.verify import reference_loss
from megatron_lossagg.verify.cases import reference_options

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
    """In place of the one of Megatron-Bridge: a value for each token."""

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
