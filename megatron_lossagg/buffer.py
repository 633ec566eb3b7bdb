"""Plan a step whose data is read while it trains: read, count, plan, replay.

A weight may need counts of the whole step (``docs/math.md``, "What each mode must know").
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.counts import StepTotals
from megatron_lossagg.errors import PlanError
from megatron_lossagg.integers import IntsLike, checked_integers, is_integer
from megatron_lossagg.lookahead import Lookahead
from megatron_lossagg.microbatch import PADDING
from megatron_lossagg.options import Options
from megatron_lossagg.plan import StepPlan, plan_step
from megatron_lossagg.sequences import MOST_TOKENS, Sequences

__all__ = ["MicrobatchSequences", "StepBuffer", "StepMicrobatch"]

_DEFAULTS = Options()


@dataclass(frozen=True, kw_only=True, eq=False)
class MicrobatchSequences:
    """What a step must know of a microbatch before it runs: one entry per segment, on the CPU.

    Numbers are those of whole sequences, before slicing for context parallelism.
    """

    active_tokens: IntsLike
    """n_s of each segment; the sums of a float mask will do."""
    lengths: IntsLike | None = None
    """Tokens of each segment, padding included; None if no layout is made from them."""
    sample: IntsLike | None = None
    """Sample id of each segment; None: each sequence is its own sample."""
    prompt: IntsLike | None = None
    """Prompt id of each segment, global over the data-parallel group."""
    is_padding: IntsLike | None = None
    """1 for a segment that only fills a shape, whose other numbers (but its length) are not read;
    None: no segment is."""

    def checked(self) -> MicrobatchSequences:
        """Return these as arrays; counts that are not integers are left to :func:`plan_step`."""
        active_G = np.asarray(self.active_tokens)
        if active_G.ndim != 1:
            raise ValueError(f"got {active_G.ndim} dimensions, expected one number per sequence")
        is_integral = active_G.dtype.kind == "f" and (active_G == np.rint(active_G)).all()
        if is_integral and (np.abs(active_G) <= MOST_TOKENS).all():
            active_G = active_G.astype(np.int64)
        others = {
            name: checked_integers(name, values, PlanError, length=len(active_G))
            for name, values in vars(self).items()
            if name != "active_tokens" and values is not None
        }
        others.setdefault("is_padding", np.zeros(len(active_G), dtype=np.int64))
        return MicrobatchSequences(active_tokens=active_G, **others)

    def of_sequences(self, name: str) -> list[int]:
        """Return a field's checked values without those of padding; empty if it is None."""
        values_G = getattr(self, name)
        return [] if values_G is None else values_G[np.asarray(self.is_padding) == 0].tolist()


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
    """``MicrobatchSequences.lengths``, if ``count`` gave them."""


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
                f"got num_microbatches {num_microbatches!r}, expected an integer from 1"
            )
        if data_iterator is not None and not hasattr(data_iterator, "__next__"):
            raise PlanError(
                f"got a {type(data_iterator).__name__}, expected one iterator of microbatches or "
                "None: make a StepBuffer of each chunk's, and of a list of microbatches pass iter()"
            )
        self.num_microbatches = num_microbatches
        self._counts: list[MicrobatchSequences] = []
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
        active_tokens = _joined(counts, "active_tokens") or []
        sequences = _numbered(counts)
        replayed = [one for of_microbatch in sequences for one in of_microbatch if one != PADDING]
        if replayed != [*range(len(active_tokens))]:  # it would fail in the schedule, on some ranks
            fault = (
                f"the replay has sequences {replayed[:8]}, expected each of the step's "
                f"{len(active_tokens)} once, in order: report this defect of megatron_lossagg"
            )
        given = Sequences(
            active_tokens=active_tokens,
            sample=_joined(counts, "sample"),
            prompt=_joined(counts, "prompt"),
            microbatch=[i for i, mb in enumerate(counts) for _ in mb.of_sequences("active_tokens")],
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
            lengths = None if counted.lengths is None else [int(n) for n in counted.lengths]
            yield StepMicrobatch(index=index, sequences=sequences, data=data, lengths=lengths)

    def _read(self, data_iterator: Iterator[Any], source: Any) -> None:
        ahead = Lookahead(source, self.num_microbatches)
        for index in range(self.num_microbatches):
            try:
                ahead.add(next(data_iterator))
            except StopIteration:
                self._fault = (
                    f"the data iterator ended after {index} of {self.num_microbatches} "
                    "microbatches: pass whole steps, or lower num_microbatches"
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
    ) -> tuple[list[MicrobatchSequences] | None, str, Exception | None]:
        """Count each microbatch, or return why that failed and the error that caused it."""
        if self._fault or not self._reads:
            return None, self._fault, self._cause
        counts = []
        for index, data in enumerate(self._data):
            try:
                counted = count(data)
                if not isinstance(counted, MicrobatchSequences):
                    counted = MicrobatchSequences(active_tokens=counted)
                counts.append(counted.checked())
            except Exception as error:  # as above
                fault = (
                    f"counting microbatch {index} of {self.num_microbatches} raised {error!r}: "
                    "count gives the active tokens of each sequence, on the CPU"
                )
                return None, fault, error
        return counts, "", None


def _numbered(counts: list[MicrobatchSequences]) -> list[list[int]]:
    """Number the sequences of a step; a padding sequence is no sequence."""
    numbers = itertools.count()
    return [
        [PADDING if padding else next(numbers) for padding in np.asarray(counted.is_padding)]
        for counted in counts
    ]


def _joined(counts: list[MicrobatchSequences], name: str) -> list[int] | None:
    """Join a field over a step; a microbatch without ids is one where no sequence needs any."""
    if all(getattr(counted, name) is None for counted in counts):
        return None
    return [value for counted in counts for value in counted.of_sequences(name)]
