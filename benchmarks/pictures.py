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


WORKLOAD_COLORS = ("#888888", "#1b7837", "#2166ac")


def scale(results: dict[str, Any], path: Path) -> None:
    """Draw bytes and CPU time of ``plan_step``, and of ``read`` and ``close``, against ranks."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    bytes_axis, time_axis = axes
    for (name, alone), color in zip(results["alone"].items(), WORKLOAD_COLORS, strict=True):
        threads = results["threads"][name]
        for axis, key, unit in ((bytes_axis, "bytes", 1e6), (time_axis, "cpu", 1e-3)):
            for points, marker, face in ((alone, "o--", "white"), (threads, "o-", color)):
                axis.plot(
                    [point["ranks"] for point in points],
                    [point["plan_step"][key] / unit for point in points],
                    marker,
                    color=color,
                    markerfacecolor=face,
                    markersize=5,
                    label=f"plan_step, {name}" if points is threads else None,
                )
    name = list(results["alone"])[1]
    for call, color in (("read", "#e08214"), ("close", "#b2182b")):
        for side, marker, face in (("alone", "o--", "white"), ("threads", "o-", color)):
            points = results[side][name]
            time_axis.plot(
                [point["ranks"] for point in points],
                [point[call]["cpu"] * 1e3 for point in points],
                marker,
                color=color,
                markerfacecolor=face,
                markersize=5,
                label=f"{call}{', once per run' if call == 'read' else ''}"
                if side == "threads"
                else None,
            )
    for axis in axes:
        axis.set(xscale="log", yscale="log", xlabel="data-parallel ranks")
        axis.set_xticks([2, 16, 256, 1024, 16384], ["2", "16", "256", "1,024", "16,384"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    bytes_axis.set(ylabel="MB received per rank", title="Bytes of a step's all-gathers")
    time_axis.set(ylabel="CPU ms on one rank", title="Host time, waiting and network left out")
    handles, labels = time_axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize=8, ncols=3)
    figure.suptitle(
        "Filled: every rank a thread that exchanges. Open: one rank of a fake group.", fontsize=9
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
