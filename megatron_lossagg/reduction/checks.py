"""Checks of a microbatch's values: its arguments, mask, losses, positions and token weights.

Each function looks at one value and raises, or leaves its result in the plan's ``Faults`` for the
end of the step. A mask is 0 or 1, nothing past the end, each sequence's tokens as counted. A token
weight is finite and not negative, each sequence's sum as counted. No collective.

Shape suffixes: P = positions of the whole mask; T = tokens that this rank holds of the microbatch;
R = runs of consecutive positions; G = segments (G1, G2: and one or two more); S = sequences of the
step.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_lossagg.errors import ReducerError
from megatron_lossagg.reduction.devices import from_numpy, moved
from megatron_lossagg.reduction.faults import Faults, warn_once
from megatron_lossagg.reduction.integers import Ints, IntsLike, checked_integers, first_few
from megatron_lossagg.reduction.layout import PADDING, Layout, SegmentSums, held
from megatron_lossagg.reduction.sequences import Checked
from megatron_lossagg.reduction.step_state import Line

MASK_DTYPES = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
)


def checked_sequences(sequences: IntsLike, layout: Layout, planned: Checked) -> Ints:
    """Return a microbatch's sequences, ``[G]``: each of this step, in one segment, or -1.

    If microbatches were planned, all of one of them.
    """
    sequences_G = checked_integers("sequences", sequences, ReducerError)
    if len(sequences_G) != layout.num_segments:
        raise ReducerError(
            f"got {len(sequences_G)} sequences for {layout.num_segments} segments of the layout "
            f"{layout.name}: one entry per segment, -1 for a padding sequence or padding segment"
        )
    if sequences_G.tobytes() in planned.in_order:
        return sequences_G
    num_sequences = len(planned.active_tokens)
    in_order = np.sort(sequences_G[sequences_G != PADDING])
    if len(in_order) and (in_order[0] < PADDING or in_order[-1] >= num_sequences):
        wrong = sequences_G[(sequences_G < PADDING) | (sequences_G >= num_sequences)][0]
        raise ReducerError(
            f"sequence {wrong} is not one of the {num_sequences} sequences of the step on this "
            "rank: pass positions in Sequences.active_tokens, or -1"
        )
    doubled = in_order[1:][np.diff(in_order) == 0]
    if len(doubled):
        times = int((sequences_G == doubled[0]).sum())
        raise ReducerError(
            f"sequence {doubled[0]} appears in {times} segments of one microbatch: a sequence is "
            "in one segment of one microbatch"
        )
    if planned.microbatch is not None:
        _check_one_microbatch(sequences_G, planned.microbatch)
    return sequences_G


def _check_one_microbatch(sequences_G: Ints, microbatch_S: Ints) -> None:
    """Refuse sequences that were not planned as one whole microbatch."""
    own_sequences = sequences_G[sequences_G != PADDING]
    planned = microbatch_S[own_sequences]
    other = np.flatnonzero(planned != planned[:1])
    if len(other):
        raise ReducerError(
            f"sequence {own_sequences[0]} was planned in microbatch {planned[0]} and sequence "
            f"{own_sequences[other[0]]} in microbatch {planned[other[0]]}: pass the sequences of "
            "one microbatch, as Sequences.microbatch has them"
        )
    whole = np.flatnonzero(microbatch_S == planned[:1]) if len(own_sequences) else own_sequences
    if len(own_sequences) != len(whole):
        missing = np.setdiff1d(whole, own_sequences)
        raise ReducerError(
            f"microbatch {planned[0]} was planned with {len(whole)} sequences, got "
            f"{len(own_sequences)} without {first_few(missing)}: pass all of its sequences"
        )


def checked_mask(mask: Tensor, layout: Layout) -> Tensor:
    """Return a mask flat, ``[P]``: a constant of a known type, as long as the layout."""
    if not isinstance(mask, Tensor):
        raise ReducerError(
            f"got the mask {mask!r}, expected a tensor of 0 and 1: pass the microbatch's whole "
            "loss mask, packed like its tokens"
        )
    if mask.dtype not in MASK_DTYPES:
        raise ReducerError(
            f"got a mask of {mask.dtype}, expected bool, a signed integer, uint8 or a float type"
        )
    if mask.requires_grad:
        raise ReducerError(
            "got a mask that requires a gradient, expected constants: pass mask.detach(), and "
            "multiply what is trained into the losses"
        )
    past_end = mask.numel() - layout.num_tokens
    if past_end < 0 or (past_end > 0 and not layout.allows_tail):
        raise ReducerError(
            f"got a mask of {mask.numel()} tokens, the layout {layout.name} has "
            f"{layout.num_tokens}: pass the whole mask, packed and padded like the tokens, "
            "before slicing for context parallelism"
        )
    if layout.batch_shape is not None and not layout.is_in_rows(mask.shape, is_local=False):
        raise ReducerError(
            f"got a mask of shape {tuple(mask.shape)}, expected [b, s] = {layout.batch_shape}: "
            "pass it so and not as [s, b], or flat"
        )
    return mask if mask.dim() == 1 else mask.reshape(-1)


def checked_weights(weights: Tensor, mask: Tensor) -> Tensor:
    """Return token weights flat, ``[P]``, in floating point and on the mask's device."""
    if not isinstance(weights, Tensor) or weights.dtype not in MASK_DTYPES:
        raise ReducerError(
            f"got the token weights {weights!r}, expected a tensor of numbers: pass one weight for "
            "each position of the mask"
        )
    if weights.shape != mask.shape:
        raise ReducerError(
            f"got token weights of shape {tuple(weights.shape)} for a mask of shape "
            f"{tuple(mask.shape)}: pass them packed, padded and sliced as the mask is"
        )
    if weights.requires_grad:
        raise ReducerError(
            "got token weights that require a gradient, expected constants, as their counted sums "
            "are: pass token_weights.detach(), and multiply what is trained into the losses"
        )
    weight_P = moved(weights, mask.device).reshape(-1)
    return weight_P if weight_P.is_floating_point() else weight_P.to(torch.float32)


def check_mask(
    mask_P: Tensor, keep_P: Tensor, nonzero: Tensor | None, line: Line, faults: Faults
) -> None:
    """Say what is wrong with a microbatch's mask, if something is.

    ``keep_P``: where it is 1, whose sums ``line`` has. ``nonzero``: how many positions are not 0;
    None for a bool mask. Every context-parallel rank checks the whole mask, so that all refuse it.
    Raises :class:`ReducerError`; for a CUDA mask when the step finishes. No collective, no host
    sync.
    """
    found = [line.trained.at_N] if nonzero is None else [line.trained.at_N, nonzero]
    # On the CPU a value is named; a device does not keep the mask until it is read.
    values = (mask_P, keep_P) if mask_P.device.type == "cpu" else None
    faults.compare(found, partial(_describe_mask, line, values))


def first_of(is_wrong_T: Tensor, value_T: Tensor) -> list[Tensor]:
    """Say whether any is wrong, the index of the first, and its value."""
    is_wrong, index = is_wrong_T.max(dim=0)
    return [is_wrong, index, value_T.index_select(0, index.view(1)).view(())]


def _describe_mask(
    line: Line, values: tuple[Tensor, Tensor] | None, found: list[npt.NDArray[Any]]
) -> str:
    """Describe values that are not 0 or 1, and then counts."""
    (sum_G1, last_G), nonzero = line.trained.read(found[0]), found[1:]
    if nonzero and (num := int(nonzero[0].item()) - int(sum_G1.sum())):
        return _describe_value(line, num, values)
    missing_G1 = np.append(line.known.counted, 0) - sum_G1
    if missing_G1.any() and (fault := _describe_counts(line, missing_G1)):
        return fault
    if line.layout.is_whole and last_G.any():
        _warn_of_shift()
    return ""


def _describe_value(line: Line, num: int, values: tuple[Tensor, Tensor] | None) -> str:
    """Describe a mask's values that are not 0 or 1: the first, where it can be read."""
    what = f"other numbers than 0 and 1 at {num} positions"
    if values is not None:
        value_P, keep_P = values
        position = int((value_P != keep_P).nonzero()[0])
        what = f"{value_P[position]:.9g} at position {position}"
    return (
        f"{line.mask_name} holds {what}: a mask is 0 or 1; pass "
        "weights that the denominators count as token_weights= (--loss-aggregation-count "
        "weights), and multiply another coefficient (importance ratio) into the losses"
    )


def _describe_counts(line: Line, missing_G1: Ints) -> str:
    """Describe a segment that trains other tokens than were counted."""
    least_segment, most_segment = int(missing_G1.argmin()), int(missing_G1.argmax())
    least, most = int(missing_G1[least_segment]), int(missing_G1[most_segment])
    if least < 0 and least_segment == len(line.known.sequences):
        return (
            f"{line.mask_name} is 1 at {-least} positions past the last segment's end "
            f"{line.layout.num_tokens}: end cu_seqlens after them, or clear the mask there"
        )
    if least < 0:
        return f"{line.mask_name}: {_miscounted(line, least, least_segment)}"
    if most > 0 and not line.rejects_tokens and not line.is_sliced_by_framework:
        return f"{line.mask_name}: {_miscounted(line, most, most_segment)}"
    return ""


def _miscounted(line: Line, missing: int, segment: int) -> str:
    """Describe a segment that trains ``missing`` tokens fewer than were counted."""
    sequence, counted = line.known.sequences[segment], line.known.counted[segment]
    if sequence == PADDING:
        return (
            f"segment {segment} is named as padding (-1) and its mask is 1 at {-missing} "
            "positions: give its sequence, or clear the mask there"
        )
    remedy = "check mask, sequences and Sequences.active_tokens"
    if missing > 0:
        remedy += (
            "; if tokens are rejected on purpose, declare it with "
            "--loss-aggregation-rejects-tokens (Options(rejects_tokens=True))"
        )
    return (
        f"segment {segment} trains {counted - missing} tokens, the plan counted {counted} for "
        f"its sequence {sequence}: {remedy}"
    )


def _warn_of_shift() -> None:
    """Warn of a segment's last position, which predicts a token outside of it, and is trained."""
    warn_once(
        "shift",
        "the mask is 1 at the last position of a segment, whose logit predicts a token "
        "that the segment does not hold: mask[i] belongs to logit i, the prediction of "
        "token i + 1; shift it before packing. Ignore this if each label is one token "
        "longer than its sequence, as in pretraining data",
    )


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
        partial(_describe_losses, line, is_custom),
    )


def _extremes(kept_T: Tensor) -> list[Tensor]:
    """Largest loss and its index, smallest and its index; a NaN is both. Empty for no tokens."""
    if not kept_T.numel():
        return []
    return [*kept_T.max(dim=0), *kept_T.min(dim=0)]


def _describe_losses(line: Line, is_custom: bool, values: list[float]) -> str:
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


def check_positions(
    positions: Tensor, keep_T: Tensor, line: Line, num_past_end: int, faults: Faults
) -> None:
    """Refuse position ids other than the layout's at a token that this rank trains.

    ``positions``: of this rank's tokens, counted from the start of their sequence or of the whole
    buffer. ``keep_T``: which of them it trains. ``num_past_end``: mask positions past the last
    segment. Raises :class:`ReducerError`; for CUDA positions when the step finishes. No collective,
    no host sync.
    """
    layout = line.layout
    if not layout.is_whole or not isinstance(positions, Tensor) or positions.is_floating_point():
        raise ReducerError(
            f"got positions= {positions!r} with the layout {layout.name}, expected an integer "
            "tensor and a layout of whole sequences: pass this rank's position ids, or none"
        )
    num, past_end = layout.num_local_tokens, num_past_end // layout.cp_size
    if positions.numel() not in (num, num + past_end):
        raise ReducerError(
            f"got {positions.numel()} positions, the layout {layout.name} holds {num} tokens on CP "
            f"rank {layout.cp_rank} of {layout.cp_size}: pass the position ids of this rank's slice"
        )
    if not num:
        return
    device = positions.device
    in_buffer_T = layout.positions.numpy()
    in_sequence_T = in_buffer_T - np.repeat(layout.offset_G1[layout.segment_R], layout.length_R)
    expected_2T = from_numpy(np.stack([in_sequence_T, in_buffer_T]), device)
    given_T = positions.reshape(-1)[:num]
    wrong_T = moved(keep_T, device) & (given_T != expected_2T).all(dim=0)
    faults.check_or_record(
        device,
        lambda: first_of(wrong_T, given_T),
        partial(_describe_positions, line),
        seems_right=lambda: not wrong_T.any(),
    )


def _describe_positions(line: Line, values: list[float]) -> str:
    is_wrong, index, given = map(int, values)
    if not is_wrong:
        return ""
    sequence, token = line.token(index)
    return (
        f"{line.rank_name}: its token {index} has the position {given}, and by the layout "
        f"{line.layout.name} it is token {token} of {sequence}: slice tokens as the layout "
        "does (layout.positions), and pass the offsets by which the model slices"
    )


_Sums = TypeVar("_Sums", Tensor, npt.NDArray[np.float64])


def weight_slack(counted: _Sums, total: _Sums) -> _Sums:
    """Return how far sums of weights may be from those counted.

    1e-6 of their own size, and 1e-10 of ``total``, from whose cumulative sum they are taken.
    """
    return 1e-6 * counted + 1e-10 * total


def check_token_weights(
    weight_P: Tensor, mask_P: Tensor, keep_T: Tensor, line: Line, faults: Faults
) -> tuple[Tensor, SegmentSums]:
    """Slice token weights and check them.

    Returns those of the tokens that this rank holds, ``[T]``, and the sums of those that are
    trained, in float64. Raises :class:`ReducerError`; on CUDA when the step finishes.
    No collective, no host sync.
    """
    layout, device = line.layout, mask_P.device
    weight_T = held(weight_P, layout)
    if layout.interval is not None:  # a view, and the caller may use its memory again
        weight_T = weight_T.clone()
    is_wrong_T = ~((weight_T >= 0) & (weight_T < torch.inf))
    if not line.rejects_tokens:
        is_wrong_T |= (weight_T != 0) & ~keep_T
    if len(weight_T):
        faults.check_or_record(
            device,
            lambda: first_of(is_wrong_T, weight_T),
            partial(_describe_weight, line),
            seems_right=lambda: not is_wrong_T.any(),
        )
    sums = SegmentSums.of(torch.where(mask_P == 1, weight_P, 0), layout, torch.float64)
    faults.compare([sums.at_N], partial(_describe_sums, line, sums))
    return weight_T, sums


def _describe_weight(line: Line, values: list[float]) -> str:
    """Describe a token weight that no loss may have."""
    is_wrong, index, value = values
    if not is_wrong:
        return ""
    position = line.layout.positions[int(index)]
    return (
        f"{line.rank_name}: the token weights of {line} hold {value:g} at position "
        f"{position}: a weight is finite and not negative, and 0 where the mask is 0"
    )


def _describe_sums(line: Line, sums: SegmentSums, found: list[npt.NDArray[Any]]) -> str:
    """Describe a segment whose trained weights are not those counted."""
    assert line.planned.token_weight_sums is not None
    counted_S1 = np.append(line.planned.token_weight_sums, 0.0)
    counted_G1 = counted_S1[np.append(line.known.sequences, PADDING)]
    if not np.isfinite(found[0]).all():
        return ""  # a weight is not finite, and was named
    sum_G1, _ = sums.read(found[0])
    missing_G1 = counted_G1 - sum_G1
    slack_G1 = weight_slack(counted_G1, sum_G1.sum())
    least_segment = int((missing_G1 + slack_G1).argmin())
    most_segment = int((missing_G1 - slack_G1).argmax())
    least = (missing_G1 + slack_G1)[least_segment]
    most = (missing_G1 - slack_G1)[most_segment]
    allows_fewer = line.rejects_tokens or line.is_sliced_by_framework
    if least >= 0 and (most <= 0 or allows_fewer):
        return ""
    segment = most_segment if least >= 0 else least_segment
    whose = f"{line.rank_name}: the token weights of {line}"
    if segment == len(line.known.sequences):
        return f"{whose} are not 0 past the last segment's end"
    return (
        f"{whose} do not sum to what was counted: segment {segment} has "
        f"{'less' if least >= 0 else 'more'} than the "
        f"{counted_G1[segment]:.9g} of its sequence {line.known.sequences[segment]}: "
        "check token_weights, mask, sequences and Sequences.token_weight_sums, which are sums in "
        "float64"
    )
