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

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megatron_lossagg.errors import ReducerError
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.custom import ReducerContext, load_reducer_factory
from megatron_lossagg.reduction.integers import Ints
from megatron_lossagg.reduction.layout import Layout
from megatron_lossagg.reduction.microbatch import Microbatch, Segments, held
from megatron_lossagg.reduction.step_state import ReducerCall

if TYPE_CHECKING:
    from megatron_lossagg.reduction.plan import StepPlan

__all__ = ["Reducer"]


_LOSS_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer of as many bytes as a loss."""


class _MaskedSum(torch.autograd.Function):
    """sum_t w_t x_t over the kept tokens, for any values of the others; and the kept losses.

    The gradient is w itself, which is 0 where a token is not kept: the backward pass is one
    product. In the forward pass a masked token may hold inf or NaN, and inf * 0 is NaN. So the
    bits of a loss, as an integer, are multiplied by 0 or 1: on a CPU several times as fast as
    ``torch.where``, and on a device one kernel instead of two.
    """

    @staticmethod
    def forward(
        ctx: Any, x_T: Tensor, keep_T: Tensor, weight_T: Tensor
    ) -> tuple[Tensor, tuple[Tensor]]:
        ctx.save_for_backward(weight_T)
        kept_T = (x_T.view(_BITS[x_T.element_size()]) * keep_T).view(x_T.dtype)
        if kept_T.dtype != weight_T.dtype:
            kept_T = kept_T.to(weight_T.dtype)
        return (kept_T * weight_T).sum(), (kept_T,)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (weight_T,) = ctx.saved_tensors
        return gradients[0] * weight_T, None, None  # autograd casts it to the dtype of x


def _extremes(kept_T: Tensor) -> list[Tensor]:
    """Largest loss and its index, smallest and its index; a NaN is both. Empty for no tokens."""
    if not kept_T.numel():
        return []
    return [*kept_T.max(dim=0), *kept_T.min(dim=0)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Reducer:
    """Turns this rank's per-token losses of one microbatch into a partial loss.

    Built by ``StepPlan.reducer``. Calling it costs the same number of operations for 1
    and for 1,000 sequences, and no collective.
    """

    plan: StepPlan
    microbatch: Microbatch
    custom: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if self.custom is None:  # here rather than in the call, whose cost is constant
            self._weight(torch.float32, self.microbatch.keep.device)

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

        While a step runs, the call is noted. A partial loss that can be trained raises if its plan
        is not the step's, and if its layout is not of the model's split and this rank.
        """
        x_T = self._local_losses(x)
        dtype = torch.promote_types(x.dtype, torch.float32)
        partial_loss = self._partial_loss(x_T, dtype)
        call = ReducerCall(
            microbatch=self.microbatch.identity,
            sequences=self.sequences,
            aggregation=self.plan.aggregation,
            requires_grad=x.requires_grad,
        )
        self.plan.state.note_call(call, partial_loss, self.layout)
        self.microbatch.note_trained(len(self.plan.active_tokens))
        return partial_loss

    def _partial_loss(self, x_T: Tensor, dtype: torch.dtype) -> Tensor:
        keep_T = self.microbatch.keep_on(x_T.device)
        if self.custom is not None:
            kept_T = torch.where(keep_T, x_T, 0).to(dtype)
            partial_loss = self._checked_custom(self.custom(kept_T))
        else:
            partial_loss, kept_T = self._masked_sum(x_T, dtype)
        kept_T = kept_T.detach()
        self.microbatch.state.faults.check(
            x_T.device,
            lambda: [partial_loss, *_extremes(kept_T)],
            # Of what names the tokens only: the weights and the mask may go before the step ends.
            partial(_describe, self.microbatch.segments, self.custom is not None),
            seems_right=lambda: self._seems_finite(partial_loss, kept_T),
        )
        return partial_loss

    def _seems_finite(self, partial_loss: Tensor, kept_T: Tensor) -> bool:
        swallows = self.custom is not None and not kept_T.isfinite().all()
        return math.isfinite(partial_loss.item()) and not swallows

    def _checked_custom(self, partial_loss: Any) -> Tensor:
        if (
            not isinstance(partial_loss, Tensor)
            or partial_loss.dim() != 0
            or not partial_loss.is_floating_point()
        ):
            raise ReducerError(
                f"the custom reducer {self.plan.aggregation.reducer_path!r} returned "
                f"{_kind(partial_loss)}: return a 0-dim floating-point tensor, an additive partial "
                "loss"
            )
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

    def _masked_sum(self, x_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the partial loss, and the losses with 0 where none is kept."""
        keep_T = self.microbatch.keep_on(x_T.device)
        weight_T = self._weight(dtype, x_T.device)
        found = _MaskedSum.apply(x_T, keep_T, weight_T)  # type: ignore[no-untyped-call]
        partial_loss, (kept_T,) = found
        return partial_loss, kept_T

    def weight_sum(self, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """Sum w m v over the tokens this rank holds, 0-dim: for the weight-sum check.

        None for a custom reducer, whose weights are its own.
        """
        if self.custom is not None:
            return None
        return self._weight(dtype, self.microbatch.keep.device).sum()

    @property
    def counted_tokens(self) -> int:
        """Active tokens of this microbatch by the plan's count, complete over CP."""
        return int(self.microbatch.segments.counted.sum())

    def _weight(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        weight_S = self.plan.weight_S
        return self.microbatch.weights(self.plan.aggregation, weight_S, dtype, device)

    def _local_losses(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or x.dtype not in _LOSS_DTYPES:
            raise ReducerError(f"got {_kind(x)}, expected per-token losses in floating point")
        layout, past_end = self.layout, self.microbatch.num_past_end
        num_losses = layout.num_tokens if layout.is_gathered else layout.num_local_tokens
        num_past_end = past_end if layout.is_gathered else past_end // layout.cp_size
        if x.numel() not in (num_losses, num_losses + num_past_end):
            whose = "the whole mask" if layout.is_gathered else "this rank's slice"
            raise ReducerError(
                f"got {x.numel()} per-token losses (shape {tuple(x.shape)}), the layout "
                f"{layout.name} holds {num_losses} on CP rank {layout.cp_rank} of "
                f"{layout.cp_size}: pass the losses of {whose}, in its order"
            )
        if x.dim() != 1:
            self._check_sequence_starts(x)
            x = x.reshape(-1)
        if x.numel() > num_losses:
            self._check_tail_is_no_padding()
            x = x[:num_losses]
        return held(x, layout) if layout.is_gathered else x

    def _check_tail_is_no_padding(self) -> None:
        """Refuse losses past the last segment that padded segments would explain exactly.

        With offsets before padding, sequences whose lengths divide by 2 CP all the same would get
        other tokens' losses.
        """
        cp, num_tokens = self.layout.cp_size, self.microbatch.num_past_end + self.layout.num_tokens
        length_G = np.diff(self.layout.offset_G1)
        multiple = 4 * cp
        while cp > 1 and multiple <= num_tokens:
            if int((-(-length_G // multiple) * multiple).sum()) == num_tokens:
                raise ReducerError(
                    f"got losses and a mask of {num_tokens} tokens for segments that end at "
                    f"{self.layout.num_tokens}, which is what padding each segment to a multiple "
                    f"of {multiple} would give: pass the padded offsets (cu_seqlens_padded); if "
                    "the tokens after the last segment belong to no sequence, end the offsets "
                    "after them and give that segment -1"
                )
            multiple *= 2

    def _check_sequence_starts(self, x: Tensor) -> None:
        """Refuse losses whose dimensions are in a different order, such as ``[s, b]``."""
        sizes = [size for size in x.shape if size != 1]
        if len(sizes) < 2 or x.numel() == 0:
            return
        is_local = not self.layout.is_gathered
        if not self.layout.is_in_rows(sizes, is_local=is_local):
            raise ReducerError(
                f"got losses of shape {tuple(x.shape)}, and not each of their sequences begins "
                f"with a segment of the layout {self.layout.name}: pass them in the order of the "
                "mask, [b, s] and not [s, b], or flat"
            )


def _describe(segments: Segments, is_custom: bool, values: list[float]) -> str:
    partial_loss, *extremes = values
    found = zip(extremes[::2], extremes[1::2], strict=True)
    wrong = [(int(index), value) for value, index in found if not math.isfinite(value)]
    if wrong:
        index, value = min(wrong, key=lambda one: one[0])
        sequence, token = segments.token(index)
        return (
            f"{segments.rank_name}: the loss of {sequence} is {value} at its token {token}: check "
            "what the loss is computed from (logits; in RL also importance ratios and advantages), "
            "or clear the mask there: a masked loss may be anything"
        )
    if math.isfinite(partial_loss):
        return ""
    cause = "the sum overflows; scale the losses down, or pass them in a wider type"
    if is_custom:
        cause = "check the custom reducer"
    return (
        f"{segments.rank_name}: every trained loss of {segments} is finite and their partial loss "
        f"is {partial_loss}: {cause}"
    )


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return repr(value)
