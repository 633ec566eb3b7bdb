"""Explain what a mode means on sequences you can check by hand, before you train.

Prints the formula; the weight of every sequence; the loss to expect on the
dashboard, compared with that of the other modes; and, if you give a parallelism
(--dp, --cp, --microbatches or --loss-scaling), the factors between loss_func
and the gradient. Nothing is trained, and Megatron-Core is not needed. --lengths
has the active tokens of each sample: "," separates samples, "/" separates
prompts, 0 is a fully masked sample. --lengths-file reads recorded ones instead.
Sequences are assigned in turn to the data-parallel ranks' microbatches.
Exit status: 0, or 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from fractions import Fraction
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megatron_lossagg.aggregation import ALIASES, MODES, alias_lines, mode_lines
from megatron_lossagg.cli.explanation import (
    DEFAULT_LENGTHS,
    Comparison,
    ExplainError,
    Explanation,
    Split,
    explain,
    read_lengths,
)
from megatron_lossagg.cli.rollouts import add_reading_arguments, read_rollouts
from megatron_lossagg.cli.shares import Shares, add_bucket_argument, read_buckets
from megatron_lossagg.files import check_outputs, write_whole
from megatron_lossagg.scaling import K_FORMULA, LOSS_SCALINGS
from megatron_lossagg.text import number_of

__all__ = ["add_arguments", "run"]

_NARROWEST, _WIDEST = 72, 100
"""Limits on the width of the text, in columns."""
_OF_A_FILE = ("tokenizer", "characters", "trust_pickle", "buckets")
"""Options that only --lengths-file has a use for."""
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``lossagg explain``; a training run's spellings work as well."""
    parser.add_argument("mode", metavar="MODE", help="a mode, or another system's system:name")
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
        "--count-empty",
        "--loss-aggregation-count-empty",
        action=argparse.BooleanOptionalAction,
        dest="count_empty",
        help="whether a fully masked sample or prompt still counts toward B or P "
        "(default: it does; another system's name brings its own)",
    )
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument(
        "--lengths",
        default=DEFAULT_LENGTHS,
        metavar="N,N/N",
        help=f"active tokens of each sample (default {DEFAULT_LENGTHS})",
    )
    lengths.add_argument(
        "--lengths-file",
        type=Path,
        metavar="FILE",
        help="recorded rollouts, as lossagg plot reads them, in place of --lengths",
    )
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write it as JSON")
    add_bucket_argument(add_reading_arguments(parser))


def run(args: argparse.Namespace) -> int:
    """Explain a mode and return 0. Raises :class:`LossAggregationError` for wrong usage."""
    check_outputs({"--json": args.json}, inputs=[args.lengths_file, args.tokenizer])
    given = {name: getattr(args, name) for name in _OF_A_SPLIT if getattr(args, name) is not None}
    split = Split(**given)
    if args.lengths_file is None:
        _refuse_options_of_a_file(args)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        explanation = explain(
            args.mode,
            read_lengths(args.lengths)
            if args.lengths_file is None
            else read_rollouts([args.lengths_file], args),
            split,
            divisor=args.divisor,
            count_empty=args.count_empty,
            highs=read_buckets(args.buckets),
        )
    for message in dict.fromkeys(str(warning.message) for warning in caught):
        print(f"lossagg: {message}", file=sys.stderr)
    if args.json is not None:
        text = json.dumps(asdict(explanation), indent=1, allow_nan=False, default=_in_json)
        write_whole("--json", args.json, text + "\n")
    page = _Page()
    _show_mode(page, explanation)
    if explanation.shares is None:
        _show_weights(page, explanation)
    else:
        _show_shares(page, explanation.shares, explanation.mode)
    _show_dashboard(page, explanation)
    if given:
        _show_chain(page, explanation)
    page.print()
    return 0


def _in_json(value: Any) -> object:
    """Write a table as records, a fraction as text."""
    return str(value) if isinstance(value, Fraction) else value.to_dict("records")


def _refuse_options_of_a_file(args: argparse.Namespace) -> None:
    given = [name for name in _OF_A_FILE if getattr(args, name) not in (None, False)]
    if given:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ExplainError(
            f"got {flags} without --lengths-file, expected recorded rollouts: give "
            f"--lengths-file FILE, or leave out {flags}"
        )


def _width() -> int:
    return min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)


class _Page:
    """Text and tables, as wide as the terminal within limits, without trailing spaces."""

    def __init__(self) -> None:
        self._console = Console(width=_width(), highlight=False, markup=False, emoji=False)
        self._parts: list[str] = []

    def heading(self, text: str) -> None:
        """Add a heading; a line that is too long is not wrapped."""
        self._add(Text(text, style="bold", no_wrap=True, overflow="ignore"), indent=0)

    def text(self, text: str, *, wrap: bool = True) -> None:
        """Add a paragraph."""
        self._add(Text(text, no_wrap=not wrap, overflow="fold" if wrap else "ignore"))

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        left: int = 1,
        wrapped: int | None = None,
    ) -> None:
        """Add a table: ``left`` columns are aligned to the left; one may be ``wrapped``."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.show_header = any(columns)
        for index, column in enumerate(columns):
            side: Literal["left", "right"] = "left" if index < left else "right"
            table.add_column(column, justify=side, no_wrap=index != wrapped, overflow="fold")
        for row in rows:
            table.add_row(*row)
        self._add(table)
        self.text("")

    def _add(self, part: Text | Table, *, indent: int = 2) -> None:
        with self._console.capture() as captured:
            self._console.print(Padding(part, (0, 0, 0, indent)))
        self._parts.append(captured.get())

    def print(self) -> None:
        """Print what was added."""
        lines = "".join(self._parts).rstrip().splitlines()
        print(*(line.rstrip() for line in lines), sep="\n", file=sys.stdout)


_SYMBOLS: dict[str, Callable[[Explanation], str]] = {
    "w_s": lambda e: "weight of every token of sequence s",
    "N": lambda e: f"active tokens of the step: {e.counts['N']}",
    "B": lambda e: f"samples of the step: {e.counts['B']}",
    "V": lambda e: f"samples with an active token: {e.counts['V']}",
    "P": lambda e: f"prompts of the step: {e.counts['P']}",
    "Q": lambda e: f"prompts with an active token: {e.counts['Q']}",
    "n_b": lambda e: "active tokens of the sample that s belongs to",
    "n_p": lambda e: "active tokens of the prompt that s belongs to",
    "n_mb": lambda e: "active tokens of the microbatch that s is in",
    "M": lambda e: f"microbatches on each data-parallel rank: {e.split.microbatches}",
    "DP": lambda e: f"data-parallel ranks: {e.split.dp}",
}


def _show_mode(page: _Page, e: Explanation) -> None:
    mode, alias = MODES[e.mode], ALIASES.get(e.name)
    page.heading(f"{e.mode}: w_s = {e.formula}")
    article = "The " if mode.meaning.startswith("mean") else ""
    meaning = article + mode.meaning
    page.text(f"{meaning[0].upper()}{meaning[1:]}.")
    if alias is not None:
        note = f": {alias.note}" if alias.note else ""
        page.text(f"{e.name} is another system's name for it{note}.")
    page.text("loss = sum over sequences s of w_s * (sum of the losses of its active tokens)")
    page.text("")
    symbols = ["w_s", *re.findall(r"[A-Za-z]\w*", e.formula)]
    page.table(["", ""], [[s, _SYMBOLS[s](e)] for s in symbols], left=2, wrapped=1)
    if e.shares is not None and e.shares.num_steps > 1:
        page.text("Every step has its own counts; the first step's are shown.")
    if e.divisor is not None and mode.divisor == "none":
        page.text(f"It takes no divisor: {e.divisor:g} is used for the other modes below.")
    page.text(f"Train it with  {e.flags}", wrap=False)


def _show_weights(page: _Page, e: Explanation) -> None:
    page.heading("\nWEIGHTS")
    names = ["prompt", "n_s", *re.findall(r"n_\w+", e.formula)]
    if "n_mb" in names:
        names[:1] = ["rank", "microbatch"]
    rows = [
        [str(number), *(str(getattr(s, name)) for name in names), f"{s.w_s:.6g}",
         f"{s.w_s * s.n_s:.6g}", f"{s.share:.1%}"]
        for number, s in enumerate(e.sequences)
    ]  # fmt: skip
    total = sum(s.w_s * s.n_s for s in e.sequences)
    rows.append(["sum", *[""] * (len(names) + 1), f"{total:.6g}", "100.0%"])
    page.table(["sequence", *names, "w_s", "w_s n_s", "share"], rows, left=0)
    page.text(
        "Here a sequence is a sample. n_s: its active tokens. share: w_s n_s over its sum. A "
        "training run reports the sum as lossagg/weight_expected."
    )


def _show_shares(page: _Page, shares: Shares, mode: str) -> None:
    """Show what ``lossagg plot`` draws: this mode in detail, then every mode."""
    page.heading("\nWEIGHTS")
    page.text(f"{shares.summary}.")
    page.text("")
    unit, buckets = f"{shares.unit}s", shares.buckets
    page.table(
        ["length", "responses", "of all", f"of {unit}", "of weight", f"weight / {unit}"],
        [
            [b["label"], str(b["num"]), f"{b['responses']:.1%}", f"{b['tokens']:.1%}",
             f"{b[mode]:.1%}", f"{b[mode] / b['tokens']:.3g}" if b["tokens"] else ""]
            for b in buckets.to_dict("records")
        ],
        left=0,
    )  # fmt: skip
    page.text(
        f"of weight: share of the step's w_s n_s. weight / {unit}: weight per {shares.unit}, "
        "relative to the average."
    )
    page.text("\nThe same share under every mode, by the bucket's longest response:\n")
    page.table(
        ["", *map(_in_thousands, buckets["high"])],
        [[other, *(f"{share:.1%}" for share in buckets[other])] for other in shares.modes],
    )
    for note in shares.notes:
        page.text(note)


def _in_thousands(number: int) -> str:
    """Write a length in few columns."""
    return f"{number // 1000}k" if number >= 10_000 and number % 1000 == 0 else str(number)


def _show_dashboard(page: _Page, e: Explanation) -> None:
    page.heading("\nON THE DASHBOARD")
    page.text("The loss of the same sequences under every mode, if each token's loss is 1.\n")
    page.table(["mode", "w_s", "loss", "ratio", "gradient"], map(_compared, e.comparisons), left=2)
    lacking = [c.mode for c in e.comparisons if c.loss is None]
    if lacking:
        page.text(f"To compare with {', '.join(lacking)}, give --divisor.")
    ranks = number_of(e.split.dp, "rank")
    page.text(
        f"ratio: to the loss of {e.mode}. scaled: the same gradient, times the ratio. reweighted: "
        "a gradient of a different direction; the ratio of real losses then depends on them. For "
        f"microbatch_token_mean the sequences are assigned in turn to {ranks} x "
        f"{number_of(e.split.microbatches, 'microbatch')}; its values change with them."
    )
    if e.shares is not None and e.shares.num_steps > 1:
        page.text(
            "Losses are means over the steps. rescaled: in every step the gradient is only scaled, "
            "by a number of the step's own."
        )
    page.text(
        "A loss or grad_norm that jumps after a switch is expected: NovaSky-AI/SkyRL#1296 reported "
        "0.322, 0.065 and 0.001 for the same data. A clipping threshold does not carry over: if "
        "the gradient is scaled, multiply the threshold by the ratio; if it is reweighted, look at "
        "the new grad_norm first. More: docs/which-mode.md."
    )


def _compared(c: Comparison) -> list[str]:
    if c.loss is None or c.ratio is None:
        return [c.mode, c.w_s, "", "", c.gradient]
    return [c.mode, c.w_s, f"{c.loss:.5g}", f"{c.ratio:.5g}", c.gradient]


def _show_chain(page: _Page, e: Explanation) -> None:
    s, k = e.split, K_FORMULA[e.split.loss_scaling]
    page.heading("\nFROM LOSS TO GRADIENT")
    page.text(
        f"loss scaling {s.loss_scaling}, M = {number_of(s.microbatches, 'microbatch')}, "
        f"DP = {s.dp}, CP = {s.cp}, K = {k} = {e.k}"
    )
    if e.shares is not None and e.shares.num_steps > 1 and s.loss_scaling == "per_token":
        page.text("Every step has its own N; this is the first step's.")
    page.text("")
    so_far = accumulate((link.factor for link in e.chain), mul)
    page.table(
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
            f"({some} = {e.counts['N']})"
        )
    page.text(f"loss_func returns partial loss * {e.k}, and as num_tokens {tokens}.")
    if e.k == 1:
        page.text("K is 1 here, so a loss_func that returns the bare partial loss is right too.")
    else:
        page.text(
            f"A loss_func that returns the bare partial loss with the same num_tokens trains "
            f"1/{f'({k})' if ' ' in k else k} = 1/{e.k} of this loss, without an error."
        )
    page.text(
        "K does not depend on the mode. The K that the start of a run measures is that of the "
        "probe's own small step, with an M and N of its own."
    )
