"""Run an unmodified Megatron-LM script with --loss-aggregation.

Under torchrun, in a Megatron-LM checkout: write the script and all its
options as ever, and the options below anywhere among them. Without any of
them the script runs as it is. Known scripts: pretrain_gpt.py, packed SFT
included, those that share its loss, and train_rl.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from megatron_lossagg.errors import AggregationError, LossAggregationError
from megatron_lossagg.integrations._script import run_hooked, run_stock
from megatron_lossagg.loop.flags import add_loss_aggregation_args, aggregation_from_args
from megatron_lossagg.reduction.options import Options

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lossagg run``."""
    parser.allow_abbrev = False  # the script's own options are not abbreviations of ours
    _add_cpu(parser)
    parser.add_argument(
        "script", help="a script of a Megatron-LM checkout, such as pretrain_gpt.py"
    )
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="the script's own options, and those of the group below",
    )
    add_loss_aggregation_args(parser)


def _add_cpu(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="train on CPU and gloo, with stand-ins for CUDA (docs/integrations/megatron-lm.md)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the script in this process; return its exit status, 1 if a step is refused.

    Raises :class:`ContractError` if an aggregation was asked for and the script ended without
    the training loop that it is put into. A loop that had no step left to do is no error.
    """
    parser = argparse.ArgumentParser(prog="lossagg run", add_help=False, allow_abbrev=False)
    _add_cpu(parser)
    add_loss_aggregation_args(parser)
    # ``args`` has those that stand before the script; of a flag given twice, the last one counts.
    flags, rest = parser.parse_known_args(args.arguments, args)
    unknown = [option for option in rest if option.startswith(("--loss-agg", "--no-loss-agg"))]
    if unknown:
        raise AggregationError(
            f"got {unknown[0]}, which is not an option of ours, expected those that lossagg run "
            "--help lists: correct the name"
        )
    aggregation = aggregation_from_args(flags)
    script = Path(args.script)
    if not script.is_file():
        raise LossAggregationError(
            f"got the script {script}, which does not exist: give the path that python would take"
        )
    wants_help = bool({"-h", "--help"} & set(rest))
    if wants_help and os.environ.get("RANK", "0") == "0":
        parser.usage = argparse.SUPPRESS
        parser.print_help()
    sys.argv = [str(script), *rest]
    sys.path[0] = str(script.resolve().parent)
    if args.cpu:
        from megatron_lossagg.cpu.training import install_training

        install_training()
    options = Options.from_args(flags)
    if wants_help or (aggregation is None and not options.shadow):
        return run_stock(script, on_cpu=args.cpu)
    return run_hooked(script, aggregation, options=options, on_cpu=args.cpu)
