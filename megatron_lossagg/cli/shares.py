"""Which responses the loss comes from: each mode's share of the loss weight, by response length.

The weight of a sequence is w_s n_s, from the step's plan. Its share is taken within its step, and
a share of several steps is their mean, so that every step counts alike. A share depends neither on
a divisor nor on ``count_empty``: within a step they multiply every weight by one number. That of
``microbatch_token_mean`` depends on the microbatches, which no file has: it is left out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_lossagg.cli.extras import needed
from megatron_lossagg.cli.plans import Split, aggregation_of, plan_of
from megatron_lossagg.cli.rollouts import Rollouts
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.text import number_of

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, kw_only=True, eq=False)
class Shares:
    """What ``lossagg plot`` draws."""

    num: Sequence[int]
    """Responses of each bucket, over all steps."""
    buckets: DataFrame
    """Shares, which add up to 1, by bucket of response lengths, such as ``101-200``. Columns:
    ``responses`` (of those with an active token), ``tokens`` (or ``characters``), and the loss
    weight under each mode, by the names of those that have the same."""
    finding: str
    """What the longest responses have: a quarter of all at most, a bucket at least."""
    summary: str
    """What the file has."""
    notes: Sequence[str]
    """What a reader has to know next to the numbers."""
    unit: str


def shares_of(rollouts: Rollouts, exponent: float) -> Shares:
    """Compute the shares; ``exponent``: of ``length_power``."""
    pandas = needed("pandas", by="lossagg plot", extra="plot")
    steps, unit = rollouts.steps, rollouts.unit
    sequences = pandas.concat([_of_step(step, exponent) for step in steps], ignore_index=True)
    sequences = sequences.rename(columns={"tokens": f"{unit}s"})
    lengths = sequences.pop("length")
    is_response = sequences["responses"] > 0
    edges = _edges(lengths[is_response])
    labels = [f"{a + 1}-{b}" if a + 1 < b else str(b) for a, b in pairwise(edges)]
    bucket = pandas.cut(lengths, edges, labels=labels)  # none for no active token
    buckets = sequences.groupby(bucket, observed=False).sum() / len(steps)
    samples = sum(step["sample"].nunique() for step in steps)
    masked = samples - int(is_response.sum())
    of = [number_of(samples, "response")]
    notes = [*rollouts.notes]
    if masked:
        notes.append(f"{number_of(masked, 'response')} with no active token: no weight, not drawn.")
    if "prompt" in steps[0]:
        of.append(f"to {number_of(sum(step['prompt'].nunique() for step in steps), 'prompt')}")
    else:
        notes.append("prompt_mean is missing: the file has no prompts.")
    if len(steps) > 1:
        of.append(f"in {number_of(len(steps), 'step')}")
    total = sum(int(step["active_tokens"].sum()) for step in steps)
    responses = lengths[is_response]
    return Shares(
        num=bucket[is_response].value_counts(sort=False).tolist(),
        buckets=buckets,
        finding=_finding(buckets, edges, unit),
        summary=f"{' '.join(of)}, {number_of(total, f'active {unit}')}, "
        f"median {responses.median():,g}, longest {responses.max():,}",
        notes=notes,
        unit=unit,
    )


def _of_step(step: DataFrame, exponent: float) -> DataFrame:
    """Return each sequence's shares, and its sample's length; a sample is its first sequence."""
    aggregations = {
        # The others weigh the tokens of a step alike too.
        "token_mean, constant, sample_sum, token_sum": Aggregation("token_mean"),
        "sample_mean": Aggregation("sample_mean"),
        f"length_power (a = {exponent:g})": aggregation_of("length_power", None, exponent),
    }
    if "prompt" in step:
        aggregations["prompt_mean"] = Aggregation("prompt_mean")
    tokens = step["active_tokens"]
    length = tokens.groupby(step["sample"]).transform("sum")
    is_response = (length > 0) & ~step["sample"].duplicated()
    shares = step[[]].assign(responses=is_response.astype(float), tokens=tokens)
    for modes, aggregation in aggregations.items():
        shares[modes] = plan_of(step, aggregation, Split()).weight_S * tokens
    return (shares / shares.sum()).assign(length=length)


def _finding(buckets: DataFrame, edges: Sequence[int], unit: str) -> str:
    modes = buckets.iloc[:, 2:]
    if np.allclose(modes, modes.iloc[:, :1]):
        return "Every mode has the same shares on these responses."
    from_here_on = buckets["responses"][::-1].cumsum()[::-1]
    first = min(int((from_here_on > 0.25).sum()), len(buckets) - 1)
    weights = modes[first:].sum().sort_values()
    least, *_, most = (modes.split(",")[0] for modes in weights.index)
    return (
        f"Responses of {edges[first] + 1} {unit}s and more are {from_here_on.iloc[first]:.1%} of "
        f"all trained responses. They have {weights.iloc[-1]:.1%} of the loss weight under {most}, "
        f"{weights.iloc[0]:.1%} under {least}."
    )


def _edges(lengths: Any) -> list[int]:
    """Return the edges of the buckets: bucket k has lengths above edge k, up to edge k + 1.

    They are of equal width if the longest response is not many times the median, else they grow
    like 1, 2, 5, 10.
    """
    shortest, longest = int(lengths.min()), int(lengths.max())
    if longest <= 8 * lengths.median():
        ticker = needed("matplotlib.ticker", by="drawing", extra="plot")
        edges = ticker.MaxNLocator(6, integer=True).tick_values(shortest - 1, longest)
        return [int(edge) for edge in edges]
    numbers = [0, *(digit * 10**power for power in range(17) for digit in (1, 2, 5))]
    first, last = bisect_left(numbers, shortest) - 1, bisect_left(numbers, longest)
    return [numbers[first], *numbers[max(first + 1, last - 6) : last + 1]]
