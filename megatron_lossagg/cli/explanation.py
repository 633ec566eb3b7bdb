"""Compute what ``lossagg explain`` prints: weights, factors, and losses under every mode."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from megatron_lossagg.aggregation import ALIASES, CUSTOM, MODES, Aggregation
from megatron_lossagg.cli.rollouts import Rollouts, Step
from megatron_lossagg.cli.shares import Shares, plan_of, shares_of
from megatron_lossagg.counts import StepTotals
from megatron_lossagg.errors import LossAggregationError
from megatron_lossagg.plan import StepPlan
from megatron_lossagg.scaling import (
    K_FORMULA,
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
    "Link",
    "Row",
    "Split",
    "exact",
    "explain",
    "explain_rollouts",
    "read_lengths",
]

DEFAULT_LENGTHS = "12,3,40/5,0,20"
"""Uneven lengths, a fully masked sample, two prompts."""
_MOST = 2**31 - 1
"""Of a size: the product of two is an int64."""


class ExplainError(LossAggregationError, ValueError):
    """A mode, rows or sizes that cannot be explained."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """How Megatron splits the step, and how it scales: what K depends on."""

    loss_scaling: LossScaling = "average"
    microbatches: int = 2
    """M of every data-parallel rank."""
    dp: int = 2
    cp: int = 2

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
class Row:
    """One row of the step, which is one sample here, and what the mode makes of it."""

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
    part: float
    """w_s n_s over its sum: how much of the step's weight the row has."""


@dataclass(frozen=True, kw_only=True)
class Link(Factor):
    """A factor between share and gradient, with the product up to it."""

    so_far: Fraction


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A mode on the same rows; numbers are None where it lacks a divisor."""

    mode: str
    w_s: str
    ones: float | None = None
    """The loss where every token's is 1."""
    ones_ratio: float | None = None
    rising: float | None = None
    """The loss where token t of a row, from 1, has t over the longest row's tokens."""
    rising_ratio: float | None = None
    scales_only: bool | None = None
    """Whether on these rows its gradient is the explained mode's times a number."""
    scales_steps: bool | None = None
    """Whether it is so in every step, by a number of the step's own."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Everything that ``lossagg explain`` prints."""

    name: str
    """The name given: a mode, or another system's name."""
    note: str
    """The note of an alias."""
    mode: str
    formula: str
    meaning: str
    flags: str
    """The flags of a training run."""
    divisor: float | None
    """The one given, even where this mode takes none."""
    split: Split
    totals: StepTotals
    """Of a file with several steps, those of the first; so are factor and num_tokens."""
    rows: tuple[Row, ...]
    """None of a file: it has ``shares``."""
    shares: Shares | None
    """Of a file, what ``lossagg plot`` draws of it."""
    total_weight: float
    """The sum of w_s n_s; of a file with several steps, their mean."""
    chain: tuple[Link, ...]
    factor: int
    """K."""
    num_tokens: tuple[int, ...]
    """Of loss_func on CP rank 0: one per microbatch with rows in the per-token loss scaling, else
    1.
    """
    comparisons: tuple[Comparison, ...]
    """Every mode on the same rows, this one too; of a file with several steps, their mean."""

    @property
    def several_steps(self) -> bool:
        """Whether it is about more than one step."""
        return self.shares is not None and self.shares.num_steps > 1

    @property
    def k_formula(self) -> str:
        """K in symbols."""
        return K_FORMULA[self.split.loss_scaling]


def read_lengths(text: str) -> list[list[int]]:
    """Read active tokens by prompt and sample from text such as ``3,5,9/2,0``."""
    prompts = [[n.strip() for n in prompt.split(",")] for prompt in text.split("/")]
    for n in (n for prompt in prompts for n in prompt):
        if not n.isdecimal() or len(n) > 16:
            raise ExplainError(
                f"--lengths {text!r}: got {n!r}, expected a sample's active tokens. Write integers "
                f"from 0, ',' between samples, '/' between prompts, as in {DEFAULT_LENGTHS}"
            )
    return [[int(n) for n in prompt] for prompt in prompts]


def explain(
    name: str,
    *,
    prompts: Sequence[Sequence[int]],
    split: Split,
    divisor: float | None = None,
    count_empty: bool | None = None,
) -> Explanation:
    """Compute everything that is printed. ``prompts``: active tokens by prompt and sample.

    ``divisor`` is for the modes that take one, this mode or another one compared with it.
    Raises :class:`LossAggregationError` for an unknown mode, and for rows or sizes that do
    not describe a step.
    """
    aggregation = _aggregation(name, divisor, count_empty)
    plan = _planned(aggregation, _step(prompts), split, flag="--lengths")
    explanation = _explanation(name, [plan], split, divisor, count_empty)
    rows = tuple(_rows(plan, prompts, split, explanation.total_weight))
    return replace(explanation, rows=rows)


def explain_rollouts(
    name: str,
    *,
    rollouts: Rollouts,
    split: Split,
    divisor: float | None = None,
    count_empty: bool | None = None,
    highs: Sequence[int] | None = None,
) -> Explanation:
    """Compute the same on recorded steps; ``highs``: of the buckets of :func:`shares_of`."""
    aggregation = _aggregation(name, divisor, count_empty)
    if aggregation.mode == "prompt_mean" and rollouts.steps[0].prompt is None:
        raise ExplainError(
            f"prompt_mean: got no prompts from {rollouts.source}: give every record a 'prompt_id'"
        )
    plans = [_planned(aggregation, step, split, flag="--lengths-file") for step in rollouts.steps]
    shares = shares_of(rollouts, microbatches=split.microbatches, dp=split.dp, highs=highs)
    explanation = _explanation(name, plans, split, divisor, count_empty)
    return replace(explanation, shares=shares)


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


def _explanation(
    name: str,
    plans: Sequence[StepPlan],
    split: Split,
    divisor: float | None,
    count_empty: bool | None,
) -> Explanation:
    """Compute all but the rows and shares."""
    plan, alias = plans[0], ALIASES.get(name)
    aggregation = plan.aggregation
    scaling = Scaling(
        loss_scaling=split.loss_scaling,
        num_microbatches=split.microbatches,
        dp_cp_size=split.dp * split.cp,
        active_tokens=plan.totals.active_tokens,
    )
    comparisons = tuple(_comparisons(plans, divisor))
    total_weight = next(c.ones for c in comparisons if c.mode == aggregation.mode)
    assert total_weight is not None
    assert plan.microbatch is not None
    counted = np.bincount(plan.microbatch, weights=plan.active_tokens).astype(int)
    num_tokens = [
        scaling.num_tokens(int(counted[slot]), cp_rank=0)
        for slot in dict.fromkeys(plan.microbatch.tolist())
    ]
    return Explanation(
        name=name,
        note=alias.note if alias else "",
        mode=aggregation.mode,
        formula=aggregation.formula,
        meaning=MODES[aggregation.mode].meaning,
        flags=_flags(name, aggregation.divisor, count_empty),
        divisor=divisor,
        split=split,
        totals=plan.totals,
        rows=(),
        shares=None,
        total_weight=total_weight,
        chain=tuple(_chain(scaling)),
        factor=scaling.k,
        num_tokens=tuple(num_tokens),
        comparisons=comparisons,
    )


def _step(prompts: Sequence[Sequence[int]]) -> Step:
    tokens = [n for prompt in prompts for n in prompt]
    if not any(tokens):
        raise ExplainError(
            f"--lengths: got {number_of(len(tokens), 'fully masked sample')} and no active token, "
            "so that every weight is 0. Give at least one sample above 0"
        )
    return Step(
        active_tokens=np.array(tokens),
        sample=None,
        prompt=np.array([p for p, prompt in enumerate(prompts) for _ in prompt]),
    )


def _planned(aggregation: Aggregation, step: Step, split: Split, *, flag: str) -> StepPlan:
    """Plan a step; ``flag``: what gave it, for errors."""
    tokens = int(step.active_tokens.sum())
    if split.loss_scaling == "per_token" and tokens > MOST_TOKENS_PER_TOKEN:
        raise ExplainError(
            f"{flag}: got {tokens} active tokens in a step, expected at most "
            f"{MOST_TOKENS_PER_TOKEN}, because Megatron-Core sums them in int32 in the per-token "
            "loss scaling. Give fewer, or --loss-scaling average"
        )
    return plan_of(step, aggregation, split.microbatches, split.dp)


def _rows(
    plan: StepPlan, prompts: Sequence[Sequence[int]], split: Split, total_weight: float
) -> Iterator[Row]:
    ids = [p for p, prompt in enumerate(prompts) for _ in prompt]
    counts = (plan.sample_tokens, plan.prompt_tokens, plan.microbatch_tokens, plan.microbatch)
    n_b_S, n_p_S, n_mb_S, slot_S = (c.tolist() for c in counts if c is not None)
    n_S, w_S = plan.active_tokens.tolist(), plan.weights.tolist()
    for p, n_s, n_b, n_p, n_mb, slot, w_s in zip(
        ids, n_S, n_b_S, n_p_S, n_mb_S, slot_S, w_S, strict=True
    ):
        yield Row(
            prompt=p,
            rank=slot % split.dp,
            microbatch=slot // split.dp,
            n_s=n_s,
            n_b=n_b,
            n_p=n_p,
            n_mb=n_mb,
            w_s=w_s,
            part=w_s * n_s / total_weight,
        )


def _chain(scaling: Scaling) -> Iterator[Link]:
    """Fill in the table of docs/megatron-contract.md, "Two loss scalings", with numbers."""
    so_far = Fraction(1)
    for place in scaling.factors():
        so_far *= place.factor
        yield Link(where=place.where, does=place.does, factor=place.factor, so_far=so_far)


def _comparisons(plans: Sequence[StepPlan], divisor: float | None) -> Iterator[Comparison]:
    """Compare every mode on the plans' rows, with the plans' own ``count_empty``."""
    longest = max(plan.active_tokens.max() for plan in plans)
    ones_S = [torch.tensor(plan.active_tokens, dtype=torch.float64) for plan in plans]
    rising_S = [n_S * (n_S + 1) / 2 / longest for n_S in ones_S]  # sum of t / longest, t = 1..n_s
    ones, rising = _mean_loss(plans, ones_S), _mean_loss(plans, rising_S)
    for mode in (mode for mode in MODES.values() if mode.name != CUSTOM):
        if mode.name == "prompt_mean" and plans[0].prompt_tokens is None:
            continue
        if mode.divisor == "required" and divisor is None:
            yield Comparison(mode=mode.name, w_s=mode.weight.format(B="B", L="L"))
            continue
        aggregation = Aggregation(
            mode.name,
            divisor=None if mode.divisor == "none" else divisor,
            count_empty=plans[0].aggregation.count_empty,
        )
        others = [plan.under(aggregation) for plan in plans]
        other_ones, other_rising = _mean_loss(others, ones_S), _mean_loss(others, rising_S)
        scale = other_ones / ones
        yield Comparison(
            mode=mode.name,
            w_s=aggregation.formula,
            ones=other_ones,
            ones_ratio=scale,
            rising=other_rising,
            rising_ratio=other_rising / rising,
            scales_only=_scales(plans, others, [scale] * len(plans)),
            scales_steps=_scales(
                plans,
                others,
                [
                    _loss(other, n_S) / _loss(plan, n_S)
                    for plan, other, n_S in zip(plans, others, ones_S, strict=True)
                ],
            ),
        )


def _scales(plans: Sequence[StepPlan], others: Sequence[StepPlan], scales: Sequence[float]) -> bool:
    return all(
        torch.allclose(other.weights, plan.weights * scale, rtol=1e-9, atol=0)
        for plan, other, scale in zip(plans, others, scales, strict=True)
    )


def _mean_loss(plans: Sequence[StepPlan], sum_S_by_step: Sequence[Tensor]) -> float:
    losses = [_loss(plan, sum_S) for plan, sum_S in zip(plans, sum_S_by_step, strict=True)]
    return math.fsum(losses) / len(losses)


def _loss(plan: StepPlan, sum_S: Tensor) -> float:
    """Compute the step's loss from the sum of each row's per-token losses."""
    loss = float((plan.weights * sum_S).sum())
    if not 0 < loss < math.inf:
        raise ExplainError(
            f"{plan.aggregation}: got a loss of {loss}, expected a positive float64 because every "
            "token's loss is positive. Give a --divisor of the size of a response"
        )
    return loss


def _flags(name: str, divisor: float | None, count_empty: bool | None) -> str:
    flags = [f"--loss-aggregation {name}"]
    if divisor is not None:
        flags.append(f"--loss-aggregation-divisor {exact(divisor)}")
    if count_empty is not None:
        flags.append(f"--{'' if count_empty else 'no-'}loss-aggregation-count-empty")
    return " ".join(flags)


def exact(divisor: float) -> str:
    """Write a divisor so that reading it gives the same number, without a trailing ``.0``."""
    return repr(divisor).removesuffix(".0")
