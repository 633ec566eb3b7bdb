"""What is counted of a call: operations, bytes and tensors held, for any number of sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.counting import Counted, counted
from benchmarks.workloads import AGGREGATION, TOKEN_MEAN, Workload
from megatron_lossagg import Aggregation
from megatron_lossagg.reducer import Reducer

DEVICES = ("cpu", "meta")
"""``meta`` stands for every device that is not the CPU: there a read of a value raises."""
MASK_TYPES = {"bool": torch.bool, "int32": torch.int32, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class CallCounts:
    """One microbatch's reducer: built, called, and the backward of its partial loss."""

    build: Counted
    forward: Counted
    backward: Counted
    num_positions: int
    num_local_tokens: int

    @property
    def operations(self) -> tuple[int, int]:
        """Operations of a call, forward and backward."""
        return self.forward.num_operations, self.backward.num_operations

    @property
    def bytes_per_token(self) -> tuple[float, float]:
        """Bytes per local token of a call, forward and backward."""
        n = self.num_local_tokens
        return self.forward.bytes / n, self.backward.bytes / n

    @property
    def build_bytes_per_position(self) -> float:
        """Bytes per mask position to build."""
        return self.build.bytes / self.num_positions


def of_a_call(
    workload: Workload,
    device: str = "cpu",
    mask_type: torch.dtype = torch.int32,
    aggregation: Aggregation = AGGREGATION,
    *,
    in_step: bool = False,
) -> CallCounts:
    """Count one microbatch on a device; on ``meta`` any host sync is an error.

    ``in_step``: while a step runs, which notes what each context-parallel rank trains.
    """
    plan, layout = workload.plan.under(aggregation), workload.layout()
    mask_P = workload.mask_P.to(mask_type).to(device)
    x_T = workload.x_T.detach().to(device).requires_grad_()
    if in_step:
        plan.state.begin()
    with counted() as build:
        reducer = plan.reducer(range(workload.num_sequences), mask_P, layout)
    with counted() as forward:
        partial_loss = reducer(x_T)
    with counted() as backward:
        partial_loss.backward()
    plan.state.end()
    return CallCounts(
        build=build,
        forward=forward,
        backward=backward,
        num_positions=len(mask_P),
        num_local_tokens=len(x_T),
    )


CALL_OPERATIONS = (5, 2)
CALL_BYTES = (33.0, 8.0)
NOTED_OPERATIONS = 7
"""More operations of a first call in a step at CP > 1."""
SLACK_BYTES = 0.1
"""For the few bytes of 0-dim tensors, shared by the tokens of a small microbatch."""
BUILD_BYTES = 43.0
HELD_BYTES = 4.0

HELD_OF = {
    "one call": 1,
    "six calls of one reducer": 1,
    "six calls, each by under with the same aggregation": 1,
    "six calls under three aggregations": 3,
}
"""Calls whose graphs are looked at, and under how many aggregations they are."""


def held_for_backward(workload: Workload) -> dict[str, float]:
    """Count the bytes per local token that graphs of ``HELD_OF`` hold, losses themselves aside."""
    reducer = workload.plan.reducer(
        range(workload.num_sequences), workload.mask_P, workload.layout()
    )
    losses = [workload.x_T.detach().requires_grad_() for _ in range(6)]

    def held(reducers: list[Reducer]) -> float:
        def call() -> Tensor:
            return torch.stack([r(x) for r, x in zip(reducers, losses, strict=False)]).sum()

        return bytes_saved_for_backward(call) / workload.num_local_tokens

    own = reducer.plan.aggregation
    token_mean, constant = reducer.under(TOKEN_MEAN), reducer.under(workload.constant)
    calls = (
        [reducer],
        [reducer] * 6,
        [reducer, *(reducer.under(own) for _ in range(5))],
        [reducer, reducer, token_mean, token_mean, constant, constant],
    )
    return dict(zip(HELD_OF, map(held, calls), strict=True))


def bytes_saved_for_backward(call: Callable[[], Tensor]) -> int:
    """Count the bytes that the graph of ``call`` holds, each storage once."""
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = call()
    for tensor in _attributes_of_graph(loss):
        keep(tensor)
    return sum(storage.nbytes() for storage in storages.values())


def _attributes_of_graph(loss: Tensor) -> Iterator[Tensor]:
    """Find tensors that an autograd function keeps as plain attributes, which no hook sees."""
    seen, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kept = tree_leaves(list(getattr(node, "__dict__", {}).values()))
        yield from (leaf for leaf in kept if isinstance(leaf, Tensor))
        todo.extend(after for after, _ in node.next_functions)
