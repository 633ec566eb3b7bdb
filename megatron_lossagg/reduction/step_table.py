"""The sequences of all data-parallel ranks in one step, for weights that need each of them.

Shape suffixes: A = sequences of all ranks; I = distinct ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron_lossagg.reduction.id_groups import IdGroups
from megatron_lossagg.reduction.integers import Ints
from megatron_lossagg.reduction.sequences import Floats, Kind


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTable:
    """One entry per sequence, in the order of the ranks; the same on every rank."""

    counted_A: Ints | Floats
    """n_s: active tokens, or the sums of their weights."""
    groups: Mapping[Kind, IdGroups]
    """Which sequences have one id, for each kind of id that was passed."""
    sequence_weight_A: Floats | None
    """omega_s; None if none were passed."""
    columns: Mapping[str, Floats]
    """The caller's own numbers of each sequence, ``[A]`` by name, read-only."""
    own: slice
    """This rank's sequences."""

    def __post_init__(self) -> None:
        for value_A in self.columns.values():
            value_A.flags.writeable = False  # every mode and shadow reads the same

    def num_rows(self, *, count_empty: bool) -> int:
        """Count the sequences; ``count_empty``: whether those with no active tokens count."""
        return int(np.count_nonzero((self.counted_A > 0) | count_empty))

    def column(self, name: str, *, count_empty: bool) -> Any:
        """Compute a count of each sequence, an array ``[A]``; None if its ids were not passed.

        ``count_empty``: whether sequences and samples with no active tokens count.
        """
        counted_A: Any = self.counted_A
        if name == "sequence_tokens":
            return counted_A
        if name == "rows":
            is_row_A = (counted_A > 0) | count_empty
            return self._samples.sums(is_row_A.astype(np.int64))[self._samples.index_A]
        kind, _, what = name.partition("_")
        ids = self._samples if kind == "sample" else self.groups.get(kind)  # type: ignore[call-overload]
        if ids is None or what not in ("tokens", "samples"):
            return None
        if what == "tokens":
            return ids.sums(counted_A)[ids.index_A]
        _, first = np.unique(self._samples.index_A, return_index=True)
        is_sample_A = np.zeros(len(self.counted_A), dtype=np.int64)
        tokens_A = self._samples.sums(counted_A)[self._samples.index_A]
        is_sample_A[first] = (tokens_A[first] > 0) | count_empty
        return ids.sums(is_sample_A)[ids.index_A]

    @cached_property
    def _samples(self) -> IdGroups:
        """Which sequences are one sample; without ids each is its own."""
        if "sample" in self.groups:
            return self.groups["sample"]
        return IdGroups.of(np.arange(len(self.counted_A)))
