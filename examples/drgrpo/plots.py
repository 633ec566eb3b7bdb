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

RIGHT, WRONG, GREY = "#0072b2", "#d55e00", "#888888"
MODE_COLORS = {
    "token_mean": "#0072b2",
    "sample_mean": "#e69f00",
    "prompt_mean": "#009e73",
    "constant": "#cc79a7",
    "microbatch_token_mean": "#888888",
}
STYLE = {"font.size": 12, "axes.spines.top": False, "axes.spines.right": False}
SIZE = {"figsize": (8, 4.4), "layout": "constrained"}
"""Text that is readable 800 pixels wide."""


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
    plt.rcParams.update(STYLE)
    figure, (left, right) = plt.subplots(1, 2, **SIZE)
    _mean_line(left, metrics, "reward", GREY, "samples")
    for i, (file, lines) in enumerate(zip(metrics_files, metrics, strict=True)):
        seen = [(line["step"], line["accuracy"]) for line in lines if "accuracy" in line]
        after_warmup = [(0, line["accuracy"]) for line in read_metrics(file, "warmup")[-1:]]
        if len(metrics) > 1:
            left.annotate(
                file.parent.name.replace("seed", "seed "),
                seen[-1],
                xytext=(4, 5),
                textcoords="offset points",
                fontsize=10,
            )
        left.plot(
            *zip(*after_warmup, *seen, strict=True),
            "o-",
            color="black",
            linewidth=1,
            markersize=4,
            label="greedy accuracy" if i == 0 else None,
        )
    left.set(xlabel="RL step", ylabel="share of right answers", ylim=(0, 1.02))
    left.set_title("More answers become right", loc="left")
    left.margins(x=0.12 if len(metrics) > 1 else 0.05)  # room for the seeds' names
    _mean_line(right, metrics, "response_length_right", RIGHT, "right answers")
    _mean_line(right, metrics, "response_length_wrong", WRONG, "wrong answers")
    right.set(xlabel="RL step", ylabel="mean response length, tokens")
    right.set_title("Responses get longer", loc="left")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right", fontsize=11, frameon=False)
    figure.savefig(path, dpi=150)
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
    """Draw the gradient norm of the same replay at every layout: one line, one band.

    Each norm is divided by that of its mode's first layout, because modes differ in scale. The
    first mode is drawn as a line per layout, the second as a band from lowest to highest. Each
    run trains on, so that the band also has the drift of its weights.
    """
    of_mode: dict[str, list[Any]] = {}
    for curve in curves:
        of_mode.setdefault(curve.mode, []).append(curve)
    (line_mode, line_curves), (band_mode, band_curves) = of_mode.items()
    first = f"{line_curves[0].layout}, M {line_curves[0].num_microbatches}"
    steps = range(1, len(line_curves[0].steps["grad_norm"]) + 1)

    plt.rcParams.update(STYLE)
    figure, axes = plt.subplots(**SIZE)
    by_step = list(zip(*map(_norms_over_first, repeat(band_curves[0]), band_curves), strict=True))
    low, high = [min(norms) for norms in by_step], [max(norms) for norms in by_step]
    axes.fill_between(
        steps,
        low,
        high,
        color=MODE_COLORS[band_mode],
        alpha=0.45,
        label=f"{band_mode}: from lowest to highest",
    )
    for i, curve in enumerate(line_curves):
        axes.plot(
            steps,
            _norms_over_first(line_curves[0], curve),
            color=MODE_COLORS[line_mode],
            linewidth=2,
            label=f"{line_mode}: {len(line_curves)} lines" if i == 0 else None,
        )
    apart = max((top - bottom) / top for bottom, top in zip(low, high, strict=True))
    axes.set(xlabel="training step", ylabel=f"grad norm / at {first}")
    axes.set_title(
        f"Gradient norms of {len(line_curves)} runs on the same data, at DP 2, CP 2 and PP 2:\n"
        f"{line_mode} is one curve, a mean of microbatch means is up to {apart:.0%} apart",
        loc="left",
        fontsize=13,
    )
    axes.set_xlim(1, len(steps))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _norms_over_first(first: Any, curve: Any) -> list[float]:
    return [
        norm / of_first
        for norm, of_first in zip(curve.steps["grad_norm"], first.steps["grad_norm"], strict=True)
    ]


def plot_gradient_share(
    shares: Mapping[str, Mapping[str, float]],
    tokens: Mapping[str, float],
    path: Path,
) -> None:
    """Draw how much of the gradient comes from responses of each length, by mode.

    ``shares``: by mode and bucket. ``tokens``: each bucket's share of the active tokens.
    """
    plt.rcParams.update(STYLE)
    figure, axes = plt.subplots(**SIZE)
    buckets = list(tokens)
    width = 0.84 / len(shares)
    for i, (mode, by_bucket) in enumerate(shares.items()):
        bars = axes.bar(
            [x + (i - (len(shares) - 1) / 2) * width for x in range(len(buckets))],
            [100 * by_bucket[bucket] for bucket in buckets],
            0.94 * width,
            color=MODE_COLORS[mode],
            label=mode,
        )
        axes.bar_label(bars, fmt="%.0f", fontsize=10, padding=1)
    names = [f"{bucket} tokens\n{tokens[bucket]:.0%} of all tokens" for bucket in buckets]
    axes.set_xticks(range(len(buckets)), names)
    axes.set_ylabel("share of the gradient's norm, %")
    shortest = {mode: by_bucket[buckets[0]] for mode, by_bucket in shares.items()}
    axes.set_title(
        f"sample_mean takes {shortest['sample_mean']:.0%} of the gradient from the shortest "
        f"responses,\ntoken_mean {shortest['token_mean']:.0%}",
        loc="left",
        fontsize=13,
    )
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
