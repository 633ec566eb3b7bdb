"""Placeholders for what a framework imports and its step never calls.

A finder of ``sys.meta_path``, and no package on a path: frameworks import submodules and names by
the hundred, others in every release, which a package would have to list; a finder answers for any.
It stands last, so that what is installed is imported, or first, before what a framework's own
module would load.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import typing
from collections.abc import Iterable
from types import ModuleType
from typing import Any


def install(*, first: Iterable[str] = (), last: Iterable[str] = ()) -> None:
    """Answer for modules, in place of what is there (``first``) or if nothing is (``last``)."""
    sys.meta_path.insert(0, Placeholders(first))
    sys.meta_path.append(Placeholders(last))


def older_python() -> None:
    """Let code for Python 3.12 be imported: its pydantic models and overrides."""
    if sys.version_info < (3, 12):
        import typing_extensions

        for name in ("TypedDict", "override"):
            setattr(typing, name, getattr(typing_extensions, name))


class _Placeholder:
    """Whatever a module does with a name at import: a class, a decorator, a constant."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def __init_subclass__(cls, **_: Any) -> None:
        super().__init_subclass__()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __getitem__ = __or__

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return False

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (_Placeholder,)


class _Module(ModuleType):
    __version__ = "2.9.0"  # of Transformer Engine: compared by Megatron-Bridge

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder()


class Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that are missing, and what lies in them, as a finder of ``sys.meta_path``."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names = list(names)

    def find_spec(self, fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        """Find what lies in one of the names."""
        if any(f"{fullname}.".startswith(f"{name}.") for name in self.names):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Make a module that has any name."""
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing."""
