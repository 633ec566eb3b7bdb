"""The guards of one step, and what happens with what they find."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from megatron_lossagg.errors import ContractError
from megatron_lossagg.guards.guard import Guard, StepFacts
from megatron_lossagg.reduction.faults import warn_once

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
        for guard in guards:
            if type(guard).on_term is not Guard.on_term:
                facts.log.on_term = partial(guard.on_term, facts)
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
