"""The loss you configured is the loss you train, on any Megatron layout."""

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.buffer import StepBuffer, StepMicrobatch
from megatron_lossagg.contract import MegatronContract, StepContract
from megatron_lossagg.counts import Sequences, StepTotals
from megatron_lossagg.errors import LossAggregationError
from megatron_lossagg.flags import (
    add_loss_aggregation_args,
    aggregation_from_args,
    empty_step_from_args,
    probe_from_args,
)
from megatron_lossagg.layout import Layout
from megatron_lossagg.plan import StepPlan, plan_step
from megatron_lossagg.reducer import Reducer, ReducerContext

__version__ = "0.1.0"

__all__ = [
    "Aggregation",
    "Layout",
    "LossAggregationError",
    "MegatronContract",
    "Reducer",
    "ReducerContext",
    "Sequences",
    "StepBuffer",
    "StepContract",
    "StepMicrobatch",
    "StepPlan",
    "StepTotals",
    "add_loss_aggregation_args",
    "aggregation_from_args",
    "empty_step_from_args",
    "plan_step",
    "probe_from_args",
]
