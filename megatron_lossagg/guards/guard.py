"""What a guard is: a check of a running step, and what it may know of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from megatron_lossagg.contract.groups import LiveGroups
from megatron_lossagg.contract.scaling import Scaling
from megatron_lossagg.contract.sequence_tracker import SequenceTracker
from megatron_lossagg.reduction.microbatch import Microbatch
from megatron_lossagg.reduction.plan import StepPlan
from megatron_lossagg.reduction.step_state import Line, StepLog, Term


@dataclass(kw_only=True, eq=False)
class ScheduleCalls:
    """The training calls of the schedule since gradients were zero; kept by a run."""

    number: int = 0
    declared: bool | int = False
    """What the latest was begun with, as ``accumulates=``."""
    left_some: bool = False
    """Whether gradients were not zero when the latest ended."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepFacts:
    """What a guard may know of a step.

    No guard keeps the step itself, so that one that is given up without its end is collected.
    """

    chunks: Sequence[Any]
    """The DDP-wrapped chunks of this rank."""
    groups: LiveGroups
    scaling: Scaling
    plan: StepPlan
    tracker: SequenceTracker
    log: StepLog
    """What the step's microbatches have written."""
    forward_only: bool
    accumulates: bool | int
    """How many schedule calls the optimizer step has; False is one, True any number."""
    calls: ScheduleCalls
    is_weighed: bool = False
    """Whether the weights that arrive at the model's losses are compared in this step."""

    @property
    def config(self) -> Any:
        """The first chunk's ``TransformerConfig``."""
        return self.chunks[0].config

    @property
    def trains(self) -> bool:
        """Whether loss_func ran on this rank in a training step."""
        return not self.forward_only and self.tracker.num_calls > 0


class Guard:
    """A check of a running step; its subclasses are in :data:`megatron_lossagg.guards.GUARDS`.

    One is made for each step, and reads the step's log when the step ends. Its methods are called
    in the order below; one that is not overridden does nothing. Each but :meth:`together` may
    raise; :meth:`on_finish` returns what is wrong instead, for a rank that fails enters the
    collectives first.
    """

    catches: ClassVar[str]
    """What would train wrongly without it."""
    costs: ClassVar[str] = "nothing on the device"
    may_only_warn: ClassVar[bool] = True
    """Whether a run may train on, warned; not after a check of what was passed."""

    @property
    def name(self) -> str:
        """How it is called where it is only warned of."""
        return type(self).__name__

    @classmethod
    def of(cls, step: StepFacts) -> Guard | None:
        """Make it for a step; None if there is nothing to check in this one."""
        return cls()

    def on_term(
        self, step: StepFacts, line: Line, term: Term, losses: Tensor, microbatch: Microbatch
    ) -> None:
        """``mb.reduce`` has made a term of losses, whose graph can be looked at only now."""

    def on_unusual_term(self, step: StepFacts, line: Line, term: Term, plan: StepPlan) -> None:
        """``mb.reduce`` has made a term under another aggregation than the step's.

        Or a microbatch that ``StepPlan.reducer`` made has made one. ``plan``: the term's.
        """

    def on_first_outputs(self, step: StepFacts) -> None:
        """``mb.outputs`` is called for the first time in a pass over the step."""

    def on_unusual_outputs(self, step: StepFacts, line: Line, loss: Tensor) -> None:
        """``mb.outputs`` gets a loss without a gradient, or of what was not reduced before."""

    def on_finalize(self, step: StepFacts, num_tokens: Tensor | None) -> None:
        """Megatron finalizes the gradients, in a training step; this rank's num_tokens."""

    def on_finish(self, step: StepFacts) -> str:
        """The step finishes: say what is wrong on this rank, empty if nothing is."""
        return ""

    def together(self, step: StepFacts, *, has_failed: bool) -> None:
        """Compare with other ranks, after all verdicts; ``has_failed``: this rank's."""

    def on_end(self) -> None:
        """The step ends, however it does."""

    def recorded(self) -> Mapping[str, Any]:
        """Return what the step's line in ``Options.record`` gets, once faults have been read."""
        return {}
