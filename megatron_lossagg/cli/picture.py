"""Draw the shares of the loss weight as a PNG, with matplotlib where it is installed."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lossagg.cli.rollouts import RolloutsError
from megatron_lossagg.cli.shares import Shares

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["COLORS", "drawn"]

COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#555555")
"""Okabe and Ito's, which colour-blind readers can tell apart; one for each mode at most."""
_GREY = "#9aa3ab"
_GROUP = 0.84
"""Part of a bucket's width that its bars take."""


def drawn(shares: Shares, path: Path) -> bytes:
    """Return the picture, in the format of the path's ending. Raises :class:`RolloutsError`."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RolloutsError(
            "a PNG needs matplotlib, which is not installed: pip install matplotlib, or give "
            "--html FILE, which needs nothing"
        ) from None
    figure = Figure(figsize=(9, 6.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.7))
    _histogram(above, shares)
    _weights(below, shares)
    figure.suptitle(f"{shares.finding}\n", fontsize=11, x=0.01, ha="left", wrap=True)
    picture = BytesIO()
    try:
        figure.savefig(picture, format=path.suffix[1:] or "png", dpi=120)
    except Exception as error:  # of matplotlib, and of what some formats need
        raise RolloutsError(f"--png {path} cannot be written ({error}): name a .png file") from None
    return picture.getvalue()


def _histogram(axes: Axes, shares: Shares) -> None:
    from matplotlib.ticker import MaxNLocator

    numbers = [bucket.num for bucket in shares.buckets]
    axes.bar(range(len(numbers)), numbers, width=_GROUP, color=_GREY)
    for k, bucket in enumerate(shares.buckets):
        axes.annotate(
            f"{bucket.responses:.1%} of responses\n{bucket.tokens:.1%} of {shares.unit}s",
            (k, bucket.num),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=min(8, 50 / len(numbers)),
        )
    axes.set_ylim(0, max(numbers) * 1.35)
    axes.set_ylabel("responses")
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_title(shares.summary, loc="left", fontsize=9, color="#444444")
    axes.spines[["top", "right"]].set_visible(False)


def _weights(axes: Axes, shares: Shares) -> None:
    groups = shares.groups
    width = _GROUP / len(groups)
    for g, group in enumerate(groups):
        left = -_GROUP / 2 + (g + 0.5) * width
        bars = axes.bar(
            [k + left for k in range(len(shares.buckets))],
            [100 * bucket.weight[group[0]] for bucket in shares.buckets],
            width=0.94 * width,
            color=COLORS[g],
            label=", ".join(group),
        )
        if len(groups) * len(shares.buckets) <= 28:
            axes.bar_label(bars, fmt="%.0f", fontsize=7, padding=1, color="#444444")
    axes.set_xticks(range(len(shares.buckets)), [bucket.label for bucket in shares.buckets])
    axes.set_xlabel(f"response length, active {shares.unit}s")
    axes.set_ylabel("share of the loss weight, %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=9)
