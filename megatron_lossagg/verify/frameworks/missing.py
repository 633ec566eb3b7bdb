"""Every module that a framework's import lacks, in one run instead of one per run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

__all__ = ["missing_modules"]


class _StandIns(MetaPathFinder, Loader):
    """The last finder: it has the modules that were named, with any attribute."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        parts = fullname.split(".")
        named = any(".".join(parts[:n]) in self.names for n in range(1, len(parts) + 1))
        return ModuleSpec(fullname, self, is_package=True) if named else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = _attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def _attribute(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock()


def missing_modules(
    error: ModuleNotFoundError, load: Callable[[], object], *, own: str
) -> list[str]:
    """Name the modules that ``load`` lacks, that of ``error`` first; none of the package ``own``.

    It is called again and again, with stand-ins for the modules that are known to be missing,
    until it lacks none or ends otherwise. This process is of no other use afterwards.
    """
    stand_ins = _StandIns()
    sys.meta_path.append(stand_ins)
    ended: BaseException | None = error
    while isinstance(ended, ModuleNotFoundError) and ended.name:
        if ended.name in stand_ins.names or f"{ended.name}.".startswith(f"{own}."):
            break
        stand_ins.names.append(ended.name)
        try:
            load()
            ended = None
        except (Exception, SystemExit) as caught:
            ended = caught
    return stand_ins.names
