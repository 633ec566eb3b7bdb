"""The step's counts as the table of modes reads them.

Shape suffix: S = sequences of this data-parallel rank in the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_lossagg.errors import PlanError
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.modes import MODES
from megatron_lossagg.reduction.sequences import Floats
from megatron_lossagg.reduction.step_table import StepTable
from megatron_lossagg.reduction.totals import StepTotals


class ModeCounts:
    """The counts of one aggregation: a total that its mode needs and nobody knows raises.

    Its attributes have the names of :class:`StepTotals`. If empty samples and prompts do not
    count, ``samples`` is V and ``prompts`` is Q.
    """

    def __init__(
        self,
        aggregation: Aggregation,
        totals: StepTotals,
        num_microbatches: int,
        given: Mapping[str, float] | None = None,
    ) -> None:
        self.totals = totals
        """What the aggregation counts, tokens or token weights; an unknown total is None."""
        self._given = given or {}
        """Numbers that stand in place of counts."""
        self.divisor = self._given.get("divisor", aggregation.divisor or 1.0)
        self.num_microbatches = num_microbatches
        self._aggregation = aggregation
        self._exponent = aggregation.exponent or 0.0
        self._all: StepTable | None = None

    @staticmethod
    def of(aggregation: Aggregation, totals: StepTotals, num_microbatches: int) -> ModeCounts:
        """Choose what the aggregation counts.

        Raises :class:`PlanError` if it is token weights and none were passed.
        """
        if aggregation.count != "weights":
            return ModeCounts(aggregation, totals, num_microbatches)
        if totals.weighted is None:
            raise PlanError(
                f"{aggregation} needs Sequences(token_weight_sums=...) without totals=, "
                "which was not passed"
            )
        return ModeCounts(aggregation, totals.weighted, num_microbatches)

    @property
    def is_empty(self) -> bool:
        """Whether N is known to be 0."""
        return self.totals.active_tokens == 0

    def of_all_samples(self) -> ModeCounts:
        """Return these counts with n_b of every sample of the step in place of this rank's."""
        lengths: Any = self.totals.sample_lengths
        totals = self.totals if lengths is None else replace(self.totals, sample_tokens=lengths)
        return ModeCounts(self._aggregation, totals, self.num_microbatches, self._given)

    def with_total(self, total: float) -> ModeCounts:
        """Return these counts with a number in place of the mode's :attr:`Mode.total`."""
        given = {str(MODES[self._aggregation.mode].total): total}
        return ModeCounts(self._aggregation, self.totals, self.num_microbatches, given)

    def of_all_sequences(self) -> ModeCounts:
        """Return these counts with every sequence of the step in place of this rank's.

        Raises :class:`PlanError` if they were not gathered.
        """
        every = ModeCounts(self._aggregation, self.totals, self.num_microbatches, self._given)
        every._all = self.table
        return every

    @property
    def num_rows(self) -> int:
        """Sequences of the step; needs those of all ranks."""
        return int(self.table.num_rows(count_empty=bool(self._aggregation.count_empty)))

    @property
    def length_power(self) -> Floats:
        """n_b^a of each of this rank's sequences, float64 ``[S]``."""
        return _powers(self.sample_tokens, self._exponent)

    @property
    def length_power_sum(self) -> float:
        """Z: the sum of n_b^(1-a) over the step's samples, rounded once.

        It depends neither on the order of samples nor on how ranks share them.
        """
        if "length_power_sum" in self._given:
            return self._given["length_power_sum"]
        lengths, counts = np.unique(self.sample_lengths, return_counts=True)
        try:
            with np.errstate(over="ignore"):
                return math.fsum(_powers(lengths, 1 - self._exponent) * counts)
        except OverflowError:
            raise _beyond(lengths, 1 - self._exponent) from None

    def known(self, name: str) -> Any:
        """Return a total, or None if it is not known."""
        if name in self._given:
            return self._given[name]
        if self._all is not None and name in _OF_A_SEQUENCE:
            return self._all.column(name, count_empty=bool(self._aggregation.count_empty))
        if name in _OF_A_SEQUENCE:
            return getattr(self.totals, name, None)
        return getattr(self.totals, self._field(name))

    def __getattr__(self, name: str) -> Any:
        if "_all" not in vars(self):  # of an object that is being copied or unpickled
            raise AttributeError(name)
        value = self.known(name)
        if value is None:
            field = self._field(name)
            missing = _PASSED_AS.get(field, f"StepTotals({field}=...) of the whole step")
            raise PlanError(f"{self._aggregation} needs {missing}, which was not passed")
        # Exact up to 2^53; a product with B could wrap int64.
        return value.astype(np.float64) if isinstance(value, np.ndarray) else value

    def _field(self, name: str) -> str:
        if name in ("samples", "prompts") and not self._aggregation.count_empty:
            return f"active_{name}"
        return name


_OF_A_SEQUENCE = (
    "sequence_tokens",
    "sample_tokens",
    "prompt_tokens",
    "group_tokens",
    "microbatch_tokens",
    "rows",
    "prompt_samples",
    "group_samples",
)
"""The counts with one entry per sequence."""

_PROMPT = "Sequences(prompt=...) without totals="
_GROUP = "Sequences(group=...) without totals="
_PASSED_AS = {
    "prompt_tokens": _PROMPT,
    "prompts": _PROMPT,
    "active_prompts": _PROMPT,
    "prompt_samples": _PROMPT,
    "group_tokens": _GROUP,
    "group_samples": _GROUP,
    "table": "the sequences of all ranks (plan under it, without totals=)",
    "sample_lengths": "the lengths of all ranks' samples (plan under it, without totals=)",
    "microbatch_tokens": "Sequences(microbatch=...)",
    "data_parallel_size": "group=, also with totals=",
}


def _powers(length_S: Floats, exponent: float) -> Floats:
    """Raise lengths to a power, the same for a length wherever it stands; 0 for an empty one."""
    lengths, index = np.unique(length_S, return_inverse=True)
    try:
        powers = [math.pow(n, exponent) if n else 0.0 for n in lengths.tolist()]
    except OverflowError:
        powers = []
    if len(lengths) and np.count_nonzero(powers) < np.count_nonzero(lengths):
        raise _beyond(lengths, exponent)
    return np.array(powers, dtype=np.float64)[index.reshape(-1)]


def _beyond(lengths: Floats, exponent: float) -> PlanError:
    return PlanError(
        f"samples of up to {lengths[-1]:g} tokens to the power {exponent:g} are beyond float64: "
        "change --loss-aggregation-exponent (exponent=)"
    )
