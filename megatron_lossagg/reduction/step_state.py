"""What a plan knows of the step that runs over it, and the log that the step's microbatches write.

A microbatch writes one line: its sequences, the sums of its mask, its partial losses with the
gradients that arrive at them, and the loss that was returned. The step's guards read the log when
the step ends.

Shape suffixes: G = segments of a microbatch; S = sequences of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.errors import ReducerError
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.faults import Faults
from megatron_lossagg.reduction.integers import Ints, first_few
from megatron_lossagg.reduction.layout import PADDING, Layout, SegmentSums

if TYPE_CHECKING:
    from megatron_lossagg.reduction.microbatch import Microbatch
    from megatron_lossagg.reduction.plan import StepPlan
    from megatron_lossagg.reduction.sequences import Checked

LossScale = Callable[[Tensor], Tensor]
"""Multiplies by the loss scale of the moment."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Known:
    """What a step knows of a microbatch by its sequences alone; integers on the CPU."""

    sequences: Ints
    """int64 ``[G]``: the sequence of each segment, -1 for a padding sequence."""
    own: Ints
    """The sequences of the segments that are not padding."""
    counted: Ints
    """int64 ``[G]``: the plan's count of each segment's sequence, 0 for a padding sequence."""
    counted_tokens: int
    """Their sum: the microbatch's active tokens, complete over CP."""
    expected: bytes
    """What a mask's cumulative sum should be at the end of each segment, ``[G]``, at that of the
    mask, and before the last position of each segment, ``[G]``: int32."""


@dataclass(kw_only=True, eq=False)
class Term:
    """A partial loss: what one call of a microbatch's ``reduce`` has returned."""

    aggregation: Aggregation
    is_recomputed: bool
    """Whether it was made in a backward pass, by a checkpoint."""
    num_returned: int
    """Microbatches for which loss_func had returned before."""
    has_gradient: bool = False
    """Whether its losses require one."""
    can_be_trained: bool = False
    """Whether it does."""
    losses: tuple[Any, ...] = ()
    """Which tensor was reduced, without keeping it; of one that can be trained, in training."""
    value: Tensor | None = None
    """Likewise."""
    loss_scale: LossScale | None = None
    """The one that there was when it was made."""
    version: int = 0
    """Of the value, which a change in place increases."""
    arrived: list[tuple[int, list[Tensor]]] = field(default_factory=list)
    """Of each backward pass that reached it: for how many microbatches loss_func had returned; the
    gradient, and the loss scale if there is one."""
    on_arrival: Callable[[Any], None] | None = None
    """Gets, when the first gradient arrives, the node of the graph that made the losses."""


@dataclass(kw_only=True, eq=False)
class Line:
    """What one microbatch did in a step, and how messages name it; nothing of its tokens' size."""

    known: Known
    layout: Layout
    planned: Checked
    """The sequences of the step."""
    rejects_tokens: bool
    """Whether a sequence may train fewer tokens than were counted."""
    is_of_step: bool = False
    """Whether the running step made it, of a layout of its own or one that it has checked."""
    trained: SegmentSums
    """Tokens that the mask trains."""
    trained_weights: SegmentSums | None = None
    """The sums of their weights, in float64; None if the plan has none."""
    terms: list[Term] = field(default_factory=list)
    is_reduced: bool = False
    """Whether there is a term under the step's own aggregation."""
    number: int | None = None
    """Its place among those for which loss_func has returned; None: it has not."""
    loss: Tensor | None = None
    version: int = 0
    """Of the loss."""
    coefficient: float = 1.0
    """With which the step's own partial loss should arrive."""
    heard: list[Tensor] = field(default_factory=list)
    """Gradients at the model's output, if it is listened to."""
    num_early: int = 0
    """How many of them had arrived before loss_func returned, which are not trained."""

    def __str__(self) -> str:
        """Name the microbatch: ``microbatch 2 with sequences 5, 6``."""
        real = self.known.own
        if not len(real):
            return "a microbatch without sequences"
        number = "a microbatch"
        if self.planned.microbatch is not None:
            number = f"microbatch {self.planned.microbatch[real[0]]}"
        return f"{number} with sequences {first_few(real)}"

    @property
    def is_sliced_by_framework(self) -> bool:
        """Whether the mask has only this rank's part of each sequence."""
        return self.layout.is_local and self.layout.cp_size > 1

    @property
    def rank_name(self) -> str:
        """Name this rank."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        return f"rank {rank} (context-parallel rank {self.layout.cp_rank})"

    @property
    def mask_name(self) -> str:
        """Name this microbatch's mask on this rank."""
        return f"{self.rank_name}: the mask of {self}"

    def token(self, index: int) -> tuple[str, str]:
        """Name the sequence, and the token in it, that this rank's token ``index`` is."""
        segment, token = self.layout.place(index)
        sequence = self.known.sequences[segment]
        whose = "a padding sequence" if sequence == PADDING else f"sequence {sequence}"
        part = " of this rank's part" if self.is_sliced_by_framework else ""
        return f"{whose} (segment {segment} of {self})", f"{token}{part}"


class StepLog:
    """The lines of a step's microbatches. It keeps neither the step nor a token's loss.

    ``aggregation``: the step's own. ``trains``: whether it is a training step.
    """

    def __init__(self, aggregation: Aggregation, *, trains: bool = True) -> None:
        self.aggregation = aggregation
        self.trains = trains
        self.lines: list[Line] = []
        """In the order in which they were first reduced."""
        self.returned: list[Line] = []
        """In the order in which loss_func returned for them."""
        self.pass_began = 0
        """How many had returned when the latest pass over the step began."""
        self.loss_scale: Callable[[], LossScale | None] | None = None
        """Returns that of the moment; None: nobody asks for the gradients of partial losses."""
        self.on_term: Callable[[Line, Term, Tensor, Microbatch], None] | None = None
        """Gets each term as it is made, with its losses; a guard that looks at their graph."""
        self.on_unusual_term: Callable[[Line, Term, StepPlan], None] | None = None
        """Gets those under another aggregation than the step's, or without ``step.microbatch``."""

    def add(self, line: Line, term: Term, plan: StepPlan) -> None:
        """Write a term under a plan into its microbatch's line; raises what a guard does."""
        is_own = term.aggregation is self.aggregation or term.aggregation == self.aggregation
        if not (is_own and line.is_of_step) and self.on_unusual_term is not None:
            self.on_unusual_term(line, term, plan)
        if not line.terms:
            self.lines.append(line)
        line.terms.append(term)
        line.is_reduced |= is_own
        if self.loss_scale is not None:
            term.loss_scale = self.loss_scale()

    def arrived(self, term: Term, gradient: Tensor, node: Any = None) -> None:
        """Note the gradient that arrives at a term; ``node``: what made its losses."""
        if term.on_arrival is not None:
            term.on_arrival(node)
            term.on_arrival = None
        if self.loss_scale is not None:
            found = [gradient.detach()]
            if term.loss_scale is not None:
                found.append(term.loss_scale(torch.ones_like(gradient)).reshape(()))
            term.arrived.append((len(self.returned), found))


@dataclass(kw_only=True, eq=False)
class StepState:
    """The state of one plan's step; shared by ``StepPlan.under``."""

    faults: Faults = field(default_factory=Faults)
    """Where checks on a device leave their results."""
    rejects_tokens: bool = False
    """Whether loss masks were declared to select fewer tokens than were counted."""
    is_stepped: bool = False
    """Whether a training step has begun over the plan."""
    log: StepLog | None = None
    """Of the step that runs over the plan; None while none does."""
    known: dict[object, Known] = field(default_factory=dict)
    """The planned microbatches, by the bytes of their sequences and by their range."""

    def refuse_others(self) -> None:
        """While the step runs, let no microbatch of another plan make a partial loss."""
        _running.add(self)

    def end(self) -> None:
        """End the step that runs over the plan."""
        self.log = None
        _running.discard(self)

    def check_running(self, partial_loss: Tensor) -> None:
        """Refuse a partial loss that can be trained if steps run, and none over this plan.

        A metric without a gradient may be of any plan.
        """
        if _running and partial_loss.requires_grad:
            raise ReducerError(
                "the reducer belongs to a plan other than the running step's: make it with "
                "step.microbatch(...), and a term in another mode with its reduce(losses, mode)"
            )


_running: WeakSet[StepState] = WeakSet()
"""The plans' states of the steps that run; one that was given up goes with its aggregator."""
