"""Compute what ``lossagg explain`` prints: weights, losses under every mode, and K."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_lossagg.aggregation import ALIASES, CUSTOM, MODES, Aggregation
from megatron_lossagg.cli.rollouts import Rollouts
from megatron_lossagg.cli.shares import Shares, plan_of, shares_of
from megatron_lossagg.errors import LossAggregationError
from megatron_lossagg.plan import StepPlan
from megatron_lossagg.scaling import (
    LOSS_SCALINGS,
    MOST_TOKENS_PER_TOKEN,
    Factor,
    LossScaling,
    Scaling,
)
from megatron_lossagg.text import number_of

__all__ = [
    "DEFAULT_LENGTHS",
    "Comparison",
    "ExplainError",
    "Explanation",
    "Split",
    "WeightedSequence",
    "explain",
    "read_lengths",
]

DEFAULT_LENGTHS = "2000,500,8000,1500/3000,1000,0,4000"
"""Uneven lengths as reasoning models write them, a fully masked sample, two prompts."""
_MOST = 2**31 - 1
"""Of a size: the product of two is an int64."""


class ExplainError(LossAggregationError, ValueError):
    """A mode, sequences or sizes that cannot be explained."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """The parallelism of a step and how Megatron scales its loss: what K depends on."""

    loss_scaling: LossScaling = "average"
    microbatches: int = 2
    """M of every data-parallel rank."""
    dp: int = 2
    cp: int = 1

    def __post_init__(self) -> None:
        for flag in ("microbatches", "dp", "cp"):
            size = getattr(self, flag)
            if not 1 <= size <= _MOST:
                raise ExplainError(f"--{flag}: got {size}, expected an integer from 1 to {_MOST}")
        if self.loss_scaling not in LOSS_SCALINGS:
            raise ExplainError(
                f"--loss-scaling: got {self.loss_scaling!r}, expected "
                f"{' or '.join(map(repr, LOSS_SCALINGS))}"
            )


@dataclass(frozen=True, kw_only=True)
class WeightedSequence:
    """One sequence of the step, which is one sample here, and what the mode makes of it."""

    prompt: int
    rank: int
    """The data-parallel rank that it is assigned to."""
    microbatch: int
    """Index on that rank."""
    n_s: int
    n_b: int
    n_p: int
    n_mb: int
    w_s: float
    share: float
    """w_s n_s over its sum: how much of the step's weight the sequence has."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A mode on the same sequences; numbers are None if it lacks a divisor."""

    mode: str
    w_s: str
    loss: float | None = None
    """The loss if every token's is 1; of several steps, their mean."""
    ratio: float | None = None
    """To the loss of the explained mode."""
    gradient: str = "no divisor"
    """What becomes of the explained mode's: ``this mode``; ``scaled``, by one number; ``rescaled``,
    in each step by a number of its own; ``reweighted``, by no single number."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Everything that ``lossagg explain`` prints."""

    name: str
    """The name that was given: a mode, or another system's name."""
    mode: str
    formula: str
    flags: str
    """The flags of a training run."""
    divisor: float | None
    """The one that was given, even if this mode takes none."""
    split: Split
    counts: dict[str, int | None]
    """N, B, V, P and Q; of a file with several steps, those of the first. So are k and
    num_tokens."""
    sequences: tuple[WeightedSequence, ...]
    """None of a file: it has ``shares``."""
    shares: Shares | None
    """Of a file, what ``lossagg plot`` draws of it."""
    comparisons: tuple[Comparison, ...]
    """Every mode on the same sequences, this one too."""
    chain: tuple[Factor, ...]
    """What multiplies a partial loss on its way to the gradient."""
    k: int
    num_tokens: tuple[int, ...]
    """Of loss_func on CP rank 0, for each microbatch that has sequences."""


def read_lengths(text: str) -> list[list[int]]:
    """Read active tokens by prompt and sample from text such as ``3,5,9/2,0``."""
    prompts = [[n.strip() for n in prompt.split(",")] for prompt in text.split("/")]
    for n in (n for prompt in prompts for n in prompt):
        if not n.isdecimal() or len(n) > 16:
            raise ExplainError(
                f"--lengths {text!r}: got {n!r}, expected a sample's active tokens. Write integers "
                f"from 0, ',' between samples, '/' between prompts, as in {DEFAULT_LENGTHS}"
            )
    lengths = [[int(n) for n in prompt] for prompt in prompts]
    if not any(map(any, lengths)):
        masked = number_of(sum(map(len, lengths)), "fully masked sample")
        raise ExplainError(
            f"--lengths: got {masked} and no active token, so that every weight is 0. Give at "
            "least one sample above 0"
        )
    return lengths


def explain(
    name: str,
    lengths: Sequence[Sequence[int]] | Rollouts,
    split: Split,
    *,
    divisor: float | None = None,
    count_empty: bool | None = None,
    highs: Sequence[int] | None = None,
) -> Explanation:
    """Compute everything that is printed.

    ``lengths``: active tokens by prompt and sample, or recorded steps with ``highs`` of the buckets
    of :func:`shares_of`. ``divisor`` is for the modes that take one: this one, or those that it is
    compared with. Raises :class:`LossAggregationError` for an unknown mode, and for sequences or
    sizes that do not describe a step.
    """
    aggregation = _aggregation(name, divisor, count_empty)
    if isinstance(lengths, Rollouts):
        if aggregation.mode == "prompt_mean" and "prompt" not in lengths.steps[0]:
            raise ExplainError(
                f"prompt_mean: got no prompts from {lengths.source}: give every record a "
                "'prompt_id'"
            )
        plans = [_planned(step, aggregation, split, "--lengths-file") for step in lengths.steps]
        shares = shares_of(lengths, microbatches=split.microbatches, dp=split.dp, highs=highs)
        sequences = []
    else:
        prompts = [p for p, of_prompt in enumerate(lengths) for _ in of_prompt]
        tokens = [n for of_prompt in lengths for n in of_prompt]
        plans = [_planned({"active_tokens": tokens, "prompt": prompts}, aggregation, split)]
        shares, sequences = None, list(_sequences(plans[0], prompts, split))
    plan = plans[0]
    scaling = Scaling(
        loss_scaling=split.loss_scaling,
        num_microbatches=split.microbatches,
        dp_cp_size=split.dp * split.cp,
        active_tokens=plan.totals.active_tokens,
    )
    comparisons = tuple(_comparisons(plans, divisor))
    assert plan.microbatch is not None
    counted = np.bincount(plan.microbatch, weights=plan.active_tokens).astype(int)
    used = dict.fromkeys(plan.microbatch.tolist())
    flags = [f"--loss-aggregation {name}"]
    if aggregation.divisor is not None:
        flags.append(f"--loss-aggregation-divisor {aggregation.divisor!r}".removesuffix(".0"))
    if count_empty is not None:
        flags.append(f"--{'' if count_empty else 'no-'}loss-aggregation-count-empty")
    return Explanation(
        name=name,
        mode=aggregation.mode,
        formula=aggregation.formula,
        flags=" ".join(flags),
        divisor=divisor,
        split=split,
        counts={
            "N": plan.totals.active_tokens,
            "B": plan.totals.samples,
            "V": plan.totals.active_samples,
            "P": plan.totals.prompts,
            "Q": plan.totals.active_prompts,
        },
        sequences=tuple(sequences),
        shares=shares,
        comparisons=comparisons,
        chain=tuple(scaling.factors()),
        k=scaling.k,
        num_tokens=tuple(scaling.num_tokens(int(counted[slot]), cp_rank=0) for slot in used),
    )


def _aggregation(name: str, divisor: float | None, count_empty: bool | None) -> Aggregation:
    """Read the name; a divisor that its mode does not take is for the others."""
    mode = ALIASES[name].mode if name in ALIASES else name
    if mode == CUSTOM:
        raise ExplainError(
            "custom has no formula to explain: its loss is what the factory of "
            "--loss-aggregation-reducer-path returns. Name one of "
            f"{', '.join(other for other in MODES if other != CUSTOM)}"
        )
    taken = None if mode in MODES and MODES[mode].divisor == "none" else divisor
    return Aggregation(name, divisor=taken, count_empty=count_empty)


def _planned(
    step: Mapping[str, Any], aggregation: Aggregation, split: Split, flag: str = "--lengths"
) -> StepPlan:
    """Plan a step; ``flag``: what gave it, for errors."""
    tokens = sum(map(int, step["active_tokens"]))
    if split.loss_scaling == "per_token" and tokens > MOST_TOKENS_PER_TOKEN:
        raise ExplainError(
            f"{flag}: got {tokens} active tokens in a step, expected at most "
            f"{MOST_TOKENS_PER_TOKEN}, because Megatron-Core sums them in int32 with the loss "
            "scaling per_token. Give fewer, or --loss-scaling average"
        )
    return plan_of(step, aggregation, microbatches=split.microbatches, dp=split.dp)


def _sequences(plan: StepPlan, prompts: Sequence[int], split: Split) -> Iterator[WeightedSequence]:
    columns = (
        plan.active_tokens, plan.sample_tokens, plan.prompt_tokens, plan.microbatch_tokens,
        plan.microbatch, plan.weights,
    )  # fmt: skip
    total = _loss(plan)
    lists = (column.tolist() for column in columns if column is not None)
    for prompt, n_s, n_b, n_p, n_mb, slot, w_s in zip(prompts, *lists, strict=True):
        yield WeightedSequence(
            prompt=prompt,
            rank=slot % split.dp,
            microbatch=slot // split.dp,
            n_s=n_s,
            n_b=n_b,
            n_p=n_p,
            n_mb=n_mb,
            w_s=w_s,
            share=w_s * n_s / total,
        )


def _comparisons(plans: Sequence[StepPlan], divisor: float | None) -> Iterator[Comparison]:
    """Compare every mode on the plans' sequences, with the plans' own ``count_empty``."""
    own = plans[0].aggregation
    losses = [_loss(plan) for plan in plans]
    for mode in (mode for mode in MODES.values() if mode.name != CUSTOM):
        if mode.name == "prompt_mean" and plans[0].prompt_tokens is None:
            continue
        if mode.divisor == "required" and divisor is None:
            yield Comparison(mode=mode.name, w_s=mode.weight.format(B="B", L="L"))
            continue
        taken = None if mode.divisor == "none" else divisor
        aggregation = Aggregation(mode.name, divisor=taken, count_empty=own.count_empty)
        others = [plan.under(aggregation) for plan in plans]
        other_losses = [_loss(other) for other in others]
        ratio = math.fsum(other_losses) / math.fsum(losses)
        of_steps = [other / loss for other, loss in zip(other_losses, losses, strict=True)]
        if mode.name == own.mode:
            gradient = "this mode"
        elif _scales(plans, others, [ratio] * len(plans)):
            gradient = "scaled"
        else:
            gradient = "rescaled" if _scales(plans, others, of_steps) else "reweighted"
        yield Comparison(
            mode=mode.name,
            w_s=aggregation.formula,
            loss=math.fsum(other_losses) / len(plans),
            ratio=ratio,
            gradient=gradient,
        )


def _scales(plans: Sequence[StepPlan], others: Sequence[StepPlan], ratios: Sequence[float]) -> bool:
    return all(
        torch.allclose(other.weights, plan.weights * ratio, rtol=1e-9, atol=0)
        for plan, other, ratio in zip(plans, others, ratios, strict=True)
    )


def _loss(plan: StepPlan) -> float:
    """Compute the step's loss if every token's is 1: the sum of w_s n_s."""
    loss = float((plan.weights.numpy() * plan.active_tokens).sum())
    if not 0 < loss < math.inf:
        raise ExplainError(
            f"{plan.aggregation}: got a loss of {loss}, expected a positive float64 because every "
            "token's loss is positive. Give a --divisor of the size of a response"
        )
    return loss
