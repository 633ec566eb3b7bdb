"""Custom reducers: load the factory at a path."""

from __future__ import annotations

import importlib
from functools import cache

from megatron_lossagg.errors import ReducerPathError
from megatron_lossagg.reducer import ReducerFactory

__all__ = ["load_reducer_factory"]


@cache
def load_reducer_factory(path: str) -> ReducerFactory:
    """Import ``pkg.mod:name`` or ``pkg.mod.name`` and return the callable.

    Raises :class:`ReducerPathError` where the module does not import, has no such name, or
    the name is not callable. ``name`` may be dotted after a colon.
    """
    expected = "write pkg.mod:name of a factory(context) -> Callable[[Tensor], Tensor]"
    module_name, colon, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or not name or not colon:
        raise ReducerPathError(f"reducer path {path!r} is not an attribute of a module: {expected}")
    try:
        factory: object = importlib.import_module(module_name)
    except Exception as error:  # a module may fail to import with anything
        raise ReducerPathError(
            f"reducer path {path!r}: importing {module_name!r} raised {error!r}; install it on "
            f"every node or put it on PYTHONPATH, and {expected}"
        ) from error
    for part in name.split("."):
        try:
            factory = getattr(factory, part)
        except AttributeError as error:
            raise ReducerPathError(
                f"reducer path {path!r}: {module_name!r} has no {name!r}; {expected}"
            ) from error
    if not callable(factory):
        raise ReducerPathError(
            f"reducer path {path!r} leads to {factory!r}, which is not callable: {expected}"
        )
    return factory
