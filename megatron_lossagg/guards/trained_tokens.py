"""What this rank trains of each sequence, which context-parallel ranks compare."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_lossagg.reduction.devices import from_numpy, moved
from megatron_lossagg.reduction.integers import Ints
from megatron_lossagg.reduction.segments import PADDING, SegmentSums, held_sums
from megatron_lossagg.reduction.step_state import Line


class _Tally:
    """A number of each sequence on this rank; summed when it is asked for.

    If several masks over one sequence are noted, the one that trains most counts, so running a
    microbatch again changes nothing.
    """

    def __init__(self, num_sequences: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._noted: dict[torch.device, list[tuple[SegmentSums, Ints]]] = {}
        self._is_noted_S = np.zeros(num_sequences, dtype=bool)

    def add(self, sums: SegmentSums, sequences_G: Ints, *, only_new: bool) -> None:
        """Note a microbatch; ``only_new``: nothing of a sequence that was noted. No operation."""
        is_sequence_G = sequences_G != PADDING
        if only_new:
            is_sequence_G[is_sequence_G] = ~self._is_noted_S[sequences_G[is_sequence_G]]
        if is_sequence_G.any():
            sequences_G = np.where(is_sequence_G, sequences_G, PADDING)
            self._noted.setdefault(sums.at_N.device, []).append((sums, sequences_G))
            self._is_noted_S[sequences_G[is_sequence_G]] = True

    def of_sequences(self) -> Tensor | None:
        """Return ``[S]``; None if nothing was noted. No host sync."""
        found = [self._on(device) for device in self._noted]
        if not found:
            return None
        return torch.stack([moved(value_S, found[0].device) for value_S in found]).amax(dim=0)

    def _on(self, device: torch.device) -> Tensor:
        noted = self._noted[device]
        sequences = np.concatenate([sequences_G for _, sequences_G in noted])
        rows = from_numpy(np.flatnonzero(sequences != PADDING), device)
        index = from_numpy(sequences[sequences != PADDING], device)
        sums = held_sums([sums for sums, _ in noted]).to(self.dtype)[rows]
        value_S = torch.zeros(len(self._is_noted_S), dtype=self.dtype, device=device)
        return value_S.scatter_reduce_(0, index, sums, "amax")


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

    def add(self, line: Line) -> None:
        """Note what this rank trains of each sequence of a microbatch; no operation.

        Where the framework slices the mask, and of gathered losses, each rank weighs its part by a
        mask of its own: every microbatch that was reduced is noted. A whole mask should be the
        other ranks' too; of several over one sequence the first is noted.
        """
        is_own = line.layout.is_local or line.layout.is_gathered
        tally = self.own if is_own else self.whole
        tally.add(line.trained, line.known.sequences, only_new=not is_own)
        if line.trained_weights is not None:
            tally = self.own_weights if is_own else self.whole_weights
            tally.add(line.trained_weights, line.known.sequences, only_new=not is_own)
