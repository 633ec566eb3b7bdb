"""Lookahead for loops that read their data while they train.

A weight may need counts of the whole step (``docs/math.md``, "What each mode must know").
A loop that pulls microbatches from an iterator inside the schedule wraps it: the step's
microbatches are read, counted, planned, and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.counts import Sequences, StepTotals
from megatron_lossagg.errors import PlanError
from megatron_lossagg.layout import IntsLike
from megatron_lossagg.plan import EmptyStep, StepPlan, plan_step


@dataclass(frozen=True, kw_only=True)
class StepMicrobatch:
    """One replayed microbatch."""

    rows: list[int]
    """Its rows' positions in the step, for ``StepPlan.reducer``; fillers are the caller's."""
    data: Any
    """What the iterator gave; None on a tensor-parallel rank without an iterator."""


class StepBuffer:
    """Reads one optimizer step's microbatches, plans the step, replays them.

    ``data_iterator``: yields microbatches, or None on a rank that gets its data by
    broadcast (Megatron-LM: all tensor-parallel ranks but the first). Reading happens here,
    outside the schedule. Raises :class:`PlanError` where the iterator ends early.
    """

    def __init__(self, data_iterator: Iterator[Any] | None, num_microbatches: int) -> None:
        self.num_microbatches = num_microbatches
        self._counts: list[list[int]] = []
        self._data: list[Any] = [None] * num_microbatches
        self._reads = data_iterator is not None
        if data_iterator is not None:
            for index in range(num_microbatches):
                try:
                    self._data[index] = next(data_iterator)
                except StopIteration:
                    raise PlanError(
                        f"the data iterator ended after {index} of {num_microbatches} microbatches"
                        ": give whole steps, or lower num_microbatches"
                    ) from None

    def plan(
        self,
        aggregation: Aggregation,
        count: Callable[[Any], IntsLike],
        *,
        group: ProcessGroup | None = None,
        tp_group: ProcessGroup | None = None,
        totals: StepTotals | None = None,
        empty_step: EmptyStep = "zero",
    ) -> StepPlan:
        """Count the buffered microbatches and plan the step; see :func:`plan_step`.

        ``count``: active tokens of each row of a microbatch, fillers left out; the sums of a
        float mask will do. ``group``: the data-parallel group. ``tp_group``: the
        tensor-parallel group, needed where some of its ranks have no iterator: its first rank
        broadcasts the counts, one ``broadcast_object_list``.
        """
        counts = [_whole_numbers(count(data)) for data in self._data] if self._reads else None
        if tp_group is not None and dist.get_world_size(tp_group) > 1:
            shared = [counts]
            dist.broadcast_object_list(
                shared, src=dist.get_global_rank(tp_group, 0), group=tp_group
            )
            counts = shared[0]
        if counts is None:
            raise PlanError(
                "this rank has no data iterator and got no counts: pass tp_group=, whose first "
                "rank reads the data"
            )
        self._counts = counts
        sequences = Sequences(
            active_tokens=[n for microbatch in counts for n in microbatch],
            microbatch=np.repeat(np.arange(len(counts)), [len(c) for c in counts]),
            num_microbatches=self.num_microbatches,
        )
        return plan_step(aggregation, sequences, group=group, totals=totals, empty_step=empty_step)

    def __iter__(self) -> Iterator[StepMicrobatch]:
        """Replay the microbatches in order, each with its rows; may be called again."""
        if len(self._counts) != self.num_microbatches:
            raise PlanError("StepBuffer replays a planned step: call plan() before iterating")
        first = 0
        for counts, data in zip(self._counts, self._data, strict=True):
            yield StepMicrobatch(rows=list(range(first, first + len(counts))), data=data)
            first += len(counts)


def _whole_numbers(values: IntsLike) -> list[int]:
    """Counts as Python integers; what is no whole number is left for plan_step to refuse."""
    array = np.asarray(values)
    if array.dtype.kind == "f" and (array == np.rint(array)).all():
        array = array.astype(np.int64)
    numbers: list[int] = array.tolist()
    return numbers
