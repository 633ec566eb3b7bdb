"""What counting a step finds: its totals, in tokens and in token weights, and which step it is.

Shape suffix: S = sequences of this data-parallel rank in the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np

from megatron_lossagg.reduction.counted import Counted
from megatron_lossagg.reduction.integers import Ints, is_integer
from megatron_lossagg.reduction.step_table import StepTable


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Counts of the whole step over the data-parallel group; None if not known.

    Passed to :func:`plan_step` they replace the collectives: a mode raises
    :class:`PlanError` for what they lack. What follows ``microbatch_means`` is never passed.

    Examples:
        >>> totals = StepTotals(active_tokens=8, samples=4)
        >>> sequences = Sequences(active_tokens=[3, 1])
        >>> plan_step(Aggregation("sample_sum"), sequences, totals=totals).weights.tolist()
        [0.25, 0.25]
    """

    active_tokens: int | None = None
    """N: active tokens."""
    samples: int | None = None
    """B: samples."""
    prompts: int | None = None
    """P: prompts."""
    active_samples: int | None = None
    """V: samples with an active token."""
    active_prompts: int | None = None
    """Q: prompts with an active token."""
    microbatch_means: float | None = None
    """Sum over ranks of (microbatches with an active token) / (M of the rank)."""
    data_parallel_size: int | None = field(default=None, repr=False, compare=False)
    """DP; None if totals were passed without a group in a job of several processes."""
    longest_sample: int | None = field(default=None, repr=False, compare=False)
    """The largest n_b; of this rank if totals were passed."""
    sample_lengths: Ints | None = field(default=None, repr=False, compare=False)
    """n_b of every sample of the step, int64; None if lengths were not gathered."""
    sample_tokens: Ints | None = field(default=None, repr=False, compare=False)
    """n_b of each of this rank's sequences, int64 ``[S]``."""
    prompt_tokens: Ints | None = field(default=None, repr=False, compare=False)
    """n_p likewise; None without prompt ids."""
    microbatch_tokens: Ints | None = field(default=None, repr=False, compare=False)
    """n_mb of each of this rank's sequences' microbatch; None without ``Sequences.microbatch``."""
    weighted: StepTotals | None = field(default=None, repr=False, compare=False)
    """The same in token weights, float64; None without ``Sequences.token_weight_sums``.

    An active sample or prompt is one whose sum is not 0. Each sum over sequences is rounded once,
    so that it depends neither on their order nor on how ranks share them.
    """
    table: StepTable | None = field(default=None, repr=False, compare=False)
    """The sequences of all ranks; None if they were not gathered."""
    kept: StepTotals | None = field(default=None, repr=False, compare=False)
    """The same without the sequences that are left out, and with arrays of the others only; None
    if ``Sequences.left_out`` was not passed."""
    counted: Counted | None = field(default=None, repr=False, compare=False)
    """What was counted, in numbers; None if totals were passed."""

    def __post_init__(self) -> None:
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                value.flags.writeable = False  # the weights follow from them


class WhichStep(NamedTuple):
    """Which step is planned, as far as that is known; ranks of a group plan the same."""

    kind: int
    """0 if it is not known, 1 if it trains, 2 if it evaluates."""
    number: int
    """Of a training step, from 1; 0 if it is not known."""

    @staticmethod
    def of(forward_only: bool | None, iteration: object) -> WhichStep:
        """Return it; what is no number of a step is left to others to refuse."""
        kind = 0 if forward_only is None else 1 + bool(forward_only)
        is_number = kind == 1 and is_integer(iteration, lowest=1, highest=2**62)
        return WhichStep(kind, cast(int, iteration) if is_number else 0)

    def __str__(self) -> str:
        """Name it in a message."""
        if self.number:
            return f"training step {self.number}"
        return ("a plan", "a training step", "an evaluation")[self.kind]
