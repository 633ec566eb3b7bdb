"""A framework's configuration with its own defaults, without what its constructor asks for."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any


def defaults(kind: Any, **given: Any) -> Any:
    """Return an instance of a dataclass with its own defaults, but for what is given.

    ``__post_init__`` does not run, which reads models and devices; a field without a default that
    is not given is not there.
    """
    made = object.__new__(kind)
    for one in fields(kind):
        if one.name in given:
            setattr(made, one.name, given[one.name])
        elif one.default_factory is not MISSING:
            setattr(made, one.name, one.default_factory())
        elif one.default is not MISSING:
            setattr(made, one.name, one.default)
    return made
