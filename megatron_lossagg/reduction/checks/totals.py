"""Passed totals of a step against its counts, in some steps."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields

from megatron_lossagg.errors import PlanError
from megatron_lossagg.reduction.exchange import Exchange
from megatron_lossagg.reduction.faults import looks_again
from megatron_lossagg.reduction.totals import StepTotals

_steps: Counter[tuple[int, ...] | None] = Counter()
"""Steps that were planned with passed totals, of each group."""


def is_counted_all_the_same(exchange: Exchange) -> bool:
    """Whether to count a step although its totals were passed: steps 1, 2, 4, ..., each 64th."""
    return looks_again(_steps[exchange.ranks] + 1)


def note_step_with_totals(exchange: Exchange) -> None:
    """Note a step that was planned with passed totals."""
    _steps[exchange.ranks] += 1


def check_totals(given: StepTotals, counted: StepTotals) -> None:
    """Raise :class:`PlanError` for totals that are not those of the group's sequences."""
    for name in (field.name for field in fields(StepTotals) if field.compare):
        value, found = getattr(given, name), getattr(counted, name)
        # A sum of fractions may differ in its last bit.
        if value is not None and found is not None and not math.isclose(value, found, rel_tol=1e-9):
            raise PlanError(
                f"got StepTotals({name}={value!r}), the group's sequences have {found}: pass the "
                "totals of the whole step over the data-parallel group, or drop totals="
            )
