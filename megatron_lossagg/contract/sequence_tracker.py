"""Whether each sequence and microbatch of a step arrived, and none of them twice.

Each sequence is in exactly one microbatch of the step. While Megatron's rerun machine repeats a
step, all its microbatches come once more: a new pass over the same sequences.

Shape suffix: S = sequences of this data-parallel rank in the step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_lossagg.errors import ContractError
from megatron_lossagg.reduction.integers import Ints, first_few

_NOT_SEEN = -1


class SequenceTracker:
    """Which of ``num_sequences`` arrived in which of ``num_microbatches``; pure integers.

    ``is_rerunning``: whether the rerun machine repeats the step now.
    """

    def __init__(
        self,
        *,
        num_sequences: int,
        num_microbatches: int,
        is_rerunning: Callable[[], bool],
    ) -> None:
        self.num_microbatches = num_microbatches
        self.num_calls = 0
        """Microbatches of the current pass that arrived."""
        self._is_rerunning = is_rerunning
        self._microbatch_S = np.full(num_sequences, _NOT_SEEN)

    @property
    def is_at_start(self) -> bool:
        """Whether the next microbatch is the first of a pass."""
        return self.num_calls == 0 or (
            self.num_calls == self.num_microbatches and self._is_rerunning()
        )

    def add(self, sequences: Ints) -> None:
        """Record a microbatch by its sequences, padding left out.

        Raises :class:`ContractError` for a sequence that another microbatch had, for more
        microbatches than planned, and for sequences that are missing when the last one arrives.
        """
        if self.num_calls in (0, self.num_microbatches) and self.is_at_start:
            self.num_calls = 0
            self._microbatch_S.fill(_NOT_SEEN)
        if self.num_calls == self.num_microbatches:
            raise ContractError(
                f"loss_func ran for more than the {self.num_microbatches} planned microbatches: "
                "pass the schedule's num_microbatches to aggregator.step"
            )
        if np.maximum.reduce(self._microbatch_S[sequences], initial=_NOT_SEEN) != _NOT_SEEN:
            taken = sequences[self._microbatch_S[sequences] != _NOT_SEEN]
            raise ContractError(
                f"sequence {taken[0]} is in two microbatches of the step, number "
                f"{self._microbatch_S[taken[0]]} and number {self.num_calls} in the order of their "
                f"calls, the second with sequences {first_few(sequences)}: each sequence is "
                f"trained once"
            )
        self._microbatch_S[sequences] = self.num_calls
        self.num_calls += 1
        if self.num_calls == self.num_microbatches:
            self._check_no_sequence_missing()

    def finish(self, *, may_be_empty: bool) -> None:
        """Raise :class:`ContractError` if a microbatch or a sequence is missing.

        ``may_be_empty``: whether none at all is right, as on all but the last pipeline stage.
        """
        if self.num_calls == 0 and may_be_empty:
            return
        if self.num_calls < self.num_microbatches:
            raise ContractError(
                f"loss_func ran for {self.num_calls} microbatches, {self.num_microbatches} were "
                "planned: pass the schedule's num_microbatches to aggregator.step, and give each "
                "call sequences of its own"
            )
        self._check_no_sequence_missing()

    def _check_no_sequence_missing(self) -> None:
        missing = np.flatnonzero(self._microbatch_S == _NOT_SEEN)
        if len(missing):
            raise ContractError(
                f"{len(missing)} of {len(self._microbatch_S)} sequences were in no microbatch of "
                f"the step ({first_few(missing)}): each sequence is trained once"
            )
