"""The ``--loss-aggregation*`` flags; with ``Options.from_args`` the only reader of them.

For Megatron's ``extra_args_provider``. Without a flag nothing is touched: stock Megatron
bit for bit. ``--calculate-per-token-loss`` stays Megatron's: it chooses how Megatron scales
(the loss scaling), never which loss is configured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from megatron_lossagg.errors import AggregationError
from megatron_lossagg.reduction.aggregation import Aggregation, Options, load_reducer_factory
from megatron_lossagg.reduction.modes import COUNTS, CUSTOM, MODES, OWN_WEIGHTS


def add_loss_aggregation_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group of flags and return the parser, as ``extra_args_provider`` wants it.

    Args:
        parser: The parser of the training script.

    Returns:
        The same parser.

    Raises:
        argparse.ArgumentError: If the parser has one of the flags already.

    Examples:
        >>> parser = add_loss_aggregation_args(argparse.ArgumentParser())
        >>> parser.parse_args(["--loss-aggregation", "token_mean"]).loss_aggregation
        'token_mean'
    """
    group = parser.add_argument_group("loss aggregation", _description())
    _add_args_of_a_mode(group)
    _add_args_of_a_run(group)
    for name, what in (
        ("weights", "A function from a step's counts to one weight per sequence"),
        ("reducer", "A factory(context), for what is no weight per sequence"),
    ):
        group.add_argument(
            f"--loss-aggregation-{name}-path",
            metavar="PKG.MOD:NAME",
            help=f"{what}. It replaces the mode; passed without mode and divisor.",
        )
    return parser


def _add_args_of_a_mode(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--loss-aggregation",
        metavar="MODE|SYSTEM:NAME",
        help="Which loss is trained: a mode listed above, a paper's name (grpo, dr_grpo, scalerl), "
        "or another system's, such as trl:dr_grpo. Default: stock Megatron, "
        "untouched.",
    )
    group.add_argument(
        "--loss-aggregation-divisor",
        type=float,
        metavar="TOKENS",
        help="L of constant (required), C of token_sum (default 1).",
    )
    group.add_argument(
        "--loss-aggregation-exponent",
        type=float,
        metavar="A",
        help="a of length_power (required): 0 weighs tokens alike, 1 samples alike.",
    )
    group.add_argument(
        "--loss-aggregation-count-empty",
        action=argparse.BooleanOptionalAction,
        help="Whether a sample or prompt with no active tokens still counts toward B or P. "
        "Default: it does; an alias brings its own.",
    )
    group.add_argument(
        "--loss-aggregation-count",
        choices=tuple(COUNTS),
        help="What the denominators count: "
        + "; ".join(f"{name}, {what}" for name, what in COUNTS.items())
        + ". Default: mask.",
    )


def _add_args_of_a_run(group: argparse._ArgumentGroup) -> None:
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
        "stop if it is not what is compensated. Default: it is measured.",
    )
    group.add_argument(
        "--loss-aggregation-record",
        metavar="FILE",
        help="Append one line of JSON for each training step to FILE, for lossagg diff.",
    )
    group.add_argument(
        "--loss-aggregation-shadow",
        metavar="MODE[,MODE...]",
        help="Report next to the trained loss what these modes would give, as lossagg/shadow/MODE. "
        "A mode's number follows a colon: constant:4096, length_power:0.5. Without "
        "--loss-aggregation, stock trains.",
    )
    group.add_argument(
        "--loss-aggregation-side-losses",
        choices=("stock", "follow"),
        help="MoE and MTP losses: as stock Megatron scales them (the default), or times the sum of "
        "the mode's weights, so that their coefficients mean the same under every mode "
        "(megatron-core 0.19 and newer).",
    )
    group.add_argument(
        "--loss-aggregation-guards",
        choices=("error", "warn"),
        help="What a guard finds ends the step (the default), or is warned of once and recorded "
        "while the run trains on. A loss that is not finite, and a wrong mask, are errors always.",
    )


def aggregation_from_args(args: argparse.Namespace) -> Aggregation | None:
    """Read the flags: an :class:`Aggregation`, or None if no flag asks for one.

    With ``--loss-aggregation-shadow`` only, None too: then stock trains.

    A flag that ``args`` lacks (a framework whose arguments come from a file) has its default; a
    number that a file has as a string is read as a number. Raises :class:`AggregationError`
    for contradicting flags, and :class:`ReducerPathError` for a reducer or weights path that does
    not lead to a callable, at launch rather than at the first step: it imports the path's module.
    """
    path = getattr(args, "loss_aggregation_reducer_path", None)
    weights = getattr(args, _WEIGHTS, None)
    mode, divisor, exponent, count_empty, count = (getattr(args, name, None) for name in _OF_A_MODE)
    if path is not None:
        if ignored := _given(args, (*_OF_A_MODE, _WEIGHTS)):
            raise AggregationError(
                f"--loss-aggregation-reducer-path {path} replaces the mode, and {ignored} would be "
                "ignored: drop one"
            )
        aggregation = Aggregation(CUSTOM, reducer_path=path)
        load_reducer_factory(path)  # an invalid path fails at launch
        return aggregation
    if mode is None and weights is None:
        has_shadow = bool(getattr(args, _SHADOW, None))
        allowed = (_SHADOW, "loss_aggregation_rejects_tokens") if has_shadow else ()
        names = [name for name in _OF_A_MODE + _OF_A_RUN if name not in allowed]
        if ignored := _given(args, names):
            raise AggregationError(
                f"got {ignored} without --loss-aggregation: name the mode that it belongs to"
            )
        return None
    return Aggregation(
        mode or "",
        weights=weights,
        divisor=_as_number("divisor", divisor),
        exponent=_as_number("exponent", exponent),
        count_empty=count_empty,
        count=count or "mask",
    )


def args_of(aggregation: Aggregation) -> dict[str, Any]:
    """Return the arguments from which :func:`aggregation_from_args` reads it; not of ``custom``."""
    names = ("mode", "divisor", "exponent", "count_empty", "count")
    args = dict(zip(_OF_A_MODE, (getattr(aggregation, name) for name in names), strict=True))
    args[_WEIGHTS] = None
    if aggregation.count == "mask":  # as if the flag was not given
        args["loss_aggregation_count"] = None
    if aggregation.weights_function is not None:
        args |= {"loss_aggregation": None, _WEIGHTS: aggregation.weights_function.path}
    return args


_OF_A_MODE = (
    "loss_aggregation",
    "loss_aggregation_divisor",
    "loss_aggregation_exponent",
    "loss_aggregation_count_empty",
    "loss_aggregation_count",
)
_WEIGHTS = "loss_aggregation_weights_path"
_SHADOW = "loss_aggregation_shadow"
_OF_A_RUN = tuple(f"loss_aggregation_{field.name}" for field in fields(Options))


def _given(args: argparse.Namespace, names: Iterable[str]) -> str:
    """Write those flags that have a value, for a message."""
    values = {name: getattr(args, name, None) for name in names}
    given = [f"--{k.replace('_', '-')} {v}" for k, v in values.items() if v is not None]
    return " and ".join(given)


def _as_number(name: str, value: float | str | None) -> float | None:
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        raise AggregationError(
            f"got --loss-aggregation-{name} {value!r}, expected a number"
        ) from None


def _description() -> str:
    """Describe the group: one line per mode, and one short paragraph if argparse re-wraps it."""
    width = max(map(len, MODES))
    lines = [
        f"{mode.name:<{width}}  w_s = {mode.formula};"
        for mode in MODES.values()
        if mode.name not in (CUSTOM, OWN_WEIGHTS)
    ]
    return "\n".join(
        [
            "loss = sum_s w_s sum_t m_t x_t, with one weight w_s per sequence s. The modes:",
            *lines,
            "what each means, and other systems' names: lossagg explain --list",
        ]
    )
