"""The check of a loss mask: 0 or 1, nothing past the end, each sequence's tokens as counted.

Shape suffixes: P = positions of the whole mask; T = tokens that this rank holds; G = segments (G1,
G2: and one or two more).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron_lossagg.reduction.faults import Faults, warn_once
from megatron_lossagg.reduction.integers import Ints
from megatron_lossagg.reduction.segments import PADDING
from megatron_lossagg.reduction.step_state import Line


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
    faults.compare(found, partial(_describe, line, values))


def first_of(is_wrong_T: Tensor, value_T: Tensor) -> list[Tensor]:
    """Say whether any is wrong, the index of the first, and its value."""
    is_wrong, index = is_wrong_T.max(dim=0)
    return [is_wrong, index, value_T.index_select(0, index.view(1)).view(())]


def _describe(
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
