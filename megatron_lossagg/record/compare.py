"""Whether two records are of the same loss, and from which step on not.

The runs may differ in their parallelism, in their microbatches and in how often they were resumed:
a step is the same if mode, divisor, exponent, count, totals and weights are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_lossagg.record.step_record import StepRecord
from megatron_lossagg.reduction.modes import CUSTOM

COMPARED = {
    "mode": "mode",
    "divisor": "divisor",
    "exponent": "exponent",
    "count_empty": "count_empty",
    "count": "count",
    "active_tokens": "N",
    "samples": "B",
    "prompts": "P",
    "weights": "weights",
}
"""The fields of :class:`StepRecord` that decide the loss, and what each is called."""


@dataclass(frozen=True, kw_only=True)
class RecordDiff:
    """What a comparison of two records found in the steps that both have."""

    common: tuple[int, ...]
    """These steps, in order."""
    num_same: int
    """How many of them, from the first one on, trained the same loss."""
    differences: Mapping[str, tuple[object, object]]
    """What differs in the step after these, of the first and of the second record; empty if it
    cannot be compared, or if there is none."""

    @property
    def step(self) -> int | None:
        """The first step that is not known to have trained the same loss; None if all have."""
        return self.common[self.num_same] if self.num_same < len(self.common) else None


def compare_records(
    first: Mapping[int, StepRecord], second: Mapping[int, StepRecord]
) -> RecordDiff:
    """Compare the steps that two records have in common, up to the first that is not the same.

    A custom reducer's weights are in no record: its step ends the comparison without a difference.
    """
    common = tuple(sorted(first.keys() & second.keys()))
    for num_same, step in enumerate(common):
        differences = compare_steps(first[step], second[step])
        if differences or first[step].mode == CUSTOM:
            return RecordDiff(common=common, num_same=num_same, differences=differences)
    return RecordDiff(common=common, num_same=len(common), differences={})


def compare_steps(one: StepRecord, other: StepRecord) -> dict[str, tuple[object, object]]:
    """Return what differs of two steps, by name; the weights only if nothing explains them."""
    pairs = {name: (getattr(one, field), getattr(other, field)) for field, name in COMPARED.items()}
    differences = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if len(differences) > 1:
        differences.pop("weights", None)
    return differences
