"""Pictures of runs. A picture shows what a run wrote; nothing here trains."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

RIGHT, WRONG, GREY = "#1b7837", "#b2182b", "#888888"
BLUE, BAND = "#1f77b4", "#c8c8c8"


def read_metrics(path: Path, phase: str = "rl") -> list[dict[str, Any]]:
    """Read the lines of one phase."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["phase"] == phase]


def plot_training(metrics_files: Sequence[Path], path: Path) -> None:
    """Draw reward, greedy accuracy, and response length of right and wrong answers apart.

    ``metrics_files``: ``metrics.jsonl`` of each run; several runs are drawn as thin lines with
    their mean, and named by their folder. Step 0 is the end of the warm-up.
    """
    metrics = [read_metrics(file) for file in metrics_files]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    _mean_line(left, metrics, "reward", GREY, "reward of samples")
    for i, (file, lines) in enumerate(zip(metrics_files, metrics, strict=True)):
        seen = [(line["step"], line["accuracy"]) for line in lines if "accuracy" in line]
        after_warmup = [(0, line["accuracy"]) for line in read_metrics(file, "warmup")[-1:]]
        if len(metrics) > 1:
            left.annotate(
                file.parent.name.replace("seed", "seed "),
                seen[-1],
                xytext=(4, 5),
                textcoords="offset points",
                fontsize=8,
            )
        left.plot(
            *zip(*after_warmup, *seen, strict=True),
            "o-",
            color="black",
            linewidth=1,
            markersize=4,
            label="greedy accuracy, 200 held-out problems" if i == 0 else None,
        )
    left.set(xlabel="RL step", ylabel="share right", ylim=(0, 1.02), title="Reward")
    left.margins(x=0.12 if len(metrics) > 1 else 0.05)  # room for the seeds' names
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
    """Draw the gradient norm of the same replay at every layout: one line, one grey band.

    Each norm is divided by that of its mode's first layout, because modes differ in scale. The
    first mode is drawn as a line per layout, the second as a band from lowest to highest.
    """
    of_mode: dict[str, list[Any]] = {}
    for curve in curves:
        of_mode.setdefault(curve.mode, []).append(curve)
    (line_mode, line_curves), (band_mode, band_curves) = of_mode.items()
    first = f"{line_curves[0].layout}, M {line_curves[0].num_microbatches}"
    steps = range(1, len(line_curves[0].steps["grad_norm"]) + 1)

    figure, axes = plt.subplots(figsize=(12, 4.2), layout="constrained")
    by_step = list(zip(*map(_norms_over_first, repeat(band_curves[0]), band_curves), strict=True))
    low, high = [min(norms) for norms in by_step], [max(norms) for norms in by_step]
    axes.fill_between(
        steps,
        low,
        high,
        color=BAND,
        label=f"{band_mode}: from lowest to highest of {len(band_curves)} layouts",
    )
    for i, curve in enumerate(line_curves):
        axes.plot(
            steps,
            _norms_over_first(line_curves[0], curve),
            color=BLUE,
            linewidth=1.8,
            label=f"{line_mode}: {len(line_curves)} layouts, a line each" if i == 0 else None,
        )
    axes.set(xlabel="step", ylabel=f"grad norm over that at {first}")
    axes.set_title("One step's gradient norm at DP 2, CP 2 and PP 2 with 1, 2 and 4 microbatches")
    axes.set_xlim(1, len(steps))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left", fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _norms_over_first(first: Any, curve: Any) -> list[float]:
    return [
        norm / of_first
        for norm, of_first in zip(curve.steps["grad_norm"], first.steps["grad_norm"], strict=True)
    ]


def plot_gradient_share(
    shares: Mapping[str, Mapping[str, Mapping[str, float]]],
    tokens: Mapping[str, float],
    path: Path,
) -> None:
    """Draw how much of the gradient comes from responses of each length, by mode.

    ``shares``: of ``gradient_share.py``: ``norm`` and ``projection`` by mode and bucket.
    ``tokens``: each bucket's share of the active tokens.
    """
    figure, sequence = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    titles = {
        "norm": "Share of the gradient's size: |g_b| / sum of |g_b|",
        "projection": "Signed part of the step's gradient: <g_b, g> / <g, g>",
    }
    for axes, (kind, title) in zip(sequence, titles.items(), strict=True):
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
        names = [f"{bucket}\n{tokens[bucket]:.0%} of tokens" for bucket in buckets]
        axes.set_xticks(range(len(buckets)), names)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set(xlabel="response length, tokens", ylabel="share, mean over steps", title=title)
        axes.title.set_fontsize(10)
        axes.grid(alpha=0.3, axis="y")
    sequence[0].legend(fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)
