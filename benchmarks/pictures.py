"""Pictures of one run's numbers; nothing is measured here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

STYLE = {"font.size": 12, "axes.spines.top": False, "axes.spines.right": False}
SIZE = {"figsize": (8, 4.4), "layout": "constrained"}
"""Text that is readable 800 pixels wide."""
BLACK, BLUE, GREEN, ORANGE, RED = "#000000", "#0072b2", "#009e73", "#e69f00", "#d55e00"
"""Okabe and Ito's, which colour-blind readers can tell apart."""


def ratios(results: dict[str, Any], path: Path) -> None:
    """Draw how far a whole microbatch of each workload is ahead of the loop over samples."""
    plt.rcParams.update(STYLE)
    figure, axis = plt.subplots(**SIZE)
    found = [workload["ahead of loop"] for workload in results["workloads"].values()]
    medians = [spread["median"] for spread in found]
    below = [spread["median"] - spread["low"] for spread in found]
    above = [spread["high"] - spread["median"] for spread in found]
    axis.bar(list(results["workloads"]), medians, color=BLUE, yerr=[below, above])
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set(yscale="log", ylabel="time of the loop / time of this package")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_title("Ahead of the loop over samples, except for few long sequences", loc="left")
    axis.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def scale(results: dict[str, Any], path: Path) -> None:
    """Draw bytes and CPU time of ``plan_step``, and of ``read`` and ``finish``, against ranks."""
    plt.rcParams.update(STYLE)
    figure, axes = plt.subplots(1, 2, **SIZE)
    bytes_axis, time_axis = axes
    of_one_rank = results["one rank"]

    def line(axis: Any, name: str, call: str, key: str, unit: float, color: str) -> None:
        ranks = [point["ranks"] for point in of_one_rank[name]]
        values = [point[call][key] / unit for point in of_one_rank[name]]
        axis.plot(ranks, values, "o-", color=color, markersize=5, label=f"{call}, {name}")

    for name, color in zip(of_one_rank, (BLACK, GREEN, BLUE), strict=True):
        line(bytes_axis, name, "plan_step", "bytes", 1e6, color)
        line(time_axis, name, "plan_step", "cpu", 1e-3, color)
    name = list(of_one_rank)[1]
    line(time_axis, name, "read", "cpu", 1e-3, ORANGE)
    line(time_axis, name, "finish", "cpu", 1e-3, RED)
    for axis in axes:
        axis.set(xscale="log", yscale="log", xlabel="data-parallel ranks")
        axis.set_xticks([2, 16, 128, 1024], ["2", "16", "128", "1,024"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.yaxis.set_major_formatter("{x:g}")
    bytes_axis.set_ylabel("MB received per rank")
    bytes_axis.set_title("Bytes grow with a step's sequences", loc="left")
    time_axis.set_ylabel("ms of CPU, network left out")
    time_axis.set_title("and so does CPU time", loc="left")
    handles, labels = time_axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize=10, ncols=2, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
