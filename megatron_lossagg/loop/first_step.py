"""What happens once in a run: it is said what was counted, and that the first step has ended."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from megatron_lossagg.errors import say
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.faults import first_time
from megatron_lossagg.reduction.modes import MODES
from megatron_lossagg.reduction.table import Counted
from megatron_lossagg.reduction.weighted import StepWeights

_Plan = TypeVar("_Plan", bound=StepWeights)

FIRST_STEP_FILE = "LOSSAGG_FIRST_STEP_FILE"
"""The environment variable in which a launcher names a file."""


def record_first_step() -> None:
    """Write the launcher's file, if it named one, after the first step of this process."""
    if path := os.environ.pop(FIRST_STEP_FILE, None):
        with suppress(OSError):  # the launcher's loss, not the run's
            Path(path).touch()


def say_counted(
    plan: _Plan,
    *,
    is_first: bool | None = None,
    sample: str = "",
    leave_out: str = "",
    counted: Counted | None = None,
) -> _Plan:
    """Print what the first training step under an aggregation counted, on one rank of the job.

    ``is_first``: whether it is this one; None: the first rank of the last pipeline stage, which
    counts in every framework. ``sample``: what a sample is, in words. ``leave_out``: the setting
    that takes empty samples and prompts out of the counts. ``counted``: of a step of several
    plans. Returns the plan. No collective.
    """
    is_new = first_time(f"counts of {plan.aggregation!r}")
    if is_new and (_is_first() if is_first is None else is_first):
        of_sample = sample and f"; a sample is {sample}"
        say(f"{plan.aggregation}; its first step counted {counted or plan.counted}{of_sample}")
    if leave_out:
        kind = _counted_empty(plan.aggregation)
        number = plan.counted.get(f"empty_{kind}")
        say_empty(plan.aggregation, number or 0, leave_out, is_first=is_first)
    return plan


def say_empty(
    aggregation: Aggregation, number: int, leave_out: str, *, is_first: bool | None = None
) -> None:
    """Print, in the first step that has some, that empty samples or prompts are counted.

    ``leave_out``: the setting that takes them out; ``is_first`` as of :func:`say_counted`.
    """
    kind = _counted_empty(aggregation)
    is_new = bool(kind and number) and first_time(f"empty of {aggregation!r}")
    if is_new and (_is_first() if is_first is None else is_first):
        counted = f"{kind} without an active token, {number} here"
        say(f"{aggregation} counts {counted}; {leave_out} takes them out")


def _counted_empty(aggregation: Aggregation) -> str:
    """Name what a mode counts even if it is empty: ``samples``, ``prompts``, or nothing."""
    counts = MODES[aggregation.mode].weight if aggregation.count_empty else ""
    return "prompts" if "{P}" in counts else "samples" if "{B}" in counts else ""


def _is_first() -> bool:
    if not dist.is_initialized():
        return True
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is None or not parallel_state.model_parallel_is_initialized():
        return dist.get_rank() == 0
    return bool(
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    )
