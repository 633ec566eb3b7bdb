"""The drawn batch of all drivers: twelve sequences, the losses of their tokens, and the modes.

Samples split into several sequences, fully masked ones, and a prompt with no active tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.cases import MASK_CASES
from megatron_lossagg.verify.step_data import VOCABULARY

_SAMPLES, _PER_PROMPT, _SPLIT, _MASKED = 8, 2, (1, 6), (2, 4, 5)
"""Samples 4 and 5 are all of prompt 2."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawn:
    """One sequence: a prompt and a response, whose tokens have losses."""

    tokens: Tensor
    mask: list[int]
    """Of the response."""
    sample: int
    prompt: int
    advantages: Tensor
    """Float64, as both log-probabilities, of the response."""
    old_log_probs: Tensor
    ref_log_probs: Tensor


def draw(*, edges: bool = True) -> list[Drawn]:
    """Draw the twelve sequences.

    ``edges``: whether two samples are split into three, and three are fully masked. Without, each
    sequence is a sample.
    """
    drawn: list[Drawn] = []
    lengths = random.Random(11)
    for sample in range(_SAMPLES):
        for _ in range(3 if sample in _SPLIT else 1):
            number = sample if edges else len(drawn)
            n, prompt_length = lengths.choice([4, 5, 9, 14]), lengths.randint(1, 6)
            mask = [int(lengths.random() < 0.8) for _ in range(n)]
            mask[-1] = 1
            generator = torch.Generator().manual_seed(len(drawn))
            tokens = torch.randint(0, VOCABULARY, (prompt_length + n,), generator=generator)
            advantages, old, ref = (
                torch.randn(n, generator=generator, dtype=torch.float64) for _ in range(3)
            )
            drawn.append(
                Drawn(
                    tokens=tokens,
                    mask=[0] * n if edges and sample in _MASKED else mask,
                    sample=number,
                    prompt=number // (_PER_PROMPT if edges else 3),  # not of a microbatch
                    advantages=advantages,
                    old_log_probs=-3.4 + 0.1 * old,
                    ref_log_probs=-3.4 + 0.1 * ref,
                )
            )
    return drawn


def ppo_losses(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip: float,
    dual_clip: float | None = None,
) -> Tensor:
    """Compute PPO's clipped losses per token: arXiv 1707.06347 eq. 7, 1912.09729 eq. 5.

    ::

        x = -min(r A, clamp(r, 1 - clip, 1 + clip) A);  where A < 0: x = min(x, -dual_clip A)
    """
    ratio = (log_probs - old_log_probs).exp()
    losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    if dual_clip is None:
        return losses
    return torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)


def kl_losses(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Compute the k3 estimate per token."""
    log_ratio = ref_log_probs - log_probs
    return log_ratio.exp() - log_ratio - 1


def aggregations() -> dict[str, Aggregation]:
    """Name the aggregations of one term that need no microbatches and groups."""
    made = {
        str(case): case.aggregation
        for case in MASK_CASES
        if case.second is None
        and case.aggregation.mode not in ("microbatch_token_mean", "balanced")
    }
    return {**made, "token_sum": Aggregation("token_sum", divisor=3.0)}


def column(values: Sequence[Any], ends: Sequence[int], width: int) -> Tensor:
    """Stack values of each sequence's response, each row's before its end; zeros elsewhere."""
    made = torch.zeros(len(ends), width)
    for row, end, given in zip(made, ends, values, strict=True):
        row[end - len(given) : end] = torch.as_tensor(given)
    return made
