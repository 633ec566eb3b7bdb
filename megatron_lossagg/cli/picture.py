"""Draw the shares of the loss weight with matplotlib, for a file and for a page."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lossagg.cli.extras import needed
from megatron_lossagg.cli.html import page as html_page
from megatron_lossagg.cli.rollouts import RolloutsError
from megatron_lossagg.cli.shares import Shares
from megatron_lossagg.reduction.modes import MODES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["MODE_COLORS", "SIZE", "STYLE", "drawn", "figure_of", "page"]

MODE_COLORS = {
    "token_mean": "#0072b2",
    "sample_mean": "#e69f00",
    "prompt_mean": "#009e73",
    "constant": "#cc79a7",
    "sample_sum": "#56b4e9",
    "token_sum": "#d55e00",
    "length_power": "#b8a900",
    "microbatch_token_mean": "#888888",
}
"""One colour for each mode, the same in all pictures. They are Okabe and Ito's, which colour-blind
readers can tell apart, with a darker yellow.
"""
STYLE = {"font.size": 12, "axes.spines.top": False, "axes.spines.right": False}
SIZE = {"figsize": (8, 4.4), "layout": "constrained"}
"""Of the examples' and the benchmarks' pictures: text that is readable 800 pixels wide."""
_GREY, _INK, _SOFT = "#9aa3ab", "#1d2125", "#5b646d"
_BARS = 0.84
"""Part of a bucket's width that its bars take."""


def drawn(shares: Shares, path: Path) -> bytes:
    """Return the picture, in the format of the path's ending. Raises :class:`RolloutsError`."""
    figure = figure_of(shares)
    figure.suptitle(f"{shares.finding}\n", fontsize=13, x=0.01, ha="left", wrap=True)
    figure.axes[0].set_title(shares.summary, loc="left", fontsize=10, color=_SOFT)
    try:
        return _saved(figure, path.suffix[1:] or "png")
    except Exception as error:  # of matplotlib, and of what some formats need
        raise RolloutsError(f"--png {path} cannot be written ({error}): name a .png file") from None


def page(shares: Shares) -> str:
    """Write the page: the finding, the picture, the numbers, how to read them."""
    matplotlib = needed("matplotlib", by="--html", extra="plot")
    style = {"svg.fonttype": "none", "svg.hashsalt": "", "font.family": "sans-serif"}
    with matplotlib.rc_context(style):
        svg = _saved(figure_of(shares), "svg", metadata=dict.fromkeys(_SVG_METADATA)).decode()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor").replace(_SOFT, "var(--soft)")
    buckets = shares.buckets
    columns = ["share of", "w_s", *buckets["label"]]
    measured = [("responses", "responses", ""), ("tokens", f"{shares.unit}s", "")]
    symbols = {"B": "B", "P": "P", "L": "L", "C": "C", "a": f"{shares.exponent:g}"}
    of_modes = [(mode, mode, MODES[mode].weight.format(**symbols)) for mode in shares.modes]
    rows = [
        [name, weight, *(f"{share:.1%}" for share in buckets[column])]
        for column, name, weight in measured + of_modes
    ]
    return html_page(
        "shares.html", extra="plot", shares=shares, svg=svg, columns=columns, rows=rows
    )


_SVG_METADATA = ("Creator", "Date", "Format", "Type")
"""Left out: they are links."""


def _saved(figure: Figure, kind: str, **options: object) -> bytes:
    picture = BytesIO()
    figure.savefig(picture, format=kind, dpi=120, transparent=kind == "svg", **options)
    return picture.getvalue()


def figure_of(shares: Shares) -> Figure:
    """Draw the number of responses, and below it each mode's share of the loss weight."""
    figures = needed("matplotlib.figure", by="drawing", extra="plot")
    figure: Figure = figures.Figure(figsize=(8, 6.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.7))
    _histogram(above, shares)
    _weights(below, shares)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_SOFT)
        axes.tick_params(colors=_SOFT)
        axes.yaxis.label.set_color(_INK)
    return figure


def _histogram(axes: Axes, shares: Shares) -> None:
    numbers = shares.buckets["num"]
    bars = axes.bar(numbers.index, numbers, width=_BARS, color=_GREY)
    labels = [
        f"{bucket.responses:.1%} of responses\n{bucket.tokens:.1%} of {shares.unit}s"
        for bucket in shares.buckets.itertuples()
    ]
    size = min(9, 50 / len(numbers))
    axes.bar_label(bars, labels, fontsize=size, padding=3, color=_SOFT)
    axes.set_ylim(0, numbers.max() * 1.35)
    axes.set_ylabel("responses")
    axes.locator_params("y", nbins=5, integer=True)


def _weights(axes: Axes, shares: Shares) -> None:
    groups = shares.groups
    percent = 100 * shares.buckets[[group[0] for group in groups]]
    width = _BARS / len(groups)
    named = {"length_power": f"length_power, a = {shares.exponent:g}"}
    for g, group in enumerate(groups):
        left = -_BARS / 2 + (g + 0.5) * width
        bars = axes.bar(
            percent.index + left,
            percent[group[0]],
            width=0.94 * width,
            color=MODE_COLORS[group[0]],
            label=", ".join(named.get(mode, mode) for mode in group),
        )
        if percent.size <= 28:
            axes.bar_label(bars, fmt="%.0f", fontsize=9, padding=1, color=_SOFT)
    axes.set_xticks(percent.index, shares.buckets["label"])
    axes.set_xlabel(f"response length, active {shares.unit}s", color=_INK)
    axes.set_ylabel("share of the loss weight, %")
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=2,
        frameon=False,
        fontsize=10,
        labelcolor=_INK,
    )
