"""Plan a step whose data is read while it trains: read, copy, count, plan, replay.

A weight may need counts of the whole step (``docs/which-mode.md``, "What each mode must know"). A
loop that reads each microbatch just before it runs may refill one buffer with all of them, so what
is read ahead is copied.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lossagg.errors import PlanError
from megatron_lossagg.guards.before import check_microbatches
from megatron_lossagg.guards.refilled import KeptObjects
from megatron_lossagg.reduction.aggregation import Aggregation, Options
from megatron_lossagg.reduction.exchange import TP_RANK, to_begin, together
from megatron_lossagg.reduction.integers import IntsLike
from megatron_lossagg.reduction.layout import PADDING
from megatron_lossagg.reduction.plan import StepPlan, plan_step
from megatron_lossagg.reduction.sequences import Checked, Sequences

_DEFAULTS = Options()


@dataclass(frozen=True, kw_only=True)
class StepMicrobatch:
    """One replayed microbatch."""

    index: int
    """Its position in the step."""
    sequences: list[int]
    """Its sequences' positions in the step, for ``StepPlan.reducer``; -1 for padding."""
    data: Any
    """What the iterator returned; None on a tensor-parallel rank without an iterator."""
    lengths: list[int] | None = None
    """``Sequences.lengths``, if ``count`` gave them."""


class StepBuffer:
    """Reads one optimizer step's microbatches, plans the step, replays them.

    ``data_iterator``: yields microbatches, or None on a rank that gets its data by
    broadcast (Megatron-LM: all tensor-parallel ranks but the first); an interleaved pipeline
    has one per chunk, and a buffer for each. Reading happens here, outside the schedule.
    ``step_number``: of the step in its run, from 1, which says whether memory is looked at (below);
    None: since the latest :class:`LossAggregator` was made.

    Each microbatch is copied as it is read, CUDA tensors without a host sync, because an iterator
    may use its memory again: a buffer that it refills, one dict for all microbatches, views of one
    storage. Copied are the tensors and NumPy arrays in dicts, lists, tuples, dataclasses, the
    attributes of a microbatch and those of an object in it that has a tensor or array as an
    attribute, and these containers. What such an object or a dataclass refers to is not, if it is
    an object of another kind: a tensor that is refilled there, and may be of tokens, is reported by
    :meth:`plan` in steps 1, 2, 4, ..., 64 and each 64th.

    Raises :class:`PlanError` for what is not an iterator and for a ``num_microbatches`` that
    is not an integer from 1. An iterator that ends early or raises, and a microbatch that cannot be
    copied, is reported by :meth:`plan`, on every rank.

    Examples:
        >>> masks = [torch.tensor([[1, 1, 1, 0]]), torch.tensor([[1, 0, 0, 0]])]
        >>> buffer = StepBuffer(iter(masks), num_microbatches=2)
        >>> plan = buffer.plan(Aggregation("token_mean"), lambda mask: mask.sum(-1))
        >>> [mb.sequences for mb in buffer], plan.weights.tolist()
        ([[0], [1]], [0.25, 0.25])
    """

    def __init__(
        self,
        data_iterator: Iterator[Any] | None,
        num_microbatches: int,
        *,
        step_number: int | None = None,
    ) -> None:
        check_microbatches(num_microbatches, PlanError)
        if data_iterator is not None and not hasattr(data_iterator, "__next__"):
            raise PlanError(
                f"got a {type(data_iterator).__name__}, expected one iterator of microbatches or "
                "None: make a StepBuffer of each chunk's, and of a list of microbatches pass iter()"
            )
        self.num_microbatches = num_microbatches
        self._data: list[Any] = []
        self._replayed: list[StepMicrobatch] = []
        self._reads = data_iterator is not None
        self._error: PlanError | None = None
        self._kept = KeptObjects(step_number)
        if data_iterator is not None:
            self._read(data_iterator)

    def plan(
        self,
        aggregation: Aggregation,
        count: Callable[[Any], IntsLike | Sequences],
        *,
        group: ProcessGroup | None = None,
        tp_group: ProcessGroup | None = None,
        options: Options = _DEFAULTS,
        forward_only: bool | None = None,
        iteration: int | None = None,
    ) -> StepPlan:
        """Count the buffered microbatches and plan the step; see :func:`plan_step`.

        ``count``: active tokens of each sequence of a microbatch, padding sequences left out, or
        :class:`Sequences`. ``group``: the data-parallel group. ``tp_group``: the
        tensor-parallel group, needed if some of its ranks have no iterator: all take the
        numbers of its first rank, by one all-gather, two if they are long. ``options``,
        ``forward_only``, ``iteration``: as in :func:`plan_step`.

        An iterator that ended early or raised, and a ``count`` that raises, are reported as a
        wrong count is: :class:`PlanError` with the same message on every rank of ``group``,
        and on ``tp_group``'s. On the rank itself the error that was raised is among its causes.
        """
        counts: list[Checked] = []

        def given() -> Sequences:
            counts.extend(self._of_first_rank(count, tp_group, to_begin(forward_only)))
            return Sequences.of_microbatches(counts, self.num_microbatches)

        plan = plan_step(
            aggregation,
            given,
            group=group,
            options=options,
            forward_only=forward_only,
            iteration=iteration,
        )
        self._replayed = self._numbered(counts)
        return plan

    def _of_first_rank(
        self,
        count: Callable[[Any], IntsLike | Sequences],
        tp_group: ProcessGroup | None,
        doing: str,
    ) -> list[Checked]:
        with together(tp_group, doing, named=TP_RANK, raises=PlanError) as ranks:
            ranks.own = self._counted(count)
        counts: list[Checked] | None = ranks.of_ranks[0]
        if counts is None:
            raise PlanError(
                "this rank has no data iterator and got no counts: pass tp_group=, whose first "
                "rank reads the data"
            )
        return counts

    def _numbered(self, counts: Sequence[Checked]) -> list[StepMicrobatch]:
        """Number the sequences of the step in the order of its microbatches."""
        numbers = itertools.count()
        data = self._data or [None] * self.num_microbatches
        return [
            StepMicrobatch(
                index=index,
                sequences=[PADDING if pads else next(numbers) for pads in mb.is_padding],
                data=data[index],
                lengths=None if mb.lengths is None else [int(n) for n in mb.lengths],
            )
            for index, mb in enumerate(counts)
        ]

    def __iter__(self) -> Iterator[StepMicrobatch]:
        """Replay the microbatches in order, each with its sequences; may be called again."""
        if not self._replayed:
            raise PlanError("StepBuffer replays a planned step: call plan() before iterating")
        return iter(self._replayed)

    def _read(self, data_iterator: Iterator[Any]) -> None:
        for index in range(self.num_microbatches):
            doing = "the data iterator raised"
            try:
                data = next(data_iterator)
                doing = (
                    "copying a microbatch, so that the iterator may use its memory again, raised"
                )
                self._data.append(_copied(data, functools.partial(self._kept.note, index)))
            except StopIteration:
                self._error = PlanError(
                    f"the data iterator ended after {index} of {self.num_microbatches} "
                    "microbatches: pass whole steps, or lower num_microbatches"
                )
                return
            except Exception as error:  # of any type: the other ranks wait in plan()
                self._error = PlanError(
                    f"{doing} {error!r} after {index} of "
                    f"{self.num_microbatches} microbatches: its traceback is on that rank"
                )
                self._error.__cause__ = error
                return
        self._kept.end()

    def _counted(self, count: Callable[[Any], IntsLike | Sequences]) -> list[Checked] | None:
        """Count each microbatch; None on a rank that reads none. Raises :class:`PlanError`."""
        if self._error is not None:
            raise self._error
        if not self._reads:
            return None
        counts, active = [], []
        for index, data in enumerate(self._data):
            try:
                counted = count(data)
                if not isinstance(counted, Sequences):
                    counted = Sequences(active_tokens=counted)
                counts.append(counted.listed())
                active.append(sum(map(float, counts[-1].trained_entries()["active_tokens"])))
            except Exception as error:
                raise PlanError(
                    f"counting microbatch {index} of {self.num_microbatches} raised {error!r}: "
                    "count gives the active tokens of each sequence, on the CPU"
                ) from error
        if fault := self._kept.fault(active):
            raise PlanError(fault)
        return counts


def _copied(microbatch: Any, note: Callable[[list[Any], list[Any]], None]) -> Any:
    """Copy a microbatch's containers, tensors and arrays, and nothing that is of another kind.

    ``note`` is called with what was kept as it is, and with the arrays that were copied.
    """
    seen: dict[int, Any] = {}  # with the values: a mapping may make its own anew
    known: dict[int, Any] = {}
    arrays: list[tuple[Any, Any]] = []  # each with what holds it

    def look_at(value: Any, *, is_microbatch: bool, in_object: bool = False) -> None:
        if id(value) in seen:
            return
        seen[id(value)] = value
        parts = _parts(value, is_microbatch=is_microbatch, in_object=in_object)
        if parts is None and isinstance(value, (Tensor, np.ndarray)):
            known[id(value)] = _copied_array(value)
        elif parts is None and not is_microbatch:
            known[id(value)] = value
        in_lockstep = is_microbatch and isinstance(value, tuple)  # one per chunk of the model
        # What an object refers to may be a whole data set.
        in_object |= not (is_microbatch or isinstance(value, (Mapping, list, tuple, np.ndarray)))
        for part in parts or ():
            look_at(part, is_microbatch=in_lockstep, in_object=in_object)
            if isinstance(part, (Tensor, np.ndarray)):
                arrays.append((part, value))

    look_at(microbatch, is_microbatch=True)
    copied = copy.deepcopy(microbatch, known)  # which adds to ``known`` what it copies
    kept = {key: value for key, value in seen.items() if known.get(key, value) is value}
    note([*kept.values()], [array for array, holder in arrays if id(holder) not in kept])
    return copied


def _parts(value: Any, *, is_microbatch: bool, in_object: bool) -> Iterable[Any] | None:
    """Return what a container holds, None if it is no container."""
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        objects: list[Any] = value.ravel().tolist()
        return objects
    if isinstance(value, (Tensor, np.ndarray, type)):
        return None
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple)):
        return value
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    held = list(getattr(value, "__dict__", {}).values())
    holds_some = any(isinstance(part, (Tensor, np.ndarray)) for part in held)
    is_container = hasattr(value, "__dict__") and (is_microbatch or (holds_some and not in_object))
    return held if is_container else None


def _copied_array(array: Any) -> Any:
    if not isinstance(array, Tensor):
        return np.array(array, subok=True)
    if array.is_pinned():  # its copy to the device does not wait
        return torch.empty_like(array, pin_memory=True).copy_(array)
    return array.clone()
