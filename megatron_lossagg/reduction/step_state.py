"""What a plan knows of the step that runs over it; shared by ``StepPlan.under``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakSet

from torch import Tensor

from megatron_lossagg.errors import ReducerError
from megatron_lossagg.reduction.faults import Faults

if TYPE_CHECKING:
    from megatron_lossagg.reduction.reducer import Reducer

OnReduce = Callable[["Reducer", Tensor, Tensor], None]
"""Gets each call of a reducer of the running step: the reducer, its losses, the partial loss."""


@dataclass(kw_only=True, eq=False)
class StepState:
    """The state of one plan's step."""

    faults: Faults = field(default_factory=Faults)
    """Where checks on a device leave their results."""
    rejects_tokens: bool = False
    """Whether loss masks were declared to select fewer tokens than were counted."""
    is_stepped: bool = False
    """Whether a training step has begun over the plan."""
    on_reduce: OnReduce | None = None
    """Of the step that runs over the plan; None while none does."""

    def begin(self, on_reduce: OnReduce) -> None:
        """Tell ``on_reduce`` of each reducer's call from here on."""
        self.on_reduce = on_reduce

    def refuse_others(self) -> None:
        """While the step runs, let no reducer of another plan make a partial loss."""
        _running.add(self)

    def end(self) -> None:
        """End the step that runs over the plan."""
        self.on_reduce = None
        _running.discard(self)

    def note(self, reducer: Reducer, losses: Tensor, partial_loss: Tensor) -> None:
        """Tell the running step of a reducer's call.

        Raises :class:`ReducerError` for a partial loss that can be trained if steps run and none
        is over this plan, and what the step's guards raise. A metric without a gradient may be of
        any plan.
        """
        if self.on_reduce is not None:
            self.on_reduce(reducer, losses, partial_loss)
        elif _running and partial_loss.requires_grad:
            raise ReducerError(
                "the reducer belongs to a plan other than the running step's: make it with "
                "step.microbatch(...), and a term in another mode with its reduce(losses, mode)"
            )


_running: WeakSet[StepState] = WeakSet()
"""The plans' states of the steps that run; one that was given up goes with its aggregator."""
