"""What a step of this package tells a weighing that listens: its plan, and each microbatch.

Imports neither: a step calls :func:`tell` for each microbatch, and nobody may listen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

listening: list[Callable[[Any, Any, Any], None]] = []
"""Called with a plan, a microbatch, and the positions of its sequences."""


def tell(plan: Any, microbatch: Any, numbers: Any) -> None:
    """Tell who listens of a microbatch."""
    for one in listening:
        one(plan, microbatch, numbers)
