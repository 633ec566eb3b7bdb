"""Pictures of runs. A picture shows what a run wrote; nothing here trains."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

RIGHT, WRONG, GREY = "#1b7837", "#b2182b", "#888888"
COLORS = {"DP 2": "#1f77b4", "CP 2": "#ff7f0e", "PP 2": "#2ca02c"}
WIDTHS = {"DP 2": 5.0, "CP 2": 3.0, "PP 2": 1.2}
SMALLEST = 1e-8
"""Relative differences below it, 0 among them, are drawn here."""
STYLES = {1: "-", 2: "--", 4: ":"}


def read_metrics(path: Path, phase: str = "rl") -> list[dict[str, Any]]:
    """Read the lines of one phase."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["phase"] == phase]


def plot_training(metrics_files: Sequence[Path], path: Path) -> None:
    """Draw reward, greedy accuracy, and response length of right and wrong answers apart.

    ``metrics_files``: ``metrics.jsonl`` of each run; several runs are drawn as thin lines with
    their mean. Step 0 is the end of the warm-up.
    """
    metrics = [read_metrics(file) for file in metrics_files]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    _mean_line(left, metrics, "reward", GREY, "reward of samples")
    for i, (file, lines) in enumerate(zip(metrics_files, metrics, strict=True)):
        seen = [(line["step"], line["accuracy"]) for line in lines if "accuracy" in line]
        after_warmup = [(0, line["accuracy"]) for line in read_metrics(file, "warmup")[-1:]]
        left.plot(
            *zip(*after_warmup, *seen, strict=True),
            "o-",
            color="black",
            linewidth=1,
            markersize=4,
            label="greedy accuracy, 200 held-out problems" if i == 0 else None,
        )
    left.set(xlabel="RL step", ylabel="share right", ylim=(0, 1.02), title="Reward")
    _mean_line(right, metrics, "response_length_right", RIGHT, "right answers")
    _mean_line(right, metrics, "response_length_wrong", WRONG, "wrong answers")
    right.set(xlabel="RL step", ylabel="tokens", title="Mean response length")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _mean_line(
    axes: Any,
    metrics: Sequence[Sequence[Mapping[str, Any]]],
    name: str,
    color: str,
    label: str,
) -> None:
    by_step: dict[int, list[float]] = {}
    for lines in metrics:
        seen = [line for line in lines if line[name] is not None]
        for line in seen:
            by_step.setdefault(line["step"], []).append(line[name])
        if len(metrics) > 1:
            axes.plot(
                [line["step"] for line in seen],
                [line[name] for line in seen],
                color=color,
                linewidth=0.6,
                alpha=0.4,
            )
    steps = sorted(by_step)
    mean = [sum(by_step[step]) / len(by_step[step]) for step in steps]
    axes.plot(steps, mean, color=color, linewidth=1.8, label=label)


def plot_layouts(curves: Sequence[Any], path: Path) -> None:
    """Draw loss and gradient norm of the same replay at every layout, one row a mode.

    The third column is what the first two cannot show: each curve's relative difference from
    the first one's, of loss and gradient norm, whichever is larger.
    """
    modes = list(dict.fromkeys(curve.mode for curve in curves))
    figure, grid = plt.subplots(
        len(modes), 3, figsize=(15, 3.6 * len(modes)), layout="constrained", squeeze=False
    )
    for row, mode in zip(grid, modes, strict=True):
        of_mode = [curve for curve in curves if curve.mode == mode]
        for curve in of_mode:
            loss, norm = curve.steps["loss"], curve.steps["grad_norm"]
            difference = [
                max(SMALLEST, *(_relative(a, b) for a, b in zip(pair, first, strict=True)))
                for pair, first in zip(
                    zip(loss, norm, strict=True),
                    zip(of_mode[0].steps["loss"], of_mode[0].steps["grad_norm"], strict=True),
                    strict=True,
                )
            ]
            drawn = [(row[0], loss), (row[1], norm)]
            drawn += [(row[2], difference)] if curve is not of_mode[0] else []
            for axes, values in drawn:
                axes.plot(
                    range(1, len(values) + 1),
                    values,
                    STYLES[curve.num_microbatches],
                    color=COLORS[curve.layout],
                    # Thick below thin: curves that agree stay visible under each other.
                    linewidth=WIDTHS[curve.layout],
                    label=f"{curve.layout}, M {curve.num_microbatches}",
                )
        row[0].set(ylabel="loss", title=mode)
        row[1].set(ylabel="grad norm", title=mode)
        row[2].set(ylabel="relative difference", title="difference from DP 2, M 1")
        row[2].set(yscale="log", ylim=(SMALLEST / 2, 10))
        row[2].axhline(1e-5, color="black", linewidth=0.8)
        row[2].text(1, 1.4e-5, "1e-5", fontsize=8)
        for axes in row:
            axes.set(xlabel="step")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(alpha=0.3)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0


def plot_gradient_share(
    shares: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path
) -> None:
    """Draw how much of the gradient comes from responses of each length, by mode.

    ``shares``: of ``gradient_share.py``: ``norm`` and ``projection`` by mode and bucket.
    """
    figure, row = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    titles = {
        "norm": "Share of the gradient's size: |g_b| / sum of |g_b|",
        "projection": "Signed part of the step's gradient: <g_b, g> / <g, g>",
    }
    for axes, (kind, title) in zip(row, titles.items(), strict=True):
        modes = list(shares[kind])
        buckets = list(shares[kind][modes[0]])
        width = 0.8 / len(modes)
        for i, mode in enumerate(modes):
            axes.bar(
                [x + (i - (len(modes) - 1) / 2) * width for x in range(len(buckets))],
                [shares[kind][mode][bucket] for bucket in buckets],
                width,
                label=mode,
            )
        axes.set_xticks(range(len(buckets)), buckets)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set(xlabel="response length, tokens", title=title)
        axes.title.set_fontsize(10)
        axes.grid(alpha=0.3, axis="y")
    row[0].legend(fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)
