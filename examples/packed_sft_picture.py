"""The picture of ``packed_sft.py``: each step's gradient norm at CP 2, as a multiple of DP 2's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

GREY, ORANGE, BLUE = "#717680", "#c35400", "#1d78bb"
"""At least 4.5:1 on white. The picture has no background of its own."""
IN_THE_DARK = {GREY: "#858b95", ORANGE: "#dd6a10", BLUE: "#2f8fd0"}
"""The same on a dark page, if the picture is an SVG."""
SHOWN = {"stock, default": ("stock Megatron", ORANGE), "token_mean": ("with this package", BLUE)}
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
    figure, axes = plt.subplots(figsize=(7.5, 3.0), layout="constrained")
    steps = range(1, len(lines) + 1)
    for name, (label, color) in SHOWN.items():
        ratios = [ratio(line, name) for line in lines]
        axes.plot(steps, ratios, "o-", color=color, markersize=8, linewidth=2, label=label)
    axes.set_title(TITLE, loc="left", size=15)
    axes.set_xlabel("training step", size=15, labelpad=2)
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
    if path.suffix == ".svg":
        path.write_text(with_dark_colors(path.read_text()))


def with_dark_colors(svg: str) -> str:
    """Let the reader's browser take the second colours if it is set to dark."""
    rules = "".join(
        f'[style*="{what}: {light}"] {{{what}: {dark} !important}}\n'
        for light, dark in IN_THE_DARK.items()
        for what in ("fill", "stroke")
    )
    dark = f"@media (prefers-color-scheme: dark) {{\n{rules}}}\n"
    return svg.replace("</style>", f"\n{dark}</style>", 1)
