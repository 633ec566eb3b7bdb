"""Per-token losses to a partial loss: the weighted sum.

A partial loss is the sum over the tokens that this rank holds of this microbatch::

    partial_loss = sum_t w_{s(t)} * m_t * v_t * x_t

where v_t is 1 unless the aggregation counts token weights.

Partial losses add up: over microbatches, context-parallel ranks and data-parallel ranks their sum
is the step's loss, for any parallelism. Nothing here knows a mode, a rank or a
denominator: weights come from the plan, tokens from the microbatch.

Shape suffixes: T = tokens this rank holds of the microbatch; G = its segments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_lossagg.errors import ReducerError
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.checks.losses import (
    check_finite,
    checked_losses,
    checked_partial_loss,
)
from megatron_lossagg.reduction.custom import ReducerContext, load_reducer_factory
from megatron_lossagg.reduction.integers import Ints
from megatron_lossagg.reduction.layout import Layout
from megatron_lossagg.reduction.microbatch import Microbatch
from megatron_lossagg.reduction.segments import held

if TYPE_CHECKING:
    from megatron_lossagg.reduction.plan import StepPlan

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer of as many bytes as a loss."""


class _MaskedSum(torch.autograd.Function):
    """sum_t w_t x_t over the kept tokens: ``kept_T`` is x with 0 where the mask is.

    The gradient is w itself, which is 0 where a token is not kept: the backward pass is one
    product.
    """

    @staticmethod
    def forward(ctx: Any, x_T: Tensor, kept_T: Tensor, weight_T: Tensor) -> Tensor:
        ctx.save_for_backward(weight_T)
        return (kept_T * weight_T).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (weight_T,) = ctx.saved_tensors
        return gradient * weight_T, None, None  # autograd casts it to the dtype of x


@dataclass(frozen=True, kw_only=True, eq=False)
class Reducer:
    """Turns this rank's per-token losses of one microbatch into a partial loss.

    Built by ``StepPlan.reducer``. Calling it costs the same number of operations for 1
    and for 1,000 sequences, and no collective.
    """

    plan: StepPlan
    microbatch: Microbatch
    custom: Callable[[Tensor], Tensor] | None = None

    @staticmethod
    def of(plan: StepPlan, microbatch: Microbatch) -> Reducer:
        """Make the reducer of a microbatch, or the custom one that the reducer path leads to."""
        path = plan.aggregation.reducer_path
        if path is None:
            return Reducer(plan=plan, microbatch=microbatch)
        custom = load_reducer_factory(path)(
            ReducerContext(
                plan=plan,
                sequences=microbatch.segments.sequences,
                mask=microbatch.keep,
                layout=microbatch.segments.layout,
            )
        )
        if not callable(custom):
            raise ReducerError(
                f"the reducer factory returned {custom!r}: return a callable that takes this "
                "rank's per-token losses and returns a 0-dim partial loss"
            )
        return Reducer(plan=plan, microbatch=microbatch, custom=custom)

    @property
    def sequences(self) -> Ints:
        """int64 ``[G]``: the sequence of each segment, -1 for a padding sequence."""
        return self.microbatch.segments.sequences

    @property
    def layout(self) -> Layout:
        """Which tokens this rank holds."""
        return self.microbatch.segments.layout

    def __call__(self, x: Tensor) -> Tensor:
        """Sum w m v x over the tokens this rank holds.

        ``x``: this rank's per-token losses in the layout's order, any floating dtype, with as
        many elements as the layout has local tokens, or as the mask if they are gathered (tokens
        past the last segment weigh 0); if two-dimensional, each row begins with a segment. Returns
        a 0-dim partial loss in float32, or float64 if x is float64, connected to the graph of x
        even if no token is active. Masked positions of x may hold inf or NaN: neither the partial
        loss nor its gradient with respect to x sees them.

        A loss that the mask keeps and that is not finite raises :class:`ReducerError`, which
        names its sequence and token: immediately on the CPU, when the step finishes on a device.

        While a step runs, its guards see the call. A partial loss that can be trained raises if
        its plan is not the step's, and if its layout is not of the model's split and this rank.
        """
        x_T = self._local_losses(x)
        dtype = torch.promote_types(x.dtype, torch.float32)
        if self.custom is None:
            partial_loss, kept_T = self._masked_sum(x_T, dtype)
        else:
            kept_T = torch.where(self.microbatch.keep_on(x_T.device), x_T, 0).to(dtype)
            partial_loss = self.custom(kept_T)
            partial_loss = checked_partial_loss(partial_loss, self.plan.aggregation.reducer_path)
        check_finite(
            partial_loss,
            kept_T,
            self.microbatch.segments,
            self.plan.state.faults,
            is_custom=self.custom is not None,
        )
        self.plan.state.note(self, x, partial_loss)
        return partial_loss

    def under(self, aggregation: Aggregation | str) -> Reducer:
        """Return a reducer over the same tokens under another aggregation, without a collective.

        The weights are computed once per step and aggregation.
        """
        return replace(self, plan=self.plan.under(aggregation), custom=None)

    def shadow(self, x: Tensor, aggregation: Aggregation) -> Tensor:
        """Sum what another aggregation would train: no gradient, not checked, not noted.

        ``x``: as in :meth:`__call__`. Returns a 0-dim partial loss. No collective, no host sync.
        """
        x_T = self._local_losses(x.detach())
        dtype = torch.promote_types(x.dtype, torch.float32)
        return self.under(aggregation)._masked_sum(x_T, dtype)[0]

    def weights(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return w m v of each token this rank holds, ``[T]``; made once for a dtype and device.

        ``dtype``: float32 or float64. Of a mode, not of a custom reducer. No host sync.
        """
        weight_S1 = self.plan.weight_S1
        return self.microbatch.weights(self.plan.aggregation, weight_S1, dtype, device)

    def weight_sum(self, dtype: torch.dtype | None = None) -> Tensor | None:
        """Sum w m v over the tokens this rank holds, 0-dim: for the weight-sum check.

        ``dtype``: of the weights that are summed; None for those that losses were reduced with,
        whose sum is in float32. None for a custom reducer, whose weights are its own.
        """
        if self.custom is not None:
            return None
        weight_T = None
        if dtype is None:
            weight_T = self.microbatch.made_weights(self.plan.aggregation)
        if weight_T is None:
            weight_T = self.weights(dtype or torch.float32, self.microbatch.keep.device)
        return weight_T.sum().to(dtype or torch.float32)

    @cached_property
    def counted_tokens(self) -> int:
        """Active tokens of this microbatch by the plan's count, complete over CP."""
        return int(self.microbatch.segments.counted.sum())

    def _masked_sum(self, x_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the partial loss, and the losses with 0 where none is kept.

        A masked token may hold inf or NaN, and inf * 0 is NaN. So the bits of a loss, as an
        integer, are multiplied by 0 or 1: on a CPU several times as fast as ``torch.where``, and on
        a device one kernel instead of two.
        """
        bits_T = x_T.detach().view(_BITS[x_T.element_size()])
        kept_T = (bits_T * self.microbatch.keep_on(x_T.device)).view(x_T.dtype).to(dtype)
        weight_T = self.weights(dtype, x_T.device)
        partial_loss: Tensor = _MaskedSum.apply(x_T, kept_T, weight_T)  # type: ignore[no-untyped-call]
        return partial_loss, kept_T

    def _local_losses(self, x: Tensor) -> Tensor:
        layout = self.microbatch.segments.layout
        x_T = checked_losses(x, layout, self.microbatch.num_past_end)
        return held(x_T, layout) if layout.is_gathered else x_T
