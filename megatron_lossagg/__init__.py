"""The loss you configured is the loss you train, on any Megatron layout.

A name loads its module, and with it torch, when it is first used: ``lossagg --version`` and
``--help`` need neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_lossagg.aggregation import Aggregation
    from megatron_lossagg.aggregator import LossAggregator
    from megatron_lossagg.buffer import MicrobatchSequences, StepBuffer, StepMicrobatch
    from megatron_lossagg.counts import StepTotals
    from megatron_lossagg.errors import LossAggregationError
    from megatron_lossagg.flags import add_loss_aggregation_args
    from megatron_lossagg.layout import Layout
    from megatron_lossagg.plan import StepPlan, plan_step
    from megatron_lossagg.reducer import Reducer, ReducerContext
    from megatron_lossagg.schedule import FrameworkLoss, Integration
    from megatron_lossagg.sequences import Sequences

__version__ = "0.1.0"

__all__ = [
    "Aggregation",
    "FrameworkLoss",
    "Integration",
    "Layout",
    "LossAggregationError",
    "LossAggregator",
    "MicrobatchSequences",
    "Reducer",
    "ReducerContext",
    "Sequences",
    "StepBuffer",
    "StepMicrobatch",
    "StepPlan",
    "StepTotals",
    "add_loss_aggregation_args",
    "plan_step",
]

_MODULE_OF = {
    "Integration": "schedule",
    "Aggregation": "aggregation",
    "FrameworkLoss": "schedule",
    "Layout": "layout",
    "LossAggregationError": "errors",
    "LossAggregator": "aggregator",
    "MicrobatchSequences": "buffer",
    "Reducer": "reducer",
    "ReducerContext": "reducer",
    "Sequences": "sequences",
    "StepBuffer": "buffer",
    "StepMicrobatch": "buffer",
    "StepPlan": "plan",
    "StepTotals": "counts",
    "add_loss_aggregation_args": "flags",
    "plan_step": "plan",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
