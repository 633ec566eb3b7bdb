"""One line of JSON for each optimizer step: which loss was trained (``--loss-aggregation-record``).

Two runs trained the same loss in a step if mode, counts and weights agree, whatever their
parallelism, their microbatches and how often they were resumed. The weights are compared by a hash
that depends on neither order nor rank::

    hash = sum over sequences with n_s > 0 of mix(n_s, w_s)  modulo 2^64

With ``count="weights"`` the sum of a sequence's token weights is mixed in too; which of its tokens
has which weight is not in the hash, nor which of two sequences with equal counts has which w_s, nor
what a rejection left out of the loss.

Shape suffix: S = sequences of this data-parallel rank in the step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_lossagg.errors import LossAggregationError
from megatron_lossagg.reduction.modes import CUSTOM

if TYPE_CHECKING:
    from megatron_lossagg.reduction.integers import Ints
    from megatron_lossagg.reduction.sequences import Floats


class RecordError(LossAggregationError, ValueError):
    """A file that is no record of steps."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one optimizer step trained, and at which parallelism."""

    step: int
    """Number of the step, from 1."""
    mode: str
    divisor: float | None
    exponent: float | None
    count_empty: bool
    count: str
    """What the denominators count: ``mask`` or ``weights``."""
    active_tokens: int | None
    """N. A count is None if ``totals=`` left it out."""
    samples: int | None
    """B, with ``count_empty=False`` those with an active token."""
    prompts: int | None
    """P likewise; None if no prompt ids were passed."""
    weights: str
    """Hash of the weights, 16 hexadecimal digits; empty for a custom reducer."""
    weight_sum: float | None
    """Sum of w_s over the trained tokens of all ranks; None for a custom reducer."""
    weight_expected: float | None
    """Sum of w_s n_s, which ``weight_sum`` equals unless tokens were rejected."""
    k: int
    loss_scaling: str
    num_microbatches: int
    """M of the rank that writes."""
    data_parallel_size: int
    context_parallel_size: int
    coefficients: list[float]
    """With which the partial losses of the writing rank's first microbatch arrived in the backward
    pass, in the order of their reduction."""
    version: str
    """Of this package."""
    counted: dict[str, int] = field(default_factory=dict)
    """How many sequences, samples, prompts and groups were counted, how many of them are empty,
    and how many padding sequences were left out, as far as it is known."""
    ratios: list[float] = field(default_factory=list)
    """The smallest and the largest weight that arrived at the model's losses on the writing rank,
    over that of the mode; empty if the step was not weighed."""
    warned: list[str] = field(default_factory=list)
    """The guards that found a fault on the writing rank, under ``guards="warn"``."""

    def line(self) -> str:
        """Write it as one line of JSON."""
        return json.dumps(asdict(self), default=int) + "\n"  # NumPy's integers


def hash_weights(active_tokens_S: Ints, *columns: Floats) -> int:
    """Hash this rank's weights; the sum of all ranks' hashes modulo 2^64 is the step's.

    ``columns``: w_s, and with ``count="weights"`` the sums of token weights.
    """
    is_active_S = active_tokens_S > 0
    mixed_S = np.zeros(int(is_active_S.sum()), dtype=np.uint64)
    for column_S in (active_tokens_S, *columns):
        mixed_S = _mixed(mixed_S ^ np.ascontiguousarray(column_S[is_active_S]).view(np.uint64))
    return int(mixed_S.sum(dtype=np.uint64))


def _mixed(value_S: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix 64 bits, as splitmix64 does (Steele, Lea and Flood, OOPSLA 2014); sums wrap."""
    value_S = value_S + np.uint64(0x9E3779B97F4A7C15)
    value_S = (value_S ^ (value_S >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value_S = (value_S ^ (value_S >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed_S: npt.NDArray[np.uint64] = value_S ^ (value_S >> np.uint64(31))
    return mixed_S


def read_record(path: Path) -> dict[int, StepRecord]:
    """Read a record: its steps by number, in the order of their last lines.

    Of a step that was trained again the last line counts.

    Raises :class:`RecordError` for a file that cannot be read or a line that is no step. A last
    line without an end, of a run that was stopped while writing it, is left out.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} cannot be read ({error})") from None
    steps: dict[int, StepRecord] = {}
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        record = _parsed(line)
        if record is None:
            raise RecordError(
                f"{path}, line {number}: expected one line of JSON for each step, as "
                "--loss-aggregation-record writes it"
            )
        steps.pop(record.step, None)
        steps[record.step] = record
    return steps


def _parsed(line: str) -> StepRecord | None:
    names = {field.name for field in fields(StepRecord)}
    try:
        values: Any = json.loads(line)
        record = StepRecord(**{name: values[name] for name in names & values.keys()})
        return record if type(record.step) is int else None
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


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
