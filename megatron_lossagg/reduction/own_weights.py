"""A user's own weights: the function, what it is given, and what it may return.

Imports no torch, and NumPy when it is called. Shape suffix: A = sequences of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_lossagg.errors import AggregationError, LossAggregationError, PlanError
from megatron_lossagg.reduction.user_path import resolved

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    _Array = npt.NDArray[np.float64]


class StepCounts:
    """What a weights function is given: one step's counts, over all data-parallel ranks.

    The names are those of the math page. N, B and P are numbers; the others are float64
    ``[A]``, one entry per sequence of the step, in the same order on every rank. With
    ``count_empty=False`` only samples, prompts and sequences with active tokens are counted; with
    ``count="weights"`` tokens are token weights. Ids and columns that were not passed raise
    :class:`PlanError`.

    Examples:
        The mean of each prompt's mean over samples, of samples' token means:

        >>> def weights(counts):
        ...     return 1 / (counts.P * counts.k_p * counts.n_b)
        >>> sequences = Sequences(active_tokens=[4, 1, 5], prompt=["a", "a", "b"])
        >>> plan_step(Aggregation(weights=weights), sequences).weights.tolist()
        [0.0625, 0.25, 0.1]
    """

    def __init__(self, counts: Any) -> None:
        self._counts = counts

    @property
    def N(self) -> float:
        """Active tokens of the step."""
        return float(self._counts.active_tokens)

    @property
    def B(self) -> float:
        """Samples of the step."""
        return float(self._counts.samples)

    @property
    def P(self) -> float:
        """Prompts of the step."""
        return float(self._counts.prompts)

    @property
    def n_s(self) -> _Array:
        """Active tokens of the sequence."""
        return self._of("sequence_tokens")

    @property
    def n_b(self) -> _Array:
        """Active tokens of its sample."""
        return self._of("sample_tokens")

    @property
    def n_p(self) -> _Array:
        """Active tokens of its prompt."""
        return self._of("prompt_tokens")

    @property
    def n_c(self) -> _Array:
        """Active tokens of its group, ``Sequences(group=...)``."""
        return self._of("group_tokens")

    @property
    def R_b(self) -> _Array:
        """Rows: sequences of its sample."""
        return self._of("rows")

    @property
    def R(self) -> float:
        """Rows: sequences of the step."""
        return float(self._counts.num_rows)

    @property
    def columns(self) -> Mapping[str, _Array]:
        """The caller's own numbers by name, ``Sequences(columns=...)``; whole, empty ones too."""
        return _Columns(self._counts.table.columns)

    @property
    def k_p(self) -> _Array:
        """Samples of its prompt."""
        return self._of("prompt_samples")

    @property
    def k_c(self) -> _Array:
        """Samples of its group."""
        return self._of("group_samples")

    def _of(self, name: str) -> _Array:
        found: _Array = getattr(self._counts, name)
        return found


class _Columns(dict[str, Any]):
    """The columns that were passed; another name is an error of the step."""

    def __missing__(self, name: str) -> Any:
        raise PlanError(
            f"the weights function reads the column {name!r}, and the step has "
            f"{', '.join(map(repr, self)) or 'none'}: pass Sequences(columns={{{name!r}: ...}}), "
            "one number per sequence"
        )


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
