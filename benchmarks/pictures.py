"""Pictures of one run's numbers; nothing is measured here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from benchmarks.report import AHEAD_OF_LOOP, CONTENDERS

COLORS = {
    "ours": "#1b7837",
    "floor": "#888888",
    "loop": "#b2182b",
    "padded": "#2166ac",
    "scaled": "#e08214",
}


def draw(results: dict[str, Any], folder: Path) -> None:
    """Draw cost against the number of rows, and ratios per workload."""
    folder.mkdir(parents=True, exist_ok=True)
    if results["curve"] is not None:
        _cost_by_rows(results["curve"], folder / "cost_by_rows.png")
    _ratios(results["workloads"], folder / "ratios.png")


def _cost_by_rows(curve: dict[str, Any], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, (title, points) in zip(axes, curve.items(), strict=True):
        rows = [point["rows"] for point in points]
        for name in ("loop", "ours", "floor"):
            axis.loglog(
                rows,
                [point[name] for point in points],
                "o-",
                color=COLORS[name],
                markersize=4,
                label=CONTENDERS[name],
            )
        axis.set(title=title, xlabel="rows of the microbatch, 256 tokens in the mean")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("CPU microseconds per microbatch")
    axes[0].legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _ratios(workloads: dict[str, Any], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(10, 4), layout="constrained")
    others = list(CONTENDERS)[1:]
    width = 0.8 / len(others)
    for i, other in enumerate(others):
        places = [x for x, v in enumerate(workloads.values()) if other in v["ahead"]]
        found = [v["ahead"][other] for v in workloads.values() if other in v["ahead"]]
        medians = [spread["median"] for spread in found]
        axis.bar(
            [x + (i - 1.5) * width for x in places],
            medians,
            width,
            color=COLORS[other],
            label=CONTENDERS[other],
            yerr=[
                [spread["median"] - spread["low"] for spread in found],
                [spread["high"] - spread["median"] for spread in found],
            ],
            error_kw={"linewidth": 0.8},
        )
    for x, name in enumerate(workloads):
        goal = AHEAD_OF_LOOP[name[0]]
        label = "goal against the loop" if x == 0 else None
        axis.hlines(goal, x - 0.4, x + 0.4, color="black", linestyle=":", label=label)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set(
        yscale="log",
        ylabel="time over this package's",
        title="A whole microbatch: above 1 this package is faster",
    )
    axis.set_xticks(range(len(workloads)), list(workloads))
    figure.legend(loc="outside lower center", fontsize=8, ncols=5)
    axis.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)
