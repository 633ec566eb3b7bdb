"""The reference of a reducer of one's own: the same reducer over all tokens on one process.

It has no formula. But a loss is the same at every parallelism if what each rank returns of each
microbatch adds up to what the reducer returns of all tokens at once.

Shape suffixes: Y = tokens of all sequences and a padding sequence, padded, as
``reference_gradient.py`` has them; T = the tokens that one rank holds of one microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megatron_lossagg.errors import LossAggregationError, ProofError
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.layout import PADDING, Layout
from megatron_lossagg.reduction.plan import StepPlan
from megatron_lossagg.reduction.sequences import Sequences
from megatron_lossagg.reduction.step_state import StepState
from megatron_lossagg.reduction.table import count_step
from megatron_lossagg.verify.reference_gradient import Reference

if TYPE_CHECKING:
    from megatron_lossagg.verify.causes import Facts

NOT_ADDITIVE = "not_additive"
"""Name of the cause."""


def loss_of_whole(aggregation: Aggregation, reference: Reference, y_Y: Tensor) -> Tensor:
    """Return the reducer's loss of all tokens, in one microbatch of one process.

    ``y_Y``: each token's loss before its coefficient. Raises :class:`ProofError` if the reducer
    raises, and if its loss does not depend on the losses.
    """
    whole = _Tokens(aggregation, reference, [0] * len(reference.sequences))
    try:
        loss = whole.reduced(range(len(reference.sequences)), y_Y)
    except Exception as error:  # of the user's code: any
        raise ProofError(
            f"{aggregation.reducer_path} raised {error!r} over all tokens on one process"
        ) from error
    if not loss.requires_grad:
        raise ProofError(
            f"{aggregation.reducer_path} returned {loss.item()}, which does not depend on the "
            "losses that it was given: nothing would be trained"
        )
    return loss.double()


def loss_of_parts(aggregation: Aggregation, facts: Facts, y_Y: Tensor) -> Tensor:
    """Sum the reducer's partial losses over the ranks and microbatches of a layout."""
    split, keys = facts.parallelism, facts.assignment.keys
    slots = [(rank, m) for rank, number in enumerate(split.m_of_ranks) for m in range(number)]
    parts = _Tokens(
        aggregation, facts.reference, [slots.index(key) for key in keys], num=len(slots)
    )
    total = torch.zeros((), dtype=torch.float64)
    for slot in slots:
        sequences = [index for index, key in enumerate(keys) if key == slot]
        for cp_rank in range(split.cp):
            offsets = parts.offsets(sequences)
            held = split.held(offsets, cp_rank)
            total = total + parts.reduced(sequences, y_Y, held, split.cp, cp_rank)
    return total


def not_additive(aggregation: Aggregation, facts: Facts, loss: float, tolerance: float) -> str:
    """Say that partial losses do not add up to ``loss``, that of the whole; empty if they do."""
    try:
        parts = loss_of_parts(aggregation, facts, facts.reference.losses_Y).item()
    except LossAggregationError as error:
        found = f"it raises: {error}"
    else:
        if abs(parts - loss) <= tolerance * abs(loss):
            return ""
        found = f"its partial losses add up to {parts:.6g}"
    return (
        f"{aggregation.reducer_path} does not return a sum: of all tokens on one process it "
        f"returns {loss:.6g}; split as in this layout, {found}. Divide a sum of losses by a count "
        "of the whole step, such as context.plan.totals.active_tokens, never by what one rank "
        "holds, as losses.mean() does"
    )


@dataclass(frozen=True, eq=False)
class _Tokens:
    """The step's sequences in the microbatches of one process, under the reducer."""

    aggregation: Aggregation
    reference: Reference
    microbatch: Sequence[int]
    """Of each sequence."""
    num: int = 1
    """Number of microbatches."""

    @cached_property
    def _plan(self) -> StepPlan:
        """Plan on this process only, though other ranks run."""
        sequences = Sequences(
            active_tokens=[sum(s.counted) for s in self.reference.sequences],
            sample=[s.sample for s in self.reference.sequences],
            prompt=[s.prompt for s in self.reference.sequences],
            group=[s.group for s in self.reference.sequences],
            microbatch=self.microbatch,
            num_microbatches=self.num,
        ).checked()
        return StepPlan(
            aggregation=self.aggregation,
            sequences=sequences,
            table=count_step(self.aggregation, sequences),
            group_ranks=None,
            state=StepState(rejects_tokens=True),
        )

    def offsets(self, sequences: Sequence[int]) -> list[int]:
        """Return where each of some sequences, and a padding sequence, begins if packed."""
        return [0, *accumulate(map(len, self._places(sequences)))]

    def _places(self, sequences: Sequence[int]) -> list[range]:
        """List the indices in Y of some sequences, and of the padding sequence."""
        starts = [*self.reference.starts, len(self.reference.losses_Y)]
        return [range(*starts[at : at + 2]) for at in (*sequences, len(starts) - 2)]

    def reduced(
        self,
        sequences: Sequence[int],
        y_Y: Tensor,
        held: Sequence[int] | None = None,
        cp_size: int = 1,
        cp_rank: int = 0,
    ) -> Tensor:
        """Reduce what a context-parallel rank holds of a microbatch; None: all of it."""
        places = self._places(sequences)
        packed = torch.tensor([index for place in places for index in place])
        segment = np.repeat(np.arange(len(places)), [len(place) for place in places])
        here = np.arange(len(packed)) if held is None else np.asarray(held, dtype=np.int64)
        lengths = np.bincount(segment[here], minlength=len(places))
        index_T = packed[here]
        reducer = self._plan.reducer(
            [*sequences, PADDING],
            self._column_Y("trained")[index_T],
            Layout.local(lengths, cp_size=cp_size, cp_rank=cp_rank),
        )
        losses_Y = y_Y * self._column_Y("coefficient")
        return reducer(losses_Y[index_T])

    def _column_Y(self, name: str) -> Tensor:
        """Return a number of each token, 0 for padding; float64."""
        column_Y = torch.zeros(len(self.reference.losses_Y), dtype=torch.float64)
        for start, sequence in zip(self.reference.starts, self.reference.sequences, strict=False):
            numbers = torch.tensor(getattr(sequence, name), dtype=torch.float64)
            column_Y[start : start + len(sequence)] = numbers
        return column_Y
