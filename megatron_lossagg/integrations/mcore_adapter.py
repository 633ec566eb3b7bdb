"""ROLL's mcore_adapter, which LLaMA-Factory trains with under ``USE_MCA=1``: ``install(...)``.

``McaTrainer`` takes Megatron's schedule when it is constructed. A microbatch is a dict with
``labels``, moved to the logit that predicts them and -100 where nothing is trained. The trainer's
loss is a masked sum, which it adds up over context-parallel ranks where autograd does not see it;
its log adds up over data-parallel ranks only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.errors import ContractError
from megatron_lossagg.integrations._shared import (
    count_segments,
    field_of,
    imported,
    rebind,
    to_numpy,
)
from megatron_lossagg.loop.schedule_hook import FrameworkLoss, Integration, Schedule, ScheduleHook
from megatron_lossagg.reduction.aggregation import Aggregation, Options
from megatron_lossagg.reduction.sequences import Sequences

_MODULE = "mcore_adapter.trainer.trainer"
_OWN = ("_inner_forward_step", "_pre_compute_loss", "_post_compute_loss")
"""Methods of ``McaTrainer`` whose loss is known here; its ``DPOTrainer`` has others."""
_IGNORED = -100


class McaIntegration(Integration):
    """``McaTrainer``: pretraining and SFT, one sequence per entry of the batch or packed.

    A sequence is an entry of the batch; with ``sequence_packing`` one number of its
    ``attention_mask``, 0 for padding. Other trainers, as of DPO, are refused before the first step.
    """

    loss_name = "loss"

    def __init__(self, trainer_class: Any) -> None:
        self._class = trainer_class
        self._trainer: Any = None
        """That of the running step; None before the first."""

    def applies(self, call: Mapping[str, Any]) -> bool:
        """Refuse, on every rank and before each step, the loss of another trainer."""
        trainer = trainer_of(call)
        kind = type(trainer)
        others = [n for n in _OWN if getattr(kind, n, None) is not getattr(self._class, n)]
        if others:
            raise ContractError(
                f"got {', '.join(others)} of {kind.__name__}, expected McaTrainer's own: a "
                "different loss is not known here; train it without megatron_lossagg"
            )
        self._trainer = trainer
        return super().applies(call)

    def iteration(self) -> int | None:
        """Number the step as the trainer's log does: ``global_step`` counts finished steps."""
        return int(self._trainer.state.global_step) + 1

    def sequences(self, data: Any) -> Sequences:
        """Count the labels of each sequence; ``data`` is what the trainer's collator returns."""
        labels = field_of(data, "labels", "mcore_adapter's collator")
        b, s = labels.shape
        lengths, is_padding = np.full(b, s), np.zeros(b, dtype=bool)
        if self._trainer.args.sequence_packing and data.get("attention_mask") is not None:
            lengths, is_padding = _packed(data["attention_mask"])
        start_G = np.cumsum(lengths) - lengths
        return count_segments(start_G, is_padding, to_numpy(labels).ravel() != _IGNORED)

    def loss(self, loss_func: Callable[..., Any], output: Tensor) -> FrameworkLoss:
        """Take the mask out of ``partial(trainer._post_compute_loss, loss_mask)``."""
        (mask,) = loss_func.args  # type: ignore[attr-defined]
        returned = loss_func(output)
        losses, mask = output.reshape(-1), mask.reshape(-1)
        # Its value is that of all context-parallel ranks, its gradient that of this one.
        here = (losses * mask).sum().detach()
        return FrameworkLoss(
            losses=losses,
            mask=mask,
            returned=returned,
            masked_sum=returned[0] - returned[0].detach() + here,
        )


def _packed(attention_mask: Tensor) -> tuple[Any, Any]:
    """Return length of each segment of a packed batch, and whether it is padding.

    mcore_adapter takes the entries of a batch one after the other: sequences by their number, then
    the padding.
    """
    counts = [np.bincount(row) for row in to_numpy(attention_mask).astype(np.int64)]
    length_G = np.concatenate([np.append(count[1:], count[0]) for count in counts])
    is_padding_G = np.concatenate([np.arange(1, len(count) + 1) == len(count) for count in counts])
    return length_G[length_G > 0], is_padding_G[length_G > 0]


def trainer_of(call: Mapping[str, Any]) -> Any:
    """Return the trainer whose method a schedule is called with."""
    return getattr(call["forward_step_func"], "__self__", None)


class _Hook(ScheduleHook):
    """Gives the trainer reports in its own form, and the aggregator the chunks that are trained."""

    adds_evaluations = False  # the trainer takes the mean of what microbatches report

    def wrap(self, schedule: Schedule) -> Schedule:
        """Wrap the schedule; one all-reduce per step more, over context-parallel ranks."""

        @functools.wraps(schedule)
        def stock(**call: Any) -> Any:
            if call["forward_only"]:  # the trainer evaluates without DDP
                call["model"] = [chunk.module for chunk in call["model"]]
            return schedule(**call)

        hooked = super().wrap(stock)

        @functools.wraps(hooked)
        def run(**call: Any) -> Any:
            trainer = trainer_of(call)
            if call["forward_only"]:
                call["model"] = getattr(trainer, "models_wrapped", call["model"])
            return self._logged(hooked(**call), trainer)

        return run

    def _logged(self, reports: list[dict[str, Any]], trainer: Any) -> list[dict[str, Any]]:
        """Complete our reports over CP, which the trainer's log does not, in the log's form."""
        names = [name for name in self.reported if not name.startswith("stock/")]
        if not reports:  # an earlier pipeline stage
            return reports
        pairs = torch.stack([report[name] for report in reports for name in names])
        aggregator = self.aggregator
        if aggregator is not None and aggregator.cp_size > 1:
            dist.all_reduce(pairs, group=aggregator.groups.cp_group)
            pairs = pairs / aggregator.cp_size
        for report, values in zip(reports, pairs.view(len(reports), -1, 2), strict=True):
            report.update(zip(names, (values[:, 0] / values[:, 1]).unbind(), strict=True))
            if "loss" in names and trainer.args.calculate_per_token_loss:
                report["loss"] = tuple(values[names.index("loss")].unbind())
        return reports


def install(
    aggregation: Aggregation | str | None, *, options: Options | None = None
) -> ScheduleHook:
    """Hook mcore_adapter's trainers in this process; return the hook, which counts its steps.

    Call it before a trainer is constructed. The arguments are those of :class:`ScheduleHook`;
    ``prompt_mean`` is refused, for there are no prompt ids, and ``count="weights"``, for there are
    no token weights. Raises :class:`ContractError` if mcore_adapter is not there. Adds the numbers
    of the hook to what the trainer logs, and one all-reduce per step over context-parallel ranks.
    """
    trainer = imported(_MODULE, expected="mcore_adapter of ROLL: install it").McaTrainer
    hook = _Hook(aggregation, McaIntegration(trainer), options=options)
    rebind(hook, [_MODULE], "mcore_adapter")
    trainer.metrics_keys = list(dict.fromkeys(["loss", *hook.reported]))
    return hook
