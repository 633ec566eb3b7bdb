"""Lookahead for loops that read their data while they train.

A weight may need counts of the whole step (``docs/math.md``, "What each mode must know").
A loop that pulls microbatches from an iterator inside the schedule wraps it: the step's
microbatches are read, counted, planned, and replayed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.counts import StepTotals
from megatron_lossagg.errors import PlanError
from megatron_lossagg.integers import Ints, IntsLike, checked_integers, is_integer
from megatron_lossagg.lookahead import Lookahead
from megatron_lossagg.microbatch import PADDING
from megatron_lossagg.options import Options
from megatron_lossagg.plan import StepPlan, plan_step
from megatron_lossagg.sequences import MOST_TOKENS, Sequences

__all__ = ["MicrobatchSequences", "StepBuffer", "StepMicrobatch"]

_DEFAULTS = Options()


@dataclass(frozen=True, kw_only=True, eq=False)
class MicrobatchSequences:
    """What a step must know of a microbatch before it runs: one entry per segment, on the host.

    Numbers are those of whole sequences, before slicing for context parallelism.
    """

    active_tokens: IntsLike
    """n_s of each segment; the sums of a float mask will do."""
    lengths: IntsLike | None = None
    """Tokens of each segment, padding included; None where no layout is made from them."""
    sample: IntsLike | None = None
    """Sample id of each segment; None: each sequence is its own sample."""
    prompt: IntsLike | None = None
    """Prompt id of each segment, global over the data-parallel group."""
    is_padding: IntsLike | None = None
    """1 for a segment that only fills a shape, whose other numbers (but its length) are not read;
    None: no segment is."""


@dataclass(frozen=True, kw_only=True)
class StepMicrobatch:
    """One replayed microbatch."""

    index: int
    """Its position in the step."""
    sequences: list[int]
    """Its sequences' positions in the step, for ``StepPlan.reducer``; -1 for a padding sequence
    that ``count``
    named, others are the caller's."""
    data: Any
    """What the iterator returned; None on a tensor-parallel rank without an iterator."""
    lengths: list[int] | None = None
    """``MicrobatchSequences.lengths``, where ``count`` gave them."""


class _Counted(NamedTuple):
    """The numbers of one microbatch as Python integers, to be sent to other ranks."""

    is_padding: list[bool]
    lengths: list[int] | None
    active_tokens: list[int]
    """Of sequences, without padding sequences; as are the ids."""
    sample: list[int] | None
    prompt: list[int] | None


class StepBuffer:
    """Reads one optimizer step's microbatches, plans the step, replays them.

    ``data_iterator``: yields microbatches, or None on a rank that gets its data by
    broadcast (Megatron-LM: all tensor-parallel ranks but the first); an interleaved pipeline
    has one per chunk, and a buffer for each. Reading happens here, outside the schedule.
    ``source``: where ``data_iterator`` is made anew for each step, what it reads from.

    An iterator may use its memory again: a buffer that it refills, one dict for all microbatches,
    views of one storage. The first step of an iterator (``source``), and the first with more
    microbatches than before, is copied while it is read, and is right on any of them. Where no
    two microbatches of that step shared a byte, the copies are dropped, and later steps are not
    copied. One of these in which two share memory is refused, and so is a shared one that cannot
    be copied. Seen are the tensors and NumPy arrays in dicts, lists, tuples, dataclasses and the
    attributes of a microbatch.

    Raises :class:`PlanError` for what is not an iterator and for a ``num_microbatches`` that
    is not an integer from 1. An iterator that ends early, raises, or is refused is reported by
    :meth:`plan`, on every rank.
    """

    def __init__(
        self, data_iterator: Iterator[Any] | None, num_microbatches: int, *, source: Any = None
    ) -> None:
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
        self._counts: list[_Counted] = []
        self._sequences: list[list[int]] = []
        self._data: list[Any] = [None] * num_microbatches
        self._reads = data_iterator is not None
        self._fault = ""
        self._cause: Exception | None = None
        if data_iterator is not None:
            self._read(data_iterator, data_iterator if source is None else source)

    def plan(
        self,
        aggregation: Aggregation,
        count: Callable[[Any], IntsLike | MicrobatchSequences],
        *,
        group: ProcessGroup | None = None,
        tp_group: ProcessGroup | None = None,
        totals: StepTotals | None = None,
        options: Options = _DEFAULTS,
    ) -> StepPlan:
        """Count the buffered microbatches and plan the step; see :func:`plan_step`.

        ``count``: active tokens of each sequence of a microbatch, padding sequences left out, or
        :class:`MicrobatchSequences`. ``group``: the data-parallel group. ``tp_group``: the
        tensor-parallel group, needed where some of its ranks have no iterator: all take the
        numbers of its first rank, by one ``all_gather_object``.

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
        sequences, num_sequences = (
            _numbered(counts),
            sum(len(counted.active_tokens) for counted in counts),
        )
        replayed = [
            sequence
            for of_microbatch in sequences
            for sequence in of_microbatch
            if sequence != PADDING
        ]
        if replayed != list(
            range(num_sequences)
        ):  # a wrong replay would fail in the schedule, on some
            fault = (
                f"the replay has sequences {replayed[:8]}, expected each of the step's "
                f"{num_sequences} sequences "
                "once, in order: this is a defect of megatron_lossagg, report it"
            )
        given = Sequences(
            active_tokens=[n for counted in counts for n in counted.active_tokens],
            sample=_ids([counted.sample for counted in counts]),
            prompt=_ids([counted.prompt for counted in counts]),
            microbatch=np.repeat(np.arange(len(counts)), [len(c.active_tokens) for c in counts]),
            num_microbatches=self.num_microbatches,
        )
        try:
            plan = plan_step(
                aggregation,
                given,
                group=group,
                totals=totals,
                options=options,
                fault=fault,
            )
        except PlanError as error:
            raise error from cause
        self._counts, self._sequences = counts, sequences
        return plan

    def __iter__(self) -> Iterator[StepMicrobatch]:
        """Replay the microbatches in order, each with its sequences; may be called again."""
        if len(self._counts) != self.num_microbatches:
            raise PlanError("StepBuffer replays a planned step: call plan() before iterating")
        replayed = zip(self._counts, self._sequences, self._data, strict=True)
        for index, (counted, sequences, data) in enumerate(replayed):
            yield StepMicrobatch(
                index=index, sequences=sequences, data=data, lengths=counted.lengths
            )

    def _read(self, data_iterator: Iterator[Any], source: Any) -> None:
        ahead = Lookahead(source, self.num_microbatches)
        for index in range(self.num_microbatches):
            try:
                ahead.add(next(data_iterator))
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
        try:
            self._data = ahead.microbatches()
        except PlanError as error:
            self._fault = str(error)

    def _counted(
        self, count: Callable[[Any], IntsLike | MicrobatchSequences]
    ) -> tuple[list[_Counted] | None, str, Exception | None]:
        """Count each microbatch, or return why that failed and the error that caused it."""
        if self._fault or not self._reads:
            return None, self._fault, self._cause
        counts = []
        for index, data in enumerate(self._data):
            try:
                counts.append(_counted(count(data)))
            except Exception as error:  # as above
                fault = (
                    f"counting microbatch {index} of {self.num_microbatches} raised {error!r}: "
                    "count gives the active tokens of each sequence, on the host"
                )
                return None, fault, error
        return counts, "", None


def _counted(sequences: IntsLike | MicrobatchSequences) -> _Counted:
    """Convert what ``count`` gave; plan_step refuses counts that are not integers."""
    if not isinstance(sequences, MicrobatchSequences):
        sequences = MicrobatchSequences(active_tokens=sequences)
    active_G = _active_tokens(sequences.active_tokens)
    size = len(active_G)
    is_padding_G = _of_segments("is_padding", sequences.is_padding, size)
    keep_G = np.ones(size, dtype=bool) if is_padding_G is None else is_padding_G == 0

    def of_sequences(name: str, values: IntsLike | None) -> list[int] | None:
        of_segments = _of_segments(name, values, size)
        return None if of_segments is None else of_segments[keep_G].tolist()

    length_G = _of_segments("lengths", sequences.lengths, size)
    return _Counted(
        is_padding=(~keep_G).tolist(),
        lengths=None if length_G is None else length_G.tolist(),
        active_tokens=active_G[keep_G].tolist(),
        sample=of_sequences("sample", sequences.sample),
        prompt=of_sequences("prompt", sequences.prompt),
    )


def _numbered(counts: list[_Counted]) -> list[list[int]]:
    """Number the sequences of a step; a padding sequence is no sequence."""
    numbers = itertools.count()
    return [
        [PADDING if padding else next(numbers) for padding in counted.is_padding]
        for counted in counts
    ]


def _of_segments(name: str, values: IntsLike | None, size: int) -> Ints | None:
    if values is None:
        return None
    return checked_integers(name, values, PlanError, length=size)


def _active_tokens(values: IntsLike) -> np.ndarray[Any, Any]:
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"got {array.ndim} dimensions, expected one number per sequence")
    is_integral = array.dtype.kind == "f" and (array == np.rint(array)).all()
    if is_integral and (np.abs(array) <= MOST_TOKENS).all():
        array = array.astype(np.int64)
    return array


def _ids(of_microbatches: list[list[int] | None]) -> list[int] | None:
    """Join the ids of a step; a microbatch without ids is one where no sequence needs any."""
    if all(ids is None for ids in of_microbatches):
        return None
    return [i for ids in of_microbatches for i in ids or []]
