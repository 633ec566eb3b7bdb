"""What each step checks: the table of all guards.

A guard costs its class, a line of this table, and its cases in ``tests/guards``: none of the
algebra's code. ``docs/reference/checks.md`` is printed from here and lists all that is checked.

No guards: ``before`` has the refusals before a step. ``frozen`` looks when a run and each step
start, ``refilled`` while data is read, ``framework_loss`` in the schedule hook.
"""

from __future__ import annotations

from megatron_lossagg.guards.each_step import Finalized, GradientBuffers, Split, Terms
from megatron_lossagg.guards.gradient_audit import GradientAudit
from megatron_lossagg.guards.guard import Guard, StepFacts
from megatron_lossagg.guards.outcome import Outcome
from megatron_lossagg.guards.ownership import Ownership
from megatron_lossagg.guards.replicas import Replicas

__all__ = ["GUARDS", "guards_of"]

GUARDS: tuple[type[Guard], ...] = (
    Split,
    Terms,
    GradientAudit,
    GradientBuffers,
    Finalized,
    Ownership,
    Outcome,
    Replicas,
)
"""In the order in which they look."""


def guards_of(step: StepFacts) -> list[Guard]:
    """Make the guards of a step."""
    made = (kind.of(step) for kind in GUARDS)
    return [guard for guard in made if guard is not None]
