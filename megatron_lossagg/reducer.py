"""Per-token losses to a share of the step's loss: the weighted sum.

A share is the sum over the tokens that this rank holds of this microbatch::

    share = sum_t w_{s(t)} * m_t * x_t

Shares add up: over microbatches, context-parallel ranks and data-parallel ranks their sum
is the step's loss, for any parallel layout. Nothing here knows a mode, a rank or a
denominator: weights come from the plan, tokens from the microbatch.

Shape suffixes: T = tokens this rank holds of the microbatch; G = its segments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.devices import moved, on_host
from megatron_lossagg.errors import ReducerError
from megatron_lossagg.integers import Ints
from megatron_lossagg.layout import Layout
from megatron_lossagg.microbatch import Microbatch, Place

if TYPE_CHECKING:
    from megatron_lossagg.plan import StepPlan

__all__ = ["Reducer", "ReducerContext", "ReducerFactory"]


@dataclass(frozen=True, kw_only=True)
class ReducerContext:
    """What a custom reducer factory is given: ``factory(context) -> Callable[[Tensor], Tensor]``.

    The callable takes this rank's per-token losses, masked positions already set to 0,
    flat in the layout's order, and returns a 0-dim additive share.
    """

    plan: StepPlan
    """Totals and, under a mode of the table, weights: ``plan.under("token_mean").weights``."""
    rows: Ints
    """int64 ``[G]``: the row of each segment, -1 for a filler."""
    mask: Tensor
    """bool ``[T]``: the training mask, sliced for this rank, on its device; shared, read only."""
    layout: Layout
    arguments: object
    """The host's parsed arguments, or None."""

    @property
    def aggregation(self) -> Aggregation:
        """The plan's aggregation."""
        return self.plan.aggregation


_LOSS_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

ReducerFactory = Callable[[ReducerContext], Callable[[Tensor], Tensor]]


class _MaskedSum(torch.autograd.Function):
    """sum_t w_t x_t over the kept tokens, for any values of the others.

    The gradient is w itself, which is 0 where a token is not kept: the backward pass is one
    product. In the forward pass a masked token may hold inf or NaN, and inf * 0 is NaN, so
    it is selected, not multiplied.
    """

    @staticmethod
    def forward(ctx: Any, x_T: Tensor, keep_T: Tensor, weight_T: Tensor) -> Tensor:
        ctx.save_for_backward(weight_T)
        kept_T = torch.where(keep_T, x_T, 0)
        if kept_T.dtype != weight_T.dtype:
            kept_T = kept_T.to(weight_T.dtype)
        return kept_T.mul_(weight_T).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (weight_T,) = ctx.saved_tensors
        return gradients[0] * weight_T, None, None  # autograd casts it to the dtype of x


def _masked_sum(x_T: Tensor, keep_T: Tensor, weight_T: Tensor) -> Tensor:
    share: Tensor = _MaskedSum.apply(x_T, keep_T, weight_T)  # type: ignore[no-untyped-call]
    return share


@dataclass(frozen=True, kw_only=True, eq=False)
class Reducer:
    """Turns this rank's per-token losses of one microbatch into a share.

    Built by ``StepPlan.reducer``. Calling it costs the same number of operations for 1
    and for 1,000 rows, and no collective.
    """

    plan: StepPlan
    microbatch: Microbatch
    custom: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if self.custom is None:  # here rather than in the call, whose cost is constant
            self._weight(torch.float32, self.microbatch.keep.device)

    @staticmethod
    def of(
        plan: StepPlan, microbatch: Microbatch, factory: ReducerFactory | None, arguments: object
    ) -> Reducer:
        """Make the reducer of a microbatch, or the custom one of ``factory``."""
        if factory is None:
            return Reducer(plan=plan, microbatch=microbatch)
        custom = factory(
            ReducerContext(
                plan=plan,
                rows=microbatch.rows,
                mask=microbatch.keep,
                layout=microbatch.layout,
                arguments=arguments,
            )
        )
        if not callable(custom):
            raise ReducerError(
                f"the reducer factory returned {custom!r}: return a callable that takes this "
                "rank's per-token losses and returns a 0-dim share"
            )
        return Reducer(plan=plan, microbatch=microbatch, custom=custom)

    @property
    def rows(self) -> Ints:
        """int64 ``[G]``: the row of each segment, -1 for a filler."""
        return self.microbatch.rows

    @property
    def layout(self) -> Layout:
        """Which tokens this rank holds."""
        return self.microbatch.layout

    def __call__(self, x: Tensor) -> Tensor:
        """Sum w m x over the tokens this rank holds.

        ``x``: this rank's per-token losses in the layout's order, any floating dtype, with as
        many elements as the layout has local tokens (tokens past the last segment weigh 0);
        of two dimensions, each of its rows begins with a segment. Returns a 0-dim share in
        float32, or float64 where x is float64, connected to the graph of x even when no token
        is active. Masked positions of x may hold inf or NaN: neither the share nor its
        gradient with respect to x sees them.

        A loss that the mask keeps and that is not finite raises :class:`ReducerError`, which
        names its row and token. On CUDA the share stays on the device without a host sync,
        and closing the step raises it; row and token are named there if the step was planned
        with ``locate=True``. On the CPU one scalar is read.
        """
        x_T = self._local_losses(x)
        dtype = torch.promote_types(x.dtype, torch.float32)
        if self.custom is not None:
            return self._custom_share(self.custom, x_T, dtype)
        weight_T = self._weight(dtype, x.device)
        if not on_host(x):
            share = _masked_sum(x_T, self.microbatch.keep_on(x.device), weight_T)
            self._record(x_T, share)
            return share
        share = (x_T * weight_T).sum()
        if not math.isfinite(share.item()):  # a masked token may be the reason
            share = _masked_sum(x_T, self.microbatch.keep_on(x.device), weight_T)
            if not math.isfinite(share.item()):
                self._raise_not_finite(x_T.detach(), share)
        return share

    def under(self, aggregation: Aggregation | str) -> Reducer:
        """Return a reducer over the same tokens under another aggregation, without a collective."""
        return replace(self, plan=self.plan.under(aggregation), custom=None)

    def weight_sum(self) -> Tensor | None:
        """Sum w m over the tokens this rank holds, 0-dim float32: the weight-sum check's share.

        None for a custom reducer, whose weights are its own.
        """
        if self.custom is not None:
            return None
        return self._weight(torch.float32, self.microbatch.keep.device).sum()

    @property
    def counted_tokens(self) -> int:
        """Active tokens of this microbatch by the plan's count, complete over CP."""
        return self.microbatch.counted_tokens

    def _weight(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.microbatch.weights(self.plan.aggregation, self.plan.weights, dtype, device)

    def _local_losses(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or x.dtype not in _LOSS_DTYPES:
            raise ReducerError(f"got {_kind(x)}, expected per-token losses in floating point")
        layout = self.layout
        num_local, past_end = layout.num_local_tokens, self.microbatch.num_past_end
        if x.numel() not in (num_local, num_local + past_end // layout.cp_size):
            raise ReducerError(
                f"got {x.numel()} per-token losses (shape {tuple(x.shape)}), the layout "
                f"{layout.name} holds {num_local} on CP rank {layout.cp_rank} of {layout.cp_size}: "
                "pass the losses of this rank's slice, in its order"
            )
        if x.dim() != 1:
            self._check_row_starts(x)
            x = x.reshape(-1)
        return x if x.numel() == num_local else x[:num_local]

    def _check_row_starts(self, x: Tensor) -> None:
        """Refuse losses of several dimensions in another order, such as ``[s, b]`` for [b, s]."""
        sizes = [size for size in x.shape if size != 1]
        if len(sizes) < 2 or x.numel() == 0:
            return
        if not self.layout.is_in_rows(sizes, is_local=True):
            raise ReducerError(
                f"got losses of shape {tuple(x.shape)}, and not each of their rows begins with a "
                f"segment of the layout {self.layout.name}: pass them in the order of the mask, "
                "[b, s] and not [s, b], or flat"
            )

    def _custom_share(
        self, custom: Callable[[Tensor], Tensor], x_T: Tensor, dtype: torch.dtype
    ) -> Tensor:
        x_T = torch.where(self.microbatch.keep_on(x_T.device), x_T, 0).to(dtype)
        share = custom(x_T)
        if not isinstance(share, Tensor) or share.dim() != 0 or not share.is_floating_point():
            raise ReducerError(
                f"the custom reducer {self.plan.aggregation.reducer_path or custom!r} "
                f"returned {_kind(share)}: return a 0-dim floating-point tensor, an additive share"
            )
        # A custom reducer may swallow a NaN; 0 * x is NaN where x is not finite, else 0.
        seen = moved(share.detach(), x_T.device) + (x_T.detach() * 0).sum()
        if not on_host(seen):
            self._record(x_T, seen)
        elif not math.isfinite(seen.item()):
            self._raise_not_finite(x_T.detach(), share)
        return share

    def _record(self, x_T: Tensor, share: Tensor) -> None:
        """Leave the share on its device, for the step to read when it closes."""
        found = [share]
        if self.microbatch.faults.locate and x_T.numel():
            fault_T = self._faults_of(x_T)
            found += [fault_T.any(), fault_T.int().argmax()]
        # A partial of what names the tokens: the weights and the mask may go before the step ends.
        describe = partial(_describe, self.microbatch.place, self.custom is not None)
        self.microbatch.faults.record(found, describe)

    def _faults_of(self, x_T: Tensor) -> Tensor:
        """Mark the losses that the mask keeps and that are not finite; bool ``[T]``."""
        return self.microbatch.keep_on(x_T.device) & x_T.detach().isfinite().logical_not()

    def _raise_not_finite(self, x_T: Tensor, share: Tensor) -> None:
        place, fault_T = self.microbatch.place, self._faults_of(x_T)
        if fault_T.any():
            index = int(fault_T.int().argmax())
            raise ReducerError(_loss_is(f"{x_T[index].item()}", place, index))
        raise ReducerError(_share_is(f"{share.item()}", place, self.custom is not None))


def _describe(place: Place, is_custom: bool, values: list[float]) -> str:
    share, *located = values
    if math.isfinite(share):
        return ""
    if located and located[0]:
        return _loss_is("not finite", place, int(located[1]))
    if located or not place.layout.num_local_tokens:
        return _share_is(f"{share}", place, is_custom)
    return (
        f"{place.rank}: the share of {place} is {share}: a trained loss is not finite, or the sum "
        "overflows; plan the step with plan_step(locate=True) to have row and token named"
    )


def _loss_is(value: str, place: Place, index: int) -> str:
    row, token = place.token(index)
    return (
        f"{place.rank}: the loss of {row} is {value} at its token {token}: check "
        "log-probabilities, importance ratios and advantages, or clear the mask there: a masked "
        "loss may be anything"
    )


def _share_is(value: str, place: Place, is_custom: bool) -> str:
    cause = "the sum overflows; scale the losses down, or pass them in a wider type"
    if is_custom:
        cause = "check the custom reducer"
    return (
        f"{place.rank}: every trained loss of {place} is finite and their share is {value}: {cause}"
    )


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return repr(value)
