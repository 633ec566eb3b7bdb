"""One microbatch on this rank: which of its tokens are trained, and their sequences' weights.

Everything that the reducers of a microbatch share, under any aggregation. The code is the same
for a mask on any device.

Shape suffixes: T = tokens that this rank holds; G = segments of the microbatch; S = sequences of
the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.checks.arguments import (
    checked_mask,
    checked_sequences,
    checked_weights,
)
from megatron_lossagg.reduction.checks.mask import check_mask
from megatron_lossagg.reduction.checks.token_weights import check_token_weights
from megatron_lossagg.reduction.devices import from_numpy, moved
from megatron_lossagg.reduction.integers import IntsLike
from megatron_lossagg.reduction.layout import Layout
from megatron_lossagg.reduction.segments import PADDING, Segments, SegmentSums

if TYPE_CHECKING:
    from megatron_lossagg.reduction.plan import StepPlan


@dataclass(frozen=True, kw_only=True, eq=False)
class Microbatch:
    """One microbatch: its segments, and which of their tokens this rank trains."""

    segments: Segments
    keep: Tensor
    """bool ``[T]``, on the mask's device: the loss mask of the tokens this rank holds."""
    token_weights: Tensor | None
    """v_t of the same tokens, on the mask's device; None if the plan has none."""
    num_past_end: int
    """Mask positions past the last segment: as many losses may follow this rank's."""
    trained: SegmentSums
    """Tokens that the mask trains."""
    trained_weights: SegmentSums | None
    """The sums of their weights, in float64; None if the plan has none."""
    identity: object = field(default_factory=object, init=False, repr=False)
    """Stands for this microbatch when its tensors must not be kept."""
    _keep_on: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)
    _weights: dict[tuple[Aggregation, torch.dtype, torch.device], Tensor] = field(
        default_factory=dict, init=False, repr=False
    )

    @staticmethod
    def of(
        plan: StepPlan,
        sequences: IntsLike,
        mask: Tensor,
        layout: Layout,
        token_weights: Tensor | None,
    ) -> Microbatch:
        """Check sequences and mask and slice the mask; see ``StepPlan.reducer``.

        Raises :class:`ReducerError`. No collective. No host sync, unless ``sequences`` is a CUDA
        tensor.
        """
        planned, faults = plan.sequences, plan.state.faults
        sequences_G = checked_sequences(sequences, layout, planned)
        mask_P = checked_mask(mask, layout)
        segments = Segments(
            sequences=sequences_G,
            counted=plan.active_tokens_S1[sequences_G],
            planned=planned,
            layout=layout,
            rejects_tokens=plan.state.rejects_tokens,
        )
        keep_T, trained = check_mask(mask_P, segments, faults)
        weight_T, trained_weights = None, None
        if token_weights is not None:
            weight_P = checked_weights(token_weights, mask)
            weight_T, trained_weights = check_token_weights(
                weight_P, mask_P, keep_T, segments, faults
            )
        return Microbatch(
            segments=segments,
            keep=keep_T,
            token_weights=weight_T,
            num_past_end=mask_P.numel() - layout.num_tokens,
            trained=trained,
            trained_weights=trained_weights,
        )

    def keep_on(self, device: torch.device) -> Tensor:
        """Return ``keep`` on a device; copied there once."""
        if device == self.keep.device:
            return self.keep
        if device not in self._keep_on:
            self._keep_on[device] = moved(self.keep, device)
        return self._keep_on[device]

    def weights(
        self,
        aggregation: Aggregation,
        weight_S1: npt.NDArray[np.float64],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Give each token its sequence's weight, 0 where it is not trained; ``[T]``.

        ``weight_S1``: the step's weights under the aggregation, and a 0. Made once for an
        aggregation, dtype (float32 or float64) and device.
        """
        key = (aggregation, dtype, device)
        weight_T = self._weights.get(key)
        if weight_T is None:
            weight_T = self._packed(weight_S1, dtype, device)
            if aggregation.count == "weights":
                assert self.token_weights is not None
                weight_T = weight_T.mul_(moved(self.token_weights, device).to(dtype))
            self._weights[key] = weight_T
        return weight_T

    def made_weights(self, aggregation: Aggregation) -> Tensor | None:
        """Return the weights of the tokens that were made first; None if none were."""
        for (made_of, _, _), weight_T in self._weights.items():
            if made_of == aggregation:
                return weight_T
        return None

    def _packed(
        self, weight_S1: npt.NDArray[np.float64], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        keep_T, layout = self.keep_on(device), self.segments.layout
        sequences_G, counted_G = self.segments.sequences, self.segments.counted
        weight_G = weight_S1[sequences_G].astype(str(dtype).removeprefix("torch."))
        values = weight_G[counted_G > 0]  # what weighs nothing may be kept
        if len(values) and values.min() == values.max() and PADDING not in sequences_G:
            # Sequences without tokens train nothing, so one weight serves for all that is kept.
            return torch.mul(keep_T, torch.from_numpy(values[0, ...]))
        weight_T = np.repeat(weight_G[layout.segment_R], layout.length_R)
        return from_numpy(weight_T, device).mul_(keep_T)
