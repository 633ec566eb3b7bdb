"""The picture of ``packed_sft.py``: each step's gradient norm at CP 2, as a multiple of DP 2's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

GREY = "#7a7f87"
"""Readable on white and on black, as the next: the picture has no background of its own."""
SHOWN = {
    "stock, default": ("stock Megatron", "#d55e00"),
    "token_mean": ("with this package", "#2f8fd0"),
}
"""Label and colour of a run."""


TITLE = "same data, same weights: gradient norm at CP 2 / at DP 2"


def ratio(line: dict[str, Any], name: str) -> float:
    """Return a step's gradient norm at CP 2 over that at DP 2."""
    at = {parallelism: line[parallelism][name]["grad_norm"] for parallelism in ("DP 2", "CP 2")}
    return float(at["CP 2"] / at["DP 2"])


def apart(line: dict[str, Any], name: str) -> float:
    """Return by which factor the two differ, at least 1."""
    return max(ratio(line, name), 1 / ratio(line, name))


def draw(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw stock's default and this package; wide letters, for a telephone."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 15, "svg.hashsalt": "", "svg.fonttype": "path"})
    for name in ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"):
        plt.rcParams[name] = GREY
    figure, axes = plt.subplots(figsize=(7.5, 2.7), layout="constrained")
    steps = range(1, len(lines) + 1)
    for name, (label, color) in SHOWN.items():
        ratios = [ratio(line, name) for line in lines]
        axes.plot(steps, ratios, "o-", color=color, markersize=8, linewidth=2, label=label)
    axes.set_title(TITLE, loc="left", size=15)
    axes.set(xticks=steps, yscale="log", yticks=[0.5, 1, 2], yticklabels=["1/2", "1", "2"])
    axes.minorticks_off()
    axes.grid(alpha=0.3, axis="y")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        loc="outside lower center", ncols=2, frameon=False, labelcolor="linecolor", handlelength=1.2
    )
    # No date, so that the same numbers are the same file.
    date = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, dpi=150, transparent=True, metadata=date)
