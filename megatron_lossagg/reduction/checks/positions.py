"""The check of position ids that a loop passes: whether it sliced as the layout says.

Shape suffixes: R = runs of consecutive positions; T = tokens that this rank holds.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from torch import Tensor

from megatron_lossagg.errors import ReducerError
from megatron_lossagg.reduction.checks.mask import first_of
from megatron_lossagg.reduction.devices import from_numpy, moved
from megatron_lossagg.reduction.faults import Faults
from megatron_lossagg.reduction.step_state import Line


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
        partial(_describe, line),
        seems_right=lambda: not wrong_T.any(),
    )


def _describe(line: Line, values: list[float]) -> str:
    is_wrong, index, given = map(int, values)
    if not is_wrong:
        return ""
    sequence, token = line.token(index)
    return (
        f"{line.rank_name}: its token {index} has the position {given}, and by the layout "
        f"{line.layout.name} it is token {token} of {sequence}: slice tokens as the layout "
        "does (layout.positions), and pass the offsets by which the model slices"
    )
