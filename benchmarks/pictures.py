"""Pictures of one run's numbers; nothing is measured here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

WORKLOAD_COLORS = ("#888888", "#1b7837", "#2166ac")


def ratios(results: dict[str, Any], path: Path) -> None:
    """Draw how far a whole microbatch of each workload is ahead of the loop over samples."""
    figure, axis = plt.subplots(figsize=(10, 4), layout="constrained")
    found = [workload["ahead of loop"] for workload in results["workloads"].values()]
    medians = [spread["median"] for spread in found]
    below = [spread["median"] - spread["low"] for spread in found]
    above = [spread["high"] - spread["median"] for spread in found]
    axis.bar(list(results["workloads"]), medians, color="#1b7837", yerr=[below, above])
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set(
        yscale="log",
        ylabel="time of the loop over samples / this package's",
        title="A whole microbatch on the CPU: above 1 this package is faster",
    )
    axis.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def scale(results: dict[str, Any], path: Path) -> None:
    """Draw bytes and CPU time of ``plan_step``, and of ``read`` and ``finish``, against ranks."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    bytes_axis, time_axis = axes
    of_one_rank = results["one rank"]

    def line(axis: Any, name: str, call: str, key: str, unit: float, color: str) -> None:
        ranks = [point["ranks"] for point in of_one_rank[name]]
        values = [point[call][key] / unit for point in of_one_rank[name]]
        axis.plot(ranks, values, "o-", color=color, markersize=5, label=f"{call}, {name}")

    for name, color in zip(of_one_rank, WORKLOAD_COLORS, strict=True):
        line(bytes_axis, name, "plan_step", "bytes", 1e6, color)
        line(time_axis, name, "plan_step", "cpu", 1e-3, color)
    name = list(of_one_rank)[1]
    line(time_axis, name, "read", "cpu", 1e-3, "#e08214")
    line(time_axis, name, "finish", "cpu", 1e-3, "#b2182b")
    for axis in axes:
        axis.set(xscale="log", yscale="log", xlabel="data-parallel ranks")
        axis.set_xticks([2, 16, 256, 1024], ["2", "16", "256", "1,024"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    bytes_axis.set(ylabel="MB received per rank", title="Bytes of a step's all-gathers")
    time_axis.set(ylabel="CPU ms on one rank", title="CPU time, waiting and network left out")
    handles, labels = time_axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize=8, ncols=3)
    figure.savefig(path, dpi=130)
    plt.close(figure)
