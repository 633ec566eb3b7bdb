"""A weighed step as a picture: the weight of a token against its sequence's length."""

from __future__ import annotations

import textwrap
from io import BytesIO
from typing import TYPE_CHECKING

from megatron_lossagg.cli.files import needed
from megatron_lossagg.errors import LossAggregationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from megatron_lossagg.weigh.compare import Weighed

_GREY = "#808890"
"""Of text and axes: readable on white and on black."""
_TITLE = 76
"""Characters of a line of the title."""
_DOTS = "#e69f00"
_LINES = {"token_mean": "#009e73", "sample_mean": "#56a0d8"}


def drawn(step: Weighed, kind: str, *, number: int) -> bytes:
    """Return the picture in a format such as ``svg``. Raises :class:`LossAggregationError`."""
    figure, picture = figure_of(step, number=number), BytesIO()
    try:
        figure.savefig(picture, format=kind, dpi=120, transparent=True)
    except Exception as error:  # of matplotlib, and of what some formats need
        raise LossAggregationError(
            f"--picture: no picture as {kind!r} ({error}): name a .svg or a .png file"
        ) from None
    return picture.getvalue()


def figure_of(step: Weighed, *, number: int) -> Figure:
    """Draw one dot per sequence, with the span of weights inside it, and a line per mode.

    The weight of a token is relative to ``token_mean``: times N.
    """
    figures = needed("matplotlib.figure", by="--picture", extra="plot")
    figure: Figure = figures.Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    n, b = step.tokens, len(step.sequences) + step.counted_empty
    lengths = [sequence.tokens for sequence in step.sequences]
    of_mean = [n * sequence.weight_sum / sequence.tokens for sequence in step.sequences]
    lowest = [n * sequence.weight_min for sequence in step.sequences]
    highest = [n * sequence.weight_max for sequence in step.sequences]
    axes.vlines(lengths, lowest, highest, color=_DOTS, alpha=0.6, linewidth=1.5)
    axes.scatter(lengths, of_mean, color=_DOTS, s=22, zorder=3, label="a sequence of this run")
    ends = [min(lengths, default=1), max(lengths, default=1)]
    span = [ends[0] * (ends[1] / ends[0]) ** (place / 50) for place in range(51)]
    of_sample_mean = [n / (max(b, 1) * length) for length in span]
    curves = {"token_mean": [1.0] * len(span), "sample_mean": of_sample_mean}
    for mode, weights in curves.items():
        axes.plot(span, weights, color=_LINES[mode], label=mode)
    axes.set(xscale="log", xlabel="trained tokens of the sequence", ylabel="weight of a token x N")
    if min(lowest, default=1) > 0:
        axes.set_yscale("log")
    tickers = needed("matplotlib.ticker", by="--picture", extra="plot")
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            axis.set_major_locator(tickers.LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")
    title = textwrap.fill(f"Step {number}: {step.verdict}", _TITLE)
    axes.set_title(title, loc="left", fontsize=10, color=_GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GREY)
    axes.tick_params(which="both", colors=_GREY)
    axes.xaxis.label.set_color(_GREY)
    axes.yaxis.label.set_color(_GREY)
    axes.legend(frameon=False, fontsize=9, labelcolor=_GREY)
    return figure
