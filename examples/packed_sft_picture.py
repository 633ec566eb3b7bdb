"""The picture of ``packed_sft.py``: the gradient norm of each step at DP 2 and at CP 2."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def difference(line: dict[str, Any], name: str) -> float:
    """Return the relative difference of a step's gradient norms at DP 2 and CP 2."""
    norms = [line[parallelism][name]["grad_norm"] for parallelism in ("DP 2", "CP 2")]
    return (max(norms) - min(norms)) / min(norms)


def draw(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw each step's gradient norm, divided by that of the token mean by hand."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from megatron_lossagg.cli.picture import MODE_COLORS, SIZE, STYLE

    steps = range(1, len(lines) + 1)
    plt.rcParams.update(STYLE)
    figure, axes = plt.subplots(**SIZE)
    shown = [
        ("stock, default", MODE_COLORS["microbatch_token_mean"], "stock's default"),
        ("token_mean", MODE_COLORS["token_mean"], "this package, token_mean"),
    ]
    for name, color, label in shown:
        for parallelism, marker, filled in (("DP 2", "o", True), ("CP 2", "s", False)):
            axes.plot(
                steps,
                [
                    line[parallelism][name]["grad_norm"] / line["by hand"]["token_mean"]
                    for line in lines
                ],
                marker=marker,
                markersize=8 if filled else 11,
                markerfacecolor=color if filled else "none",
                markeredgewidth=1.8,
                linestyle="-",
                linewidth=1.2,
                color=color,
                label=f"{label}, {parallelism}",
            )
    apart = max(difference(line, "stock, default") for line in lines)
    axes.set_title(
        "Same data, same weights, same objective: the mean over tokens.\n"
        f"From DP 2 to CP 2 stock's gradient norm changes by a factor of up to {1 + apart:.1f}.",
        loc="left",
        fontsize=13,
    )
    axes.set(
        xlabel="step, each from the same weights",
        ylabel="gradient norm / that by hand",
        xticks=steps,
    )
    axes.grid(alpha=0.25, axis="y")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=150)
