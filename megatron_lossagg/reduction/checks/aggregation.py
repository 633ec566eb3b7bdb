"""Checks of an aggregation's numbers: its divisor, its exponent, what it counts."""

from __future__ import annotations

import math
from contextlib import suppress
from numbers import Real

from megatron_lossagg.errors import AggregationError
from megatron_lossagg.reduction.modes import COUNTS, CUSTOM, Mode


def checked_divisor(mode: Mode, divisor: float | None) -> float | None:
    """Return a mode's divisor: finite and above 0, and only if the mode has one."""
    if divisor is None:
        if mode.divisor == "required":
            raise AggregationError(
                f"mode {mode.name!r} divides by a constant length and got none: pass the longest "
                "response that generation allows as --loss-aggregation-divisor (divisor=)"
            )
        return None
    if mode.divisor == "none":
        raise AggregationError(
            f"mode {mode.name!r} takes no divisor, got {divisor!r}: drop "
            "--loss-aggregation-divisor (divisor=), or choose constant or token_sum"
        )
    number = _as_float(divisor)
    if not math.isfinite(number) or number <= 0:
        raise AggregationError(
            f"got divisor {divisor!r}, expected a finite number above 0: "
            "change --loss-aggregation-divisor (divisor=)"
        )
    return number


def checked_exponent(mode: Mode, exponent: float | None) -> float | None:
    """Return a mode's exponent: finite, and only if the mode has one."""
    if mode.has_exponent and exponent is None:
        raise AggregationError(
            f"mode {mode.name!r} needs an exponent and got none: pass "
            "--loss-aggregation-exponent (exponent=), 0 for token_mean up to 1 for sample_mean"
        )
    if exponent is None:
        return None
    if not mode.has_exponent:
        raise AggregationError(
            f"mode {mode.name!r} takes no exponent, got {exponent!r}: drop "
            "--loss-aggregation-exponent (exponent=), or choose length_power"
        )
    number = _as_float(exponent)
    if not math.isfinite(number):
        raise AggregationError(
            f"got exponent {exponent!r}, expected a finite number: "
            "change --loss-aggregation-exponent (exponent=)"
        )
    return number


def check_count(mode: Mode, count: object) -> None:
    """Refuse what an aggregation cannot count."""
    if not isinstance(count, str) or count not in COUNTS:
        raise AggregationError(
            f"got count {count!r}, expected {', '.join(COUNTS)}: change --loss-aggregation-count "
            "(count=)"
        )
    if mode.name == CUSTOM and count != "mask":
        raise AggregationError(
            f"got count {count!r} with a reducer path, but a custom reducer counts for itself: "
            "drop --loss-aggregation-count (count=)"
        )


def _as_float(value: object) -> float:
    """Convert a number; NaN for what is none, and for an integer beyond float64."""
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            return float(value)
    return math.nan
