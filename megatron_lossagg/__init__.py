"""The loss you configured is the loss you train, on any Megatron layout.

A name loads its module, and with it torch, when it is first used: ``lossagg --version`` and
``--help`` need neither.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_lossagg.errors import LossAggregationError as LossAggregationError
    from megatron_lossagg.loop.aggregator import LossAggregator as LossAggregator
    from megatron_lossagg.loop.buffer import StepBuffer as StepBuffer
    from megatron_lossagg.loop.flags import add_loss_aggregation_args as add_loss_aggregation_args
    from megatron_lossagg.loop.schedule_hook import FrameworkLoss as FrameworkLoss
    from megatron_lossagg.loop.schedule_hook import Integration as Integration
    from megatron_lossagg.reduction.aggregation import Aggregation as Aggregation
    from megatron_lossagg.reduction.aggregation import Options as Options
    from megatron_lossagg.reduction.aggregation import ReducerContext as ReducerContext
    from megatron_lossagg.reduction.layout import Layout as Layout
    from megatron_lossagg.reduction.plan import StepPlan as StepPlan
    from megatron_lossagg.reduction.plan import plan_step as plan_step
    from megatron_lossagg.reduction.sequences import Sequences as Sequences
    from megatron_lossagg.reduction.table import StepCounts as StepCounts
    from megatron_lossagg.reduction.table import StepTotals as StepTotals
    from megatron_lossagg.verify.own_loss import check_loss as check_loss
    from megatron_lossagg.weigh.weighing import Weighing as Weighing

__version__ = "0.1.0"

_MODULE_OF = {
    "Aggregation": "reduction.aggregation",
    "FrameworkLoss": "loop.schedule_hook",
    "Integration": "loop.schedule_hook",
    "Layout": "reduction.layout",
    "LossAggregationError": "errors",
    "LossAggregator": "loop.aggregator",
    "Options": "reduction.aggregation",
    "ReducerContext": "reduction.aggregation",
    "Sequences": "reduction.sequences",
    "StepBuffer": "loop.buffer",
    "StepCounts": "reduction.table",
    "StepPlan": "reduction.plan",
    "StepTotals": "reduction.table",
    "Weighing": "weigh.weighing",
    "add_loss_aggregation_args": "loop.flags",
    "check_loss": "verify.own_loss",
    "plan_step": "reduction.plan",
}

_RENAMED = {"MicrobatchSequences": "Sequences"}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name in _RENAMED:
        new = _RENAMED[name]
        message = f"megatron_lossagg.{name} is {new} now, and this name goes after 0.2: use {new}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        globals()[name] = __getattr__(new)  # an import statement comes here twice
        return globals()[name]
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
