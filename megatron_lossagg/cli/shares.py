"""Which responses the loss comes from: each mode's share of the loss weight, by response length.

The weight of a sequence is w_s n_s, from the step's plan. Its share is taken within its step, and
a share of several steps is their mean, so that every step counts alike. A share depends neither on
the divisor nor on ``count_empty``: within a step they multiply every weight by one number. That of
``length_power`` depends on its exponent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_lossagg.cli.extras import needed
from megatron_lossagg.cli.plans import EXPONENT, Split, aggregation_of, modes_of, plan_of
from megatron_lossagg.cli.rollouts import Rollouts, RolloutsError
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.modes import MODES
from megatron_lossagg.reduction.step_weights import StepWeights
from megatron_lossagg.verify.text import number_of

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["MOST_BUCKETS", "Shares", "read_buckets", "shares_of"]

MOST_BUCKETS = 7
"""As many columns fit a terminal next to the names of the modes."""
MOST_TIMES_THE_MEDIAN = 8
"""Above it, buckets of equal width would put most responses into the first."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Shares:
    """What ``lossagg plot`` draws."""

    buckets: DataFrame
    """One bucket of response lengths per line. Columns: ``label`` and its bounds, ``low`` to
    ``high``; ``num`` responses, over all steps; then shares, which add up to 1: ``responses`` (of
    those with an active token), ``tokens``, and the loss weight under each mode, by its name."""
    groups: tuple[tuple[str, ...], ...]
    """The modes, those with equal shares together."""
    finding: str
    """What the longest responses have: a quarter of all at most, a bucket at least."""
    summary: str
    """What the file has."""
    notes: tuple[str, ...]
    """What a reader has to know next to the numbers."""
    unit: str
    exponent: float
    """Of ``length_power``."""

    @property
    def modes(self) -> list[str]:
        """The modes, in the order of ``MODES``."""
        return [mode for mode in MODES if mode in self.buckets]


def read_buckets(text: str) -> list[int]:
    """Read the buckets' highest lengths from text such as ``256,1024,4096``."""
    numbers = [n.strip() for n in text.split(",")]
    highs = [int(n) if n.isdecimal() and len(n) <= 16 else 0 for n in numbers]
    rises = all(low < high for low, high in pairwise([0, *highs]))
    if not rises or len(highs) > MOST_BUCKETS:
        raise RolloutsError(
            f"--buckets {text!r}: expected rising integers from 1, at most {MOST_BUCKETS}, as in "
            "256,1024,4096"
        )
    return highs


def shares_of(
    rollouts: Rollouts,
    split: Split,
    highs: Sequence[int] | None = None,
    *,
    exponent: float = EXPONENT,
) -> Shares:
    """Compute the shares.

    ``highs``: the buckets' highest lengths, None to choose them. ``exponent``: of ``length_power``.
    """
    pandas = needed("pandas", by="lossagg plot", extra="plot")
    plans = [plan_of(step, Aggregation("token_mean"), split) for step in rollouts.steps]
    sequences = pandas.concat(
        [_weights(plan, step, exponent) for plan, step in zip(plans, rollouts.steps, strict=True)],
        keys=range(len(plans)),
        names=["of_step"],
    )
    is_response = sequences["responses"] > 0
    lengths = sequences["length"][is_response]
    edges = _edges(lengths, highs)
    # Of the step, then over the steps; a sample with no active token is in no bucket.
    weights = sequences.drop(columns="length")
    weights = weights / weights.groupby("of_step").transform("sum") / len(plans)
    bucket = pandas.cut(sequences["length"], edges, labels=False)
    every = range(len(edges) - 1)
    bounds = [(low + 1, high) for low, high in pairwise(edges)]
    buckets = pandas.DataFrame(bounds, columns=["low", "high"])
    buckets.insert(0, "label", [f"{a}-{b}" if a < b else str(b) for a, b in bounds])
    buckets["num"] = bucket[is_response].value_counts().reindex(every, fill_value=0)
    buckets = buckets.join(weights.groupby(bucket).sum().reindex(every, fill_value=0.0))
    groups = _groups(buckets)
    num_responses = sum(plan.totals.samples or 0 for plan in plans)
    num_prompts = sum(plan.totals.prompts or 0 for plan in plans)
    unit = rollouts.unit
    return Shares(
        buckets=buckets,
        groups=groups,
        finding=_finding(buckets, groups, unit),
        summary=f"{number_of(num_responses, 'response')}"
        + (f" to {number_of(num_prompts, 'prompt')}" if num_prompts else "")
        + (f" in {number_of(len(plans), 'step')}" if len(plans) > 1 else "")
        + f", {number_of(int(sequences['tokens'].sum()), f'active {unit}')}"
        + f", median {lengths.median():,g}, longest {lengths.max():,}",
        notes=(
            *_notes(rollouts, num_responses - int(is_response.sum()), split),
            f"length_power has the exponent {exponent:g}: --exponent changes it.",
        ),
        unit=unit,
        exponent=exponent,
    )


def _weights(plan: StepWeights, step: DataFrame, exponent: float) -> DataFrame:
    """Return for each sequence: its sample's length, 1 if it is the sample's first, its weights."""
    length = plan.totals.sample_tokens
    assert length is not None
    sample = step["sample"] if "sample" in step else step.index.to_series()
    frame = step[["active_tokens"]].set_axis(["tokens"], axis="columns")
    frame.insert(0, "length", length)
    frame["responses"] = (~sample.duplicated() & (length > 0)).astype(float)
    divisor = float(length.max())  # any gives the same shares; this one is never below a response
    for mode in modes_of(plan):
        other = plan.under(aggregation_of(mode.name, divisor, exponent))
        frame[mode.name] = other.weight_S * frame["tokens"]
    return frame


def _groups(buckets: DataFrame) -> tuple[tuple[str, ...], ...]:
    groups: list[list[str]] = []
    for mode in (mode for mode in MODES if mode in buckets):
        for group in groups:
            if np.allclose(buckets[mode], buckets[group[0]], rtol=1e-9, atol=1e-12):
                group.append(mode)
                break
        else:
            groups.append([mode])
    return tuple(map(tuple, groups))


def _finding(buckets: DataFrame, groups: Sequence[Sequence[str]], unit: str) -> str:
    leaders = [group[0] for group in groups if group[0] != "microbatch_token_mean"]
    if len(buckets) == 1:
        return "All responses are in one bucket."
    if len(leaders) == 1:
        but = "" if len(groups) == 1 else " but microbatch_token_mean"
        return f"Every mode{but} has the same shares on these responses."
    filled = buckets[: buckets["num"].to_numpy().nonzero()[0].max() + 1]
    from_here_on = filled["responses"][::-1].cumsum()[::-1]
    small = from_here_on.index[(from_here_on <= 0.25) & (from_here_on.index > 0)]
    tail = filled.loc[small[0] :] if len(small) else filled[-1:]
    weights = tail[leaders].sum()
    if np.isclose(weights.max(), weights.min(), rtol=1e-9, atol=0):
        under = f"each of {', '.join(leaders)}"
    else:
        under = f"{weights.idxmax()}, {weights.min():.1%} under {weights.idxmin()}"
    return (
        f"Responses of {tail['low'].iloc[0]} {unit}s and more are {tail['responses'].sum():.1%} of "
        f"all trained responses. They have {weights.max():.1%} of the loss weight under {under}."
    )


def _notes(rollouts: Rollouts, masked: int, split: Split) -> Iterator[str]:
    yield f"Read from {rollouts.source}."
    if rollouts.caveat:
        yield rollouts.caveat
    if masked:
        yield (
            f"{number_of(masked, 'response')} with no active token: no weight in any mode, not in "
            "the picture."
        )
    if rollouts.masked_steps:
        yield f"{number_of(rollouts.masked_steps, 'step')} with no active token: left out."
    if len(rollouts.steps) > 1:
        yield f"A share is the mean over the {len(rollouts.steps)} steps of the share in each step."
    if "prompt" not in rollouts.steps[0]:
        yield "prompt_mean is missing: the file has no prompts."
    yield (
        "microbatch_token_mean depends on the parallelism: here the sequences are assigned "
        f"alternately to {number_of(split.dp, 'rank')} x "
        f"{number_of(split.microbatches, 'microbatch')}."
    )


def _edges(lengths: Any, highs: Sequence[int] | None) -> list[int]:
    """Return the edges of the buckets: bucket k has lengths above edge k, up to edge k + 1.

    They are of equal width if the longest response is not many times the median, else they grow
    like 1, 2, 5, 10.
    """
    shortest, longest = int(lengths.min()), int(lengths.max())
    if highs is not None:
        if highs[-1] < longest and len(highs) == MOST_BUCKETS:
            raise RolloutsError(
                f"--buckets {','.join(map(str, highs))}: got a response of length {longest}, which "
                f"needs one more than {MOST_BUCKETS}: give fewer, or end with {longest}"
            )
        return [0, *highs, *([longest] if highs[-1] < longest else [])]
    if longest <= MOST_TIMES_THE_MEDIAN * lengths.median():
        for width in _round_numbers(1, 2, 3, 4, 5):
            first = (shortest - 1) // width * width
            if first + MOST_BUCKETS * width >= longest:
                return list(range(first, longest + width, width))
    numbers = _round_numbers(1, 2, 5)
    lowest = max((number for number in numbers if number < shortest), default=0)
    between = [number for number in numbers if lowest < number < longest][-(MOST_BUCKETS - 1) :]
    return [lowest, *between, next(number for number in numbers if number >= longest)]


def _round_numbers(*digits: int) -> list[int]:
    """List the digits, the digits times 10, times 100 and so on, beyond any length."""
    return [digit * 10**power for power in range(17) for digit in digits]
