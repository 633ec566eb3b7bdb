"""What a step of this package tells a weighing that listens: ids, and the numbers of its mode.

Imports neither: a step calls :func:`tell` for each microbatch, and nobody may listen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

listening: list[Callable[[Any, Any, Any], None]] = []
"""Called with an aggregation, this rank's sequences, and those of a microbatch by position."""


def tell(aggregation: Any, sequences: Any, numbers: Any) -> None:
    """Tell who listens of a microbatch."""
    for one in listening:
        one(aggregation, sequences, numbers)
