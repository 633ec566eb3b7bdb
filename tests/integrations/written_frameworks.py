"""What SkyRL and NeMo-RL do around our integrations, written from their sources.

For tests without a framework; with a checkout, the framework's own code runs in their place.
"""

from enum import Enum
from types import SimpleNamespace

import torch
from nemo_rl_functions import CLIP, DUAL_CLIP, VALUE_CLIP

from megatron_lossagg.verify.drivers.driver import ppo_losses


def kl_losses(log_probs, ref_log_probs):
    """Compute the k3 estimate per token."""
    log_ratio = ref_log_probs - log_probs
    return log_ratio.exp() - log_ratio - 1


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


class RayPPOTrainer:
    """SkyRL a9564572: the trainer reduces the advantages of each mini-batch, in its own module."""

    num_calls_left = 99

    def __init__(self, cfg):
        self.cfg = cfg

    def compute_advantages_and_returns(self, data):
        return data

    def _normalize_advantages(self, data, boundaries, prompts=None):
        for start, end in boundaries[: self.num_calls_left]:
            own = [(a - start, b - start) for a, b in prompts or () if start <= a < end]
            data["advantages"][start:end] = apply_loss_reduction_to_advantages_minibatch(
                advantages=data["advantages"][start:end],
                loss_mask=data["loss_mask"][start:end],
                loss_reduction="token_mean",
                micro_batch_size=1,
                max_seq_len=None,
                prompt_boundaries=own or None,
            )
        return data


def apply_loss_reduction_to_advantages_minibatch(**_):
    """Stand for SkyRL's own reduction, which the integration replaces."""
    raise AssertionError


def skyrl_config(*, step_wise=False, mtp=False, critic=None, strategy="megatron", **algorithm):
    """Return what the integration reads of SkyRL's configuration."""
    given = {
        "policy_loss_type": "regular",
        "use_kl_loss": False,
        "use_entropy_loss": False,
        **algorithm,
    }
    return SimpleNamespace(
        generator=SimpleNamespace(step_wise_trajectories=step_wise),
        trainer=SimpleNamespace(
            algorithm=SimpleNamespace(**given),
            strategy=strategy,
            mtp=SimpleNamespace(enabled=mtp),
            critic=SimpleNamespace(model=SimpleNamespace(path=critic)),
        ),
    )


class SFTTrainer:
    """SkyRL a9564572: collates a step's examples, and trains what the loader gives."""

    def __init__(self, cfg):
        self.collator = sft_collator

    def build_train_dataloader(self, tokenized):
        collator = self.collator
        return [collator(tokenized, batch_size=len(tokenized))]

    def train_step(self, batch, step):
        return {"loss_mask": batch["loss_mask"]}


def sft_collator(examples, batch_size):
    """Right-align the loss masks, and divide them by the batch's tokens."""
    width = max(len(one["loss_mask"]) for one in examples)
    rows = [[0] * (width - len(one["loss_mask"])) + one["loss_mask"] for one in examples]
    mask = torch.tensor(rows, dtype=torch.float64)
    return SkyRLBatch({"loss_mask": mask / mask.sum()})


class SkyRLBatch(dict):
    """SkyRL's training batch: tensors by name, and metadata."""

    def __init__(self, tensors, **metadata):
        super().__init__(tensors)
        self.metadata = metadata
