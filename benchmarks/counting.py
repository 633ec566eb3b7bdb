"""Operations, bytes and collectives of a block of code, without a clock.

An *operation* is what PyTorch dispatches and what launches a kernel on a GPU: ATen operations
that are not a view and not an allocation. Its *bytes* are those of its tensor inputs and
outputs, so that an operation in place counts its tensor twice, read and written; an expanded
dimension is not counted.

Reads of a device are not counted but excluded: on tensors of torch's ``meta`` device, which have
no values, every operation that would wait for a GPU raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALLOCATIONS = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "empty_permuted",
    "lift_fresh",
}


@dataclass
class Counted:
    """What a block of code did."""

    operations: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    collectives: Counter[str] = field(default_factory=Counter)
    collective_bytes: int = 0
    """Bytes that the collectives brought to this rank."""

    @property
    def num_operations(self) -> int:
        """Number of operations."""
        return sum(self.operations.values())

    @property
    def num_collectives(self) -> int:
        """Number of collectives."""
        return sum(self.collectives.values())


@contextmanager
def counted() -> Iterator[Counted]:
    """Count what the block does."""
    counts = Counted()
    with _Operations(counts):
        yield counts


class _Operations(TorchDispatchMode):
    def __init__(self, counts: Counted) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[-1]
        if func.namespace == "c10d":
            self.counts.collectives[name] += 1
            self.counts.collective_bytes += sum(map(_bytes, _tensors(args[0])))
            return outputs
        read = {name: value for name, value in (kwargs or {}).items() if name != "out"}
        touched = [*_tensors((args, read)), *_tensors(outputs)]  # promote_types touches none
        if touched and not func.is_view and name not in ALLOCATIONS:
            self.counts.operations[name] += 1
            self.counts.bytes += sum(map(_bytes, touched))
        return outputs


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """Bytes that a pass over the tensor moves; an expanded dimension is not moved."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride or size == 0 else 1
    return numel * tensor.element_size()
