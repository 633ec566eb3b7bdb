"""The ``lossagg`` command: finds the command that was asked for and loads only that."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import TYPE_CHECKING, Any, NoReturn

import megatron_lossagg
from megatron_lossagg.cli.files import printable
from megatron_lossagg.errors import ContractError, LossAggregationError, ReducerError, meant, say

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_REQUIRED = ("torch", "numpy", "rich")

_PIPED = {"diff", "explain", "plot"}
"""Commands that end quietly when the reader of their output does, as in ``| head``."""

_COMMANDS = {
    "verify": (
        "megatron_lossagg.cli.verify",
        "prove that the installed Megatron-Core trains the configured loss",
        "lossagg verify --dp 2 --cp 2 --loss-aggregation sample_mean",
    ),
    "run": (
        "megatron_lossagg.cli.run",
        "run an unmodified Megatron-LM script with --loss-aggregation",
        "torchrun -m megatron_lossagg run pretrain_gpt.py --loss-aggregation token_mean",
    ),
    "weigh": (
        "megatron_lossagg.cli.weigh",
        "measure which weight each token is trained with, in an unmodified Megatron-LM script",
        "torchrun -m megatron_lossagg weigh pretrain_gpt.py",
    ),
    "explain": (
        "megatron_lossagg.cli.explain",
        "print what a mode means, and the values to expect on the dashboard",
        "lossagg explain constant --divisor 4096 --lengths 512,4096/64,0",
    ),
    "plot": (
        "megatron_lossagg.cli.plot",
        "draw which responses the loss comes from, under every mode",
        "lossagg plot rollouts.jsonl --html rollouts.html",
    ),
    "diff": (
        "megatron_lossagg.cli.diff",
        "say whether two recorded runs trained the same loss function on the same batches",
        "lossagg diff dp8.jsonl dp4-cp2.jsonl",
    ),
}
"""Module, summary and example of each command; the module has ``add_arguments`` and ``run``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its status: 0, 1 for a failed case, 2 for wrong usage; 3 is diff's."""
    if arguments is not None:
        return _run(arguments)
    # The process is ours; leaving it ends the ranks that were launched.
    arguments = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if arguments[:1] in (["run"], ["weigh"]):  # what is printed, and how it fails, is the script's
        return _run(arguments)
    if _PIPED.intersection(arguments[:1]):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if sys.stdout is None:  # closed
        return _run(arguments)
    output = _Output(1, "w", closefd=False)
    sys.stdout = TextIOWrapper(
        BufferedWriter(output),
        encoding=sys.stdout.encoding,
        errors="backslashreplace",
        line_buffering=output.isatty(),
    )
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
            if output.error is not None:
                raise output.error
    except OSError:
        if output.error is None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is flushed at the end
        reason = output.error.strerror
        say(f"the output cannot be written ({reason})")
        return 1


class _Output(FileIO):
    """Standard output that remembers its error: argparse hides it."""

    error: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


def _run(arguments: Sequence[str]) -> int:
    try:
        args = _parser(arguments).parse_args(arguments)
        status: int = args.run(args)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except ModuleNotFoundError as error:
        if error.name not in _REQUIRED:
            raise
        say(
            f"{error.name} is not installed: pip install {' '.join(_REQUIRED)}, which "
            "pip install --no-deps leaves out"
        )
        return 2
    except LossAggregationError as error:
        say(printable(str(error)))
        is_broken = isinstance(error, ContractError | ReducerError)  # by Megatron-Core
        return 1 if is_broken else 2
    return status


class _Parser(argparse.ArgumentParser):
    """Asks, for a name of a command, an option or a choice that is none, for the near one."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what is left: here the options are known, and not where argparse refuses it."""
        namespace, rest = super().parse_known_args(args, namespace)
        if rest:
            name = rest[0].partition("=")[0]
            near = meant(name, self._option_string_actions) if name.startswith("-") else ""
            self.error(f"unrecognized arguments: {' '.join(rest)}{near}")
        return namespace, rest

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            raise argparse.ArgumentError(
                action, f"{error.message}{meant(str(value), action.choices or ())}"
            ) from None


def _parser(arguments: Sequence[str]) -> _Parser:
    """Build the parser; import the module of the command in ``arguments``, and no other's."""
    parser = _Parser(
        prog="lossagg",
        description="The loss you configured is the loss you train: prove it, and explain it.",
    )
    version = f"megatron_lossagg {megatron_lossagg.__version__}"
    parser.add_argument("--version", action="version", version=version)

    def print_help(_: argparse.Namespace) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(run=print_help)
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, (module_name, summary, example) in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name in arguments[:1]:  # the options before a command print and exit
            module = importlib.import_module(module_name)
            command.description = module.__doc__
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser
