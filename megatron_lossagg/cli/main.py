"""The ``lossagg`` command: finds the command that was asked for and loads only that."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

import megatron_lossagg
from megatron_lossagg.errors import ContractError, LossAggregationError, ReducerError

__all__ = ["main"]

_PIPED = {"explain", "plot"}
"""Commands that end quietly where the reader of their output does, as in ``| head``."""

_COMMANDS = {
    "verify": (
        "megatron_lossagg.verify.command",
        "prove that the installed Megatron-Core trains the configured loss",
    ),
    "run": (
        "megatron_lossagg.cli.run",
        "run an unmodified Megatron-LM script with --loss-aggregation",
    ),
    "explain": (
        "megatron_lossagg.cli.explain",
        "print what a mode means, and the values to expect on the dashboard",
    ),
    "plot": (
        "megatron_lossagg.cli.plot",
        "draw which responses the loss comes from, under every mode",
    ),
}
"""Module and summary of each command; the module has ``add_arguments`` and ``run``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status: 0, 1 for a failed case, 2 for wrong usage."""
    if arguments is None:  # the process is ours; leaving it ends the ranks that were launched
        arguments = sys.argv[1:]
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        if _PIPED.intersection(arguments[:1]):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    args = _parser(arguments).parse_args(arguments)
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (ContractError, ReducerError) as error:  # Megatron-Core breaks the contract
        print(f"lossagg: {error}", file=sys.stderr)
        return 1
    except LossAggregationError as error:
        print(f"lossagg: {error}", file=sys.stderr)
        return 2
    return status


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Build the parser; import the module of the command in ``arguments``, and no other's."""
    parser = argparse.ArgumentParser(
        prog="lossagg",
        description="The loss you configured is the loss you train: prove it, and explain it.",
    )
    version = f"megatron_lossagg {megatron_lossagg.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module_name, summary) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name in arguments[:1]:  # the options before a command print and exit
            module = importlib.import_module(module_name)
            command.description = module.__doc__
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser
