"""What a driver does to import its framework, and to configure it without what only a GPU has.

Which modules a framework imports that are not here: all of them, not the first. An import that
fails for a module that cannot be found is tried again with a placeholder in its place. What a
framework imports and its step never calls has placeholders from the start: a finder of
``sys.meta_path``, and no package on a path, because frameworks import submodules and names by
the hundred, others in every release, which a package would have to list; a finder answers for any.
It stands last, so that what is installed is imported, or first, before what a framework's own
module would load. A configuration has the framework's own defaults, without what its constructor
asks for.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import typing
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from importlib import import_module
from importlib.util import find_spec
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


def without_nvtx() -> None:
    """Let ranges be marked for a profiler without a CUDA build."""
    import torch

    for name in ("range_push", "range_pop"):
        setattr(torch.cuda.nvtx, name, lambda *_: None)


def packed_seq_params() -> Any:
    """Return Megatron-Core's class, or for 0.16 what takes Mamba's ``total_tokens`` too."""
    from megatron.core.packed_seq_params import PackedSeqParams

    if "total_tokens" in PackedSeqParams.__dataclass_fields__:
        return PackedSeqParams
    return lambda total_tokens, **given: PackedSeqParams(**given)


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
    __version__ = "2.9.0"  # of Transformer Engine: frameworks compare it

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


_MOST = 200
"""Modules that are looked for: an import that never ends would be a fault here."""
_DISTRIBUTIONS = {
    "PIL": "pillow",
    "git": "gitpython",
    "hydra": "hydra-core",
    "megatron.core": "megatron-core",
    "pynvml": "nvidia-ml-py",
    "transfer_queue": "TransferQueue",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}
"""Names of packages by their modules, if they are not the module's with hyphens."""


def missing_modules(imports: Iterable[str], *, own: str) -> list[str]:
    """Import modules; return the names of those that cannot be found, in the order met.

    All of them, not the first: one that cannot be found is tried again with a placeholder in its
    place, and this process runs nothing of the framework afterwards. ``own``: the framework's
    package, whose modules are not looked for. What an import raises for another reason ends the
    search in that module.
    """
    finder = Placeholders()
    sys.meta_path.append(finder)
    try:
        for name in imports:
            _import(name, own, finder)
    finally:
        sys.meta_path.remove(finder)
    return finder.names


def _import(name: str, own: str, finder: Placeholders) -> None:
    for _ in range(_MOST):
        try:
            import_module(name)
        except (Exception, SystemExit) as error:  # whatever a module raises, or makes of these
            missing = _outermost(not_found(error) or "")
            if not missing or missing in finder.names or f"{missing}.".startswith(f"{own}."):
                return
            finder.names.append(missing)
        else:
            return


def not_found(error: BaseException) -> str | None:
    """Return the module that an import did not find; empty if no error of the chain names it.

    None if no import failed. A package that imports on demand, as transformers does, raises an
    error of its own from the one with the name.
    """
    name: str | None = None
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, ModuleNotFoundError):
            if link.name:
                return link.name
            name = ""
        link = link.__cause__ or (link.__context__ if name is not None else None)
    return name


def _outermost(name: str) -> str:
    """Return the first package of a dotted name that cannot be found."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        outer = ".".join(parts[:end])
        try:
            if find_spec(outer) is None:
                return outer
        except (ImportError, ValueError):
            return outer
    return name


def install_line(names: Sequence[str]) -> str:
    """Write the command that installs modules, and what else they need."""
    of_megatron = [
        name for name in names if name.startswith("megatron.") and name != "megatron.core"
    ]
    packages = [
        _DISTRIBUTIONS.get(name, name.partition(".")[0].replace("_", "-"))
        for name in names
        if name not in of_megatron
    ]
    lines = [f"pip install {' '.join(packages)}"] if packages else []
    if of_megatron:
        lines.append(f"put the Megatron-LM that has {', '.join(of_megatron)} on PYTHONPATH")
    return ", and ".join(lines)


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
