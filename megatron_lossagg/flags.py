"""The ``--loss-aggregation*`` flags; the only reader of a parsed Namespace.

For Megatron's ``extra_args_provider``. Without a flag nothing is touched: stock Megatron
bit for bit. ``--calculate-per-token-loss`` stays Megatron's: it chooses how Megatron scales
(the loss scaling), never which loss is configured.
"""

from __future__ import annotations

import argparse
from functools import cache
from typing import cast

from megatron_lossagg.aggregation import CUSTOM, MODES, Aggregation
from megatron_lossagg.errors import AggregationError
from megatron_lossagg.plan import EmptyStep
from megatron_lossagg.reducer import load_reducer_factory

__all__ = [
    "add_loss_aggregation_args",
    "aggregation_from_args",
    "empty_step_from_args",
    "probe_from_args",
    "rejects_tokens_from_args",
]


def add_loss_aggregation_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group of flags and return the parser, as ``extra_args_provider`` wants it.

    Raises :class:`AggregationError` where the parser has one of the flags already.
    """
    _check_free(parser)
    group = parser.add_argument_group(
        "loss aggregation",
        _description(),
    )
    group.add_argument(
        "--loss-aggregation",
        metavar="MODE|SYSTEM:NAME",
        help="Which loss is trained: a mode listed above, or another system's name such as "
        "verl:seq-mean-token-sum-norm. Default: stock Megatron, untouched.",
    )
    group.add_argument(
        "--loss-aggregation-divisor",
        type=float,
        metavar="TOKENS",
        help="L of constant (required), C of token_sum (default 1).",
    )
    group.add_argument(
        "--loss-aggregation-count-empty",
        action=argparse.BooleanOptionalAction,
        help="Whether a sample or prompt with no active tokens still counts toward B or P. "
        "Default: it does; an alias brings its own.",
    )
    group.add_argument(
        "--loss-aggregation-empty-step",
        choices=("zero", "error"),
        help="A step with no active tokens: zero gradient and one warning (the default), or an "
        "error.",
    )
    group.add_argument(
        "--loss-aggregation-rejects-tokens",
        action="store_true",
        default=None,
        help="The script rejects tokens on purpose: a loss mask that trains fewer tokens than the "
        "data had is then no error.",
    )
    group.add_argument(
        "--loss-aggregation-probe",
        action=argparse.BooleanOptionalAction,
        help="Whether to measure at startup, in under a second, what Megatron does to a loss, and "
        "stop where it is not what is compensated. Default: it is measured.",
    )
    group.add_argument(
        "--loss-aggregation-reducer-path",
        metavar="PKG.MOD:NAME",
        help="A factory(context) that replaces the mode; given alone, without mode or divisor.",
    )
    return parser


def aggregation_from_args(args: argparse.Namespace) -> Aggregation | None:
    """Read the flags: an :class:`Aggregation`, or None where no flag asks for one.

    A flag that ``args`` lacks (a framework whose arguments come from a file) has its default; a
    number that a file gives as a string is read as a number. Raises :class:`AggregationError`
    for contradicting flags, and :class:`ReducerPathError` for a reducer path that does not lead
    to a callable, at launch rather than at the first step: it imports the path's module.
    """
    args = _with_defaults(args)
    mode, divisor = args.loss_aggregation, _as_number(args.loss_aggregation_divisor)
    count_empty, path = args.loss_aggregation_count_empty, args.loss_aggregation_reducer_path
    if path is not None:
        given = {
            "--loss-aggregation": mode,
            "--loss-aggregation-divisor": divisor,
            "--[no-]loss-aggregation-count-empty": count_empty,
        }
        for flag, value in given.items():
            if value is not None:
                raise AggregationError(
                    f"--loss-aggregation-reducer-path {path} replaces the mode, and {flag} {value} "
                    "was given too: one of them would be ignored, drop one"
                )
        aggregation = Aggregation(CUSTOM, reducer_path=path)
        load_reducer_factory(path)  # an invalid path fails at launch
        return aggregation
    if mode is None:
        alone = {
            "-divisor": divisor,
            "-count-empty": count_empty,
            "-empty-step": args.loss_aggregation_empty_step,
            "-rejects-tokens": args.loss_aggregation_rejects_tokens,
            "-probe": args.loss_aggregation_probe,
        }
        for flag, value in alone.items():
            if value is not None:
                raise AggregationError(
                    f"--loss-aggregation{flag} {value} was given without --loss-aggregation: name "
                    "the mode that it belongs to"
                )
        return None
    return Aggregation.named(mode, divisor=divisor, count_empty=count_empty)


def empty_step_from_args(args: argparse.Namespace) -> EmptyStep:
    """Read ``--loss-aggregation-empty-step``, the ``empty_step`` of ``plan_step``."""
    return cast(EmptyStep, _with_defaults(args).loss_aggregation_empty_step or "zero")


def rejects_tokens_from_args(args: argparse.Namespace) -> bool:
    """Read ``--loss-aggregation-rejects-tokens``, the ``rejects_tokens`` of ``plan_step``."""
    return _with_defaults(args).loss_aggregation_rejects_tokens is True


def probe_from_args(args: argparse.Namespace) -> bool:
    """Read ``--[no-]loss-aggregation-probe``, the ``probe`` of ``MegatronContract.read``."""
    return _with_defaults(args).loss_aggregation_probe is not False


def _with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    given = {name: value for name, value in vars(args).items() if name in _defaults()}
    return argparse.Namespace(**{**_defaults(), **given})


@cache
def _defaults() -> dict[str, object]:
    return vars(add_loss_aggregation_args(argparse.ArgumentParser()).parse_args([]))


def _as_number(divisor: float | str | None) -> float | None:
    if not isinstance(divisor, str):
        return divisor
    try:
        return float(divisor)
    except ValueError:
        raise AggregationError(
            f"got --loss-aggregation-divisor {divisor!r}, expected a number of tokens"
        ) from None


def _check_free(parser: argparse.ArgumentParser) -> None:
    taken = [
        flag for flag in parser._option_string_actions if flag.startswith("--loss-aggregation")
    ]
    if taken:
        raise AggregationError(
            f"this parser has {', '.join(taken)} already: call add_loss_aggregation_args once; if "
            "they are the framework's own, leave ours out, drop what the framework does "
            "with them, and build "
            "Aggregation.named(...) from its arguments"
        )


def _description() -> str:
    """Describe the group: one line per mode, and one short paragraph where argparse re-wraps it."""
    width = max(map(len, MODES))
    weights = {
        mode.name: mode.weight.format(B="B", P="P", L="L", C="C")
        for mode in MODES.values()
        if mode.name != CUSTOM
    }
    lines = [f"{name:<{width}}  w_s = {weight};" for name, weight in weights.items()]
    return "\n".join(
        [
            "loss = sum_s w_s sum_t m_t x_t, with one weight w_s per sequence s. The modes:",
            *lines,
            "what each means, and other systems' names: lossagg explain --list",
        ]
    )
