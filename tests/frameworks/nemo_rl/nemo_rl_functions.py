"""NeMo-RL: its losses of GRPO, SFT, values and distillation, and those under our weights.

NeMo-RL divides by the step's counts in the loss function: what it returns for each microbatch adds
up to the step's loss. In split steps both counts are 1, and the gradient is divided in the end by
what ``loss_type`` says: here by the check, as ``MegatronPolicyWorkerImpl.finish_train_step`` does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from drawn_step import Microbatch, Step
from function_checks import Check, Comparison
from torch import Tensor
from torch.nn.functional import pad

from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.drivers.driver import aggregations, ppo_losses

_LOSSES = "nemo_rl.algorithms.loss.loss_functions"
_MODES = ("token_mean", "sample_mean", "constant", "sample_sum", "token_sum")
CLIP, DUAL_CLIP, VALUE_CLIP = 0.2, 3.0, 0.3
_OF_WHOLE_STEPS = ("MseValueLossFn", "DistillationLossFn")
_EXCLUDED = 1
"""Sequences whose ``sample_mask`` is 0, as too long ones: the step's last."""


def checks() -> list[Check]:
    """List the checks; imports NeMo-RL's loss functions."""
    from nemo_rl.algorithms.loss.loss_functions import (
        ClippedPGLossConfig,
        ClippedPGLossFn,
        DistillationLossConfig,
        DistillationLossFn,
        MseValueLossConfig,
        MseValueLossFn,
        NLLLossFn,
    )

    def policy_loss(token_level: bool) -> Any:
        config = ClippedPGLossConfig(
            ratio_clip_min=CLIP,
            ratio_clip_max=CLIP,
            ratio_clip_c=DUAL_CLIP,
            reference_policy_kl_penalty=0.0,
            token_level_loss=token_level,
        )
        return ClippedPGLossFn(config)

    made: dict[str, Callable[[], Any]] = {
        "NLLLossFn": NLLLossFn,
        "MseValueLossFn": lambda: MseValueLossFn(MseValueLossConfig(cliprange=VALUE_CLIP)),
        "DistillationLossFn": lambda: DistillationLossFn(DistillationLossConfig()),
    }
    listed = []
    for token_level in (True, False):
        level = f"token_level_loss={token_level}"
        alias, policy = f"nemo-rl:{level}", partial(policy_loss, token_level)
        run = partial(compared, policy, Aggregation(alias))
        listed.append(Check(alias, f"{_LOSSES}.ClippedPGLossFn", run))
        made[f"ClippedPGLossFn({level})"] = policy
    wanted = [one for one in aggregations().values() if one.mode in _MODES and one.count_empty]
    for (name, make), one in product(made.items(), wanted):
        function = f"{_LOSSES}.{name.partition('(')[0]}"
        run = partial(compared, make, one, is_wrapped=True)
        listed.append(Check(f"aggregated({name}), {one.mode}", function, run))
        if one.mode != "token_sum" and name not in _OF_WHOLE_STEPS:
            run = partial(compared, make, one, is_wrapped=True, split_steps=True)
            listed.append(Check(f"aggregated({name}), split steps, {one.mode}", function, run))
    return listed


def compared(
    make: Callable[[], Any],
    aggregation: Aggregation,
    *,
    is_wrapped: bool = False,
    split_steps: bool = False,
) -> Comparison:
    """Compare a loss function's step, in our integration or by itself, with the reference."""
    from megatron_lossagg.integrations.nemo_rl import aggregated

    own, step = make(), Step()
    loss_function = own
    if is_wrapped:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of losses that a model adds
            loss_function = aggregated(own, aggregation, split_steps=split_steps)
    partial_losses = losses_of(loss_function, step, num_excluded=_EXCLUDED, split_steps=split_steps)
    got = torch.stack([loss for loss, _ in partial_losses]).sum()
    kind = type(own).__name__
    losses = [_token_losses(kind, mb) for mb in step.microbatches]
    return step.compared(got, aggregation, losses, num_excluded=_EXCLUDED)


def _token_losses(kind: str, mb: Microbatch) -> Tensor:
    """Compute the losses of a microbatch's tokens, ``[b, s]``; GRPO's is PPO's.

    ::

        NLLLossFn: -x;  MseValueLossFn: max((x - R)^2, (clamp(x, V - clip, V + clip) - R)^2) / 2
        DistillationLossFn: (KL(p | q) + KL(q | p)) / 2, of two tokens with logits x, 0 and A, 0
    """
    x, old = mb.log_probs, mb.old_log_probs
    if kind == "NLLLossFn":
        return -x
    if kind == "MseValueLossFn":
        clipped = x.clamp(old - VALUE_CLIP, old + VALUE_CLIP)
        return torch.maximum((x - mb.advantages) ** 2, (clipped - mb.advantages) ** 2) / 2
    if kind == "DistillationLossFn":
        teacher = mb.advantages
        return (torch.sigmoid(teacher) - torch.sigmoid(x)) * (teacher - x) / 2
    return ppo_losses(x, old, mb.advantages, clip=CLIP, dual_clip=DUAL_CLIP)


def losses_of(
    loss_function: Any, step: Step, *, num_excluded: int = 0, split_steps: bool = False
) -> list[tuple[Tensor, dict[str, Any]]]:
    """Return loss and metrics of each microbatch, with the step's counts as NeMo-RL takes them.

    A loss of logits gets values, and that of distillation gets two tokens. ``num_excluded``: the
    step's last sequences, of one microbatch, have ``sample_mask`` 0. ``split_steps``: counts are 1,
    and the losses are divided afterwards.
    """
    batches = [_data(mb) for mb in step.microbatches]
    if num_excluded:
        batches[-1]["sample_mask"][-num_excluded:] = 0
    tokens = [(one["token_mask"] * one["sample_mask"][:, None]).sum() for one in batches]
    counts = {
        "global_valid_seqs": torch.stack([one["sample_mask"].sum() for one in batches]).sum(),
        "global_valid_toks": torch.stack(tokens).sum(),
    }
    divisor = torch.ones(())
    if split_steps:
        is_by_token = loss_function.loss_type.value == "token_level"
        divisor = counts["global_valid_toks" if is_by_token else "global_valid_seqs"]
        counts = dict.fromkeys(counts, torch.ones(()))
    made = []
    for mb, data in zip(step.microbatches, batches, strict=True):
        given: dict[str, Tensor | None]
        if loss_function.input_type.value == "logit":
            given = {"logits": pad(mb.log_probs, (1, 0))}
        elif loss_function.input_type.value == "distillation":
            student, teacher = map(_of_two_tokens, (mb.log_probs, mb.advantages))
            given = {"student_topk_logprobs": student, "teacher_topk_logprobs": teacher}
            given["H_all"] = None  # the entropy of all tokens, without which these two are all
        else:
            given = {"next_token_logprobs": mb.log_probs}
        loss, metrics = loss_function(**given, data=data, **counts)
        made.append((loss / divisor, metrics))
    return made


def _of_two_tokens(logits: Tensor) -> Tensor:
    """Return the log-probabilities of a token and of another with logit 0, ``[b, s, 2]``."""
    return torch.stack([logits, torch.zeros_like(logits)], -1).log_softmax(-1)


def _data(mb: Microbatch) -> dict[str, Tensor]:
    """Return a microbatch's fields as NeMo-RL has them: whose first token has no loss."""
    other = (2 * mb.old_log_probs + mb.log_probs.detach()) / 3
    fields = {
        "advantages": mb.advantages,
        "prev_logprobs": mb.old_log_probs,
        "generation_logprobs": other,
        "reference_policy_logprobs": other,
        "returns": mb.advantages,
        "values": mb.old_log_probs,
        "token_mask": mb.mask.double(),
    }
    data = {name: pad(field, (1, 0)) for name, field in fields.items()}
    data["input_ids"] = torch.zeros_like(data["token_mask"], dtype=torch.int64)
    return {**data, "sample_mask": torch.ones(len(mb.sequences), dtype=torch.float64)}
