"""What several integrations refuse: a missing module, and a mask that is not 0 or 1."""

from __future__ import annotations

import importlib
from typing import Any

from megatron_lossagg.errors import ContractError, PlanError

__all__ = ["imported", "not_a_mask"]


def imported(name: str, *, expected: str) -> Any:
    """Import a framework's module; raises :class:`ContractError` if it cannot be imported.

    ``expected``: what has to be there, and what to do about it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ContractError(f"{name} cannot be imported ({error}), expected {expected}") from error


def not_a_mask(name: str, change: str) -> PlanError:
    """Return the error for a mask with other values; ``change``: what the user can do."""
    return PlanError(
        f"got {name} with values other than 0 and 1, expected a 0/1 mask, since counts are "
        f"integers: {change}"
    )
