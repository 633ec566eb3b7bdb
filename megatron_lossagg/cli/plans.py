"""The plan of a step that is described on the command line, under any mode."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_lossagg.contract.scaling import LossScaling
from megatron_lossagg.errors import AggregationError, LossAggregationError
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.aliases import ALIASES
from megatron_lossagg.reduction.modes import CUSTOM, MODES, OWN_WEIGHTS, Mode
from megatron_lossagg.reduction.sequences import Sequences
from megatron_lossagg.reduction.table import count_step
from megatron_lossagg.reduction.weighted import StepWeights, check_divisor

EXPONENT = 0.5
"""Of ``length_power`` if none is given: half way from ``token_mean`` to ``sample_mean``."""
_ONLY_ITSELF = (CUSTOM, OWN_WEIGHTS, "balanced", "row_mean")
"""Modes with which no other is compared."""
_MOST_SIZE = 2**31 - 1
"""The product of two is an int64."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """The parallelism of a step and how Megatron scales its loss: what K depends on."""

    loss_scaling: LossScaling = "average"
    microbatches: int = 2
    """M of every data-parallel rank."""
    dp: int = 2
    cp: int = 1

    def __post_init__(self) -> None:
        for flag in ("microbatches", "dp", "cp"):
            size = getattr(self, flag)
            if not 1 <= size <= _MOST_SIZE:
                raise LossAggregationError(
                    f"--{flag}: got {size}, expected an integer from 1 to {_MOST_SIZE}"
                )


def plan_of(step: Mapping[str, Any], aggregation: Aggregation, split: Split) -> StepWeights:
    """Plan a step, given by column, with its sequences assigned alternately to the microbatches.

    One process plans for all: M DP microbatches on one rank weigh as M on each of DP ranks.
    """
    slots = split.microbatches * split.dp
    sequences = Sequences(
        active_tokens=np.asarray(step["active_tokens"]),
        sample=np.asarray(step["sample"]) if "sample" in step else None,
        prompt=np.asarray(step["prompt"]) if "prompt" in step else None,
        group=np.asarray(step["group"]) if "group" in step else None,
        left_out=np.asarray(step["left_out"]) if "left_out" in step else None,
        microbatch=np.arange(len(step["active_tokens"])) % slots,
        num_microbatches=slots,
    ).checked()
    table = count_step(aggregation, sequences)
    plan = StepWeights(aggregation=aggregation, sequences=sequences, table=table)
    check_divisor(plan)
    return plan


def modes_of(plan: StepWeights) -> Iterator[Mode]:
    """Yield the plan's mode, and those that can be compared with it by the ids of the step."""
    for mode in MODES.values():
        lacks_prompts = "prompt" in mode.needs and plan.sequences.prompt is None
        if mode.name == plan.aggregation.mode or not (mode.name in _ONLY_ITSELF or lacks_prompts):
            yield mode


def aggregation_of(
    name: str,
    divisor: float | None,
    exponent: float | None,
    count_empty: bool | None = None,
    weights: str | None = None,
) -> Aggregation:
    """Read a name; a number that its mode does not take is for other modes."""
    mode = MODES.get(ALIASES[name].mode if name in ALIASES else name)
    if mode is not None:
        divisor = None if mode.divisor == "none" else divisor
        exponent = exponent if mode.has_exponent else None
    elif weights is not None:
        divisor = exponent = None
    try:
        return Aggregation(
            name, divisor=divisor, exponent=exponent, count_empty=count_empty, weights=weights
        )
    except AggregationError as error:
        raise AggregationError(with_own_flags(str(error))) from None


def with_own_flags(message: str) -> str:
    """Name the flags in a message as these commands call them, such as ``--divisor``."""
    return re.sub(r"--loss-aggregation-(divisor|exponent|count-empty) \(\w+=\)", r"--\1", message)
