"""Explain what a mode means on rows you can check by hand, before you train.

Prints the formula; the weight of every row; the factors between loss_func and
the gradient, in Megatron-Core's loss scaling and your layout; and the losses to
expect on the dashboard, compared with those of the other modes. Nothing is
trained, and Megatron-Core is not needed. Rows are written as active tokens per
sample: "," separates samples, "/" separates prompts, 0 is a fully masked
sample; --lengths-file reads recorded ones instead. They are assigned in turn
to the data-parallel ranks' microbatches.
Exit status: 0, or 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_lossagg.aggregation import alias_lines, mode_lines
from megatron_lossagg.cli.explanation import (
    DEFAULT_LENGTHS,
    ExplainError,
    Split,
    explain,
    explain_rollouts,
    read_lengths,
)
from megatron_lossagg.cli.prose import hanging, lines
from megatron_lossagg.cli.rollouts import add_reading_arguments, read_rollouts
from megatron_lossagg.cli.shares import add_bucket_argument, read_buckets
from megatron_lossagg.files import check_outputs, write_whole
from megatron_lossagg.scaling import LOSS_SCALINGS

__all__ = ["add_arguments", "run"]

_NARROWEST, _WIDEST = 72, 100
"""Limits on the width of the text, in columns."""
_OF_A_FILE = ("tokenizer", "characters", "trust_pickle", "buckets")
"""Options that only --lengths-file has a use for."""


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
            print(*hanging(line, width=_width()), sep="\n")
        parser.exit()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``lossagg explain``; a training run's spellings work as well."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
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
        default = getattr(sizes, name)
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default {default})"
        )
    parser.add_argument(
        "--loss-scaling",
        choices=LOSS_SCALINGS,
        default=sizes.loss_scaling,
        help=f"per-token is Megatron's --calculate-per-token-loss (default {sizes.loss_scaling})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write it as JSON")
    file_group = add_reading_arguments(parser)
    add_bucket_argument(file_group)


def run(args: argparse.Namespace) -> int:
    """Explain a mode and return 0. Raises :class:`LossAggregationError` for wrong usage."""
    check_outputs({"--json": args.json}, inputs=[args.lengths_file, args.tokenizer])
    split = Split(
        loss_scaling=args.loss_scaling, microbatches=args.microbatches, dp=args.dp, cp=args.cp
    )
    if args.lengths_file is None:
        _refuse_options_of_a_file(args)
        explanation = explain(
            args.mode,
            prompts=read_lengths(args.lengths),
            split=split,
            divisor=args.divisor,
            count_empty=args.count_empty,
        )
    else:
        explanation = explain_rollouts(
            args.mode,
            rollouts=read_rollouts([args.lengths_file], args),
            split=split,
            divisor=args.divisor,
            count_empty=args.count_empty,
            highs=None if args.buckets is None else read_buckets(args.buckets),
        )
    if args.json is not None:
        text = json.dumps(asdict(explanation), indent=1, allow_nan=False, default=str)
        write_whole("--json", args.json, text + "\n")
    print(*lines(explanation, width=_width()), sep="\n")
    return 0


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
