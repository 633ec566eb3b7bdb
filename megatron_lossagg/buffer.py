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
from megatron_lossagg.counts import MOST_TOKENS, Sequences, StepTotals
from megatron_lossagg.errors import PlanError
from megatron_lossagg.integers import IntsLike, is_integer
from megatron_lossagg.plan import EmptyStep, StepPlan, plan_step

__all__ = ["StepBuffer", "StepMicrobatch"]


@dataclass(frozen=True, kw_only=True)
class StepMicrobatch:
    """One replayed microbatch."""

    rows: list[int]
    """Its rows' positions in the step, for ``StepPlan.reducer``; fillers are the caller's."""
    data: Any
    """What the iterator returned; None on a tensor-parallel rank without an iterator."""


class StepBuffer:
    """Reads one optimizer step's microbatches, plans the step, replays them.

    ``data_iterator``: yields microbatches, or None on a rank that gets its data by
    broadcast (Megatron-LM: all tensor-parallel ranks but the first); an interleaved pipeline
    has one per chunk, and a buffer for each. Reading happens here, outside the schedule.
    Raises :class:`PlanError` for what is not an iterator and for a ``num_microbatches`` that
    is not an integer from 1; an iterator that ends early or raises is reported by :meth:`plan`.
    """

    def __init__(self, data_iterator: Iterator[Any] | None, num_microbatches: int) -> None:
        if not is_integer(num_microbatches, lowest=1):
            raise PlanError(
                f"got num_microbatches {num_microbatches!r}, expected an integer from 1: give the "
                "number of microbatches that the schedule runs per step"
            )
        if data_iterator is not None and not hasattr(data_iterator, "__next__"):
            raise PlanError(
                f"got a {type(data_iterator).__name__}, expected one iterator of microbatches or "
                "None: an interleaved pipeline has one iterator per chunk, make a StepBuffer of "
                "each; of a list of microbatches pass iter(...)"
            )
        self.num_microbatches = num_microbatches
        self._counts: list[list[int]] = []
        self._data: list[Any] = [None] * num_microbatches
        self._reads = data_iterator is not None
        self._fault = ""
        self._cause: Exception | None = None
        if data_iterator is not None:
            self._read(data_iterator)

    def plan(
        self,
        aggregation: Aggregation,
        count: Callable[[Any], IntsLike],
        *,
        group: ProcessGroup | None = None,
        tp_group: ProcessGroup | None = None,
        totals: StepTotals | None = None,
        empty_step: EmptyStep = "zero",
        rejects_tokens: bool = False,
        locate: bool = False,
    ) -> StepPlan:
        """Count the buffered microbatches and plan the step; see :func:`plan_step`.

        ``count``: active tokens of each row of a microbatch, fillers left out; the sums of a
        float mask will do. ``group``: the data-parallel group. ``tp_group``: the
        tensor-parallel group, needed where some of its ranks have no iterator: all take the
        counts of its first rank, by one ``all_gather_object``.

        An iterator that ended early or raised, and a ``count`` that raises, are reported as a
        wrong count is: :class:`PlanError` with the same message on every rank of ``group``,
        and on ``tp_group``'s. On the rank itself its cause is the error that was raised.
        """
        counts, fault, cause = self._counted(count)
        if tp_group is not None and dist.get_world_size(tp_group) > 1:
            gathered: list[Any] = [None] * dist.get_world_size(tp_group)
            dist.all_gather_object(gathered, (counts, fault), group=tp_group)
            counts = gathered[0][0]
            faults = [f"tensor-parallel rank {r}: {f}" for r, (_, f) in enumerate(gathered) if f]
            fault = next(iter(faults), "")
        if counts is None and not fault:
            fault = (
                "this rank has no data iterator and got no counts: pass tp_group=, whose first "
                "rank reads the data"
            )
        if counts is None or fault:
            counts = []
        sequences = Sequences(
            active_tokens=[n for microbatch in counts for n in microbatch],
            microbatch=np.repeat(np.arange(len(counts)), [len(c) for c in counts]),
            num_microbatches=self.num_microbatches,
        )
        try:
            plan = plan_step(
                aggregation,
                sequences,
                group=group,
                totals=totals,
                empty_step=empty_step,
                fault=fault,
                rejects_tokens=rejects_tokens,
                locate=locate,
            )
        except PlanError as error:
            raise error from cause
        self._counts = counts
        return plan

    def __iter__(self) -> Iterator[StepMicrobatch]:
        """Replay the microbatches in order, each with its rows; may be called again."""
        if len(self._counts) != self.num_microbatches:
            raise PlanError("StepBuffer replays a planned step: call plan() before iterating")
        first = 0
        for counts, data in zip(self._counts, self._data, strict=True):
            yield StepMicrobatch(rows=list(range(first, first + len(counts))), data=data)
            first += len(counts)

    def _read(self, data_iterator: Iterator[Any]) -> None:
        for index in range(self.num_microbatches):
            try:
                self._data[index] = next(data_iterator)
            except StopIteration:
                self._fault = (
                    f"the data iterator ended after {index} of {self.num_microbatches} "
                    "microbatches: give whole steps, or lower num_microbatches"
                )
                return
            except Exception as error:  # of any type: the other ranks wait in plan()
                self._fault = (
                    f"the data iterator raised {error!r} after {index} of "
                    f"{self.num_microbatches} microbatches: its traceback is on that rank"
                )
                self._cause = error
                return

    def _counted(
        self, count: Callable[[Any], IntsLike]
    ) -> tuple[list[list[int]] | None, str, Exception | None]:
        """Count each microbatch, or return why that failed and the error that caused it."""
        if self._fault or not self._reads:
            return None, self._fault, self._cause
        counts = []
        for index, data in enumerate(self._data):
            try:
                counts.append(_host_counts(count(data)))
            except Exception as error:  # as above
                fault = (
                    f"counting microbatch {index} of {self.num_microbatches} raised {error!r}: "
                    "count gives the active tokens of each row, on the host"
                )
                return None, fault, error
        return counts, "", None


def _host_counts(values: IntsLike) -> list[int]:
    """Convert counts to Python numbers; plan_step refuses those that are not integers."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"got {array.ndim} dimensions, expected one number per row")
    is_integral = array.dtype.kind == "f" and (array == np.rint(array)).all()
    if is_integral and (np.abs(array) <= MOST_TOKENS).all():
        array = array.astype(np.int64)
    numbers: list[int] = array.tolist()
    return numbers
