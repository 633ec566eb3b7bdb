"""How the commands write counts and relative errors."""

from __future__ import annotations

import math


def number_of(count: int, noun: str) -> str:
    """Write a count with its noun: ``1 case``, ``2 cases``, ``2 microbatches``."""
    plural = "es" if noun.endswith(("ch", "s")) else "s"
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}{plural}"


def error_text(error: float | None) -> str:
    """Write a relative error; JSON has None if it is not finite."""
    if error is None or not math.isfinite(error):
        return "not finite"
    return f"{error:.1e}" if error else "0"
