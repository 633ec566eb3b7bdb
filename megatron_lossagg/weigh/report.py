"""A weighed step in words, within 80 columns, and as an object for JSON."""

from __future__ import annotations

import math
import textwrap
from dataclasses import asdict
from typing import Any

from megatron_lossagg.weigh.compare import Weighed, WeighedSequence

_MOST = 3
_NUMBERS = (
    *("tokens", "num_empty", "weight_sum", "unknown", "outside", "missed", "unheard", "zeroed"),
    *("is_measured", "trains", "nearest", "factor"),
)
"""What the object for JSON has of a step as it is."""
_LEGEND = "  # has a weight, . has none, ! has one outside of the mask, 0 has none in it"
_READ = (
    "what gradients are multiplied by after the losses could not be measured, for no small "
    "parameter had a gradient of its own, and is what Megatron's or torch's own code does"
)

_ZEROED = (
    "calls of losses, {} on a rank, whose gradients were zeroed after they had trained, as of a "
    "step that is repeated; if the optimizer stepped in between, weigh one step"
)


def text(step: Weighed, *, number: int | None = None, advises: bool = True) -> str:
    """Return the report of a step; ``number``: its number in the run, if it is known.

    ``advises``: say which flags of ``lossagg weigh`` train a mode.
    """
    sizes = " ".join(f"{name} {size}" for name, size in step.sizes.items() if size > 1)
    name = "weighed step" if number is None else f"weighed step {number}"
    size = f"{step.tokens} tokens in {len(step.sequences)} sequences"
    size += f" and {step.num_empty} empty" if step.num_empty else ""
    is_read = not (step.is_measured or step.unknown) and step.weight_sum
    lines = [
        _wrapped(f"{name}: ", size + (f", {sizes}" if sizes else "")),
        f"sum of all weights: {step.weight_sum:.8g}",
        _wrapped("verdict: ", step.verdict),
        *[_wrapped("cause: ", cause) for cause in step.causes],
        *([_wrapped("read: ", _READ)] if is_read else []),
        *([_wrapped("left out: ", _ZEROED.format(step.zeroed))] if step.zeroed else []),
        "",
        "weight of a token, relative to  smallest   largest",
    ]
    for name, (low, high) in step.modes.items():
        lines.append(f"  {name:<28}{low:>10.4g} {high:>9.4g}")
    if step.inside > 1 + 1e-6:
        lines.append(f"  {'one sequence, token to token':<28}{1:>10.4g}{step.inside:>10.4g}")
    if step.lacks:
        needed = ", ".join(f"{name} ({what})" for name, what in step.lacks.items())
        lines.append(_wrapped("  not compared: ", needed))
    if step.shown:
        lines += ["", _wrapped("positions of ", step.shown), _LEGEND]
    relative = sorted(zip(step.relative, step.sequences, strict=True), key=lambda pair: pair[0])
    if relative and step.trains is None and step.factor is None:
        shown = relative if len(relative) <= 2 * _MOST else relative[:_MOST] + relative[-_MOST:]
        head, end = "sequence (rank/microbatch/number)", f"  tokens  relative to {step.nearest}"
        names = [_name(sequence)[: 79 - len(end)] for _, sequence in shown]
        width = max(32, *map(len, names))
        what = f"{len(shown)} of {len(relative)} sequences, those with the smallest and the largest"
        lines += ["", f"{what if len(shown) < len(relative) else 'all sequences, by'} mean weight"]
        lines.append(f"{head:<{width + 1}}{end}")
        for name, (ratio, sequence) in zip(names, shown, strict=True):
            lines.append(f"  {name:<{width}}{sequence.tokens:>7}{ratio:>10.4g}")
    if step.trains is None and advises:
        is_stock = step.nearest == "microbatch_token_mean" and not step.is_per_token
        flag = "--calculate-per-token-loss trains token_mean; " if is_stock else ""
        mode = "for a mode, run with --loss-aggregation MODE, and weigh it again"
        lines += ["", _wrapped("next: ", flag + mode)]
    return "\n".join(lines)


def _name(sequence: WeighedSequence) -> str:
    number = f"{sequence.dp_rank}/{sequence.microbatch}/{sequence.sequence}"
    return f"{number} {sequence.name}".strip()


def as_json(step: Weighed, *, number: int) -> dict[str, Any]:
    """Return an object whose ``sequences`` has one entry per sequence; None is not finite."""
    made = {
        "step": number,
        **{name: getattr(step, name) for name in _NUMBERS},
        "sizes": dict(step.sizes),
        "lacks": dict(step.lacks),
        "fits": [*step.fits],
        "causes": [*step.causes],
        "modes": {name: {"min": low, "max": high} for name, (low, high) in step.modes.items()},
        "sequences": [{"step": number, **asdict(sequence)} for sequence in step.sequences],
    }
    written: dict[str, Any] = finite(made)
    return written


def finite(value: Any) -> Any:
    """Replace numbers that JSON cannot represent by None, at any depth."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _wrapped(name: str, words: str) -> str:
    return textwrap.fill(name + words, 80, subsequent_indent=" " * len(name))
