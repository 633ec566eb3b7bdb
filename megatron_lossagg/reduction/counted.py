"""How much of what a step counted, over all ranks: for the first step's line, and for a record."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from megatron_lossagg.errors import PlanError

if TYPE_CHECKING:
    from megatron_lossagg.reduction.totals import StepTotals


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Numbers over all ranks; None if not known, or if no ids were passed. Padding is in none.

    Examples:
        >>> plan = plan_step(Aggregation("sample_mean"), Sequences(active_tokens=[3, 0, 2]))
        >>> print(plan.counted)
        5 active tokens, 3 sequences (1 empty), 3 samples (1 empty), each sequence one
        >>> plan.counted.empty_samples
        1
    """

    active_tokens: int | None
    sequences: int | None = None
    empty_sequences: int | None = None
    """Those without an active token; likewise of the others."""
    samples: int | None
    empty_samples: int | None = None
    prompts: int | None = None
    empty_prompts: int | None = None
    groups: int | None = None
    empty_groups: int | None = None
    left_out: int | None = None
    """Sequences of ``Sequences.left_out``, which are in none of the numbers above."""
    padding: int | None = None
    """Padding sequences, as far as every rank says how many it left out."""

    @staticmethod
    def of_known(totals: StepTotals) -> Counted:
        """Return what totals say that were passed."""
        return Counted(
            active_tokens=totals.active_tokens, samples=totals.samples, prompts=totals.prompts
        )

    @staticmethod
    def of_all(each: Sequence[Counted], unknown: Collection[str] = ()) -> Counted:
        """Add up what several plans of one step counted.

        ``unknown``: the kinds of ids, such as ``sample``, that two plans share.
        """
        numbers = {}
        for field in fields(Counted):
            values = [getattr(one, field.name) for one in each]
            is_shared = any(kind in field.name for kind in unknown)
            numbers[field.name] = None if is_shared or None in values else sum(values)
        return Counted(**numbers)

    @property
    def known(self) -> dict[str, int]:
        """The numbers that are known, by name."""
        return {name: number for name, number in asdict(self).items() if number is not None}

    def __str__(self) -> str:
        """Write the numbers that are known on one line."""
        parts = []
        for kind in ("active_tokens", "sequences", "samples", "prompts", "groups"):
            number, empty = getattr(self, kind), getattr(self, f"empty_{kind}", None)
            if number is not None:
                in_all = f" ({empty} empty)" if empty else ""
                parts.append(f"{number} {kind.replace('_', ' ')}{in_all}")
            if kind == "samples" and number is not None and number == self.sequences:
                parts.append("each sequence one")
        if self.left_out is not None:
            parts.append(f"{self.left_out} sequences left out")
        if self.padding is not None:
            parts.append(f"{self.padding} of padding")
        return ", ".join(parts)


def check_sample_count(given: int | None, found: int | None, *, has_ids: bool) -> None:
    """Raise :class:`PlanError` if a step has another number of samples than the caller knows."""
    if given is None or found is None or given == found:
        return
    if not has_ids:
        change = "without sample= each sequence is one: pass the sample of each sequence"
    elif found < given:
        change = (
            "equal ids are one sample, so ids that restart in each prompt or on each rank merge "
            'several: pass ids of the whole step, such as f"{prompt}/{sample}"'
        )
    else:
        change = (
            "each id is a sample: give all sequences of a sample one id, the same on every rank, "
            "and leave padding sequences out"
        )
    raise PlanError(f"got sample_count {given}, the step's ids have {found} samples; {change}")
