"""What this rank trains of each sequence, which context-parallel ranks compare."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_lossagg.reduction.devices import from_numpy, moved
from megatron_lossagg.reduction.integers import Ints
from megatron_lossagg.reduction.microbatch import Microbatch
from megatron_lossagg.reduction.segments import PADDING

__all__ = ["TrainedTokens"]


class _Tally:
    """A number of each sequence on this rank.

    If several masks over one sequence are noted, the one that trains most counts, so running a
    microbatch again changes nothing.
    """

    def __init__(self, num_sequences: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._value_S: dict[torch.device, Tensor] = {}
        self._is_noted_S = np.zeros(num_sequences, dtype=bool)

    def lacks(self, sequences: Ints) -> npt.NDArray[np.bool_]:
        """Say of each sequence whether nothing was noted of it."""
        return ~self._is_noted_S[sequences]

    def add(self, sequences: Ints, values: Tensor) -> None:
        """Note a microbatch's ``values``, ``[len(sequences)]``; no host sync."""
        device = values.device
        if device not in self._value_S:
            size = len(self._is_noted_S)
            self._value_S[device] = torch.zeros(size, dtype=self.dtype, device=device)
        value_S, index = self._value_S[device], from_numpy(sequences, device)
        value_S.index_copy_(0, index, torch.maximum(value_S[index], values.to(self.dtype)))
        self._is_noted_S[sequences] = True

    def of_sequences(self) -> Tensor | None:
        """Return ``[S]``; None if nothing was noted."""
        found = list(self._value_S.values())
        if not found:
            return None
        return torch.stack([moved(value_S, found[0].device) for value_S in found]).amax(dim=0)


class TrainedTokens:
    """Trained tokens of each sequence, and the sums of their weights, by two kinds of masks."""

    def __init__(self, num_sequences: int) -> None:
        self.own = _Tally(num_sequences, torch.int64)
        """By masks of each rank's own: sliced by the framework, or of gathered losses."""
        self.whole = _Tally(num_sequences, torch.int64)
        """By whole masks: what this rank holds of the first mask of each sequence."""
        self.own_weights = _Tally(num_sequences, torch.float64)
        """The sums of the token weights that ``own`` trains, if the plan has any."""
        self.whole_weights = _Tally(num_sequences, torch.float64)
        """Those of ``whole``."""

    @property
    def tallies(self) -> tuple[_Tally, ...]:
        """All four."""
        return self.own, self.whole, self.own_weights, self.whole_weights

    def add(self, microbatch: Microbatch) -> None:
        """Note what this rank trains of each sequence of a microbatch; no host sync.

        Where the framework slices the mask, and of gathered losses, each rank weighs its part by a
        mask of its own: every call of a reducer is noted. A whole mask should be the other ranks'
        too; of several over one sequence the first is noted.
        """
        layout, sequences = microbatch.segments.layout, microbatch.segments.own_sequences
        index = np.flatnonzero(microbatch.segments.sequences != PADDING)
        tally, weight_tally = self.own, self.own_weights
        if not (layout.is_local or layout.is_gathered):
            tally, weight_tally = self.whole, self.whole_weights
            is_new = tally.lacks(sequences)
            if not is_new.any():
                return
            index, sequences = index[is_new], sequences[is_new]
        index_G = from_numpy(index, microbatch.trained.device)
        tally.add(sequences, microbatch.trained[index_G])
        if microbatch.trained_weights is not None:
            weight_tally.add(sequences, microbatch.trained_weights[index_G])
