"""Draw which responses the loss comes from, under every mode.

Reads recorded rollouts and draws the share of the loss weight by response
length, with the histogram of the lengths and each bucket's share of the
tokens. A FILE is JSON lines such as {"prompt_id": 7, "response_length": 512},
with "mask" (0 or 1 per token) in place of the length if tokens are masked,
and "step" if there are several steps; or a .pt file of slime's or miles'
--save-debug-rollout-data; or what verl's rollout_data_dir and TRL's
log_completions write, or SFT's messages, which have texts and no lengths and
need --tokenizer or --characters. --column says how a column is called if its
name is a different one. Several files are several steps. Shares count the
loss mask: no record holds token weights.
Exit status: 0, or 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from megatron_lossagg.cli.explanation import EXPONENT
from megatron_lossagg.cli.files import OutputError, check_outputs, printable, write_whole
from megatron_lossagg.cli.rollouts import add_reading_arguments, read_rollouts
from megatron_lossagg.cli.shares import drawn, page, shares_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``lossagg plot``."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="recorded rollouts")
    parser.add_argument(
        "--png",
        type=Path,
        metavar="FILE",
        help="write the picture here (default: the first file's name with .png, in the current "
        "folder, unless --html is given or it exists)",
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write one page with the picture, the numbers, and how to read them",
    )
    parser.add_argument(
        "--exponent",
        type=float,
        default=EXPONENT,
        metavar="A",
        help=f"for length_power: its exponent (default {EXPONENT})",
    )
    add_reading_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Draw, and return 0. Raises :class:`LossAggregationError` for wrong usage."""
    png = args.png
    if png is None and args.html is None:
        png = Path(f"{args.files[0].stem}.png")
        if os.path.lexists(png):
            raise OutputError(
                f"got {png}, which exists, and no --png: give --png {png} to replace it, or "
                "another name"
            )
    check_outputs({"--png": png, "--html": args.html}, inputs=[*args.files, args.tokenizer])
    shares = shares_of(read_rollouts(args.files, args), args.exponent)
    print(f"{shares.summary}.", shares.finding, *shares.notes, sep="\n")
    if png is not None:
        write_whole("--png", png, drawn(shares, png.suffix[1:] or "png"))
        print(printable(str(png)))
    if args.html is not None:
        write_whole("--html", args.html, page(shares))
        print(printable(str(args.html)))
    return 0
