"""Draw which responses the loss comes from, under every mode.

Reads recorded rollouts and draws the share of the loss weight by response
length, with the histogram of the lengths and each bucket's share of the
tokens. A FILE is JSON lines such as {"prompt_id": 7, "response_length": 512},
with "mask" (0 or 1 per token) in place of the length if tokens are masked,
and "step" if there are several steps; or a .pt file of slime's or miles'
--save-debug-rollout-data; or what verl's rollout_data_dir and TRL's
log_completions write, or SFT's messages, which have texts and no lengths and
need --tokenizer or --characters. --column says how a column is called if its
name is a different one. Several files are several steps. Shares count the
loss mask: no record holds token weights.
Exit status: 0, or 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_lossagg.cli.explanation import EXPONENT, Split, aggregation_of, plan_of
from megatron_lossagg.cli.files import OutputError, check_outputs, needed, printable, write_whole
from megatron_lossagg.cli.rollouts import (
    Rollouts,
    RolloutsError,
    add_reading_arguments,
    read_rollouts,
)
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.text import number_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure
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
    """Compute the shares; ``exponent``: of ``length_power``.

    The weight of a sequence is w_s n_s, from the step's plan. Its share is taken within its step,
    and a share of several steps is their mean, so that every step counts alike. A share depends
    neither on a divisor nor on ``count_empty``: within a step they multiply every weight by one
    number. That of ``microbatch_token_mean`` depends on the microbatches, which no file has.
    """
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


_COLORS = ("#0072b2", "#e69f00", "#b8a900", "#009e73")
"""Okabe and Ito's, which colour-blind readers can tell apart, with a darker yellow."""
_BARS = 0.84
"""Part of a bucket's width that its bars take."""
_POINTS = 490
"""Width of all buckets."""
_OF_A_DIGIT, _OF_A_LETTER = 0.64, 0.57
"""Width in points at a font size of 1; of letters, that of a usual one."""


def drawn(shares: Shares, kind: str) -> bytes:
    """Return the picture in a format such as ``png``. Raises :class:`RolloutsError`."""
    figure, picture = figure_of(shares), BytesIO()
    try:
        figure.savefig(picture, format=kind, dpi=120)
    except Exception as error:  # of matplotlib, and of what some formats need
        raise RolloutsError(f"--png: no picture as {kind!r} ({error}): name a .png file") from None
    return picture.getvalue()


def page(shares: Shares) -> str:
    """Write the page: the picture, the numbers, how to read them. It loads and runs nothing."""
    jinja2 = needed("jinja2", by="--html", extra="plot")
    svg = drawn(shares, "svg").decode()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(Path(__file__).with_name("shares.html").read_text("utf-8"))
    return str(template.render(shares=shares, svg=svg[svg.index("<svg") :]))


def figure_of(shares: Shares) -> Figure:
    """Draw the number of responses, and below it each mode's share of the loss weight."""
    figures = needed("matplotlib.figure", by="drawing", extra="plot")
    figure: Figure = figures.Figure(figsize=(8, 6.4), layout="constrained")
    figure.suptitle(f"{shares.finding}\n", fontsize=13, x=0.01, ha="left", wrap=True)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.7))
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    buckets = shares.buckets
    places = range(len(buckets))
    above.set_title(shares.summary, loc="left", fontsize=10)
    above.set_ylabel("responses")
    above.margins(y=0.35)
    of_all = [
        "\n".join(f"{share:.1%} of {name}" for name, share in of_bucket.items()) if num else ""
        for num, (_, of_bucket) in zip(shares.num, buckets.iloc[:, :2].iterrows(), strict=True)
    ]
    bars = above.bar(places, shares.num, width=_BARS, color="#9aa3ab")
    above.bar_label(bars, of_all, fontsize=_font_size(9, of_all, len(buckets)), padding=3)
    modes = 100 * buckets.iloc[:, 2:]
    width = _BARS / len(modes.columns)
    for number, (name, percent) in enumerate(modes.items()):
        bars = below.bar(
            [place - _BARS / 2 + (number + 0.5) * width for place in places],
            percent,
            width=0.94 * width,
            color=_COLORS[number],
            label=name,
        )
        size = _font_size(8, ["100"], len(buckets) * len(modes.columns) / _BARS)
        below.bar_label(bars, fmt="%.0f", fontsize=size, padding=1)
    end = "-\n" if max(map(len, buckets.index)) > 11 else "-"
    lengths = [length.replace("-", end) for length in buckets.index]
    below.set_xticks(places, lengths, fontsize=_font_size(10, lengths, len(buckets)))
    below.set_xlabel(f"response length, active {shares.unit}s")
    below.set_ylabel("share of the loss weight, %")
    below.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=10)
    return figure


def _font_size(most: float, texts: Sequence[str], num: float) -> float:
    """Return the size, ``most`` at most, at which so many texts fit next to each other."""
    longest = max((line for text in texts for line in text.split("\n")), key=len)
    width = _OF_A_LETTER if any(map(str.isalpha, longest)) else _OF_A_DIGIT
    return min(most, _POINTS / num / (width * (len(longest) + 0.5)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``lossagg plot``."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="recorded rollouts")
    parser.add_argument(
        "--png",
        type=Path,
        metavar="FILE",
        help="write the picture here (default: the first file's name with .png, in the current "
        "folder, unless --html is given or it exists)",
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write one page with the picture, the numbers, and how to read them",
    )
    parser.add_argument(
        "--exponent",
        type=float,
        default=EXPONENT,
        metavar="A",
        help=f"for length_power: its exponent (default {EXPONENT})",
    )
    add_reading_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Draw, and return 0. Raises :class:`LossAggregationError` for wrong usage."""
    png = args.png
    if png is None and args.html is None:
        png = Path(f"{args.files[0].stem}.png")
        if os.path.lexists(png):
            raise OutputError(
                f"got {png}, which exists, and no --png: give --png {png} to replace it, or "
                "another name"
            )
    check_outputs({"--png": png, "--html": args.html}, inputs=[*args.files, args.tokenizer])
    shares = shares_of(read_rollouts(args.files, args), args.exponent)
    print(f"{shares.summary}.", shares.finding, *shares.notes, sep="\n")
    if png is not None:
        write_whole("--png", png, drawn(shares, png.suffix[1:] or "png"))
        print(printable(str(png)))
    if args.html is not None:
        write_whole("--html", args.html, page(shares))
        print(printable(str(args.html)))
    return 0
