"""A user's own weights: the function, and what it may return.

Imports no torch, and NumPy when it is called. Shape suffix: A = sequences of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_lossagg.errors import AggregationError, LossAggregationError, PlanError
from megatron_lossagg.reduction.user_path import resolved

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from megatron_lossagg.reduction.table import StepCounts

    _Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class WeightsFunction:
    """A function from a step's counts to one weight per sequence, and its name on every rank."""

    path: str
    """``pkg.mod:name``; all that its ``repr`` shows, because ranks compare it."""
    function: Callable[[StepCounts], Any] = field(repr=False, hash=False)

    @staticmethod
    def of(given: object) -> WeightsFunction:
        """Take a function, or import the one at a path.

        Raises :class:`ReducerPathError` for a path that leads to nothing callable, and
        :class:`AggregationError` for what is neither.
        """
        if isinstance(given, WeightsFunction):
            return given
        if isinstance(given, str) and given:
            what = "weights path", "function(counts) -> one weight per sequence"
            return WeightsFunction(given, resolved(given, *what))
        if not callable(given):
            raise AggregationError(
                f"got weights {given!r}, expected a function of a step's counts, or pkg.mod:name: "
                "change --loss-aggregation-weights-path (weights=)"
            )
        name = getattr(given, "__qualname__", type(given).__qualname__)
        return WeightsFunction(f"{getattr(given, '__module__', '')}:{name}", given)

    def __call__(self, counts: StepCounts, is_active_A: npt.NDArray[np.bool_]) -> _Array:
        """Compute w_s of every sequence, float64 ``[A]``; 0 for one with no active tokens.

        Raises :class:`PlanError` if the function raises, for another shape, and for a weight that
        is not finite or negative.
        """
        import numpy as np

        if not is_active_A.any():  # there is nothing to weigh
            return np.zeros(len(is_active_A))
        try:
            with np.errstate(all="ignore"):  # 1 / 0 of a sequence without tokens
                found = np.asarray(self.function(counts))
        except LossAggregationError:
            raise
        except Exception as error:
            raise PlanError(f"the weights function {self.path} raised {error!r}") from error
        if found.shape not in ((), is_active_A.shape) or found.dtype.kind not in "bfiu":
            raise PlanError(
                f"the weights function {self.path} returned {found.dtype} of shape {found.shape}, "
                f"expected {len(is_active_A)} numbers, one per sequence of the step"
            )
        weight_A = np.where(is_active_A, found.astype(np.float64), 0.0)
        is_wrong_A = ~(np.isfinite(weight_A) & (weight_A >= 0))
        if is_wrong_A.any():
            at = int(is_wrong_A.argmax())
            raise PlanError(
                f"the weights function {self.path} returned {weight_A[at]} for sequence {at} of "
                "the step, expected a finite weight from 0"
            )
        return weight_A
