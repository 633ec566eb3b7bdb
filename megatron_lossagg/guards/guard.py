"""What a guard is: a check of a running step, what it may know of it, what becomes of a finding.

:class:`SequenceTracker` counts what arrived: each sequence is in exactly one microbatch of the
step. While Megatron's rerun machine repeats a step, all its microbatches come once more: a new pass
over the same sequences.

Shape suffix: S = sequences of this data-parallel rank in the step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from megatron_lossagg.contract.model import LiveGroups
from megatron_lossagg.contract.scaling import Scaling
from megatron_lossagg.errors import ContractError
from megatron_lossagg.reduction.faults import warn_once
from megatron_lossagg.reduction.integers import Ints, first_few
from megatron_lossagg.reduction.microbatch import Microbatch
from megatron_lossagg.reduction.plan import StepPlan
from megatron_lossagg.reduction.step_state import Line, StepLog, Term

_NOT_SEEN = -1


class SequenceTracker:
    """Whether each sequence and microbatch of a step arrived, and none of them twice.

    Pure integers. ``is_rerunning``: whether the rerun machine repeats the step now.
    """

    def __init__(
        self,
        *,
        num_sequences: int,
        num_microbatches: int,
        is_rerunning: Callable[[], bool],
    ) -> None:
        self.num_microbatches = num_microbatches
        self.num_calls = 0
        """Microbatches of the current pass that arrived."""
        self._is_rerunning = is_rerunning
        self._microbatch_S = np.full(num_sequences, _NOT_SEEN)

    @property
    def is_at_start(self) -> bool:
        """Whether the next microbatch is the first of a pass."""
        return self.num_calls == 0 or (
            self.num_calls == self.num_microbatches and self._is_rerunning()
        )

    def add(self, sequences: Ints) -> None:
        """Record a microbatch by its sequences, padding left out.

        Raises :class:`ContractError` for a sequence that another microbatch had, for more
        microbatches than planned, and for sequences that are missing when the last one arrives.
        """
        if self.num_calls in (0, self.num_microbatches) and self.is_at_start:
            self.num_calls = 0
            self._microbatch_S.fill(_NOT_SEEN)
        if self.num_calls == self.num_microbatches:
            raise ContractError(
                f"loss_func ran for more than the {self.num_microbatches} planned microbatches: "
                "pass the schedule's num_microbatches to aggregator.step"
            )
        if np.maximum.reduce(self._microbatch_S[sequences], initial=_NOT_SEEN) != _NOT_SEEN:
            taken = sequences[self._microbatch_S[sequences] != _NOT_SEEN]
            raise ContractError(
                f"sequence {taken[0]} is in two microbatches of the step, number "
                f"{self._microbatch_S[taken[0]]} and number {self.num_calls} in the order of their "
                f"calls, the second with sequences {first_few(sequences)}: each sequence is "
                f"trained once"
            )
        self._microbatch_S[sequences] = self.num_calls
        self.num_calls += 1
        if self.num_calls == self.num_microbatches:
            self._check_no_sequence_missing()

    def finish(self, *, may_be_empty: bool) -> None:
        """Raise :class:`ContractError` if a microbatch or a sequence is missing.

        ``may_be_empty``: whether none at all is right, as on all but the last pipeline stage.
        """
        if self.num_calls == 0 and may_be_empty:
            return
        if self.num_calls < self.num_microbatches:
            raise ContractError(
                f"loss_func ran for {self.num_calls} microbatches, {self.num_microbatches} were "
                "planned: pass the schedule's num_microbatches to aggregator.step, and give each "
                "call sequences of its own"
            )
        self._check_no_sequence_missing()

    def _check_no_sequence_missing(self) -> None:
        missing = np.flatnonzero(self._microbatch_S == _NOT_SEEN)
        if len(missing):
            raise ContractError(
                f"{len(missing)} of {len(self._microbatch_S)} sequences were in no microbatch of "
                f"the step ({first_few(missing)}): each sequence is trained once"
            )


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


def _look(looks: Sequence[Callable[..., None]], *details: Any) -> None:
    """Let several guards look at a term."""
    for look in looks:
        look(*details)


_KIND = 40
"""Letters by which a fault is told from others of its guard: its numbers may change."""


class StepGuards:
    """The guards of a step.

    It keeps the step's facts, and not the step. ``only_warns``: what a guard finds is warned of
    once in a process for each kind of fault, and noted, and the step goes on; else it is raised.
    """

    def __init__(self, guards: Sequence[Guard], facts: StepFacts, *, only_warns: bool) -> None:
        self.guards = guards
        self._facts = facts
        self._only_warns = only_warns
        self._warned: set[str] = set()
        facts.log.on_unusual_term = partial(self.tell, Guard.on_unusual_term)
        looks = [one.on_term for one in guards if type(one).on_term is not Guard.on_term]
        if looks:
            facts.log.on_term = partial(_look, looks, facts)
        facts.plan.state.faults.on_guard = self._warn if only_warns else None

    def tell(self, event: Callable[..., None], *details: Any) -> None:
        """Call a method of each, as ``Guard.on_finalize``; raises a :class:`ContractError`."""
        for guard in self.guards:
            try:
                getattr(guard, event.__name__)(self._facts, *details)
            except ContractError as error:
                if not (self._only_warns and guard.may_only_warn):
                    raise
                self._warn(guard.name, str(error))

    def finish(self) -> str:
        """Say what ends the step on this rank, empty if nothing does."""
        for guard in self.guards:
            if fault := guard.on_finish(self._facts):
                if not self._only_warns:
                    return fault
                self._warn(guard.name, fault)
        return ""

    def together(self, *, has_failed: bool) -> None:
        """Compare with other ranks; see :meth:`Guard.together`."""
        for guard in self.guards:
            guard.together(self._facts, has_failed=has_failed)

    def end(self) -> None:
        """Tell them that the step ends; it may be told again."""
        self._facts.log.on_term = self._facts.log.on_unusual_term = None
        for guard in self.guards:
            guard.on_end()

    def recorded(self) -> Mapping[str, Any]:
        """Return what the guards give the record, and which of them only warned."""
        found = {name: value for guard in self.guards for name, value in guard.recorded().items()}
        return {**found, "warned": sorted(self._warned)}

    def _warn(self, guard: str, fault: str) -> None:
        self._warned.add(guard)
        kind = re.sub("[^a-z_]+", " ", fault)[:_KIND]
        warn_once(f"guard {guard}: {kind}", f"{guard}: {fault} (--loss-aggregation-guards warn)")
