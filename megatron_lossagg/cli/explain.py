"""Explain what a mode means on sequences you can check by hand, before you train.

Prints the formula; the weight of every sequence; the loss to expect on the
dashboard, compared with that of the other modes; and, if you give a parallelism
(--dp, --cp, --microbatches or --loss-scaling), the factors between loss_func
and the gradient. Nothing is trained, and Megatron-Core is not needed. --lengths
has the active tokens of each sample: "," separates samples, "/" separates
prompts, 0 is a fully masked sample. They are assigned alternately to the
data-parallel ranks' microbatches. Of recorded rollouts: lossagg plot.
Exit status: 0, or 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Literal

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megatron_lossagg.cli.arguments import import_from_here
from megatron_lossagg.cli.explanation import (
    DEFAULT_LENGTHS,
    EXPONENT,
    Comparison,
    Explanation,
    Split,
    explain,
    read_lengths,
    with_own_flags,
)
from megatron_lossagg.cli.files import check_outputs, write_json
from megatron_lossagg.contract.scaling import K_FORMULA, LOSS_SCALINGS
from megatron_lossagg.errors import say
from megatron_lossagg.reduction.modes import ALIASES, MODES
from megatron_lossagg.verify.text import number_of

_NARROWEST, _WIDEST = 72, 100
"""Limits on the width of the text, in columns."""
_OF_A_SPLIT = ("dp", "cp", "microbatches", "loss_scaling")


class _PrintModes(argparse.Action):
    """Print every mode and every other system's name, and exit."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        for line in (*mode_lines(), "", *alias_lines()):
            indent = " " * len("".join(re.findall(r"^\S*\s*", line)))
            print(textwrap.fill(line, _width(), subsequent_indent=indent, break_on_hyphens=False))
        parser.exit()


def mode_lines() -> Iterator[str]:
    """Yield one line per mode, with its formula."""
    divisor = {"required": ", needs a divisor", "optional": ", may have a divisor", "none": ""}
    width = max(len(name) for name in MODES)
    of_formulas = max(len(mode.formula) for mode in MODES.values())
    for mode in MODES.values():
        meaning = f"{mode.meaning}{divisor[mode.divisor]}"
        yield f"{mode.name:<{width}}  w_s = {mode.formula:<{of_formulas}}  {meaning}"


def alias_lines() -> Iterator[str]:
    """Yield one line per name of another system, with the mode that it means."""
    width = max(len(name) for name in ALIASES)
    for name, alias in ALIASES.items():
        empty = "" if alias.count_empty else ", count_empty=False"
        note = f"  ({alias.note})" if alias.note else ""
        yield f"{name:<{width}}  {alias.mode}{empty}{note}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``lossagg explain``; a training run's spellings work as well."""
    parser.add_argument(
        "mode",
        nargs="?",
        default="",
        metavar="MODE",
        help="a mode, a paper's name, or a system:name",
    )
    parser.add_argument(
        "--weights-path",
        "--loss-aggregation-weights-path",
        metavar="PKG.MOD:NAME",
        dest="weights",
        help="a weights function of your own, in place of MODE",
    )
    parser.add_argument(
        "--list",
        action=_PrintModes,
        nargs=0,
        help="list every mode and every other system's name, and exit",
    )
    parser.add_argument(
        "--divisor",
        "--loss-aggregation-divisor",
        type=float,
        metavar="L",
        dest="divisor",
        help="L of constant (required), C of token_sum; also for the other modes compared with",
    )
    parser.add_argument(
        "--exponent",
        "--loss-aggregation-exponent",
        type=float,
        metavar="A",
        dest="exponent",
        help="a of length_power (required); also if other modes are compared with it (default "
        f"{EXPONENT})",
    )
    parser.add_argument(
        "--count-empty",
        "--loss-aggregation-count-empty",
        action=argparse.BooleanOptionalAction,
        dest="count_empty",
        help="whether a fully masked sample or prompt still counts toward B or P "
        "(default: it does; another system's name brings its own)",
    )
    parser.add_argument(
        "--lengths",
        default=DEFAULT_LENGTHS,
        metavar="N,N/N",
        help=f"active tokens of each sample (default {DEFAULT_LENGTHS}); 500- is one of a negative "
        "advantage, for the groups of balanced; 500x one that is left out of every count",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write it as JSON")
    _add_split(parser)


def _add_split(parser: argparse.ArgumentParser) -> None:
    sizes = Split()
    for name, text in (
        ("dp", "data-parallel size, without context parallelism"),
        ("cp", "context-parallel size"),
        ("microbatches", "M, microbatches of the step on each data-parallel rank"),
    ):
        parser.add_argument(
            f"--{name}", type=int, metavar="N", help=f"{text} (default {getattr(sizes, name)})"
        )
    parser.add_argument(
        "--loss-scaling",
        choices=LOSS_SCALINGS,
        help=f"per_token is Megatron's --calculate-per-token-loss (default {sizes.loss_scaling})",
    )


def run(args: argparse.Namespace) -> int:
    """Explain a mode and return 0. Raises :class:`LossAggregationError` for wrong usage."""
    check_outputs({"--json": args.json})
    import_from_here()  # a weights function
    given = {name: getattr(args, name) for name in _OF_A_SPLIT if getattr(args, name) is not None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        # Of ids that look like placeholders: here the prompts are those that were typed.
        warnings.filterwarnings("ignore", "all .* sequences of the step have one", RuntimeWarning)
        explanation = explain(
            args.mode,
            read_lengths(args.lengths),
            Split(**given),
            divisor=args.divisor,
            exponent=args.exponent,
            count_empty=args.count_empty,
            weights=args.weights,
        )
    for message in dict.fromkeys(str(warning.message) for warning in caught):
        say(with_own_flags(message))
    write_json(args.json, asdict(explanation), default=str)  # fractions
    chain = _chain(explanation) if given else ()
    _print([*_mode(explanation), *_weights(explanation), *_dashboard(explanation), *chain])
    return 0


def _width() -> int:
    return min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)


def _print(parts: Iterable[RenderableType]) -> None:
    """Print as wide as the terminal within limits, without trailing spaces; no Text is wrapped."""
    console = Console(width=_width(), highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, Text))
    lines = captured.get().rstrip().splitlines()
    print(*(line.rstrip() for line in lines), sep="\n")


def _heading(text: str) -> Text:
    """Return a heading."""
    return Text(text, style="bold")


def _text(text: str) -> Padding:
    """Return a paragraph."""
    return Padding(Text(text, overflow="fold"), (0, 0, 0, 2))


def _table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: int = 1,
    wrapped: int | None = None,
) -> Padding:
    """Return a table: ``left`` columns are aligned to the left; one may be ``wrapped``."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.show_header = any(columns)
    for index, column in enumerate(columns):
        side: Literal["left", "right"] = "left" if index < left else "right"
        table.add_column(column, justify=side, no_wrap=index != wrapped, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return Padding(table, (0, 0, 1, 2))


_SYMBOLS = {
    "w_s": "weight of every token of sequence s",
    "N": "active tokens of the step: {N}",
    "B": "samples of the step: {B}",
    "V": "samples with an active token: {V}",
    "P": "prompts of the step: {P}",
    "Q": "prompts with an active token: {Q}",
    "Z": "sum of n_b^(1-a) over samples, a = {a:g}: {Z:.6g}",
    "n_s": "active tokens of sequence s",
    "n_b": "active tokens of the sample that s belongs to",
    "n_p": "active tokens of the prompt that s belongs to",
    "n_c": "active tokens of the group (prompt and sign of the advantage) of s",
    "k_c": "samples of that group",
    "R_b": "sequences (rows) of the sample that s belongs to",
    "n_mb": "active tokens of the microbatch that s is in",
    "M": "microbatches on each data-parallel rank: {M}",
    "DP": "data-parallel ranks: {DP}",
}


def _mode(e: Explanation) -> Iterator[RenderableType]:
    mode, alias = MODES[e.mode], ALIASES.get(e.name)
    yield _heading(f"{e.mode}: w_s = {e.formula}")
    article = "The " if mode.meaning.startswith("mean") else ""
    meaning = article + mode.meaning
    yield _text(f"{meaning[0].upper()}{meaning[1:]}.")
    if alias is not None:
        joint = ", " if alias.note.startswith("if ") else ": "
        note = f"{joint}{alias.note}" if alias.note else ""
        whose = "another system's" if ":" in e.name else "the paper's"
        yield _text(f"{e.name} is {whose} name for it{note}.")
    yield _text("loss = sum over sequences s of w_s * (sum of the losses of its active tokens)")
    yield _text("")
    symbols = ["w_s", *re.findall(r"\b[A-Za-z]\w*", e.formula)]
    counts = {**e.counts, "M": e.split.microbatches, "DP": e.split.dp, "a": e.exponent}
    yield _table(
        ["", ""],
        [[s, _SYMBOLS[s].format(**counts)] for s in symbols if s in _SYMBOLS],
        left=2,
        wrapped=1,
    )
    if e.divisor is not None and mode.divisor == "none":
        yield _text(f"It takes no divisor: {e.divisor:g} is used for the other modes below.")
    if e.exponent is not None and not mode.has_exponent:
        yield _text(f"It takes no exponent: {e.exponent:g} is used for length_power below.")
    yield Text(f"  Train it with  {e.flags}")  # a flag that is cut off would be a different one


def _weights(e: Explanation) -> Iterator[RenderableType]:
    yield _heading("\nWEIGHTS")
    names = [*dict.fromkeys(["prompt", "n_s", *re.findall(r"[nkR]_\w+", e.formula)])]
    if "n_mb" in names:
        names[:1] = ["rank", "microbatch"]
    rows = [
        [
            str(number),
            *(f"{s[name]:.10g}" for name in names),
            f"{s['w_s']:.6g}",
            f"{s['w_s'] * s['n_s']:.6g}",
            f"{s['share']:.1%}",
        ]
        for number, s in enumerate(e.sequences)
    ]
    total = sum(s["w_s"] * s["n_s"] for s in e.sequences)
    rows.append(["sum", *[""] * (len(names) + 1), f"{total:.6g}", "100.0%"])
    yield _table(["sequence", *names, "w_s", "w_s n_s", "share"], rows, left=0)
    yield _text(
        "Here a sequence is a sample. n_s: its active tokens. share: w_s n_s over its sum. "
        "A training run reports the sum as lossagg/weight_expected."
    )


def _dashboard(e: Explanation) -> Iterator[RenderableType]:
    yield _heading("\nON THE DASHBOARD")
    yield _text("The loss of the same sequences under every mode, if each token's loss is 1.\n")
    yield _table(
        ["mode", "w_s", "loss", "ratio", "gradient"],
        map(_compared, e.comparisons),
        left=2,
        wrapped=1,
    )
    lacking = [c.mode for c in e.comparisons if c.loss is None]
    if lacking:
        yield _text(f"To compare with {', '.join(lacking)}, give --divisor.")
    if e.exponent is None:
        yield _text(f"length_power is compared at a = {EXPONENT}; --exponent changes it.")
    ranks = number_of(e.split.dp, "rank")
    yield _text(
        f"ratio: to the loss of {e.mode}. scaled: the same gradient, times the ratio. reweighted: "
        "a gradient of a different direction; the ratio of real losses then depends on them. For "
        f"microbatch_token_mean the sequences are assigned alternately to {ranks} x "
        f"{number_of(e.split.microbatches, 'microbatch')}; its values change with them."
    )
    side = [f"{c.mode} {c.side:.5g}" for c in e.comparisons if c.side and f"{c.side:.5g}" != "1"]
    yield _text(
        "An MoE or MTP loss weighs 1/loss times as much against the main loss as under token_mean: "
        f"{', '.join([*side, '1 under the others'])}. "
        "--loss-aggregation-side-losses follow makes it 1 everywhere."
    )
    yield _text(
        "A loss or grad_norm that jumps after a switch is expected: NovaSky-AI/SkyRL#1296 reported "
        "0.322, 0.065 and 0.001 for the same data. A clipping threshold does not carry over: if "
        "the gradient is scaled, multiply the threshold by the ratio; if it is reweighted, look at "
        "the new grad_norm first. More: docs/which-mode.md."
    )


def _compared(c: Comparison) -> list[str]:
    if c.loss is None or c.ratio is None:
        return [c.mode, c.w_s, "", "", c.gradient]
    return [c.mode, c.w_s, f"{c.loss:.5g}", f"{c.ratio:.5g}", c.gradient]


def _chain(e: Explanation) -> Iterator[RenderableType]:
    s, k = e.split, K_FORMULA[e.split.loss_scaling]
    yield _heading("\nFROM LOSS TO GRADIENT")
    yield _text(
        f"loss scaling {s.loss_scaling}, M = {number_of(s.microbatches, 'microbatch')}, "
        f"DP = {s.dp}, CP = {s.cp}, K = {k} = {e.k}"
    )
    yield _text("")
    so_far = accumulate((link.factor for link in e.chain), mul)
    yield _table(
        ["where", "what happens to a partial loss", "factor", "so far"],
        [[x.where, x.does, str(x.factor), str(p)] for x, p in zip(e.chain, so_far, strict=True)],
        left=2,
        wrapped=1,
    )
    tokens = "1"
    if s.loss_scaling == "per_token":
        some = " + ".join(map(str, e.num_tokens[:8])) + (" + ..." if e.num_tokens[8:] else "")
        tokens = (
            "the active tokens of the microbatch's sequences on CP rank 0, and 0 on other CP ranks "
            f"({some} = {sum(e.num_tokens)})"
        )
    yield _text(f"loss_func returns partial loss * {e.k}, and as num_tokens {tokens}.")
    if e.k == 1:
        yield _text("K is 1 here, so a loss_func that returns the bare partial loss is right too.")
    else:
        yield _text(
            f"A loss_func that returns the bare partial loss with the same num_tokens trains "
            f"1/{f'({k})' if ' ' in k else k} = 1/{e.k} of this loss, without an error."
        )
    yield _text(
        "K does not depend on the mode. The K that the start of a run measures is that of the "
        "probe's own small step, with an M and N of its own."
    )
