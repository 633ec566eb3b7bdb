"""Put a hook around the schedule that a framework's modules look up by name."""

from __future__ import annotations

import atexit
import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from megatron_lossagg.errors import ContractError, say
from megatron_lossagg.integrations._refusals import imported
from megatron_lossagg.loop.schedule_hook import ScheduleHook

HOOK = "get_forward_backward_func"
"""What a framework's loop calls for Megatron's schedule."""


def rebind(hook: ScheduleHook, modules: Sequence[str], framework: str) -> ScheduleHook:
    """Put a hook around the schedule that a framework's modules look up by name; return the hook.

    ``framework``: its name in messages. Raises :class:`ContractError` if a module cannot be
    imported or has no such name; then no module is changed.
    """
    stocks: dict[str, Any] = {}
    for name in modules:
        expected = (
            f"the training loop of {framework}: put its checkout on PYTHONPATH, or use an "
            "environment that has it"
        )
        stocks[name] = getattr(imported(name, expected=expected), HOOK, None)
        if stocks[name] is None:
            raise ContractError(
                f"{name} has no {HOOK}, expected the training loop of {framework}: this "
                "loop is not known here; wrap its schedule with LossAggregator.wrap"
            )
    for name, stock in stocks.items():
        setattr(importlib.import_module(name), HOOK, _hooked(hook, stock))
    atexit.register(report_if_unused, hook, framework)
    return hook


def _hooked(hook: ScheduleHook, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def get(*args: Any, **kwargs: Any) -> Any:
        return hook.wrap(stock(*args, **kwargs))

    return get


def report_if_unused(hook: ScheduleHook, framework: str) -> None:
    """Print, as the process ends, that no step reached the hook.

    Nothing if an exception ends it: that says why already.
    """
    if hook.num_steps == 0 and not hasattr(sys, "last_value"):
        why = (
            f"the training loop of {framework} had no step left to do"
            if hook.is_found
            else f"the process ended without the training loop of {framework}, or the hook was "
            "installed after it began"
        )
        say(f"no step reached {hook.flag}: {why}")
