"""What is counted: operations, bytes, reads and tensors held, for any number of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.counting import Counted, bytes_saved_for_backward, counted
from benchmarks.workloads import AGGREGATION, TOKEN_MEAN, Workload
from megatron_lossagg import Aggregation, Reducer

PATHS = ("cpu", "device")
MASK_TYPES = {"bool": torch.bool, "int32": torch.int32, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class CallCounts:
    """One microbatch's reducer: built, called, and its share's backward."""

    path: str
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
        """Bytes per mask position to build.

        On the CPU numpy's too; on the device path those that move on the device or to it.
        """
        on_host = self.build.numpy_bytes if self.path == "cpu" else 0
        return (self.build.bytes + on_host) / self.num_positions


def of_a_call(
    workload: Workload,
    path: str = "cpu",
    mask_type: torch.dtype = torch.int32,
    aggregation: Aggregation = AGGREGATION,
) -> CallCounts:
    """Count one microbatch on the CPU, or on torch's meta device, where every read raises."""
    plan, layout = workload.plan.under(aggregation), workload.layout()
    device = "meta" if path == "device" else "cpu"
    mask_P = workload.mask_P.to(device, mask_type)
    x_T = workload.x_T.detach().to(device).requires_grad_()
    rows = range(workload.num_sequences)
    with counted(mask_P) as build:
        reducer = plan.reducer(rows, mask_P, layout)
    with counted(mask_P, x_T, *tensors_of(reducer)) as forward:
        share = reducer(x_T)
    with counted(share) as backward:
        share.backward()
    return CallCounts(
        path=path,
        build=build,
        forward=forward,
        backward=backward,
        num_positions=len(mask_P),
        num_local_tokens=len(x_T),
    )


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes per local token that graphs hold for the backward pass."""

    one_call: float
    six_calls: float
    """Six losses, one reducer."""
    six_calls_under: float
    """Six losses, each by ``under`` with the same aggregation."""
    three_aggregations: float
    """Six losses under three aggregations."""


def held_for_backward(workload: Workload) -> Held:
    """Count the bytes that the graphs of a microbatch's losses hold, losses themselves aside."""
    reducer = workload.plan.reducer(
        range(workload.num_sequences), workload.mask_P, workload.layout()
    )
    losses = [workload.x_T.detach().requires_grad_() for _ in range(6)]

    def shares(reducers: list[Reducer]) -> float:
        def call() -> Tensor:
            return torch.stack([r(x) for r, x in zip(reducers, losses, strict=False)]).sum()

        return bytes_saved_for_backward(call) / workload.num_local_tokens

    own, token_mean, constant = (
        reducer.plan.aggregation,
        reducer.under(TOKEN_MEAN),
        reducer.under(workload.constant),
    )
    return Held(
        one_call=shares([reducer]),
        six_calls=shares([reducer] * 6),
        six_calls_under=shares([reducer, *(reducer.under(own) for _ in range(5))]),
        three_aggregations=shares([reducer, reducer, token_mean, token_mean, constant, constant]),
    )


def tensors_of(value: object, depth: int = 2) -> list[Tensor]:
    """Find the tensors that an object of the package keeps, except the plan's: the host's."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (dict, list, tuple)):
        parts = value.values() if isinstance(value, dict) else value
        return [tensor for part in parts for tensor in tensors_of(part, depth)]
    if depth == 0 or not type(value).__module__.startswith("megatron_lossagg"):
        return []
    names = [name for name in getattr(value, "__dict__", {}) if name not in ("plan", "layout")]
    return [tensor for name in names for tensor in tensors_of(getattr(value, name), depth - 1)]
