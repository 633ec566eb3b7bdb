"""The check of token weights: each finite and not negative, each sequence's sum as counted.

Shape suffixes: P = positions of the whole mask; T = tokens that this rank holds; G = segments (G1:
and one more).
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_lossagg.reduction.checks.mask import first_of
from megatron_lossagg.reduction.faults import Faults
from megatron_lossagg.reduction.segments import PADDING, SegmentSums, held
from megatron_lossagg.reduction.step_state import Line

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
