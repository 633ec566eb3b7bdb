"""What NeMo-RL does around our integration, written from its source, for tests without it."""

from enum import Enum

import torch
from nemo_rl_functions import CLIP, DUAL_CLIP, VALUE_CLIP

from megatron_lossagg.verify.drivers.driver import kl_losses, ppo_losses


class LossInputType(Enum):
    """NeMo-RL's: what a loss takes of the model."""

    LOGIT = "logit"
    LOGPROB = "logprob"
    DISTILLATION = "distillation"


class LossType(Enum):
    """NeMo-RL's: by which count of the step a loss is divided."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class MetricNormalizer(Enum):
    """NeMo-RL's: by which count of the step a metric is divided."""

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    NONE = "none"


class NLLLossFn:
    """NeMo-RL 7ea279ab: the negative log-likelihood, divided by the step's tokens."""

    input_type = LossInputType.LOGPROB
    loss_type = LossType.TOKEN_LEVEL

    def __init__(self):
        self.metric_normalizations = {"loss": MetricNormalizer.TOKENS}

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        loss = -(next_token_logprobs * mask).sum() / (global_valid_toks + 1e-8)
        return loss, {"loss": loss.item(), "num_unmasked_tokens": mask.sum().item()}


class MseValueLossFn:
    """NeMo-RL 7ea279ab: half the squared error of clipped values, divided by the step's tokens."""

    input_type = LossInputType.LOGIT
    loss_type = LossType.TOKEN_LEVEL

    def __call__(self, logits, data, global_valid_seqs, global_valid_toks):
        mask = data["token_mask"] * data["sample_mask"][:, None]
        old, returns = data["values"], data["returns"]
        clipped = logits.clamp(old - VALUE_CLIP, old + VALUE_CLIP)
        x = torch.maximum((logits - returns) ** 2, (clipped - returns) ** 2) / 2
        loss = (x * mask).sum() / (global_valid_toks + 1e-8)
        values = logits[mask.bool()]
        largest = values.max().item() if len(values) else 0.0
        return loss, {"loss": loss.item(), "values_max": largest}


class DistillationLossFn:
    """NeMo-RL 7ea279ab: both KL of a teacher's k tokens, divided by the step's tokens."""

    input_type = LossInputType.DISTILLATION
    loss_type = LossType.TOKEN_LEVEL

    def __call__(
        self, student_topk_logprobs, teacher_topk_logprobs, H_all, data, global_valid_seqs,
        global_valid_toks,
    ):  # fmt: skip
        assert H_all is None
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        p, q = student_topk_logprobs.exp(), teacher_topk_logprobs.exp()
        x = ((p - q) * (student_topk_logprobs - teacher_topk_logprobs)).sum(-1) / 2
        loss = (x * mask).sum() / (global_valid_toks + 1e-8)
        return loss, {"loss": loss.item(), "num_valid_samples": len(mask)}


class ClippedPGLossFn:
    """NeMo-RL 7ea279ab ``ClippedPGLossFn``: PPO's clip, divided by the step's counts."""

    input_type = LossInputType.LOGPROB
    positive_example_nll_weight = 0.0
    reference_policy_kl_penalty = 0.0

    def __init__(self, *, token_level=True):
        self.loss_type = LossType.TOKEN_LEVEL if token_level else LossType.SEQUENCE_LEVEL
        like = MetricNormalizer.TOKENS if token_level else MetricNormalizer.SEQUENCES
        self.metric_normalizations = {
            "loss": like,
            "kl_penalty": like,
            "num_valid_samples": MetricNormalizer.NONE,
        }

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        x = next_token_logprobs
        given = {name: field[:, 1:] for name, field in data.items() if field.dim() == 2}
        mask, sample_mask = given["token_mask"], data["sample_mask"]

        def reduce(values):
            if self.loss_type.value == "token_level":
                total = (values * mask * sample_mask[:, None]).sum()
                return total / (global_valid_toks + 1e-8)
            means = (values * mask).sum(-1) / (mask.sum(-1) + 1e-8)
            return (means * sample_mask).sum() / (global_valid_seqs + 1e-8)

        old, advantages = given["prev_logprobs"], given["advantages"]
        loss = reduce(ppo_losses(x, old, advantages, clip=CLIP, dual_clip=DUAL_CLIP))
        metrics = {
            "loss": loss.item(),
            "kl_penalty": reduce(kl_losses(x, given["reference_policy_logprobs"])).item(),
            "probs_ratio_min": min([torch.inf, *(x - old).exp()[mask.bool()].tolist()]),
            "num_valid_samples": sample_mask.sum().item(),
        }
        return loss, metrics
