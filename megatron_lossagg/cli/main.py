"""The ``lossagg`` command."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

import megatron_lossagg
from megatron_lossagg.cli import explain
from megatron_lossagg.errors import ContractError, LossAggregationError, ReducerError
from megatron_lossagg.verify import command as verify


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status: 0, 1 for a failed row, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="lossagg",
        description="The loss you configured is the loss you train: prove it, and explain it.",
    )
    version = f"megatron_lossagg {megatron_lossagg.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module, summary in (
        ("verify", verify, "prove on the installed Megatron-Core that it trains the loss named"),
        ("explain", explain, "say what a mode means, and what to expect on the dashboard"),
    ):
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    if arguments is None:  # the process is ours; leaving it ends the ranks that were launched
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (ContractError, ReducerError) as error:  # Megatron-Core is not what the contract says
        print(f"lossagg: {error}", file=sys.stderr)
        return 1
    except LossAggregationError as error:
        print(f"lossagg: {error}", file=sys.stderr)
        return 2
    return status
