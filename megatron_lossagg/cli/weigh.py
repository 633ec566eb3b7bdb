"""Measure which weight each token is trained with, in an unmodified script.

Under torchrun, in a Megatron-LM checkout: the options of this command stand
before the script, and the script's own after it, as with `lossagg run`. The
script trains bit for bit as without this command; the weights of the first
step are printed on rank 0, and training goes on. Exit status: the script's;
1 with --expect if the last weighed step trains something else, and if a
report could not be written. With --framework instead of a script: a
framework's own step on a drawn batch, without GPUs.
"""

from __future__ import annotations

import argparse
import os
import textwrap
from difflib import get_close_matches
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_lossagg.cli import run as run_command
from megatron_lossagg.cli import weigh_framework
from megatron_lossagg.cli.arguments import given
from megatron_lossagg.cli.files import check_outputs, needed, write_json, write_whole
from megatron_lossagg.errors import ContractError, LossAggregationError, say
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.modes import MODES, unknown_name
from megatron_lossagg.weigh.compare import COMPARED, NEEDS, Weighed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_GREY = "#808890"
"""Of text and axes: readable on white and on black."""
_TITLE = 76
"""Characters of a line of the title."""
_DOTS = "#e69f00"
_LINES = {"token_mean": "#009e73", "sample_mean": "#56a0d8"}


def drawn(step: Weighed, kind: str, *, number: int) -> bytes:
    """Return the picture in a format such as ``svg``. Raises :class:`LossAggregationError`."""
    figure, picture = figure_of(step, number=number), BytesIO()
    try:
        figure.savefig(picture, format=kind, dpi=120, transparent=True)
    except Exception as error:  # of matplotlib, and of what some formats need
        raise LossAggregationError(
            f"--picture: no picture as {kind!r} ({error}): name a .svg or a .png file"
        ) from None
    return picture.getvalue()


def figure_of(step: Weighed, *, number: int) -> Figure:
    """Draw one dot per sequence, with the span of weights inside it, and a line per mode.

    The weight of a token is relative to ``token_mean``: times N.
    """
    figures = needed("matplotlib.figure", by="--picture", extra="plot")
    figure: Figure = figures.Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    n, b = step.tokens, len(step.sequences) + step.counted_empty
    lengths = [sequence.tokens for sequence in step.sequences]
    of_mean = [n * sequence.weight_sum / sequence.tokens for sequence in step.sequences]
    lowest = [n * sequence.weight_min for sequence in step.sequences]
    highest = [n * sequence.weight_max for sequence in step.sequences]
    axes.vlines(lengths, lowest, highest, color=_DOTS, alpha=0.6, linewidth=1.5)
    axes.scatter(lengths, of_mean, color=_DOTS, s=22, zorder=3, label="a sequence of this run")
    ends = [min(lengths, default=1), max(lengths, default=1)]
    span = [ends[0] * (ends[1] / ends[0]) ** (place / 50) for place in range(51)]
    of_sample_mean = [n / (max(b, 1) * length) for length in span]
    curves = {"token_mean": [1.0] * len(span), "sample_mean": of_sample_mean}
    for mode, weights in curves.items():
        axes.plot(span, weights, color=_LINES[mode], label=mode)
    axes.set(xscale="log", xlabel="trained tokens of the sequence", ylabel="weight of a token x N")
    if min(lowest, default=1) > 0:
        axes.set_yscale("log")
    tickers = needed("matplotlib.ticker", by="--picture", extra="plot")
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            axis.set_major_locator(tickers.LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")
    title = textwrap.fill(f"Step {number}: {step.verdict}", _TITLE)
    axes.set_title(title, loc="left", fontsize=10, color=_GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GREY)
    axes.tick_params(which="both", colors=_GREY)
    axes.xaxis.label.set_color(_GREY)
    axes.yaxis.label.set_color(_GREY)
    axes.legend(frameon=False, fontsize=9, labelcolor=_GREY)
    return figure


_OWN = ("--at", "--picture", "--expect", "--divisor", "--trust")
"""Options of this command that no script of Megatron-LM's has, nor one like them."""
_COMMON = ("--steps", "--stop", "--json")
"""Others, which a script may have too."""
_PICTURES = (".svg", ".png", ".pdf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lossagg weigh``, and those of ``lossagg run``."""
    options = parser.add_argument_group("weighing", "these stand before the script")
    options.add_argument("--at", type=int, default=1, metavar="STEP", help="first step to weigh")
    options.add_argument("--steps", type=int, default=1, metavar="N", help="how many to weigh")
    options.add_argument(
        "--stop",
        action="store_true",
        help="end the run when they are weighed, before what lossagg run checks at a step's end",
    )
    options.add_argument("--json", type=Path, metavar="FILE", help="write the weighed steps")
    options.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw the last weighed step (.svg, .png)"
    )
    options.add_argument(
        "--expect",
        type=_compared,
        metavar="MODE",
        help="exit with 1 unless this, or one of several with commas, is trained",
    )
    options.add_argument("--divisor", type=float, metavar="L", help="L of constant to compare with")
    options.add_argument(
        "--trust", action="store_true", help="with --expect: also where f could not be measured"
    )
    weigh_framework.add_arguments(parser)
    run_command.add_arguments(parser)


def _compared(names: str) -> tuple[str, ...]:
    """Return the names of modes that weights show, separated by commas."""
    found = tuple(names.split(","))
    modes = f"expected some that weights show: {', '.join([*COMPARED, *NEEDS])}"
    for name in found:
        if name not in {*COMPARED, *NEEDS}:
            known = f"got {name!r}" if name in MODES else unknown_name("mode", name)
            raise argparse.ArgumentTypeError(f"{known}; {modes}")
    return found


def run(args: argparse.Namespace) -> int:
    """Run the script and weigh its steps; return the exit status."""
    if args.framework is not None:
        return weigh_framework.run(args, given(args, add_arguments))
    if args.at < 1 or args.steps < 1:
        raise LossAggregationError(
            f"got --at {args.at} --steps {args.steps}, expected a step from 1 on, and at least one"
        )
    if args.divisor is not None:
        Aggregation("constant", divisor=args.divisor)  # which checks it
    if os.environ.get("RANK", "0") == "0":  # which writes them
        check_outputs({"--json": args.json, "--picture": args.picture})
    if args.picture is not None:  # refused before a model is built
        needed("matplotlib.figure", by="--picture", extra="plot")
        if args.picture.suffix not in _PICTURES:
            raise LossAggregationError(
                f"got --picture {args.picture}, expected a file that ends in one of {_PICTURES}"
            )
    _check_place(args)
    weighing: list[Any] = []
    unwritten: list[str] = []

    def install() -> None:
        from megatron_lossagg.integrations import weigh_script

        weighing.append(
            weigh_script.install(
                args.at,
                args.steps,
                stop=args.stop,
                report=_printed(args, unwritten),
                divisor=args.divisor,
            )
        )

    status = run_command.run(args, before=install)
    steps: list[Weighed] = weighing[0].weighed if weighing else []
    if status or not weighing:
        return status
    if not steps:
        if weighing[0].num_steps:
            raise ContractError(
                f"the script ended after {weighing[0].num_steps} steps, before step {args.at}: "
                "nothing was weighed"
            )
        raise ContractError(
            "the script ended without a training step of megatron.training: nothing was weighed"
        )
    if not args.stop and os.environ.get("RANK", "0") == "0":  # which ends right below its report
        _print_again(steps[-1], args, args.at + len(steps) - 1)
    if args.expect is not None and (unmet := _unmet(steps[-1], args)):
        if os.environ.get("RANK", "0") == "0":
            say(f"expected {' or '.join(args.expect)}, and {unmet}")
        return 1
    return int(bool(unwritten))


def _check_place(args: argparse.Namespace) -> None:
    """Refuse an option of this command after the script, which would not know it."""
    for option in args.arguments:
        name = option.partition("=")[0]
        found = get_close_matches(name, _OWN, n=1, cutoff=0.8) if name.startswith("--") else []
        if name in _COMMON and not _is_of_script(name, Path(args.script)):
            found = [name]
        if found:
            raise LossAggregationError(
                f"got {name} after {args.script}, expected the options of lossagg weigh before it: "
                f"lossagg weigh {found[0]} ... {args.script}"
            )


def _is_of_script(option: str, script: Path) -> bool:
    """Whether a script, a file beside it or ``megatron/training`` mentions an option."""
    folders = (script.parent, script.parent / "megatron" / "training")
    files = (file for folder in folders for file in folder.glob("*.py"))
    texts = (file.read_text(errors="replace") for file in files)
    return any(f"{option}{quote}" in text for text in texts for quote in "\"'")


def _print_again(step: Weighed, args: argparse.Namespace, number: int) -> None:
    """Print the last report once more, below what training has printed, and the files."""
    from megatron_lossagg.weigh.report import text

    print(text(step, number=number))
    for file in (args.json, args.picture):
        if file is not None and file.exists():
            print(f"written: {file}")


def _unmet(step: Weighed, args: argparse.Namespace) -> str:
    """Say why a step does not train what is expected, or nothing."""
    fitting = [mode for mode in args.expect if step.fits_mode(mode)]
    if not fitting and {*args.expect} <= {*step.lacks}:
        needed = ", ".join(f"{name} needs {step.lacks[name]}" for name in args.expect)
        return f"this run tells nothing of it: {needed}, as by --divisor or --loss-aggregation"
    if not fitting:
        return f"the verdict is: {step.verdict}"
    accepts_either = 1 < len(args.expect) == len(fitting)  # full packs never differ
    others = [mode for mode in step.alike(fitting[0]) if mode not in args.expect]
    if others and not accepts_either:
        return (
            f"this step does not tell {fitting[0]} from {' and '.join(others)}: weigh a later one "
            "(--at), or expect these too"
        )
    if not step.is_measured and not args.trust:
        return "what gradients are multiplied by was not measured: pass --trust to take it as read"
    return ""


def _printed(args: argparse.Namespace, unwritten: list[str]) -> Any:
    """Return what prints a weighed step on rank 0, and writes what was asked for.

    What cannot be written is said, and added to ``unwritten``: training goes on, as on other ranks.
    """
    objects: list[dict[str, Any]] = []

    def report(step: Weighed, number: int, term: str) -> None:
        del term  # a script has one
        from megatron_lossagg.weigh.report import text

        print(text(step, number=number), flush=True)
        try:
            write(step, number)
        except LossAggregationError as error:
            unwritten.append(str(error))
            say(unwritten[-1])

    def write(step: Weighed, number: int) -> None:
        from megatron_lossagg.weigh.report import as_json

        if args.json is not None:
            objects.append(as_json(step, number=number))
            merged = {
                "steps": [{k: v for k, v in one.items() if k != "sequences"} for one in objects],
                "sequences": [entry for one in objects for entry in one["sequences"]],
                "modes": objects[-1]["modes"],
            }
            write_json(args.json, merged)
        if args.picture is not None:
            kind = args.picture.suffix[1:]
            write_whole("--picture", args.picture, drawn(step, kind, number=number))

    return report
