"""Which modules a framework imports that are not here: all of them, not the first.

An import that fails for a module that cannot be found is tried again with a placeholder in its
place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec

from megatron_lossagg.verify.drivers.placeholders import Placeholders

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
