"""This package's options among the arguments of slime and miles, whose file takes any name.

They are named as the flags are: ``loss_aggregation``, ``loss_aggregation_divisor``, ... Each has a
short spelling, ``lossagg``, ``lossagg_divisor``, ..., for a release that defines an option of the
long name itself, as slime's pull request 2090 did: it was closed, and a copy of slime may have it.
The long name is the framework's there, its default is no request, and only the short one is ours.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import Any

from megatron_lossagg.errors import AggregationError, ContractError
from megatron_lossagg.loop.flags import add_loss_aggregation_args

_WITHOUT_EFFECT = (
    "loss_aggregation_record",
    "loss_aggregation_shadow",
    "loss_aggregation_probe",
    "loss_aggregation_side_losses",
    "loss_aggregation_guards",
)
"""Options of a step of this package, which these frameworks do not have."""
_LIKE_OURS = ("loss_ag", "lossag")
"""How what may be meant for us begins."""


def spelled(flag: str, framework: str) -> str:
    """Return the name that a file gives an option of ours in this release of a framework."""
    return _short(flag) if "loss_aggregation" in defined_by(framework) else flag


def requested(args: Any, framework: str) -> Namespace:
    """Return our options, each None if it is not asked for.

    Raises :class:`AggregationError` for a name that nothing reads, and :class:`ContractError` if
    the framework would aggregate too. No collective.
    """
    flags = vars(add_loss_aggregation_args(argparse.ArgumentParser()).parse_args([]))
    given = {name: value for name, value in vars(args).items() if value is not None}
    of_framework = defined_by(framework)
    _check_names(args, flags, of_framework)
    made = {}
    for flag in flags:
        spellings = [_short(flag)] if flag in of_framework else [flag, _short(flag)]
        values = [given[name] for name in spellings if name in given]
        if len(values) > 1:
            raise AggregationError(f"got {flag} and {_short(flag)}, expected one: drop one")
        made[flag] = values[0] if values else None
    changed = {name: given.get(name) for name, own in of_framework.items()}
    changed = {name: value for name, value in changed.items() if value != of_framework[name]}
    if made["loss_aggregation"] is not None and changed:
        raise ContractError(
            f"got {changed}, options of {framework}'s own, alongside lossagg, expected none: "
            f"{framework} would aggregate the policy loss itself. Drop them"
        )
    return Namespace(**made)


def _short(flag: str) -> str:
    return flag.replace("loss_aggregation", "lossagg", 1)


def _check_names(args: Any, flags: Iterable[str], of_framework: Iterable[str]) -> None:
    """Refuse an option that nothing reads: the file of --custom-config-path takes any name."""
    read = [flag for flag in flags if flag not in _WITHOUT_EFFECT]
    known = {*read, *map(_short, read), *of_framework}
    for name, value in vars(args).items():
        is_like_ours = name.replace("-", "_").lower().startswith(_LIKE_OURS)
        is_unset = name in _WITHOUT_EFFECT and value is None
        if is_like_ours and name not in known and not is_unset:
            raise AggregationError(
                f"got {name}: {value!r}, which nothing reads, expected one of {', '.join(read)}: "
                "correct the name, or drop it"
            )


@cache
def defined_by(framework: str) -> dict[str, Any]:
    """Return the options named as ours that a framework's own parser defines, and their defaults.

    Empty if its parser cannot be had here.
    """
    parser = argparse.ArgumentParser()
    try:
        arguments = import_module(f"{framework}.utils.arguments")
        getattr(arguments, f"get_{framework}_extra_args_provider")(None)(parser)
    except (Exception, SystemExit):  # whatever a framework's import raises
        return {}
    options = {action.dest: action.default for action in parser._actions}
    return {name: value for name, value in options.items() if name.startswith(_LIKE_OURS)}
