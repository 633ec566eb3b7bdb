"""Operations, bytes, reads of a device and collectives of a block of code, without a clock.

An *operation* is what PyTorch dispatches and what launches a kernel on a GPU: ATen operations
that are not a view and not an allocation. Its *bytes* are those of its tensor inputs and
outputs, so that an operation in place counts its tensor twice, read and written; an expanded
dimension is not counted. numpy's work on the host is counted apart, by the arrays that go into
and come out of the functions ``np.*`` that the package calls; not its operators and methods.

A *read* is what waits for a device: a value, a shape that depends on values, or a tensor,
brought to the host. Reads are counted of tensors on a device and of everything computed from
them; where the trace runs on a CPU, the block's inputs are named as such.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megatron_lossagg

ALLOCATIONS = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "empty_permuted",
    "lift_fresh",
}
READING_OPERATIONS = {
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
}
READING_FUNCTIONS = {"cpu", "numpy", "tolist", "__array__"}


@dataclass
class Counted:
    """What a block of code did."""

    operations: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    numpy_bytes: int = 0
    """Bytes that numpy's functions read and wrote on the host."""
    reads: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)
    collective_bytes: int = 0
    """Bytes that the collectives brought to this rank."""

    @property
    def num_operations(self) -> int:
        """Number of operations."""
        return sum(self.operations.values())

    @property
    def num_reads(self) -> int:
        """Number of reads of a device."""
        return sum(self.reads.values())

    @property
    def num_collectives(self) -> int:
        """Number of collectives."""
        return sum(self.collectives.values())


@contextmanager
def counted(*on_device: Tensor) -> Iterator[Counted]:
    """Count what the block does; ``on_device``: tensors that stand for a device's."""
    counts = Counted()
    with (
        _replaced_everywhere(np, _Numpy(np, counts)),
        _Functions(counts) as functions,
        _Operations(counts, functions.derived),
    ):
        for tensor in on_device:
            functions.derived.add(tensor)
        yield counts


def bytes_saved_for_backward(call: Callable[[], Tensor]) -> int:
    """Count the bytes that the graph of ``call`` holds, each storage once."""
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        share = call()
    for tensor in _attributes_of_graph(share):
        keep(tensor)
    return sum(storage.nbytes() for storage in storages.values())


class _Derived:
    """The tensors that are on the device or computed from one that is."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept: an address is used again

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.device.type != "cpu" or tensor.untyped_storage()._cdata in self._storages


class _Operations(TorchDispatchMode):
    def __init__(self, counts: Counted, derived: _Derived) -> None:
        super().__init__()
        self.counts, self.derived = counts, derived

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[-1]
        came_in = _tensors((args, kwargs))
        if func.namespace == "c10d":
            self.counts.collectives[name] += 1
            self.counts.collective_bytes += sum(map(_bytes, _tensors(args[0])))
            return outputs
        came_out = _tensors(outputs)
        if any(tensor in self.derived for tensor in came_in):
            for tensor in came_out:
                self.derived.add(tensor)
            if _reads(name, args, kwargs or {}):
                self.counts.reads[name] += 1
        touches = bool(came_in or came_out)  # promote_types is dispatched too
        if touches and not func.is_view and name not in ALLOCATIONS:
            self.counts.operations[name] += 1
            self.counts.bytes += sum(map(_bytes, (*came_in, *came_out)))
        return outputs


class _Functions(TorchFunctionMode):
    """Sees what is not dispatched on a CPU and is a copy from or to a device elsewhere."""

    def __init__(self, counts: Counted) -> None:
        super().__init__()
        self.counts, self.derived = counts, _Derived()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READING_FUNCTIONS and args[0] in self.derived:
            self.counts.reads[name] += 1
        if name == "to":
            self._see_move(args[0], (*args[1:], *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))

    def _see_move(self, tensor: Tensor, options: tuple[Any, ...]) -> None:
        # On a CPU `.to(x.device)` cannot be told from a copy to the host; a name can.
        if "cpu" in options and tensor in self.derived:
            self.counts.reads["to"] += 1


class _Numpy:
    """numpy, a function of it or a ufunc's method, with the bytes of its arrays counted."""

    def __init__(self, original: Any, counts: Counted) -> None:
        self._original, self._counts = original, counts

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._original, name)
        if not callable(value) or isinstance(value, type):
            return value
        return _Numpy(value, self._counts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._original(*args, **kwargs)
        # An array that is written, out=, is among the outputs.
        given = {name: value for name, value in kwargs.items() if name != "out"}
        came_in, came_out = _arrays((args, given)), _arrays(outputs)
        is_view = "out" not in kwargs and any(
            np.may_share_memory(a, b) for a in came_in for b in came_out
        )
        if not is_view:  # as of ascontiguousarray, which mostly has nothing to do
            self._counts.numpy_bytes += sum(array.nbytes for array in (*came_in, *came_out))
        return outputs


def _arrays(tree: Any) -> list[np.ndarray]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, np.ndarray)]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """Bytes that a pass over the tensor moves; an expanded dimension is not moved."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    numel = 1
    for size, stride in sizes:
        numel *= size if stride or size == 0 else 1
    return numel * tensor.element_size()


def _reads(name: str, args: Any, kwargs: Any) -> bool:
    """Whether an operation's result has a shape or a place that depends on values."""
    if name in ("index", "index_put", "index_put_"):
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors(args[1]))
    if name == "repeat_interleave":  # without output_size it reads the total
        return kwargs.get("output_size") is None
    return name in READING_OPERATIONS


def _attributes_of_graph(share: Tensor) -> Iterator[Tensor]:
    """Find tensors that an autograd function keeps as plain attributes, which no hook sees."""
    seen, todo = set(), [share.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield from _tensors(list(getattr(node, "__dict__", {}).values()))
        todo.extend(after for after, _ in node.next_functions)


@contextmanager
def _replaced_everywhere(function: Any, replacement: Any) -> Iterator[None]:
    """Replace a value in every module of the package that has a name for it."""
    package = megatron_lossagg.__name__
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == package]
    with ExitStack() as stack:
        for module in modules:
            for name in [name for name, value in vars(module).items() if value is function]:
                stack.enter_context(mock.patch.object(module, name, replacement))
        yield
