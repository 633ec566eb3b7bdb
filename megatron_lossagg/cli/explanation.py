"""Compute what ``lossagg explain`` prints: weights, losses under every mode, and K."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lossagg.cli.rollouts import Rollouts
from megatron_lossagg.cli.shares import (
    EXPONENT,
    Shares,
    Split,
    aggregation_of,
    modes_of,
    plan_of,
    shares_of,
)
from megatron_lossagg.contract.scaling import MOST_TOKENS_PER_TOKEN, Factor, Scaling
from megatron_lossagg.errors import LossAggregationError
from megatron_lossagg.reduction.modes import COUNTS, CUSTOM, MODES, Count
from megatron_lossagg.reduction.plan import StepPlan
from megatron_lossagg.reduction.sequences import MOST_TOKENS
from megatron_lossagg.verify.text import number_of

__all__ = [
    "DEFAULT_LENGTHS",
    "Comparison",
    "Explanation",
    "explain",
    "read_counted",
    "read_lengths",
]

DEFAULT_LENGTHS = "2000,500,8000,1500/3000,1000,0,4000"
"""Uneven lengths as reasoning models write them, a fully masked sample, two prompts."""


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
    exponent: float | None
    """Likewise."""
    count: Count
    """What the denominators count."""
    split: Split
    counts: dict[str, float | None]
    """N, B, V, P and Q, and Z of ``length_power``; of a file with several steps, those of the
    first. So are k and num_tokens."""
    sequences: list[dict[str, float]]
    """Of each sequence, which is one sample: its prompt, where it is assigned, its counts and
    weight, and its share of the step's w_s n_s. If not the mask is counted, what is (``counted``)
    takes the place of n_s, and ``share_by_mask`` is the share if the mask were. None of a file:
    it has ``shares``."""
    shares: Shares | None
    """Of a file, what ``lossagg plot`` draws of it."""
    comparisons: tuple[Comparison, ...]
    """Every mode on the same sequences, this one too."""
    chain: tuple[Factor, ...]
    """What multiplies a partial loss on its way to the gradient."""
    k: int
    num_tokens: tuple[int, ...]
    """Of loss_func on CP rank 0, for each microbatch that has sequences."""


def read_lengths(text: str) -> dict[str, list[int]]:
    """Read a step, by column, from its prompts' samples, such as ``3,5,9/2,0``."""
    step: dict[str, list[int]] = {"active_tokens": [], "prompt": []}
    for prompt, samples in enumerate(text.split("/")):
        for n in map(str.strip, samples.split(",")):
            if not n.isdecimal() or len(n) > 16:
                raise LossAggregationError(
                    f"--lengths {text!r}: got {n!r}, expected a sample's active tokens, as in "
                    f"{DEFAULT_LENGTHS}"
                )
            step["active_tokens"].append(int(n))
            step["prompt"].append(prompt)
    if not any(step["active_tokens"]):
        masked = number_of(len(step["prompt"]), "fully masked sample")
        raise LossAggregationError(
            f"--lengths: got {masked} and no active token, expected one or more"
        )
    return step


def read_counted(text: str, lengths: dict[str, list[int]], count: Count) -> list[float]:
    """Read what ``count`` counts of each sample of a step, in the form of its lengths."""
    if count == "mask":
        raise LossAggregationError(
            f"got --counted {text!r}, and --lengths is what the mask counts: give --count weights, "
            "or leave out --counted"
        )
    numbers = [number.strip() for prompt in text.split("/") for number in prompt.split(",")]
    form = [prompt for prompt, of in enumerate(text.split("/")) for _ in of.split(",")]
    if form != lengths["prompt"]:
        raise LossAggregationError(
            f"--counted {text!r}: got {number_of(len(form), 'sample')} of "
            f"{number_of(form[-1] + 1, 'prompt')}, expected one number for each sample of --lengths"
        )
    for number, n in zip(numbers, lengths["active_tokens"], strict=True):
        if not _is_weight_sum(number, n):
            raise LossAggregationError(
                f"--counted {text!r}: got {number!r}, expected the sum of the weights of {n} "
                "tokens: a number from 0 to 2^53, and 0 for no token"
            )
    counted = [float(number) for number in numbers]
    if not any(counted):
        raise LossAggregationError(
            f"--counted {text!r}: got 0 for every sample, expected one above 0"
        )
    return counted


def _is_weight_sum(text: str, n: int) -> bool:
    try:
        return 0 <= float(text) <= (MOST_TOKENS if n else 0)
    except ValueError:
        return False


def explain(
    name: str,
    lengths: dict[str, list[int]] | Rollouts,
    split: Split,
    *,
    divisor: float | None = None,
    exponent: float | None = None,
    count_empty: bool | None = None,
    count: Count = "mask",
    counted: Sequence[float] | None = None,
    highs: Sequence[int] | None = None,
) -> Explanation:
    """Compute everything that is printed.

    ``lengths``: of :func:`read_lengths`, or recorded steps with ``highs`` of the buckets of
    :func:`shares_of`. ``divisor`` and ``exponent`` are for the modes that take one: this one, or
    those that it is compared with. Without an exponent ``length_power`` is compared at
    ``EXPONENT``. ``counted``: what ``count`` counts of each sample; None if every token weighs 1.
    Raises :class:`LossAggregationError` for an unknown mode, and for sequences or sizes that do not
    describe a step.
    """
    if name == CUSTOM:
        raise LossAggregationError(
            "custom has no formula to explain: its loss is what the factory of "
            "--loss-aggregation-reducer-path returns"
        )
    aggregation = aggregation_of(name, divisor, exponent, count_empty, count)
    compared_at = EXPONENT if exponent is None else exponent
    if isinstance(lengths, Rollouts):
        if count != "mask":
            raise LossAggregationError(
                f"got --count {count} with {lengths.source}, which has no {COUNTS[count]}: "
                "give --lengths and --counted"
            )
        if aggregation.mode == "prompt_mean" and "prompt" not in lengths.steps[0]:
            raise LossAggregationError(
                f"prompt_mean: got no prompts from {lengths.source}: give every record a "
                "'prompt_id'"
            )
        plans = [plan_of(step, aggregation, split) for step in lengths.steps]
        flag, sequences = "--lengths-file", []
        shares = shares_of(lengths, plans, split, highs, exponent=compared_at)
    else:
        by_mask = plan_of(lengths, aggregation_of(name, divisor, exponent, count_empty), split)
        plans = [by_mask]
        if count != "mask":
            counted = lengths["active_tokens"] if counted is None else counted
            plans = [plan_of({**lengths, "token_weight_sums": counted}, aggregation, split)]
        flag, shares = "--lengths", None
        sequences = _sequences(plans[0], by_mask, split)
    most = max(plan.totals.active_tokens or 0 for plan in plans)
    if split.loss_scaling == "per_token" and most > MOST_TOKENS_PER_TOKEN:
        raise LossAggregationError(
            f"{flag}: got {most} active tokens in a step, expected at most "
            f"{MOST_TOKENS_PER_TOKEN}, because Megatron-Core sums them in int32 with the loss "
            "scaling per_token. Give fewer, or --loss-scaling average"
        )
    totals = plans[0].totals
    scaling = Scaling(
        loss_scaling=split.loss_scaling,
        num_microbatches=split.microbatches,
        dp_cp_size=split.dp * split.cp,
        active_tokens=totals.active_tokens,
    )
    flags = [f"--loss-aggregation {name}"]
    for option in ("divisor", "exponent"):
        if (value := getattr(aggregation, option)) is not None:
            flags.append(f"--loss-aggregation-{option} {value!r}".removesuffix(".0"))
    if count_empty is not None:
        flags.append(f"--{'' if count_empty else 'no-'}loss-aggregation-count-empty")
    if count != "mask":
        flags.append(f"--loss-aggregation-count {count}")
    of_count = plans[0].counts.totals
    counts: dict[str, float | None] = {
        "N": of_count.active_tokens,
        "B": of_count.samples,
        "V": of_count.active_samples,
        "P": of_count.prompts,
        "Q": of_count.active_prompts,
    }
    if MODES[aggregation.mode].has_exponent:
        counts["Z"] = plans[0].counts.length_power_sum
    # Assigned alternately: the first sequence of each microbatch comes before the second of any.
    assert totals.microbatch_tokens is not None
    of_microbatch = totals.microbatch_tokens[: split.microbatches * split.dp].tolist()
    return Explanation(
        name=name,
        mode=aggregation.mode,
        formula=aggregation.formula,
        flags=" ".join(flags),
        divisor=divisor,
        exponent=exponent,
        count=count,
        split=split,
        counts=counts,
        sequences=sequences,
        shares=shares,
        comparisons=tuple(_comparisons(plans, divisor, compared_at)),
        chain=tuple(scaling.factors()),
        k=scaling.k,
        num_tokens=tuple(scaling.num_tokens(tokens, cp_rank=0) for tokens in of_microbatch),
    )


def _sequences(plan: StepPlan, by_mask: StepPlan, split: Split) -> list[dict[str, float]]:
    slot = np.asarray(plan.sequences.microbatch)
    totals = plan.counts.totals
    columns = {
        "prompt": np.asarray(plan.sequences.prompt),
        "rank": slot % split.dp,
        "microbatch": slot // split.dp,
        "n_s": by_mask.active_tokens,
        "n_b": totals.sample_tokens,
        "n_p": totals.prompt_tokens,
        "n_mb": totals.microbatch_tokens,
        "w_s": plan.weights.numpy(),
        "share": plan.weights.numpy() * plan.counted_S / _loss(plan, plan),
    }
    if plan is not by_mask:
        columns["counted"] = plan.counted_S
        columns["share_by_mask"] = (
            by_mask.weights.numpy() * by_mask.active_tokens / _loss(by_mask, by_mask)
        )
    rows = zip(*(np.asarray(column).tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _comparisons(
    plans: Sequence[StepPlan], divisor: float | None, exponent: float
) -> Iterator[Comparison]:
    """Compare every mode on the plans' sequences, with the plans' own ``count_empty``."""
    own = plans[0].aggregation
    losses = [_loss(plan, plan) for plan in plans]
    for mode in modes_of(plans[0]):
        if mode.divisor == "required" and divisor is None:
            yield Comparison(mode=mode.name, w_s=mode.formula)
            continue
        aggregation = aggregation_of(mode.name, divisor, exponent, own.count_empty, own.count)
        others = [plan.under(aggregation) for plan in plans]
        if mode.name == own.mode:
            others = list(plans)
        other_losses = [_loss(other, plan) for other, plan in zip(others, plans, strict=True)]
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
        np.allclose(
            other.weight_S * plan.counted_S, plan.weight_S * plan.counted_S * ratio, 1e-9, atol=0
        )
        for plan, other, ratio in zip(plans, others, ratios, strict=True)
    )


def _loss(plan: StepPlan, trained: StepPlan) -> float:
    """Compute a plan's loss if the loss of every token that is trained is 1."""
    loss = float((plan.weights.numpy() * trained.counted_S).sum())
    if not 0 < loss < math.inf:
        raise LossAggregationError(
            f"{plan.aggregation}: got a loss of {loss}, expected a positive float64: give a "
            "--divisor of the size of a response"
        )
    return loss
