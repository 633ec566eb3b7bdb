"""Checks of what a microbatch is made from: its sequences, the shapes of its mask and weights.

On the CPU and immediately; no collective. Shape suffixes: P = positions of the whole mask; G =
segments; S = sequences of the step.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_lossagg.errors import ReducerError
from megatron_lossagg.reduction.devices import moved
from megatron_lossagg.reduction.integers import Ints, IntsLike, checked_integers, first_few
from megatron_lossagg.reduction.layout import Layout
from megatron_lossagg.reduction.segments import PADDING
from megatron_lossagg.reduction.sequences import Checked

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
