"""Whether memory that a microbatch refers to, and that was not copied, was filled again.

A step is read before it runs, and an iterator may use its memory again. What was copied is safe;
objects of another kind are kept as they are, and they may lead to the same buffer.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from megatron_lossagg.reduction.faults import looks_again, warn_once

_LEVELS = 4
"""How far arrays are looked for from an object that was not copied."""
_MOST = 4096
"""Values that are looked at in a step."""
_MOST_OF_ONE = 256
"""Values of one object that are looked at."""
_MOST_BYTES = 1 << 24
"""What is copied in a step, to compare."""
_SAMPLE = 1 << 16
"""Numbers of one array that are compared."""
_PLAIN = (str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device)
_SOURCES = (type, types.ModuleType, torch.nn.Module, Dataset, DataLoader, Sampler)
"""These may hold tensors that change while data is read, and none that a microbatch trains."""
_CONTAINERS = (dict, list, tuple, set, frozenset, np.ndarray)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_steps = itertools.count(1)


def begin_run() -> None:
    """Count steps without a number from 1 on: the next is the first of a run."""
    global _steps
    _steps = itertools.count(1)


class _Noted(NamedTuple):
    path: str
    microbatch: int
    array: Any
    holders: tuple[Any, ...]
    """What leads to it from the microbatch."""
    numbers: Any
    """A copy of some; None if the version has to do."""
    version: int | None


class KeptObjects:
    """The arrays to which a step's microbatches refer and that were not copied.

    Looks in steps 1, 2, 4, ..., 64, 128, ... of the run (without numbers: of those that the process
    read since its latest aggregator was made) at each object and array once, and once
    more at the same arrays when the step is read. A table that all microbatches share is right, and
    so is an array that was replaced; only one that was written is not. Not looked at: one number,
    such as a counter; memory that the microbatches hold themselves, and so have a copy of; sources,
    which are modules, data sets, iterators and what can be iterated; what is beyond 4,096 values
    and 16 MB of a step. Of a large array each n-th number is compared. One host sync for each array
    on a device that was written.
    """

    def __init__(self, step_number: int | None = None) -> None:
        self._looks = looks_again(next(_steps) if step_number is None else step_number)
        self._seen: dict[int, Any] = {}  # with the objects: an id may come back
        self._shared: set[int] = set()
        self._noted: list[_Noted] = []
        self._copied: set[int] = set()
        self._bytes_left = _MOST_BYTES
        self._changed: list[_Noted] = []

    def note(self, index: int, kept: Iterable[Any], copied: Iterable[Any]) -> None:
        """Note what microbatch ``index`` refers to; ``copied``: arrays that it has copies of."""
        if not self._looks:
            return
        self._copied.update(map(_memory_of, copied))
        objects = [value for value in kept if not isinstance(value, _PLAIN)]
        self._shared.update({id(value) for value in objects} & self._seen.keys())
        queue: deque[tuple[str, Any, tuple[Any, ...]]] = deque(
            (type(value).__name__, value, ()) for value in objects
        )
        while queue and len(self._seen) < _MOST:
            path, value, holders = queue.popleft()
            if isinstance(value, _PLAIN) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if isinstance(value, Tensor) or _is_numbers(value):
                if _num_values(value) > 1 and not isinstance(value, np.memmap):  # a file
                    numbers = _sample(value) if self._bytes_left > 0 else None
                    self._bytes_left -= 0 if numbers is None else numbers.nbytes
                    self._noted.append(
                        _Noted(path, index, value, holders, numbers, _version(value))
                    )
            elif len(holders) < _LEVELS:
                for name, part in islice(_parts(value), _MOST_OF_ONE):
                    queue.append((path + name, part, (*holders, value)))

    def end(self) -> None:
        """Look at the arrays again, and forget those that have not changed."""
        for noted in self._noted:
            if _memory_of(noted.array) not in self._copied and _has_changed(noted):
                self._changed.append(noted)
            elif self._is_replaced(noted):
                self._changed.append(noted._replace(numbers=None))
        self._noted, self._seen = [], {}

    def fault(self, active_tokens: Sequence[float]) -> str:
        """Name the first array that was filled again and may be of tokens; empty if none was.

        ``active_tokens``: of each microbatch. Warns of an array that has fewer numbers, and of what
        is not certain.
        """
        for noted in self._changed:
            is_large = _num_values(noted.array) >= active_tokens[noted.microbatch]
            if is_large and noted.numbers is not None:
                return (
                    f"{noted.path} of microbatch {noted.microbatch} was filled again after it was "
                    "read, and is not copied: the microbatch would train a later one's data; make "
                    "new tensors for each microbatch, or keep them in dicts, lists, tuples or "
                    "dataclasses, which are copied"
                )
        for noted in self._changed:
            warn_once(
                "changed memory",
                f"{noted.path} of microbatch {noted.microbatch}, {_num_values(noted.array)} "
                "numbers, was written or replaced after the microbatch was read, and is not "
                "copied: if it is data of the microbatch, such as lengths or offsets, a later "
                "one's is used; then keep it in a dict, list, tuple or dataclass. Ignore this if "
                "it is a counter, a cache or a table",
            )
        return ""

    def _is_replaced(self, noted: _Noted) -> bool:
        """Whether an object that microbatches share has new arrays in a dict or list of its own."""
        return (
            len(noted.holders) == 2
            and id(noted.holders[0]) in self._shared
            and all(part is not noted.array for _, part in _parts(noted.holders[1]))
        )


def _memory_of(array: Any) -> int:
    """Return where the memory of a tensor or array begins, also of a part of it."""
    if isinstance(array, Tensor):
        try:
            return array.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # sparse, or without memory
            return id(array)
    while isinstance(array.base, np.ndarray):
        array = array.base
    return int(array.__array_interface__["data"][0])


def _num_values(value: Any) -> int:
    return int(value.numel() if isinstance(value, Tensor) else value.size)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, np.ndarray) and not value.dtype.hasobject


def _version(array: Any) -> int | None:
    return array._version if isinstance(array, Tensor) and not array.is_inference() else None


def _sample(array: Any) -> Any:
    """Copy an array's numbers, of a large one each n-th; None if that is impossible."""
    if isinstance(array, Tensor):
        try:  # as integers, since NumPy lacks bfloat16 and float8
            numbers = array.detach().resolve_conj().resolve_neg()
            numbers = numbers.view(_INTEGERS[numbers.element_size()])
            if not array.is_cpu:
                is_readable = numbers.is_contiguous() and not array.is_meta
                return numbers.view(-1)[:: _step(array)].clone() if is_readable else None
            array = numbers.numpy()
        except (KeyError, RuntimeError, TypeError):
            return None
    flat = array.reshape(-1) if array.flags.c_contiguous else array.flat
    return flat[:: _step(array)].copy()


def _step(array: Any) -> int:
    return max(-(-_num_values(array) // _SAMPLE), 1)


def _has_changed(noted: _Noted) -> bool:
    """Whether an array was written; one host sync if its version on a device says so."""
    if isinstance(noted.numbers, np.ndarray):
        return bool(noted.numbers.tobytes() != _sample(noted.array).tobytes())
    version = _version(noted.array)  # which NumPy does not count
    if version is None or version == noted.version:
        return False
    return noted.numbers is None or not torch.equal(noted.numbers, _sample(noted.array))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object refers to, with its name; no code of the object's own runs."""
    is_iterable = hasattr(type(value), "__iter__") and not isinstance(value, _CONTAINERS)
    if isinstance(value, _SOURCES) or hasattr(type(value), "__next__") or is_iterable:
        return
    if isinstance(value, np.ndarray):
        value = value.ravel()[:_MOST_OF_ONE].tolist()
    if isinstance(value, dict):
        for key, part in list(islice(value.items(), _MOST_OF_ONE)):
            yield f"[{key!r}]" if isinstance(key, (str, int)) else "[...]", part
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, part in enumerate(list(islice(value, _MOST_OF_ONE))):
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
