"""Keeps the microbatches of a step as they were when they were read.

A loop that reads each microbatch just before it runs may refill one buffer with all of them.
Whoever reads a step ahead must then copy. A loader that gives each microbatch memory of its own
must not pay for that: the first step of an iterator is copied while it is read, and compared with
its copies afterwards. If nothing was written to and no two microbatches shared memory, later
steps are not copied.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from megatron_lossagg.errors import PlanError

__all__ = ["Lookahead"]

_IMMUTABLE = (str, bytes, int, float, complex, type(None))

_shares_nothing: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Iterators of which a whole step shared no memory, and the most microbatches of such a step."""


class _Range(NamedTuple):
    """Bytes of one address space, from ``start`` to before ``end``."""

    space: str
    start: int
    end: int


class Lookahead:
    """The microbatches of one step, as they are read.

    ``source``: their iterator. The first of its steps with so many microbatches is copied while
    it is read. Later ones are not, and are refused where two microbatches share memory.
    """

    def __init__(self, source: Any, num_microbatches: int) -> None:
        self._source = source
        self._num_microbatches = num_microbatches
        self._read: list[Any] = []
        self._found: list[_Found] = []
        self._copies: list[Any] | None = None if self._is_known() else []
        self._why_not_copied: Exception | None = None

    def add(self, data: Any) -> None:
        """Keep a microbatch that was just read; CUDA tensors are copied without a host sync."""
        found = _Found()
        found.look_at(data, is_microbatch=True)
        self._read.append(data)  # kept while the others are read: no address is used twice
        self._found.append(found)
        if self._copies is not None and self._why_not_copied is None:
            try:
                self._copies.append(found.copied(data))
            except Exception as error:  # what a class of the loader's raises
                self._why_not_copied = error

    def microbatches(self) -> list[Any]:
        """Return the step's microbatches, as they were when they were read.

        Compares the copies with what was read, which waits for the device if it is CUDA's.
        Raises :class:`PlanError` where two share memory, were not copied, and may have been
        written to.
        """
        pair = _sharing([_merged(found.ranges) for found in self._found])
        if self._copies is not None and self._why_not_copied is None:
            if not self._is_as_copied(pair):
                return self._copies
            if pair is None:
                self._remember()
            return self._read
        if pair is None or all(found.is_intact() for found in self._found):
            return self._read
        first, second = pair
        shared = (
            f"microbatches {first} and {second} of the step share memory, expected memory of its "
            "own for each, because the step is read before its first microbatch runs"
        )
        if self._copies is None:
            raise PlanError(
                f"{shared}: no two did in the first step of this iterator, so they were not "
                "copied; let it yield copies"
            )
        raise PlanError(
            f"{shared}: copying one raised {self._why_not_copied!r}; let the iterator yield copies"
        )

    def _is_as_copied(self, pair: tuple[int, int] | None) -> bool:
        """Whether reading the later microbatches left the earlier ones as they were."""
        try:
            return all(map(_is_same, self._read, self._copies or ()))
        except Exception:  # values that cannot be compared: of a meta tensor, of another's class
            return pair is None

    def _is_known(self) -> bool:
        try:
            return _shares_nothing.get(self._source, 0) >= self._num_microbatches
        except TypeError:  # it cannot be referred to weakly: map, zip
            return False

    def _remember(self) -> None:
        if self._copies is not None:
            try:
                _shares_nothing[self._source] = self._num_microbatches
            except TypeError:
                return


class _Found:
    """What a microbatch consists of."""

    def __init__(self) -> None:
        self.ranges: list[_Range] = []
        """The memory that a loader may write to again."""
        self._versions: list[tuple[Any, int]] = []
        self._containers: list[tuple[Any, list[int]]] = []
        self._may_change_unseen = False
        self._arrays: list[Any] = []
        self._opaque: list[Any] = []
        self._seen: dict[int, Any] = {}

    def look_at(self, value: Any, *, is_microbatch: bool = False) -> None:
        """Walk dicts, lists, tuples, dataclasses, and the attributes of the microbatch itself."""
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value  # kept: a mapping may make its values anew
        parts = _parts(value, is_microbatch=is_microbatch)
        if isinstance(value, (Tensor, np.ndarray)):
            self.ranges += _memory(value)
            self._watch(value)
            if parts is None:
                self._arrays.append(value)
        elif parts is not None or is_microbatch:
            if not isinstance(value, (tuple, *_IMMUTABLE)):
                self.ranges.append(_identity(value))
                self._containers.append((value, [id(part) for part in parts or ()]))
        else:
            self._opaque.append(value)
        is_array = isinstance(value, (Tensor, np.ndarray))
        if parts is None and not is_array and not isinstance(value, _IMMUTABLE):
            self._may_change_unseen = True
        in_lockstep = is_microbatch and isinstance(value, tuple)  # one per chunk of the model
        for part in parts or ():
            self.look_at(part, is_microbatch=in_lockstep)

    def is_intact(self) -> bool:
        """Whether nothing was written to since it was read, as far as torch counts writes.

        Writes to NumPy's memory are not counted, so they may have happened.
        """
        return (
            not self._may_change_unseen
            and all(tensor._version == version for tensor, version in self._versions)
            and all(
                [id(part) for part in _parts(value, is_microbatch=True) or ()] == parts
                for value, parts in self._containers
            )
        )

    def _watch(self, array: Any) -> None:
        try:
            owns = isinstance(array, Tensor) and array.untyped_storage().resizable()
            if owns:
                self._versions.append((array, array._version))
        except Exception:  # an inference tensor, one without a storage
            owns = False
        self._may_change_unseen = self._may_change_unseen or not owns

    def copied(self, data: Any) -> Any:
        """Copy the containers and the arrays, and nothing that is of another kind."""
        known: dict[int, Any] = {id(value): value for value in self._opaque}
        known.update((id(array), _copied(array)) for array in self._arrays)
        return copy.deepcopy(data, known)


def _parts(value: Any, *, is_microbatch: bool) -> Iterable[Any] | None:
    """Return what a container holds, None where it is no container."""
    if isinstance(value, (Tensor, np.ndarray)):
        has_objects = isinstance(value, np.ndarray) and value.dtype.hasobject
        return value.ravel().tolist() if has_objects else None
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if is_microbatch and hasattr(value, "__dict__"):
        return list(vars(value).values())
    return None


def _is_same(value: Any, copied: Any) -> bool:
    """Compare a microbatch with its copy, values and all."""
    if isinstance(value, Tensor):
        return value.shape == copied.shape and torch.equal(value, copied)
    if isinstance(value, np.ndarray):
        return bool(np.array_equal(value, copied))
    if isinstance(value, _IMMUTABLE):
        return bool(value == copied)
    own, other = (_parts(each, is_microbatch=True) for each in (value, copied))
    if own is None or other is None or value is copied:
        return value is copied
    if isinstance(value, Mapping) and list(value) != list(copied):
        return False
    own, other = list(own), list(other)
    return len(own) == len(other) and all(map(_is_same, own, other))


def _copied(array: Any) -> Any:
    if not isinstance(array, Tensor):
        return np.array(array, subok=True)
    if array.is_pinned():  # its copy to the device does not wait
        return torch.empty_like(array, pin_memory=True).copy_(array)
    return array.clone()


def _memory(array: Any) -> Iterator[_Range]:
    """Yield the bytes that an array lies in; for one that is not strided, its identity."""
    if isinstance(array, np.ndarray):
        yield from _extent("cpu", array.ctypes.data, array.shape, array.strides, array.itemsize)
    elif array.layout is not torch.strided or type(array).__torch_dispatch__ is not _NO_DISPATCH:
        yield _identity(array)
    else:
        size = array.element_size()
        strides = [stride * size for stride in array.stride()]
        space, start = str(array.device), array.data_ptr()
        if array.is_meta:
            space, start = f"meta {array.untyped_storage()._cdata}", array.storage_offset() * size
        yield from _extent(space, start, array.shape, strides, size)


_NO_DISPATCH = Tensor.__torch_dispatch__


def _extent(
    space: str, start: int, shape: Iterable[int], strides: Iterable[int], size: int
) -> Iterator[_Range]:
    """Yield the bytes from the lowest to the highest element; nothing of an empty array."""
    reach = [(number - 1) * stride for number, stride in zip(shape, strides, strict=True)]
    if 0 not in shape:
        low, high = sum(min(0, r) for r in reach), sum(max(0, r) for r in reach)
        yield _Range(space, start + low, start + high + size)


def _identity(value: Any) -> _Range:
    return _Range("object", id(value), id(value) + 1)


def _merged(ranges: list[_Range]) -> list[_Range]:
    """Return the union of ranges as ranges without overlap, in order."""
    merged: list[_Range] = []
    for found in sorted(ranges):
        last = merged[-1] if merged else None
        if last is not None and last.space == found.space and found.start < last.end:
            merged[-1] = last._replace(end=max(last.end, found.end))
        else:
            merged.append(found)
    return merged


def _sharing(of_microbatches: list[list[_Range]]) -> tuple[int, int] | None:
    """Return the first two microbatches found that have a byte in common."""
    everything = sorted(
        (found, index) for index, ranges in enumerate(of_microbatches) for found in ranges
    )
    # Those of one microbatch do not overlap: what reaches furthest is another's where it overlaps.
    reach: tuple[_Range, int] | None = None
    for found, index in everything:
        if reach is None or reach[0].space != found.space or reach[0].end <= found.start:
            reach = found, index
            continue
        first, second = sorted((reach[1], index))
        return first, second
    return None
