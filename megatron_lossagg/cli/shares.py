"""Which responses the loss comes from: each mode's share of the loss weight, by response length.

The weight of a row is w_s n_s, from the step's plan. Its share is taken within its step, and a
share of several steps is their mean, so that every step counts alike. A share depends neither on
the divisor nor on ``count_empty``: within a step they multiply every weight by one number.

Shape suffixes: S = rows of a step; K = buckets.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

import numpy as np
import numpy.typing as npt

from megatron_lossagg.aggregation import CUSTOM, MODES, Aggregation
from megatron_lossagg.cli.rollouts import Rollouts, RolloutsError, Step
from megatron_lossagg.integers import Ints
from megatron_lossagg.plan import StepPlan, plan_step
from megatron_lossagg.sequences import Sequences
from megatron_lossagg.text import number_of

__all__ = ["Bucket", "Shares", "add_bucket_argument", "plan_of", "read_buckets", "shares_of"]

_Floats = npt.NDArray[np.float64]

MOST_BUCKETS = 7
"""As many columns fit a terminal beside the names of the modes."""
MOST_TIMES_THE_MEDIAN = 8
"""Above it, buckets of equal width would put most responses into the first."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Responses of ``low`` to ``high`` active tokens."""

    low: int
    high: int
    num: int
    """Over all steps."""
    responses: float
    """Share of the responses that have an active token."""
    tokens: float
    """Share of the active tokens."""
    weight: dict[str, float]
    """Share of the loss weight under each mode."""

    @property
    def label(self) -> str:
        """The lengths: ``501-1000``, or ``7`` where there is one."""
        return str(self.high) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What ``lossagg plot`` draws."""

    buckets: tuple[Bucket, ...]
    source: str
    unit: str
    caveat: str
    num_steps: int
    masked_steps: int
    responses: int
    """Over all steps, those with no active token too."""
    masked: int
    """Responses with no active token: they have no weight in any mode."""
    prompts: int | None
    tokens: int
    longest: int
    median: float
    slots: tuple[int, int]
    """M and DP, over which ``microbatch_token_mean`` took the rows in turn."""

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The modes, those with equal shares together."""
        groups: list[list[str]] = []
        for mode in self.buckets[0].weight:
            for group in groups:
                if all(
                    math.isclose(b.weight[mode], b.weight[group[0]], rel_tol=1e-9, abs_tol=1e-12)
                    for b in self.buckets
                ):
                    group.append(mode)
                    break
            else:
                groups.append([mode])
        return tuple(map(tuple, groups))

    @property
    def finding(self) -> str:
        """What the longest responses have: a quarter of all at most, a bucket at least."""
        leaders = [group[0] for group in self.groups if group[0] != "microbatch_token_mean"]
        filled = self.buckets[: 1 + max(k for k, bucket in enumerate(self.buckets) if bucket.num)]
        if len(self.buckets) == 1:
            return "All responses are in one bucket."
        if len(leaders) == 1:
            but = "" if len(self.groups) == 1 else " but microbatch_token_mean"
            return f"Every mode{but} has the same shares on these responses."
        tails = (filled[k:] for k in range(1, len(filled)))
        tail = next(
            (tail for tail in tails if sum(bucket.responses for bucket in tail) <= 0.25),
            filled[-1:],
        )
        weights = {mode: sum(bucket.weight[mode] for bucket in tail) for mode in leaders}
        most, least = max(weights, key=weights.__getitem__), min(weights, key=weights.__getitem__)
        if math.isclose(weights[most], weights[least], rel_tol=1e-9):
            under = f"each of {', '.join(leaders)}"
        else:
            under = f"{most}, {weights[least]:.1%} under {least}"
        return (
            f"Responses of {tail[0].low} {self.unit}s and more are "
            f"{sum(bucket.responses for bucket in tail):.1%} of the trained ones. They have "
            f"{weights[most]:.1%} of the loss weight under {under}."
        )

    @property
    def summary(self) -> str:
        """What the file has, in a sentence."""
        prompts = "" if self.prompts is None else f" to {_count(self.prompts, 'prompt')}"
        steps = f" in {_count(self.num_steps, 'step')}" if self.num_steps > 1 else ""
        return (
            f"{_count(self.responses, 'response')}{prompts}{steps}, "
            f"{_count(self.tokens, f'active {self.unit}')}, median {self.median:,g}, "
            f"longest {self.longest:,}"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader has to know beside the numbers."""
        notes = [f"Read from {self.source}."]
        if self.caveat:
            notes.append(self.caveat)
        if self.masked:
            notes.append(
                f"{number_of(self.masked, 'response')} with no active token: no weight in any "
                "mode, not in the picture."
            )
        if self.masked_steps:
            notes.append(f"{number_of(self.masked_steps, 'step')} with no active token: left out.")
        if self.num_steps > 1:
            notes.append(
                f"A share is the mean over the {self.num_steps} steps of the share in each step."
            )
        if self.prompts is None:
            notes.append("prompt_mean is missing: the file has no prompts.")
        microbatches, dp = self.slots
        notes.append(
            "microbatch_token_mean depends on the layout: here the rows are assigned in turn to "
            f"{number_of(dp, 'rank')} x {number_of(microbatches, 'microbatch')}."
        )
        return tuple(notes)


def add_bucket_argument(group: argparse._ArgumentGroup) -> None:
    """Add ``--buckets``, which :func:`read_buckets` reads."""
    group.add_argument(
        "--buckets",
        metavar="N,N",
        help="highest response length of each bucket, such as 256,1024,4096, at most "
        f"{MOST_BUCKETS} with the one for longer responses (default: chosen from the lengths)",
    )


def read_buckets(text: str) -> list[int]:
    """Read the buckets' highest lengths from text such as ``256,1024,4096``."""
    numbers = [n.strip() for n in text.split(",")]
    if not all(n.isdecimal() and len(n) <= 16 for n in numbers):
        raise RolloutsError(
            f"--buckets {text!r}: expected integers separated by ',', as in 256,1024,4096"
        )
    highs = [int(n) for n in numbers]
    if highs[0] < 1 or any(low >= high for low, high in pairwise(highs)):
        raise RolloutsError(f"--buckets {text!r}: expected rising integers from 1")
    if len(highs) > MOST_BUCKETS:
        raise RolloutsError(
            f"--buckets {text!r}: got {len(highs)}, expected at most {MOST_BUCKETS}, which is what "
            "the picture and the table have space for"
        )
    return highs


def shares_of(
    rollouts: Rollouts,
    *,
    microbatches: int,
    dp: int,
    highs: Sequence[int] | None = None,
) -> Shares:
    """Compute the shares; ``highs``: the buckets' highest lengths, None to choose them.

    Raises :class:`LossAggregationError` where the rows do not make a step.
    """
    plans = [plan_of(step, "token_mean", microbatches, dp) for step in rollouts.steps]
    length_by_step = [
        _lengths(plan, step) for plan, step in zip(plans, rollouts.steps, strict=True)
    ]
    lengths = np.concatenate(length_by_step)
    active = lengths[lengths > 0]
    edges = _edges(active, highs)
    number_K = np.bincount(_bucket(active, edges), minlength=len(edges) - 1)
    responses_K, tokens_K = np.zeros(len(number_K)), np.zeros(len(number_K))
    weight_K = {
        mode: np.zeros(len(number_K))
        for mode in MODES
        if mode != CUSTOM and (mode != "prompt_mean" or rollouts.steps[0].prompt is not None)
    }
    for plan, of_step in zip(plans, length_by_step, strict=True):
        assert plan.sample_tokens is not None
        bucket_S = _bucket(plan.sample_tokens, edges)
        of_samples = of_step[of_step > 0]
        responses_K += _shares(_bucket(of_samples, edges), np.ones(len(of_samples)), edges)
        tokens_K += _shares(bucket_S, plan.active_tokens.astype(np.float64), edges)
        for mode, share_K in weight_K.items():
            # Any divisor gives the same shares; this one is never below a response.
            divisor = float(lengths.max()) if MODES[mode].divisor == "required" else None
            weights = plan.under(Aggregation(mode, divisor=divisor)).weights.numpy()
            share_K += _shares(bucket_S, weights * plan.active_tokens, edges)
    num = len(plans)
    return Shares(
        buckets=tuple(
            Bucket(
                low=edges[k] + 1,
                high=edges[k + 1],
                num=int(number_K[k]),
                responses=float(responses_K[k]) / num,
                tokens=float(tokens_K[k]) / num,
                weight={mode: float(share_K[k]) / num for mode, share_K in weight_K.items()},
            )
            for k in range(len(number_K))
        ),
        source=rollouts.source,
        unit=rollouts.unit,
        caveat=rollouts.caveat,
        num_steps=num,
        masked_steps=rollouts.masked_steps,
        responses=len(lengths),
        masked=len(lengths) - len(active),
        prompts=_num_prompts(plans),
        tokens=int(lengths.sum()),
        longest=int(lengths.max()),
        median=float(np.median(active)),
        slots=(microbatches, dp),
    )


def plan_of(step: Step, aggregation: Aggregation | str, microbatches: int, dp: int) -> StepPlan:
    """Plan a recorded step, its rows assigned in turn to the ranks' microbatches.

    One process plans for all: M DP microbatches on one rank weigh as M on each of DP ranks.
    """
    if isinstance(aggregation, str):
        aggregation = Aggregation(aggregation)
    slots = microbatches * dp
    return plan_step(
        aggregation,
        Sequences(
            active_tokens=step.active_tokens,
            sample=step.sample,
            prompt=step.prompt,
            microbatch=np.arange(len(step.active_tokens)) % slots,
            num_microbatches=slots,
        ),
    )


def _count(number: int, noun: str) -> str:
    """Write a count with its noun, and its thousands apart."""
    return number_of(number, noun).replace(str(number), f"{number:,}", 1)


def _lengths(plan: StepPlan, step: Step) -> Ints:
    """Return n_b of every sample."""
    assert plan.sample_tokens is not None
    if step.sample is None:
        return plan.sample_tokens
    return plan.sample_tokens[np.unique(step.sample, return_index=True)[1]]


def _num_prompts(plans: Sequence[StepPlan]) -> int | None:
    numbers = [plan.totals.prompts for plan in plans]
    return None if None in numbers else sum(n for n in numbers if n is not None)


def _bucket(length_S: Ints, edges: Sequence[int]) -> Ints:
    """Return each row's bucket; a row with no active tokens has no weight in the first."""
    return np.maximum(np.searchsorted(edges, length_S, side="left") - 1, 0)


def _shares(bucket_S: Ints, value_S: _Floats, edges: Sequence[int]) -> _Floats:
    sum_K = np.bincount(bucket_S, weights=value_S, minlength=len(edges) - 1)
    return np.asarray(sum_K / value_S.sum(), dtype=np.float64)


def _edges(active: Ints, highs: Sequence[int] | None) -> list[int]:
    """Return the edges of the buckets: bucket k has lengths above edge k, up to edge k + 1.

    Of equal width where the longest response is not many times the median, else they grow like
    1, 2, 5, 10.
    """
    shortest, longest = int(active.min()), int(active.max())
    if highs is not None:
        if highs[-1] < longest and len(highs) == MOST_BUCKETS:
            raise RolloutsError(
                f"--buckets {','.join(map(str, highs))}: got {len(highs)} and a response of "
                f"length {longest}, which needs one more, expected at most {MOST_BUCKETS} with "
                f"it: give fewer, or end with {longest}"
            )
        return [0, *highs, *([longest] if highs[-1] < longest else [])]
    if longest <= MOST_TIMES_THE_MEDIAN * np.median(active):
        for width in _round_numbers(1, 2, 3, 4, 5):
            first = (shortest - 1) // width * width
            if first + MOST_BUCKETS * width >= longest:
                return list(range(first, longest + width, width))
    below = list(takewhile(lambda number: number < longest, _round_numbers(1, 2, 5)))
    lowest = max((number for number in below if number < shortest), default=0)
    between = [number for number in below if number > lowest][-(MOST_BUCKETS - 1) :]
    return [lowest, *between, next(n for n in _round_numbers(1, 2, 5) if n >= longest)]


def _round_numbers(*digits: int) -> Iterator[int]:
    """Yield the digits, the digits times 10, times 100 and so on."""
    scale = 1
    while True:
        yield from (scale * digit for digit in digits)
        scale *= 10
