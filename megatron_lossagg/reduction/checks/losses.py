"""Checks of what a reducer gets and returns: per-token losses, and a custom partial loss.

Shape suffix: T = tokens that this rank holds of the microbatch.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.errors import ReducerError
from megatron_lossagg.reduction.faults import Faults
from megatron_lossagg.reduction.layout import Layout
from megatron_lossagg.reduction.step_state import Line

_LOSS_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def checked_losses(x: Tensor, layout: Layout, num_past_end: int) -> Tensor:
    """Return per-token losses flat and without what follows the last segment.

    ``num_past_end``: mask positions past the last segment. Immediately, on the CPU.
    """
    if not isinstance(x, Tensor) or x.dtype not in _LOSS_DTYPES:
        raise ReducerError(f"got {_kind(x)}, expected per-token losses in floating point")
    num_losses = layout.num_tokens if layout.is_gathered else layout.num_local_tokens
    past_end = num_past_end if layout.is_gathered else num_past_end // layout.cp_size
    if x.numel() not in (num_losses, num_losses + past_end):
        if not x.dim():
            raise ReducerError(
                f"got one loss without a dimension, expected {num_losses} per-token losses: sum "
                "and divide by nothing before, for the weights do both"
            )
        whose = "the whole mask" if layout.is_gathered else "this rank's slice"
        raise ReducerError(
            f"got {x.numel()} per-token losses (shape {tuple(x.shape)}), the layout "
            f"{layout.name} holds {num_losses} on CP rank {layout.cp_rank} of "
            f"{layout.cp_size}: pass the losses of {whose}, in its order"
        )
    if x.dim() > 1 and not layout.is_in_rows(x.shape, is_local=not layout.is_gathered):
        raise ReducerError(
            f"got losses of shape {tuple(x.shape)}, and not each of their sequences begins "
            f"with a segment of the layout {layout.name}: pass them in the order of the "
            "mask, [b, s] and not [s, b], or flat"
        )
    if x.dim() != 1:
        x = x.reshape(-1)
    if x.numel() > num_losses:
        _check_tail(layout, num_past_end)
        x = x[:num_losses]
    return x


def _check_tail(layout: Layout, num_past_end: int) -> None:
    """Refuse, at CP > 1, losses past the last segment: padded sequences would have as many.

    With offsets before padding, sequences whose lengths divide by 2 CP all the same would get
    other tokens' losses.
    """
    if layout.cp_size == 1 or layout.split is None:
        return
    end = layout.num_tokens
    raise ReducerError(
        f"got losses and a mask of {end + num_past_end} tokens for segments that end at {end}, at "
        f"CP = {layout.cp_size}, which says not how the last {num_past_end} are sliced: if they "
        "pad sequences, pass the padded offsets (cu_seqlens_padded); if they belong to no "
        "sequence, end the offsets after them and give that segment -1"
    )


def check_finite(
    partial_loss: Tensor, kept_T: Tensor, line: Line, faults: Faults, *, is_custom: bool
) -> None:
    """Refuse a loss that is kept and not finite, and a partial loss that overflows.

    On the CPU immediately, on a device when the step finishes. No host sync.
    """

    if (
        kept_T.device.type == "cpu"
        and math.isfinite(partial_loss.item())
        and (not is_custom or kept_T.isfinite().all())  # which may swallow what is not
    ):
        return
    faults.check_or_record(
        kept_T.device,
        lambda: [partial_loss, *_extremes(kept_T)],
        # Of what names the tokens only: the weights and the mask may go before the step ends.
        partial(_describe, line, is_custom),
    )


def _extremes(kept_T: Tensor) -> list[Tensor]:
    """Largest loss and its index, smallest and its index; a NaN is both. Empty for no tokens."""
    if not kept_T.numel():
        return []
    return [*kept_T.max(dim=0), *kept_T.min(dim=0)]


def _describe(line: Line, is_custom: bool, values: list[float]) -> str:
    partial_loss, *extremes = values
    found = zip(extremes[::2], extremes[1::2], strict=True)
    wrong = [(int(index), value) for value, index in found if not math.isfinite(value)]
    if wrong:
        index, value = min(wrong, key=lambda one: one[0])
        sequence, token = line.token(index)
        return (
            f"{line.rank_name}: the loss of {sequence} is {value} at its token {token}: check "
            "what the loss is computed from (logits; in RL also importance ratios and advantages), "
            "or clear the mask there: a masked loss may be anything"
        )
    if math.isfinite(partial_loss):
        return ""
    cause = "the sum overflows; scale the losses down, or pass them in a wider type"
    if is_custom:
        cause = "check the custom reducer"
    return (
        f"{line.rank_name}: every trained loss of {line} is finite and their partial loss "
        f"is {partial_loss}: {cause}"
    )


def checked_partial_loss(partial_loss: Any, reducer_path: str | None) -> Tensor:
    """Return what a custom reducer returned: a 0-dim floating-point tensor."""
    if (
        not isinstance(partial_loss, Tensor)
        or partial_loss.dim() != 0
        or not partial_loss.is_floating_point()
    ):
        raise ReducerError(
            f"the custom reducer {reducer_path!r} returned {_kind(partial_loss)}: return a 0-dim "
            "floating-point tensor, an additive partial loss"
        )
    return partial_loss


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return repr(value)
