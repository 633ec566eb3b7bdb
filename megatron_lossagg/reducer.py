"""Per-token losses to a share of the step's loss.

A share is the sum over the tokens that this rank holds of this microbatch::

    share = sum_t w_{s(t)} * m_t * x_t

Shares add up: over microbatches, context-parallel ranks and data-parallel ranks their
sum is the step's loss, however the tokens were split. Nothing here knows a mode, a rank
or a denominator: weights come from the plan, tokens from the layout. (Only the message of
a mask or loss that is at fault names the rank.)

Shape suffixes: T = tokens this rank holds of the microbatch; G = segments of the
microbatch; R = runs of consecutive tokens; S = rows of the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.errors import ReducerError
from megatron_lossagg.layout import Ints, Layout

FILLER = -1
"""The entry of ``rows`` that stands for a filler or padding segment."""


class Plan(Protocol):
    """What a reducer asks of the step's plan."""

    @property
    def aggregation(self) -> Aggregation:
        """The loss that is meant."""
        ...

    @property
    def weights(self) -> Tensor:
        """w_s, float64 ``[S]`` on the CPU."""
        ...

    @property
    def active_tokens(self) -> Ints:
        """n_s, int64 ``[S]``."""
        ...

    @property
    def microbatch(self) -> Ints | None:
        """Index of each row's microbatch, int64 ``[S]``, where ``Sequences`` gave it."""
        ...

    @property
    def expected_weight(self) -> float | None:
        """Sum of w m over all counted tokens of the step; None if not known."""
        ...

    def under(self, aggregation: Aggregation | str) -> Plan:
        """Return the same step under another aggregation."""
        ...


@dataclass(frozen=True, kw_only=True)
class ReducerContext:
    """What a custom reducer factory is given: ``factory(context) -> Callable[[Tensor], Tensor]``.

    The callable takes this rank's per-token losses, masked positions already set to 0,
    flat in the layout's order, and returns a 0-dim additive share.
    """

    plan: Plan
    """Totals and, under a mode of the table, weights: ``plan.under("token_mean").weights``."""
    rows: Ints
    """int64 ``[G]``: the row of each segment, -1 for a filler."""
    mask: Tensor
    """bool ``[T]``: the training mask, sliced for this rank."""
    layout: Layout
    arguments: object
    """The host's parsed arguments, or None."""

    @property
    def aggregation(self) -> Aggregation:
        """The plan's aggregation."""
        return self.plan.aggregation


ReducerFactory = Callable[[ReducerContext], Callable[[Tensor], Tensor]]


_NEVER = 2**62
_CALLS_KEPT = 1024


class _DeviceFaults:
    """Remembers on the device the first fault of a CUDA tensor; the next plan reads it.

    Reading it at once would cost a host sync a microbatch. A device holds one integer, the
    smallest of ``call * 2^32 + index`` over all faults; the host keeps what names the places
    of the last calls.
    """

    def __init__(self) -> None:
        self._first: dict[torch.device, Tensor] = {}
        self._tell: deque[Callable[[int], str]] = deque(maxlen=_CALLS_KEPT)
        self._calls = 0

    def note(self, fault_T: Tensor, tell: Callable[[int], str]) -> None:
        """Add a bool ``[T]``, T > 0; ``tell(index)`` names a place in it. No host sync."""
        base, device = self._calls << 32, fault_T.device
        index_T = torch.arange(base, base + len(fault_T), device=device)
        first = torch.where(fault_T, index_T, _NEVER).amin()
        before = self._first.get(device)
        self._first[device] = first if before is None else torch.minimum(before, first)
        self._tell.append(tell)
        self._calls += 1

    def take(self) -> str:
        """Tell the first fault and clear; one host sync for each device that noted something."""
        firsts, tells, oldest = self._first, list(self._tell), self._calls - len(self._tell)
        self._first, self._calls = {}, 0
        self._tell.clear()
        found = min((int(first) for first in firsts.values()), default=_NEVER)
        if found == _NEVER:
            return ""
        call, index = divmod(found, 2**32)
        if call < oldest:
            return (
                f"a mask or loss on a device was wrong more than {_CALLS_KEPT} reducers ago: call "
                "plan_step or StepPlan.check more often to learn where"
            )
        return tells[call - oldest](index)


mask_faults = _DeviceFaults()
loss_faults = _DeviceFaults()


@dataclass(frozen=True, kw_only=True, eq=False)
class Reducer:
    """Turns this rank's per-token losses of one microbatch into a share.

    Built by ``StepPlan.reducer``. Calling it costs the same number of operations for 1
    and for 1,000 rows, no host sync and no collective.
    """

    plan: Plan
    rows: Ints
    """int64 ``[G]``: the row of each segment, -1 for a filler."""
    keep: Tensor
    """bool ``[T]``: the training mask of the tokens this rank holds."""
    layout: Layout
    microbatch_name: str
    """For a message: ``microbatch 2 with rows 5, 6``."""
    custom: Callable[[Tensor], Tensor] | None = None
    num_past_end: int = 0
    """Mask positions past the last segment: as many losses may follow this rank's."""
    _weights: dict[tuple[torch.dtype, torch.device], Tensor] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        if self.custom is None:  # here rather than in the call, whose cost is constant
            self._weight(torch.float32, self.keep.device)

    @staticmethod
    def build(
        plan: Plan,
        rows: Sequence[int] | Ints | Tensor,
        mask: Tensor,
        layout: Layout,
        *,
        factory: ReducerFactory | None = None,
        arguments: object = None,
    ) -> Reducer:
        """Check and slice one microbatch; see ``StepPlan.reducer``."""
        rows_G = _checked_rows(rows, layout, plan.active_tokens)
        name = _microbatch_name(plan, rows_G)
        keep_T = _local_mask(mask, rows_G, layout, plan.active_tokens, name)
        custom = None
        if factory is not None:
            context = ReducerContext(
                plan=plan, rows=rows_G, mask=keep_T, layout=layout, arguments=arguments
            )
            custom = factory(context)
            if not callable(custom):
                raise ReducerError(
                    f"the reducer factory returned {custom!r}: return a callable that takes this "
                    "rank's per-token losses and returns a 0-dim share"
                )
        return Reducer(
            plan=plan,
            rows=rows_G,
            keep=keep_T,
            layout=layout,
            microbatch_name=name,
            custom=custom,
            num_past_end=mask.numel() - layout.num_tokens,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Sum w m x over the tokens this rank holds.

        ``x``: this rank's per-token losses in the layout's order, any floating dtype, any
        shape with as many elements as the layout has local tokens (tokens past the last
        segment weigh 0). Returns a 0-dim share in float32, or float64 where x is float64,
        connected to the graph of x even when no token is active. Masked positions of x may
        hold inf or NaN: neither the share nor its gradient with respect to x sees them.

        A loss of the training mask that is not finite raises :class:`ReducerError`, which
        names its row and token; on CUDA it is noted, without a host sync, for the next
        ``plan_step`` or ``StepPlan.check`` to raise.
        """
        x_T = self._local_losses(x)
        dtype = torch.promote_types(x.dtype, torch.float32)
        keep_T = self.keep.to(x.device, non_blocking=True)
        # where, not *: a masked token may hold inf or nan, and inf * 0 is nan.
        x_T = torch.where(keep_T, x_T, 0).to(dtype)
        if self.custom is None:
            share = (x_T * self._weight(dtype, x.device)).sum()
        else:
            share = self._custom_share(self.custom, x_T)
        self._check_finite(x_T.detach(), share.detach())
        return share

    def _custom_share(self, custom: Callable[[Tensor], Tensor], x_T: Tensor) -> Tensor:
        share = custom(x_T)
        if not isinstance(share, Tensor) or share.dim() != 0 or not share.is_floating_point():
            raise ReducerError(
                f"the custom reducer {self.plan.aggregation.reducer_path or custom!r} "
                f"returned {_shape_of(share)}: return a 0-dim floating-point "
                "tensor, an additive share"
            )
        return share

    def under(self, aggregation: Aggregation | str) -> Reducer:
        """Return a reducer over the same tokens under another aggregation, without a collective."""
        return replace(self, plan=self.plan.under(aggregation), custom=None)

    def weight_sum(self) -> Tensor | None:
        """Sum w m over the tokens this rank holds: the gauge's share, 0-dim float32.

        None for a custom reducer, whose weights are its own.
        """
        if self.custom is not None:
            return None
        return self._weight(torch.float32, self.keep.device).sum()

    @property
    def counted_tokens(self) -> int:
        """Active tokens of this microbatch by the plan's count, complete over CP."""
        return int(self.plan.active_tokens[self.rows[self.rows != FILLER]].sum())

    def _check_finite(self, x_T: Tensor, share: Tensor) -> None:
        """Raise, or on a device note, the first kept loss that is not finite; else the share."""
        share_1 = share.isfinite().reshape(1).to(x_T.device, non_blocking=True)
        fault_T1 = torch.cat([x_T.isfinite(), share_1]).logical_not()
        if self.custom is None:
            cause = "the sum overflows; scale the losses down, or give them in a wider type"
        else:
            cause = "the custom reducer made it"
        tell = partial(_not_finite, self.microbatch_name, self.rows, self.layout, cause)
        if not _on_host(x_T):
            loss_faults.note(fault_T1, tell)
        elif bool(fault_T1.any()):
            index = int(fault_T1.int().argmax())
            value = x_T[index] if index < len(x_T) else share
            raise ReducerError(tell(index, f"{value.item()}"))

    def _local_losses(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise ReducerError(f"per-token losses are a floating-point tensor, got {_shape_of(x)}")
        here = self.layout.num_local_tokens
        with_tail = (self.layout.num_tokens + self.num_past_end) // self.layout.cp_size
        if x.numel() not in (here, with_tail):
            raise ReducerError(
                f"got {x.numel()} per-token losses (shape {tuple(x.shape)}), the layout "
                f"{self.layout.name} holds {here} on CP rank {self.layout.cp_rank} of "
                f"{self.layout.cp_size}: pass the losses of this rank's slice, in its order"
            )
        return x.reshape(-1)[:here]

    def _weight(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        if (dtype, device) not in self._weights:
            self._weights[dtype, device] = self._packed_weights(dtype, device)
        return self._weights[dtype, device]

    def _packed_weights(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        weight_S = np.append(self.plan.weights.numpy(), 0.0)
        weight_R = weight_S[self.rows][self.layout.segment_R]  # FILLER = -1 picks the final 0
        weight_T = torch.repeat_interleave(
            _on(device, weight_R).to(dtype),
            _on(device, self.layout.length_R),
            output_size=self.layout.num_local_tokens,
        )
        return torch.where(self.keep.to(device, non_blocking=True), weight_T, 0)


def _on_host(tensor: Tensor) -> bool:
    """Whether reading a value costs no host sync."""
    return tensor.device.type == "cpu"


def _on(device: torch.device, array: np.typing.NDArray[np.generic]) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    tensor = tensor.pin_memory() if device.type == "cuda" else tensor
    return tensor.to(device, non_blocking=True)


def _checked_rows(
    rows: Sequence[int] | Ints | Tensor, layout: Layout, active_tokens_S: Ints
) -> Ints:
    try:
        rows_G = np.asarray(rows.cpu() if isinstance(rows, Tensor) else rows)
    except ValueError:  # a ragged list
        rows_G = np.array(None)
    if rows_G.size == 0:
        rows_G = rows_G.astype(np.int64)
    if rows_G.ndim != 1 or rows_G.dtype.kind not in "iu":
        raise ReducerError(f"rows holds one whole number a segment, got {rows!r}")
    if len(rows_G) != layout.num_segments:
        raise ReducerError(
            f"got {len(rows_G)} rows for {layout.num_segments} segments of the layout "
            f"{layout.name}: one entry a segment, -1 for a filler or padding segment"
        )
    known = len(active_tokens_S)
    wrong = rows_G[(rows_G < FILLER) | (rows_G >= known)]
    if len(wrong):
        raise ReducerError(
            f"row {wrong[0]} is not one of the {known} rows of the step on this rank: rows are "
            "positions in Sequences.active_tokens, or -1"
        )
    used, times = np.unique(rows_G[rows_G != FILLER], return_counts=True)
    if (times > 1).any():
        raise ReducerError(
            f"row {used[times > 1][0]} is named by {times.max()} segments of one microbatch: "
            "each row is in exactly one segment of one microbatch of the step"
        )
    return rows_G.astype(np.int64)


def _microbatch_name(plan: Plan, rows_G: Ints) -> str:
    real = rows_G[rows_G != FILLER]
    rows = ", ".join(map(str, real[:6])) + (", ..." if len(real) > 6 else "")
    if not len(real):
        return "a microbatch without rows"
    number = "a microbatch"
    if plan.microbatch is not None:
        number = f"microbatch {plan.microbatch[real[0]]}"
    return f"{number} with rows {rows}"


def _here(layout: Layout) -> str:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return f"rank {rank} (context-parallel rank {layout.cp_rank})"


def _not_finite(
    microbatch: str,
    rows_G: Ints,
    layout: Layout,
    cause: str,
    index: int,
    value: str = "not finite",
) -> str:
    """Say which token's loss is not finite; past the last: the share alone, by ``cause``."""
    if index == layout.num_local_tokens:
        return (
            f"{_here(layout)}: every trained loss of {microbatch} is finite and their share is "
            f"{value}: {cause}"
        )
    segment, token = layout.place(index)
    row = rows_G[segment]
    whose = "a filler" if row == FILLER else f"row {row}"
    part = " of this rank's part" * (layout.name == "local" and layout.cp_size > 1)
    return (
        f"{_here(layout)}: the loss of {whose} (segment {segment} of {microbatch}) is {value} at "
        f"its token {token}{part}: find what made it (log-probability, importance ratio, "
        "advantage), or clear the mask there: a masked loss may be anything"
    )


_COEFFICIENT = (
    "a mask is 0 or 1; multiply a coefficient (importance ratio, token weight) into the per-token "
    "losses"
)


def _not_a_mask(microbatch: str, layout: Layout, position: int) -> str:
    return (
        f"{_here(layout)}: the CUDA mask of {microbatch} held something else than 0 and 1 at "
        f"position {position}: {_COEFFICIENT}"
    )


def _local_mask(
    mask: Tensor, rows_G: Ints, layout: Layout, active_tokens_S: Ints, microbatch: str
) -> Tensor:
    """Check the whole mask and slice it; bool ``[T]`` on the mask's device."""
    if not isinstance(mask, Tensor):
        raise ReducerError(
            f"a mask is a tensor of 0 and 1, got {mask!r}: pass the microbatch's whole loss mask, "
            "packed like its tokens"
        )
    mask = mask.detach().reshape(-1)
    past_end = mask.numel() - layout.num_tokens
    if past_end < 0 or (past_end > 0 and layout.name != "thd_zigzag"):
        raise ReducerError(
            f"got a mask of {mask.numel()} tokens, the layout {layout.name} has "
            f"{layout.num_tokens}: pass the whole mask, packed and padded like the tokens, "
            "before slicing for context parallelism"
        )
    if _on_host(mask):
        _check_mask(mask, rows_G, layout, active_tokens_S)
    elif mask.dtype != torch.bool and len(mask):
        mask_faults.note((mask != 0) & (mask != 1), partial(_not_a_mask, microbatch, layout))
    here = layout.num_local_tokens
    shift_R = layout.start_R - (np.cumsum(layout.length_R) - layout.length_R)
    if shift_R.any():
        index_T = torch.arange(here, device=mask.device) + torch.repeat_interleave(
            _on(mask.device, shift_R), _on(mask.device, layout.length_R), output_size=here
        )
        return mask[index_T] != 0
    return mask[:here] != 0


def _check_mask(mask: Tensor, rows_G: Ints, layout: Layout, active_tokens_S: Ints) -> None:
    """Check a mask on the host: 0/1, nothing past the end, no row wider than its count."""
    wrong = torch.nonzero((mask != 0) & (mask != 1))
    if len(wrong):
        raise ReducerError(
            f"the mask holds {mask[wrong[0]].item()} at position {wrong[0].item()}: {_COEFFICIENT}"
        )
    end = layout.num_tokens
    beyond = torch.nonzero(mask[end:])
    if len(beyond):
        raise ReducerError(
            f"the mask is 1 at position {end + beyond[0].item()}, past the last segment's end {end}"
            ": such a token belongs to no row; end cu_seqlens behind it, or clear the mask there"
        )
    trained = np.append(0, torch.cumsum(mask[:end] != 0, dim=0).numpy())
    trained_G = np.diff(trained[layout.offset_S1])
    counted_G = np.append(active_tokens_S, np.iinfo(np.int64).max)[rows_G]
    wider = np.flatnonzero(trained_G > counted_G)
    if len(wider):
        segment = wider[0]
        raise ReducerError(
            f"segment {segment} trains {trained_G[segment]} tokens, the plan counted "
            f"{counted_G[segment]} for its row {rows_G[segment]}: a training mask may be narrower "
            "than the counting mask, never wider; check rows and Sequences.active_tokens"
        )


def _shape_of(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return repr(value)
