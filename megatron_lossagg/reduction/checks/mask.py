"""The check of a loss mask: 0 or 1, nothing past the end, each sequence's tokens as counted.

Shape suffixes: P = positions of the whole mask; T = tokens that this rank holds; G = segments (G1,
G2: and one or two more).
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from megatron_lossagg.reduction.devices import from_numpy
from megatron_lossagg.reduction.faults import Faults, warn_once
from megatron_lossagg.reduction.segments import (
    PADDING,
    Segments,
    cumulated,
    held,
    held_sums,
    segment_sums,
)

__all__ = ["check_mask", "first_of"]


def check_mask(mask_P: Tensor, segments: Segments, faults: Faults) -> tuple[Tensor, Tensor]:
    """Slice a mask and check it.

    Returns the mask that this rank keeps, bool ``[T]``, and how many tokens that is of each
    segment, ``[G]``: both come from the one cumulative sum that the check needs. Each rank checks
    that the tokens it holds are 0 or 1; the context-parallel ranks together hold them all.

    Raises :class:`ReducerError`; for a CUDA mask when the step finishes. No collective, no host
    sync.
    """
    layout, device = segments.layout, mask_P.device
    value_T = held(mask_P, layout)
    keep_T = value_T == 1
    if mask_P.dtype != torch.bool and len(value_T):
        faults.check_or_record(
            device,
            lambda: first_of(value_T != keep_T, value_T),
            partial(_describe_value, segments),
            seems_right=lambda: bool(value_T.count_nonzero() == keep_T.count_nonzero()),
        )
    selected_P = keep_T if len(keep_T) == len(mask_P) else mask_P
    sum_P1 = cumulated(selected_P, torch.int32)
    trained_G1, end_G2 = segment_sums(sum_P1, layout)
    # Segment G is what follows the last one, and may train nothing.
    missing_G1 = from_numpy(np.append(segments.counted, 0), device) - trained_G1
    faults.check_or_record(
        device,
        lambda: [*missing_G1.min(dim=0), *missing_G1.max(dim=0)],
        partial(_describe_counts, segments),
        seems_right=lambda: not missing_G1.any(),
    )
    if layout.is_whole and layout.num_segments and len(mask_P):
        # An empty first segment ends at 0: index -1 is the mask's last position, which is not
        # trained if it follows the last segment, and is looked at anyway if it does not.
        faults.check_or_record(
            device, lambda: [selected_P[end_G2[1:-1] - 1].any()], _describe_shift
        )
    return keep_T, held_sums(sum_P1, trained_G1[:-1], layout).long()


def first_of(is_wrong_T: Tensor, value_T: Tensor) -> list[Tensor]:
    """Say whether any is wrong, the index of the first, and its value."""
    is_wrong, index = is_wrong_T.max(dim=0)
    return [is_wrong, index, value_T.index_select(0, index.view(1)).view(())]


def _describe_value(segments: Segments, values: list[float]) -> str:
    """Describe a mask's value that is not 0 or 1."""
    is_wrong, index, value = values
    if not is_wrong:
        return ""
    position = segments.layout.positions[int(index)]
    return (
        f"{segments.mask_name} holds {value:.9g} at position {position}: a mask is 0 or 1; pass "
        "weights that the denominators count as token_weights= (--loss-aggregation-count "
        "weights), and multiply another coefficient (importance ratio) into the losses"
    )


def _describe_counts(segments: Segments, values: list[float]) -> str:
    """Describe a segment that trains other tokens than were counted."""
    least, least_segment, most, most_segment = map(int, values)
    if least < 0 and least_segment == len(segments.sequences):
        return (
            f"{segments.mask_name} is 1 at {-least} positions past the last segment's end "
            f"{segments.layout.num_tokens}: end cu_seqlens after them, or clear the mask there"
        )
    if least < 0:
        return f"{segments.mask_name}: {_miscounted(segments, least, least_segment)}"
    if most > 0 and not segments.rejects_tokens and not segments.is_sliced_by_framework:
        return f"{segments.mask_name}: {_miscounted(segments, most, most_segment)}"
    return ""


def _miscounted(segments: Segments, missing: int, segment: int) -> str:
    """Describe a segment that trains ``missing`` tokens fewer than were counted."""
    sequence, counted = segments.sequences[segment], segments.counted[segment]
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


def _describe_shift(values: list[float]) -> str:
    """Warn if a segment's last position, which predicts a token outside of it, is trained."""
    if any(values):
        warn_once(
            "shift",
            "the mask is 1 at the last position of a segment, whose logit predicts a token "
            "that the segment does not hold: mask[i] belongs to logit i, the prediction of "
            "token i + 1; shift it before packing. Ignore this if each label is one token "
            "longer than its sequence, as in pretraining data",
        )
    return ""
