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
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.devices import moved, on_host
from megatron_lossagg.errors import ReducerError, ReducerPathError
from megatron_lossagg.integers import Ints
from megatron_lossagg.layout import Layout
from megatron_lossagg.microbatch import Microbatch, Place
from megatron_lossagg.state import ReducerCall

if TYPE_CHECKING:
    from megatron_lossagg.plan import StepPlan

__all__ = ["Reducer", "ReducerContext", "ReducerFactory", "load_reducer_factory"]


@dataclass(frozen=True, kw_only=True)
class ReducerContext:
    """What a custom reducer factory is given: ``factory(context) -> Callable[[Tensor], Tensor]``.

    The callable takes this rank's per-token losses, masked positions already set to 0,
    flat in the layout's order, and returns a 0-dim additive share.
    """

    plan: StepPlan
    """Totals and, under a mode of the table, weights: ``plan.under("token_mean").weights``."""
    sequences: Ints
    """int64 ``[G]``: the sequence of each segment, -1 for a padding sequence."""
    mask: Tensor
    """bool ``[T]``: the training mask, sliced for this rank, on its device; shared, read only."""
    layout: Layout
    arguments: object
    """The framework's parsed arguments, or None."""

    @property
    def aggregation(self) -> Aggregation:
        """The plan's aggregation."""
        return self.plan.aggregation


_LOSS_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

ReducerFactory = Callable[[ReducerContext], Callable[[Tensor], Tensor]]


def load_reducer_factory(path: str) -> ReducerFactory:
    """Import the factory at ``pkg.mod:name`` or ``pkg.mod.name``.

    Raises :class:`ReducerPathError` if the path leads to nothing or to what is not callable.
    """
    expected = "write pkg.mod:name of a factory(context) -> Callable[[Tensor], Tensor]"
    try:
        factory: object = pkgutil.resolve_name(path)
    except Exception as error:  # a module may fail to import with anything
        raise ReducerPathError(
            f"reducer path {path!r} raised {error!r}: {expected}, and install its module on every "
            "node or put it on PYTHONPATH"
        ) from error
    if not callable(factory):
        raise ReducerPathError(
            f"reducer path {path!r} leads to {factory!r}, which is not callable: {expected}"
        )
    return factory


class _MaskedSum(torch.autograd.Function):
    """sum_t w_t x_t over the kept tokens, for any values of the others; and the extremes of x.

    The gradient is w itself, which is 0 where a token is not kept: the backward pass is one
    product. In the forward pass a masked token may hold inf or NaN, and inf * 0 is NaN, so
    it is selected, not multiplied.
    """

    @staticmethod
    def forward(
        ctx: Any, x_T: Tensor, keep_T: Tensor, weight_T: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        ctx.save_for_backward(weight_T)
        kept_T = torch.where(keep_T, x_T, 0)
        if kept_T.dtype != weight_T.dtype:
            kept_T = kept_T.to(weight_T.dtype)
        extremes = _extremes(kept_T)
        return kept_T.mul_(weight_T).sum(), extremes

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (weight_T,) = ctx.saved_tensors
        return gradients[0] * weight_T, None, None  # autograd casts it to the dtype of x


def _masked_sum(x_T: Tensor, keep_T: Tensor, weight_T: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    found: tuple[Tensor, tuple[Tensor, ...]]
    found = _MaskedSum.apply(x_T, keep_T, weight_T)  # type: ignore[no-untyped-call]
    return found


def _extremes(kept_T: Tensor) -> tuple[Tensor, ...]:
    """Largest loss and its index, smallest and its index; a NaN is both. Empty for no tokens."""
    if not kept_T.numel():
        return ()
    return (*kept_T.max(dim=0), *kept_T.min(dim=0))


@dataclass(frozen=True, kw_only=True, eq=False)
class Reducer:
    """Turns this rank's per-token losses of one microbatch into a share.

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
    def of(
        plan: StepPlan, microbatch: Microbatch, factory: ReducerFactory | None, arguments: object
    ) -> Reducer:
        """Make the reducer of a microbatch, or the custom one of ``factory``."""
        if factory is None:
            return Reducer(plan=plan, microbatch=microbatch)
        custom = factory(
            ReducerContext(
                plan=plan,
                sequences=microbatch.sequences,
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
    def sequences(self) -> Ints:
        """int64 ``[G]``: the sequence of each segment, -1 for a padding sequence."""
        return self.microbatch.sequences

    @property
    def layout(self) -> Layout:
        """Which tokens this rank holds."""
        return self.microbatch.layout

    def __call__(self, x: Tensor) -> Tensor:
        """Sum w m x over the tokens this rank holds.

        ``x``: this rank's per-token losses in the layout's order, any floating dtype, with as
        many elements as the layout has local tokens (tokens past the last segment weigh 0);
        of two dimensions, each of its sequences begins with a segment. Returns a 0-dim share in
        float32, or float64 where x is float64, connected to the graph of x even when no token
        is active. Masked positions of x may hold inf or NaN: neither the share nor its
        gradient with respect to x sees them.

        A loss that the mask keeps and that is not finite raises :class:`ReducerError`, which
        names its sequence and token. On CUDA the share stays on the device without a host sync,
        and closing the step raises it. On the CPU one scalar is read.

        While a step runs, the call is noted; a share that can be trained, of a plan that is not the
        step's, raises.
        """
        x_T = self._local_losses(x)
        dtype = torch.promote_types(x.dtype, torch.float32)
        share = self._share(x, x_T, dtype)
        call = ReducerCall(
            microbatch=self.microbatch.identity,
            sequences=self.sequences,
            aggregation=self.plan.aggregation,
            requires_grad=x.requires_grad,
        )
        self.plan.state.note_call(call, share)
        if self.microbatch.trained is not None:
            num_sequences = len(self.plan.active_tokens)
            self.plan.state.trained.add(
                self.microbatch.own_sequences, self.microbatch.trained, num_sequences
            )
        return share

    def _share(self, x: Tensor, x_T: Tensor, dtype: torch.dtype) -> Tensor:
        if self.custom is not None:
            return self._custom_share(self.custom, x_T, dtype)
        weight_T = self._weight(dtype, x.device)
        if not on_host(x):
            share, extremes = _masked_sum(x_T, self.microbatch.keep_on(x.device), weight_T)
            self._record(share, extremes)
            return share
        share = (x_T * weight_T).sum()
        if not math.isfinite(share.item()):  # a masked token may be the reason
            share, _ = _masked_sum(x_T, self.microbatch.keep_on(x.device), weight_T)
            if not math.isfinite(share.item()):
                self._raise_not_finite(x_T.detach(), share)
        return share

    def under(self, aggregation: Aggregation | str) -> Reducer:
        """Return a reducer over the same tokens under another aggregation, without a collective.

        The weights are computed once per step and aggregation.
        """
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
        weight_S = self.plan.weight_S
        return self.microbatch.weights(self.plan.aggregation, weight_S, dtype, device)

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
            self._check_sequence_starts(x)
            x = x.reshape(-1)
        if x.numel() == num_local:
            return x
        self._check_tail_is_no_padding()
        return x[:num_local]

    def _check_tail_is_no_padding(self) -> None:
        """Refuse losses past the last segment that padded segments would explain exactly.

        With offsets before padding, sequences whose lengths divide by 2 CP all the same would get
        other tokens' losses.
        """
        cp, num_tokens = self.layout.cp_size, self.microbatch.num_past_end + self.layout.num_tokens
        length_S = np.diff(self.layout.offset_S1)
        multiple = 4 * cp
        while cp > 1 and multiple <= num_tokens:
            if int((-(-length_S // multiple) * multiple).sum()) == num_tokens:
                raise ReducerError(
                    f"got losses and a mask of {num_tokens} tokens for segments that end at "
                    f"{self.layout.num_tokens}, which is what padding each segment to a multiple "
                    f"of {multiple} would give: pass the padded offsets (cu_seqlens_padded), or, "
                    "if the tokens after the last segment belong to no sequence, end the "
                    "offsets after "
                    "them and give that segment -1"
                )
            multiple *= 2

    def _check_sequence_starts(self, x: Tensor) -> None:
        """Refuse losses of several dimensions in another order, such as ``[s, b]`` for [b, s]."""
        sizes = [size for size in x.shape if size != 1]
        if len(sizes) < 2 or x.numel() == 0:
            return
        if not self.layout.is_in_rows(sizes, is_local=True):
            raise ReducerError(
                f"got losses of shape {tuple(x.shape)}, and not each of their sequences "
                f"begins with a "
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
        if not on_host(x_T):
            self._record(moved(share, x_T.device), _extremes(x_T.detach()))
        elif not (math.isfinite(share.item()) and x_T.isfinite().all()):  # it may swallow a NaN
            self._raise_not_finite(x_T.detach(), share)
        return share

    def _record(self, share: Tensor, extremes: tuple[Tensor, ...]) -> None:
        """Leave what shows a fault on its device, for the step to read when it closes."""
        # A partial of what names the tokens: the weights and the mask may go before the step ends.
        describe = partial(_describe, self.microbatch.place, self.custom is not None)
        self.microbatch.faults.record([share, *extremes], describe)

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
    share, *extremes = values
    found = zip(extremes[::2], extremes[1::2], strict=True)
    wrong = [(int(index), value) for value, index in found if not math.isfinite(value)]
    if wrong:
        index, value = min(wrong, key=lambda one: one[0])
        return _loss_is(f"{value}", place, index)
    return "" if math.isfinite(share) else _share_is(f"{share}", place, is_custom)


def _loss_is(value: str, place: Place, index: int) -> str:
    sequence, token = place.token(index)
    return (
        f"{place.rank}: the loss of {sequence} is {value} at its token {token}: check what "
        f"the loss is "
        "computed from (logits; in RL also importance ratios and advantages), or clear the mask "
        "there: a masked loss may be anything"
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
