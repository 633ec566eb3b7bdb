"""Finds a user's own function by its path."""

from __future__ import annotations

import pkgutil
from typing import Any

from megatron_lossagg.errors import ReducerPathError, meant


def resolved(path: str, name: str, signature: str) -> Any:
    """Import the callable at ``pkg.mod:name`` or ``pkg.mod.name``.

    ``name`` and ``signature``: of what it should be, for messages. Raises
    :class:`ReducerPathError` if the path leads to nothing or to what is not callable.
    """
    expected = f"write pkg.mod:name of a {signature}"
    try:
        found: object = pkgutil.resolve_name(path)
    except Exception as error:  # a module may fail to import with anything
        near = ""
        if isinstance(error, AttributeError) and error.name is not None:
            near = meant(error.name, dir(error.obj))
        raise ReducerPathError(
            f"{name} {path!r} raised {error!r}{near}: {expected}, and install its module on every "
            "node or put it on PYTHONPATH"
        ) from error
    if not callable(found):
        raise ReducerPathError(
            f"{name} {path!r} leads to {found!r}, which is not callable: {expected}"
        )
    return found
