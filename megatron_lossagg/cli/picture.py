"""The shares of the loss weight as a picture and as a page, which has the numbers too."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lossagg.cli.extras import needed
from megatron_lossagg.cli.rollouts import RolloutsError
from megatron_lossagg.cli.shares import Shares

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
