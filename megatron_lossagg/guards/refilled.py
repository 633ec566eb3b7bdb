"""Whether memory that a microbatch refers to, and that was not copied, was filled again.

A step is read before it runs, and an iterator may use its memory again. What was copied is safe;
objects of another kind are kept as they are, and they may lead to the same buffer.
"""

from __future__ import annotations

import functools
import types
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

__all__ = ["KeptObjects", "memory_of"]

_LEVELS = 4
"""How far tensors are looked for from an object that was not copied."""
_MOST = 4096
"""Values that are looked at from one such object."""
_WHOLE_BYTES = 1 << 24
"""Of a larger array every n-th number is compared."""
_PLAIN = (str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device)
_SOURCES = (type, types.ModuleType, torch.nn.Module, Dataset, DataLoader, Sampler)
"""These may hold tensors that change while data is read, and none that a microbatch trains."""
_CONTAINERS = (dict, list, tuple, set, frozenset, np.ndarray)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Content(NamedTuple):
    memory: int
    state: Any
    """The same as long as nothing was seen to be written."""


class KeptObjects:
    """The objects that a step's microbatches refer to and that were not copied.

    A table that all microbatches share is right; only what has changed since its microbatch was
    read is not. Host only: a CPU array is compared by its numbers, a tensor on a device by its
    version counter. One number, such as a counter, is not compared, nor is memory that the
    microbatches hold themselves, and so have a copy of. Modules, data sets, iterators and what can
    be iterated are sources, which may change.
    """

    def __init__(self) -> None:
        self._of: dict[int, tuple[Any, int, dict[str, _Content]]] = {}
        self._copied: set[int] = set()

    def note(self, index: int, kept: Iterable[Any], copied: Iterable[Tensor | Any]) -> None:
        """Note what microbatch ``index`` refers to; ``copied``: arrays that it has copies of."""
        self._copied.update(map(memory_of, copied))
        for value in kept:
            if id(value) not in self._of and not isinstance(value, _PLAIN):
                self._of[id(value)] = value, index, _contents(value)

    def fault(self) -> str:
        """Name the first tensor or array that was filled again; empty if none was."""
        for value, index, before in self._of.values():
            now = _contents(value) if before else {}
            for path, content in before.items():
                if now.get(path, content) != content and content.memory not in self._copied:
                    return (
                        f"{path} of microbatch {index} was filled again after it was read, and is "
                        "not copied: the microbatch would train a later one's data; make new "
                        "tensors for each microbatch, or keep them in dicts, lists, tuples or "
                        "dataclasses, which are copied"
                    )
        return ""


def memory_of(array: Any) -> int:
    """Return where the memory of a tensor or array begins, also of a part of it."""
    if isinstance(array, Tensor):
        try:
            return array.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # sparse, or without memory
            return id(array)
    while isinstance(array.base, np.ndarray):
        array = array.base
    return int(array.__array_interface__["data"][0])


def _contents(root: Any) -> dict[str, _Content]:
    """Return the state of the tensors and arrays to which an object leads, by their path."""
    found: dict[str, _Content] = {}
    seen = {id(root): root}
    queue = deque([(type(root).__name__, root, 0)])
    while queue:
        path, value, level = queue.popleft()
        if isinstance(value, Tensor) or _is_numbers(value):
            if _num_values(value) == 1:  # a counter or a place, which trains nothing
                continue
            found[path] = _Content(memory_of(value), _state(value))
        elif level < _LEVELS:
            for name, part in islice(_parts(value), _MOST):
                if len(seen) < _MOST and id(part) not in seen and not isinstance(part, _PLAIN):
                    seen[id(part)] = part
                    queue.append((path + name, part, level + 1))
    return found


def _num_values(value: Any) -> int:
    return int(value.numel() if isinstance(value, Tensor) else value.size)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, np.ndarray) and not value.dtype.hasobject


def _state(array: Any) -> Any:
    """Return a sum of the numbers of a CPU array, of a tensor elsewhere its version."""
    if isinstance(array, np.memmap):  # a file
        return None
    version = None
    if isinstance(array, Tensor):
        version = None if array.is_inference() else array._version
        if array.device.type != "cpu" or array.layout != torch.strided:
            return version
        try:  # NumPy lacks bfloat16 and float8
            numbers = array.detach().resolve_conj().resolve_neg()
            array = numbers.view(_INTEGERS[numbers.element_size()]).numpy()
        except (KeyError, RuntimeError, TypeError):
            return version
    if array.nbytes <= _WHOLE_BYTES:
        return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return version, zlib.crc32(array.flat[:: array.size // _MOST].tobytes())


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object refers to, with its name; no code of the object's own runs."""
    is_iterable = hasattr(type(value), "__iter__") and not isinstance(value, _CONTAINERS)
    if isinstance(value, _SOURCES) or hasattr(type(value), "__next__") or is_iterable:
        return
    if isinstance(value, np.ndarray):
        value = value.ravel().tolist()
    if isinstance(value, dict):
        for key, part in list(islice(value.items(), _MOST)):
            yield f"[{key!r}]" if isinstance(key, (str, int)) else "[...]", part
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, part in enumerate(list(islice(value, _MOST))):
            yield f"[{index}]", part
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if cell != types.CellType():  # an empty one has no contents
                yield f".{name}", cell.cell_contents
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    for name, part in [*getattr(value, "__dict__", {}).items(), *_slots(value)]:
        yield f".{name}", part


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    for kind in type(value).__mro__:
        for name, member in vars(kind).items() if "__slots__" in vars(kind) else ():
            if isinstance(member, types.MemberDescriptorType):
                with suppress(AttributeError):  # not set
                    yield name, member.__get__(value)
