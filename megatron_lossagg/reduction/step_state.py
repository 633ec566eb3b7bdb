"""What happens to a plan while its step runs; shared by ``StepPlan.under``.

While a step runs, each call of a reducer is noted here, so that the step knows which reducers
made the losses that it trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_lossagg.errors import ReducerError
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.devices import from_numpy, moved
from megatron_lossagg.reduction.faults import Faults
from megatron_lossagg.reduction.integers import Ints
from megatron_lossagg.reduction.layout import Layout

__all__ = ["ReducerCall", "StepState"]


@dataclass(kw_only=True, eq=False)
class ReducerCall:
    """One call of a reducer while a step runs."""

    microbatch: object
    """Stands for the microbatch of the reducer, without keeping its mask and weights."""
    sequences: Ints
    aggregation: Aggregation
    requires_grad: bool
    """Whether the losses that were passed require a gradient."""
    is_late: bool = False
    """Whether loss_func had returned for the microbatch; recomputing it in backward is not late."""
    has_gradient: bool = False
    """Whether a backward pass has reached the partial loss."""


class TrainedTokens:
    """Trained tokens of each sequence on this rank, which context-parallel ranks compare.

    If several masks over one sequence are noted, the one that trains most counts, so running a
    microbatch again changes nothing.
    """

    def __init__(self, dtype: torch.dtype = torch.int64) -> None:
        self.dtype = dtype
        """int64 for tokens, float64 for the sums of their weights."""
        self._tokens_S: dict[torch.device, Tensor] = {}
        self._is_noted_S: npt.NDArray[np.bool_] | None = None

    def lacks(self, sequences: Ints) -> npt.NDArray[np.bool_]:
        """Say of each sequence whether nothing was noted of it."""
        if self._is_noted_S is None:
            return np.ones(len(sequences), dtype=bool)
        return ~self._is_noted_S[sequences]

    def add(self, sequences: Ints, tokens: Tensor, num_sequences: int) -> None:
        """Note a microbatch's ``tokens``, ``[len(sequences)]``; no host sync."""
        device = tokens.device
        if device not in self._tokens_S:
            self._tokens_S[device] = torch.zeros(num_sequences, dtype=self.dtype, device=device)
        tokens_S, index = self._tokens_S[device], from_numpy(sequences, device)
        tokens_S.index_copy_(0, index, torch.maximum(tokens_S[index], tokens.to(self.dtype)))
        if self._is_noted_S is None:
            self._is_noted_S = np.zeros(num_sequences, dtype=bool)
        self._is_noted_S[sequences] = True

    def of_sequences(self) -> Tensor | None:
        """Return ``[S]``; None if nothing was noted."""
        found = list(self._tokens_S.values())
        if not found:
            return None
        return torch.stack([moved(tokens_S, found[0].device) for tokens_S in found]).amax(dim=0)


@dataclass(kw_only=True, eq=False)
class StepState:
    """The state of one step."""

    faults: Faults = field(default_factory=Faults)
    trained: TrainedTokens = field(default_factory=TrainedTokens)
    """By masks of each rank's own: sliced by the framework, or of gathered losses."""
    trained_of_whole: TrainedTokens = field(default_factory=TrainedTokens)
    """By whole masks: what this rank holds of the first mask of each sequence."""
    trained_weights: TrainedTokens = field(default_factory=lambda: TrainedTokens(torch.float64))
    """The sums of the weights that ``trained`` trains, if the plan has any."""
    weights_of_whole: TrainedTokens = field(default_factory=lambda: TrainedTokens(torch.float64))
    """Those of ``trained_of_whole``."""
    rejects_tokens: bool = False
    """Whether loss masks were declared to select fewer tokens than were counted."""
    is_stepped: bool = False
    """Whether a training step has begun over the plan."""
    calls: list[ReducerCall] | None = None
    """Calls of reducers in the step; None while no step runs over the plan."""
    check_layout: Callable[[Layout], None] | None = None
    """Refuses a layout of a different rank or split; None while no step runs."""
    pending: list[ReducerCall] = field(default_factory=list)
    """Those for whose microbatch loss_func has not returned."""
    returned: set[object] = field(default_factory=set)
    """The microbatches for which loss_func has returned."""

    def begin(self, check_layout: Callable[[Layout], None] | None = None) -> None:
        """Note from here on what reducers are called for, and what they train.

        ``check_layout``: raises for a layout whose losses may not be trained while the step runs.
        """
        self.check_layout = check_layout
        self.calls, self.pending, self.returned = [], [], set()
        self.trained, self.trained_of_whole = TrainedTokens(), TrainedTokens()
        self.trained_weights = TrainedTokens(torch.float64)
        self.weights_of_whole = TrainedTokens(torch.float64)

    def refuse_others(self) -> None:
        """While the step runs, let no reducer of another plan make a partial loss."""
        _open.add(self)

    def end(self) -> None:
        """End the step that runs over the plan."""
        self.calls, self.check_layout = None, None
        _open.discard(self)

    def note_call(self, call: ReducerCall, partial_loss: Tensor, layout: Layout) -> None:
        """Note a reducer's call, if a step runs.

        Raises :class:`ReducerError` for a partial loss that can be trained if steps run and none
        is over this plan, and as ``check_layout``. A metric without a gradient may be of any plan
        and layout.
        """
        if self.check_layout is not None and partial_loss.requires_grad:
            self.check_layout(layout)
        if self.calls is None:
            if _open and partial_loss.requires_grad:
                raise ReducerError(
                    "the reducer belongs to a plan other than the running step's: make it with "
                    "step.microbatch(...), and a further term over the same tokens with its "
                    "reduce(losses, mode)"
                )
            return
        in_backward = torch._C._current_graph_task_id() >= 0
        call.is_late = call.microbatch in self.returned and not in_backward
        self.calls.append(call)
        if call.microbatch not in self.returned:
            self.pending.append(call)
        if partial_loss.requires_grad:

            def reached(_: Any) -> None:
                call.has_gradient = True

            partial_loss.register_hook(reached)  # type: ignore[no-untyped-call]


_open: WeakSet[StepState] = WeakSet()
"""The plans' states of the steps that run; one that was given up goes with its aggregator."""
