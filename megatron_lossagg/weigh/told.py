"""What a step of this package tells a weighing that listens: its plan, and each microbatch.

Imports neither: a step calls :func:`tell` for each microbatch, and nobody may listen. An
integration that plans steps by itself calls it too, or leaves its aggregation here and ids in the
batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

listening: list[Callable[[Any, Any, Any], None]] = []
"""Called with a plan, a microbatch if there is one, and the positions of its sequences."""
own: list[Any] = []
"""The aggregation of an integration whose plan is not told."""


def tell(plan: Any, microbatch: Any, numbers: Any) -> None:
    """Tell who listens of a microbatch."""
    for one in listening:
        one(plan, microbatch, numbers)
