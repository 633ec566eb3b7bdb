"""Sequences grouped by id: how many have each, and sums over them.

Shape suffixes: A = sequences of all ranks; I = distinct ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np

from megatron_lossagg.reduction.integers import Ints
from megatron_lossagg.reduction.sequences import Floats

Numbers = TypeVar("Numbers", Ints, Floats)


@dataclass(frozen=True)
class IdGroups:
    """Sequences grouped by id."""

    index_A: Ints
    """Index of each sequence's id among I candidates, not all of which need occur."""
    num_sequences_I: Ints
    """How many sequences have it."""

    @staticmethod
    def of(id_A: Ints) -> IdGroups:
        """Group by id: in one pass if the ids are close to one another, else by sorting."""
        if not len(id_A):
            return IdGroups(id_A, id_A)
        low, high = int(id_A.min()), int(id_A.max())
        if high - low > 4 * len(id_A) + 64:
            _, index_A = np.unique(id_A, return_inverse=True)
        else:
            index_A = id_A - low if low else id_A
        return IdGroups(index_A, np.bincount(index_A))

    @property
    def num(self) -> int:
        """Number of distinct ids."""
        return int(np.count_nonzero(self.num_sequences_I))

    def sums(self, values_A: Numbers) -> Numbers:
        """Sum by id, ``[I]``: integers below 2^53 exactly, floats rounded once."""
        if values_A.dtype.kind == "f":
            sorted_A = values_A[np.argsort(self.index_A, kind="stable")].tolist()
            offsets: list[int] = [0, *np.cumsum(self.num_sequences_I).tolist()]
            return np.array([math.fsum(sorted_A[a:b]) for a, b in pairwise(offsets)])
        sums_I = np.bincount(self.index_A, values_A, minlength=len(self.num_sequences_I))
        return sums_I.astype(np.int64)

    def one_of(self, values_A: Ints) -> Ints:
        """Pick one sequence's value per id, int64 ``[I]``."""
        picked_I = np.zeros(len(self.num_sequences_I), dtype=np.int64)
        picked_I[self.index_A] = values_A
        return picked_I
