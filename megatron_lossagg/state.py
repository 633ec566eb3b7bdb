"""What happens to a plan while its step runs; shared by ``StepPlan.under``.

One training or evaluation step runs at a time in a process. While it runs, each call of a
reducer is noted here, so that the step knows which reducers made the loss that it returns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.devices import from_host, moved
from megatron_lossagg.errors import ReducerError
from megatron_lossagg.faults import Faults
from megatron_lossagg.integers import Ints

__all__ = ["ReducerCall", "StepState", "TrainedTokens", "run_step"]


@dataclass(kw_only=True, eq=False)
class ReducerCall:
    """One call of a reducer while a step runs."""

    microbatch: object
    """The microbatch of the reducer, shared by the reducers that ``Reducer.under`` makes."""
    rows: Ints
    requires_grad: bool
    """Whether the losses that were passed require a gradient."""
    has_gradient: bool = False
    """Whether a backward pass has reached the partial loss."""


class TrainedTokens:
    """Trained tokens of each row on this rank, if the framework slices the mask itself.

    A row is in one microbatch, so running a microbatch again changes nothing.
    """

    def __init__(self) -> None:
        self._tokens_S: Tensor | None = None

    def add(self, rows: Ints, tokens: Tensor, num_rows: int) -> None:
        """Note a microbatch's ``tokens``, int64 ``[len(rows)]`` on any device. No host sync."""
        if self._tokens_S is None:
            self._tokens_S = torch.zeros(num_rows, dtype=torch.int64, device=tokens.device)
        device = self._tokens_S.device
        self._tokens_S.index_copy_(0, from_host(rows, device), moved(tokens, device).long())

    def of_rows(self) -> Tensor | None:
        """Return int64 ``[S]``; None if no mask was sliced by the framework."""
        return self._tokens_S


@dataclass(kw_only=True, eq=False)
class StepState:
    """The state of one step."""

    faults: Faults = field(default_factory=Faults)
    trained: TrainedTokens = field(default_factory=TrainedTokens)
    rejects_tokens: bool = False
    """Whether loss masks were declared to select fewer tokens than were counted."""
    is_stepped: bool = False
    """Whether a training step has begun over the plan."""
    calls: list[ReducerCall] | None = None
    """Calls of reducers since loss_func last returned; None while no step runs over the plan."""

    def note_call(self, call: ReducerCall, partial_loss: Tensor) -> None:
        """Note a reducer's call, if a step runs.

        Raises :class:`ReducerError` if the step that runs is of another plan.
        """
        if _running and not any(state is self for state in _running):
            raise ReducerError(
                "the reducer belongs to a plan other than the running step's: make it with "
                "plan.reducer(...) of the step's plan or under(...), or declare the second plan "
                "with contract.step(plan, also=[second_plan])"
            )
        if self.calls is None:
            return
        self.calls.append(call)
        if partial_loss.requires_grad:

            def reached(_: Any) -> None:
                call.has_gradient = True

            partial_loss.register_hook(reached)  # type: ignore[no-untyped-call]


_running: list[StepState] = []


def run_step(states: Iterable[StepState]) -> None:
    """Let the step of these plans' states run, and no other; of none: let no step run."""
    _running[:] = states
