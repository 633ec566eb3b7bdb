"""Compute what ``lossagg explain`` prints: weights, factors, and losses under every mode."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from megatron_lossagg.aggregation import ALIASES, CUSTOM, MODES, Aggregation
from megatron_lossagg.counts import Sequences, StepTotals
from megatron_lossagg.errors import LossAggregationError
from megatron_lossagg.plan import StepPlan, plan_step
from megatron_lossagg.scaling import (
    K_FORMULA,
    MOST_TOKENS_PER_TOKEN,
    REGIMES,
    Factor,
    Regime,
    Scaling,
)
from megatron_lossagg.verify.words import number_of

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
    "read_lengths",
]

DEFAULT_LENGTHS = "12,3,40/5,0,20"
"""Uneven lengths, a fully masked sample, two prompts."""


class ExplainError(LossAggregationError, ValueError):
    """A mode, rows or sizes that cannot be explained."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """How Megatron splits the step, and how it scales: what K depends on."""

    regime: Regime = "average"
    microbatches: int = 2
    """M of every data-parallel rank."""
    dp: int = 2
    cp: int = 2

    def __post_init__(self) -> None:
        for flag in ("microbatches", "dp", "cp"):
            size = getattr(self, flag)
            if size < 1:
                raise ExplainError(f"--{flag}: got {size}, expected an integer from 1")
        if self.regime not in REGIMES:
            raise ExplainError(
                f"--regime: got {self.regime!r}, expected {' or '.join(map(repr, REGIMES))}"
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
    rows: tuple[Row, ...]
    total_weight: float
    """The sum of w_s n_s."""
    chain: tuple[Link, ...]
    factor: int
    """K."""
    num_tokens: tuple[int, ...]
    """Of loss_func on CP rank 0: one per microbatch with rows in the per-token regime, else 1."""
    comparisons: tuple[Comparison, ...]
    """Every mode on the same rows, this one too."""

    @property
    def k_formula(self) -> str:
        """K in symbols."""
        return K_FORMULA[self.split.regime]


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
    alias = ALIASES.get(name)
    mode = alias.mode if alias else name
    if mode == CUSTOM:
        raise ExplainError(
            "custom has no formula to explain: its loss is what the factory of "
            "--loss-aggregation-reducer-path returns. Name one of "
            f"{', '.join(other for other in MODES if other != CUSTOM)}"
        )
    taken = None if mode in MODES and MODES[mode].divisor == "none" else divisor
    aggregation = Aggregation.named(name, divisor=taken, count_empty=count_empty)
    plan = _planned(aggregation, prompts, split)
    scaling = Scaling(
        regime=split.regime,
        num_microbatches=split.microbatches,
        dp_cp_size=split.dp * split.cp,
        active_tokens=plan.totals.active_tokens,
    )
    comparisons = tuple(_comparisons(plan, divisor))
    total_weight = next(c.ones for c in comparisons if c.mode == mode)
    assert total_weight is not None
    rows = tuple(_rows(plan, prompts, split, total_weight))
    counted = Counter[tuple[int, int]]()
    for row in rows:
        counted[row.microbatch, row.rank] += row.n_s
    num_tokens = [scaling.num_tokens(count, cp_rank=0) for count in counted.values()]
    return Explanation(
        name=name,
        note=alias.note if alias else "",
        mode=mode,
        formula=aggregation.formula,
        meaning=MODES[mode].meaning,
        flags=_flags(name, taken, count_empty),
        divisor=divisor,
        split=split,
        totals=plan.totals,
        rows=rows,
        total_weight=total_weight,
        chain=tuple(_chain(scaling)),
        factor=scaling.k,
        num_tokens=tuple(num_tokens),
        comparisons=comparisons,
    )


def _planned(aggregation: Aggregation, prompts: Sequence[Sequence[int]], split: Split) -> StepPlan:
    tokens = [n for prompt in prompts for n in prompt]
    if not any(tokens):
        raise ExplainError(
            f"--lengths: got {number_of(len(tokens), 'fully masked sample')} and no active token, "
            "so that every weight is 0. Give at least one sample above 0"
        )
    if split.regime == "per-token" and sum(tokens) > MOST_TOKENS_PER_TOKEN:
        raise ExplainError(
            f"--lengths: got {sum(tokens)} active tokens, expected at most "
            f"{MOST_TOKENS_PER_TOKEN}, because Megatron-Core sums them in int32 in the per-token "
            "regime. Give fewer, or --regime average"
        )
    # One process plans for all: M DP microbatches on one rank weigh as M on each of DP ranks.
    slots = split.microbatches * split.dp
    return plan_step(
        aggregation,
        Sequences(
            active_tokens=tokens,
            prompt=[p for p, prompt in enumerate(prompts) for _ in prompt],
            microbatch=[s % slots for s in range(len(tokens))],
            num_microbatches=slots,
        ),
    )


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
    """Fill in the table of docs/megatron-contract.md, "Two regimes", with numbers."""
    so_far = Fraction(1)
    for place in scaling.factors():
        so_far *= place.factor
        yield Link(where=place.where, does=place.does, factor=place.factor, so_far=so_far)


def _comparisons(plan: StepPlan, divisor: float | None) -> Iterator[Comparison]:
    """Compare every mode on the plan's rows, with the plan's own ``count_empty``."""
    n_S = torch.from_numpy(plan.active_tokens).double()
    rising_S = n_S * (n_S + 1) / 2 / n_S.max()  # sum over t = 1..n_s of t / max n_s
    ones, rising = _loss(plan, n_S), _loss(plan, rising_S)
    for mode in (mode for mode in MODES.values() if mode.name != CUSTOM):
        if mode.divisor == "required" and divisor is None:
            yield Comparison(mode=mode.name, w_s=mode.weight.format(B="B", L="L"))
            continue
        other = plan.under(
            Aggregation.named(
                mode.name,
                divisor=None if mode.divisor == "none" else divisor,
                count_empty=plan.aggregation.count_empty,
            )
        )
        other_ones, other_rising = _loss(other, n_S), _loss(other, rising_S)
        scaled_S = plan.weights * (other_ones / ones)
        yield Comparison(
            mode=mode.name,
            w_s=other.aggregation.formula,
            ones=other_ones,
            ones_ratio=other_ones / ones,
            rising=other_rising,
            rising_ratio=other_rising / rising,
            scales_only=torch.allclose(other.weights, scaled_S, rtol=1e-9, atol=0),
        )


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
