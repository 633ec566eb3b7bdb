"""What several integrations share: what they refuse, and attributes replaced for a while."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron_lossagg.errors import ContractError, PlanError


def imported(name: str, *, expected: str) -> Any:
    """Import a framework's module; raises :class:`ContractError` if it cannot be imported.

    ``expected``: what has to be there, and what to do about it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ContractError(f"{name} cannot be imported ({error}), expected {expected}") from error


def field_of(data: Any, name: str, source: str) -> Any:
    """Return a field of a microbatch; raises :class:`ContractError` if it has none.

    ``source``: what of the framework makes it.
    """
    found = data.get(name) if isinstance(data, Mapping) else None
    if found is None:
        raise ContractError(
            f"got a {type(data).__name__} from the data iterator, expected the dict with {name} "
            f"that {source} makes: train it without megatron_lossagg"
        )
    return found


def not_a_mask(name: str, change: str) -> PlanError:
    """Return the error for a mask with other values; ``change``: what the user can do."""
    return PlanError(
        f"got {name} with values other than 0 and 1, expected a 0/1 mask, since counts are "
        f"integers: {change}"
    )


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of a module or an object, and put its own back."""
    own = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in own.items():
            setattr(owner, name, value)
