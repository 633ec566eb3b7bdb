"""Which loss is configured: a mode with its numbers, own weights or a reducer; a run's options.

A function of one's own is found by its path. Imports no torch, and NumPy only when own weights are
computed.

Shape suffix: A = sequences of all ranks.
"""

from __future__ import annotations

import argparse
import math
import os
import pkgutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, get_args

from megatron_lossagg.errors import (
    AggregationError,
    LossAggregationError,
    PlanError,
    ReducerPathError,
    meant,
)
from megatron_lossagg.reduction.modes import (
    ALIASES,
    COUNTS,
    CUSTOM,
    MODES,
    OWN_WEIGHTS,
    Count,
    Ids,
    Mode,
    alias_of,
    unknown_name,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from megatron_lossagg.reduction.integers import Ints
    from megatron_lossagg.reduction.layout import Layout
    from megatron_lossagg.reduction.plan import StepPlan
    from megatron_lossagg.reduction.table import StepCounts

    _Array = npt.NDArray[np.float64]


def resolved(path: str, name: str, signature: str) -> Any:
    """Import the callable at ``pkg.mod:name`` or ``pkg.mod.name``.

    ``name`` and ``signature``: of what it should be, for messages. Raises
    :class:`ReducerPathError` if the path leads to nothing or to what is not callable.
    """
    expected = f"write pkg.mod:name of a {signature}"
    try:
        found: object = pkgutil.resolve_name(path)
    except Exception as error:  # a module may fail to import with anything
        near = ""
        if isinstance(error, AttributeError) and error.name is not None:
            near = meant(error.name, dir(error.obj))
        raise ReducerPathError(
            f"{name} {path!r} raised {error!r}{near}: {expected}, and install its module on every "
            "node or put it on PYTHONPATH"
        ) from error
    if not callable(found):
        raise ReducerPathError(
            f"{name} {path!r} leads to {found!r}, which is not callable: {expected}"
        )
    return found


def checked_divisor(mode: Mode, divisor: float | None) -> float | None:
    """Return a mode's divisor: finite and above 0, and only if the mode has one."""
    if divisor is None:
        if mode.divisor == "required":
            raise AggregationError(
                f"mode {mode.name!r} divides by a constant length and got none: pass the longest "
                "response that generation allows as --loss-aggregation-divisor (divisor=)"
            )
        return None
    if mode.divisor == "none":
        raise AggregationError(
            f"mode {mode.name!r} takes no divisor, got {divisor!r}: drop "
            "--loss-aggregation-divisor (divisor=), or choose constant or token_sum"
        )
    number = _as_float(divisor)
    if not math.isfinite(number) or number <= 0:
        raise AggregationError(
            f"got divisor {divisor!r}, expected a finite number above 0: "
            "change --loss-aggregation-divisor (divisor=)"
        )
    return number


def checked_exponent(mode: Mode, exponent: float | None) -> float | None:
    """Return a mode's exponent: finite, and only if the mode has one."""
    if mode.has_exponent and exponent is None:
        raise AggregationError(
            f"mode {mode.name!r} needs an exponent and got none: pass "
            "--loss-aggregation-exponent (exponent=), 0 for token_mean up to 1 for sample_mean"
        )
    if exponent is None:
        return None
    if not mode.has_exponent:
        raise AggregationError(
            f"mode {mode.name!r} takes no exponent, got {exponent!r}: drop "
            "--loss-aggregation-exponent (exponent=), or choose length_power"
        )
    number = _as_float(exponent)
    if not math.isfinite(number):
        raise AggregationError(
            f"got exponent {exponent!r}, expected a finite number: "
            "change --loss-aggregation-exponent (exponent=)"
        )
    return number


def check_count(mode: Mode, count: object) -> None:
    """Refuse what an aggregation cannot count."""
    if not isinstance(count, str) or count not in COUNTS:
        raise AggregationError(
            f"got count {count!r}, expected {', '.join(COUNTS)}: change --loss-aggregation-count "
            "(count=)"
        )
    if mode.name == CUSTOM and count != "mask":
        raise AggregationError(
            f"got count {count!r} with a reducer path, but a custom reducer counts for itself: "
            "drop --loss-aggregation-count (count=)"
        )


def _as_float(value: object) -> float:
    """Convert a number; NaN for what is none, and for an integer beyond float64."""
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            return float(value)
    return math.nan


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


@dataclass(frozen=True)
class Aggregation:
    """How per-token losses become one scalar, and with which divisor.

    An invalid object cannot exist.

    Args:
        mode: A name of ``MODES``; another system's ``system:name`` becomes the mode that it means.
        divisor: L of ``constant`` (required) or C of ``token_sum`` (1 by default), in tokens.
        exponent: a of ``length_power`` (required): how much less a token weighs in a longer sample.
        count_empty: Whether a sample or prompt with no active tokens still counts toward B or P.
            None becomes what the alias means, and True for a mode.
        reducer_path: ``pkg.mod:name`` of the factory; only with, and required by, mode ``custom``.
        count: What n_s, n_b, n_p, n_mb and N count, and which samples V and prompts Q has.
            ``mask``: tokens whose loss mask is 1. ``weights``: the sum of the token weights
            v_t >= 0, which multiply the losses too: the loss is ``sum_s w_s sum_t m_t v_t x_t``.
        count_left_out: Whether the sequences of ``Sequences.left_out`` are counted and trained all
            the same, as a KL term may next to a policy loss.
        weights: A function from :class:`StepCounts` to one weight per sequence, NumPy ``[A]`` or
            one number; or its path ``pkg.mod:name``. It is the mode ``own_weights``, whose name may
            be left out. Ranks compare its path and its weights.

    Raises:
        AggregationError: For an unknown mode; for a divisor or exponent that is missing, not
            finite, or passed to a mode that takes none, and a divisor that is not positive; for a
            ``count_empty`` that contradicts an alias; for a ``count`` that the mode does not take;
            for a reducer path that is not a string or is passed with a mode; for weights that
            are no function or are passed with a mode.
        ReducerPathError: For a path of weights that leads to no function.

    Examples:
        >>> aggregation = Aggregation("constant", divisor=4096)
        >>> print(aggregation)
        constant: w_s = 1/(B 4096)
        >>> Aggregation("trl:dr_grpo", divisor=4096) == aggregation
        True
    """

    mode: str = ""
    _: KW_ONLY
    divisor: float | None = None
    exponent: float | None = None
    count_empty: bool | None = None
    reducer_path: str | None = None
    count: Count = "mask"
    count_left_out: bool = False
    weights: WeightsFunction | Callable[[StepCounts], Any] | str | None = None

    def __post_init__(self) -> None:
        if self.weights is not None:
            object.__setattr__(self, "mode", self.mode or OWN_WEIGHTS)
            object.__setattr__(self, "weights", WeightsFunction.of(self.weights))
        alias = alias_of(self.mode)
        mode, path, count_empty = MODES[alias.mode], self.reducer_path, self.count_empty
        if path is not None and (not isinstance(path, str) or not path):
            raise AggregationError(
                f"got reducer path {path!r}, expected pkg.mod:name: change "
                "--loss-aggregation-reducer-path (reducer_path=)"
            )
        if (mode.name == CUSTOM) != (path is not None):
            raise AggregationError(
                f"got mode {self.mode!r} with reducer path {path!r}, but a reducer path replaces "
                "the mode: pass only one of --loss-aggregation and --loss-aggregation-reducer-path"
            )
        if mode.name == OWN_WEIGHTS and self.weights is None:
            raise AggregationError(
                f"got mode {self.mode!r} without a weights function, expected "
                "--loss-aggregation-weights-path (weights=) in place of the mode"
            )
        if mode.name != OWN_WEIGHTS and self.weights is not None:
            raise AggregationError(
                f"got mode {self.mode!r} with weights {self.weights!r}, but a weights function "
                "replaces the mode: pass only one of --loss-aggregation and "
                "--loss-aggregation-weights-path (weights=)"
            )
        if count_empty is None:
            count_empty = alias.count_empty
        if not isinstance(count_empty, bool):
            raise AggregationError(f"got count_empty {count_empty!r}, expected True or False")
        if not isinstance(self.count_left_out, bool):
            raise AggregationError(
                f"got count_left_out {self.count_left_out!r}, expected True or False"
            )
        if self.mode in ALIASES and count_empty != alias.count_empty:
            raise AggregationError(
                f"{self.mode!r} means mode {mode.name!r} with count_empty={alias.count_empty}, got "
                f"count_empty={count_empty}: drop it, or name the mode {mode.name!r} instead"
            )
        check_count(mode, self.count)
        object.__setattr__(self, "mode", mode.name)
        object.__setattr__(self, "count_empty", count_empty)
        object.__setattr__(self, "divisor", checked_divisor(mode, self.divisor))
        object.__setattr__(self, "exponent", checked_exponent(mode, self.exponent))

    @property
    def weights_function(self) -> WeightsFunction | None:
        """The function of ``weights``, with its path."""
        return self.weights if isinstance(self.weights, WeightsFunction) else None

    @property
    def formula(self) -> str:
        """w_s with this object's divisor and counts, such as ``1/(B 4096)``."""
        counts = {"B": "B", "P": "P"} if self.count_empty else {"B": "V", "P": "Q"}
        divisor = repr(self.divisor or 1.0).removesuffix(".0")
        exponent = repr(self.exponent).removesuffix(".0")
        return MODES[self.mode].weight.format(**counts, L=divisor, C=divisor, a=exponent)

    @property
    def needs(self) -> tuple[Ids, ...]:
        """The kinds of ids that must be passed, for without them no sequence has a weight."""
        return MODES[self.mode].needs

    @property
    def total(self) -> tuple[object, ...]:
        """The mode's :attr:`Mode.total` and what it follows from: equal if one number is both's."""
        name = MODES[self.mode].total
        if name == "L":  # a term's own C is in proportion to the step's
            return (name,)
        # B and P have every sample and prompt, V and Q those of which something is counted.
        has_all = name in ("B", "P") and self.count_empty
        return (name, self.count_left_out, None if has_all else self.count, self.exponent)

    def reads(self, ids: Ids) -> bool:
        """Whether weights may depend on ids of a kind; a user's own may on each."""
        return ids in self.needs or self.mode == OWN_WEIGHTS

    def __str__(self) -> str:
        """Mode and formula on one line."""
        own = self.weights_function
        path = self.reducer_path if own is None else own.path
        name = self.mode if path is None else f"{self.mode} {path}"
        counts = [] if self.count == "mask" else [COUNTS[self.count]]
        counts += ["sequences that are left out"] if self.count_left_out else []
        which = f", which counts {' and '.join(counts)}" if counts else ""
        return f"{name}: w_s = {self.formula}{which}"


def require_mask_count(aggregation: Aggregation, framework: str) -> None:
    """Raise :class:`AggregationError` for a ``count`` that a framework's data cannot follow."""
    if aggregation.count != "mask":
        raise AggregationError(
            f"got count {aggregation.count!r}, and {framework} passes no token weights through "
            "this package: drop --loss-aggregation-count (count=)"
        )


def parsed_aggregation(spelling: str) -> Aggregation:
    """Read a mode, or another system's name, with its number: ``constant:4096``.

    The number after the last colon is the divisor, or the exponent of ``length_power``. Raises
    :class:`AggregationError` for a number that is missing or superfluous, for ``custom``, and for
    what :class:`Aggregation` refuses.
    """
    name, colon, number = spelling.rpartition(":")
    if not colon or spelling in ALIASES:
        name, number = spelling, ""
    elif name not in MODES and name not in ALIASES:
        is_number = number.replace(".", "", 1).isdecimal()
        raise unknown_name("name", name if is_number else spelling)
    mode = MODES[alias_of(name).mode]
    takes = "exponent" if mode.has_exponent else "divisor"
    if mode.name in (CUSTOM, OWN_WEIGHTS):
        raise AggregationError(f"got {spelling!r}, expected a mode of the table: drop it")
    if number and mode.divisor == "none" and not mode.has_exponent:
        raise AggregationError(f"got {spelling!r}, expected a mode that takes a number: drop it")
    if not number and (mode.divisor == "required" or mode.has_exponent):
        raise AggregationError(
            f"got {spelling!r} without its {takes}, expected such as constant:4096 or "
            f"length_power:0.5: write {name}:NUMBER"
        )
    try:
        value = float(number) if number else None
    except ValueError:
        raise AggregationError(
            f"got {spelling!r}, expected a number after the last colon: write {name}:NUMBER"
        ) from None
    return Aggregation(name, **{takes: value})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class ReducerContext:
    """What a custom reducer factory is given: ``factory(context) -> Callable[[Tensor], Tensor]``.

    The callable takes this rank's per-token losses, masked positions already set to 0,
    flat in the layout's order, and returns a 0-dim additive partial loss.

    Examples:
        A mean over tokens, in the file ``my_losses.py``; in a framework
        ``--loss-aggregation-reducer-path my_losses:factory``:

        >>> def factory(context: ReducerContext):
        ...     tokens = context.plan.totals.active_tokens  # N, of all ranks and microbatches
        ...     return lambda losses: losses.sum() / tokens
        >>> aggregation = Aggregation("custom", reducer_path="my_losses:factory")
        >>> plan = plan_step(aggregation, Sequences(active_tokens=[3]))
        >>> layout = Layout.thd_zigzag([0, 4], cp_size=1, cp_rank=0)
        >>> reducer = plan.reducer([0], torch.tensor([1, 1, 1, 0]), layout)
        >>> reducer(torch.tensor([1.0, 2.0, 6.0, float("inf")])).item()
        3.0
    """

    plan: StepPlan
    """Totals and, under a mode of the table, weights: ``plan.under("token_mean").weights``."""
    sequences: Ints
    """int64 ``[G]``: the sequence of each segment, -1 for a padding sequence."""
    mask: Tensor
    """bool ``[T]``: the loss mask, sliced for this rank, on its device; read only."""
    layout: Layout

    @property
    def aggregation(self) -> Aggregation:
        """The plan's aggregation."""
        return self.plan.aggregation


ReducerFactory = Callable[[ReducerContext], "Callable[[Tensor], Tensor]"]


def load_reducer_factory(path: str) -> ReducerFactory:
    """Import the factory at a path; raises as :func:`resolved`."""
    factory: ReducerFactory = resolved(
        path, "reducer path", "factory(context) -> Callable[[Tensor], Tensor]"
    )
    return factory


EmptyStep = Literal["zero", "error"]
SideLosses = Literal["stock", "follow"]
Guards = Literal["error", "warn"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run, the same on every rank; :class:`AggregationError` if one is invalid.

    The flag of each field is ``--loss-aggregation-`` and its name.

    Examples:
        >>> Options(rejects_tokens=True, shadow="token_mean,constant:4096").shadow
        ('token_mean', 'constant:4096')
    """

    empty_step: EmptyStep = "zero"
    """A step with no active tokens: zero weights and one warning, or an error."""
    probe: bool = True
    """Whether to measure at startup what Megatron does to a loss."""
    rejects_tokens: bool = False
    """Whether loss masks may select fewer tokens than were counted (rejection sampling).

    Such a mask is an error otherwise.
    """
    record: str | None = None
    """A file to which each training step appends one line of JSON; None: none is written."""
    shadow: tuple[str, ...] = ()
    """Modes whose loss over the same tokens is reported next to the trained one; no gradient.

    A mode with a number is written with it: ``constant:4096``, ``length_power:0.5``. A string is
    split at its commas.
    """
    side_losses: SideLosses = "stock"
    """Whether MoE and MTP losses keep Megatron's scale, or are multiplied by the sum of weights.

    With ``follow`` their coefficients mean the same under every mode. From megatron-core 0.19 on.
    """

    guards: Guards = "error"
    """Whether what a guard finds ends the step, or is warned of once and recorded.

    Checks of values stay errors: a loss that is not finite, a mask that is not 0 or 1, counts.
    """

    def __post_init__(self) -> None:
        for name, kinds in (
            ("empty_step", EmptyStep),
            ("side_losses", SideLosses),
            ("guards", Guards),
        ):
            first, second = get_args(kinds)
            if getattr(self, name) not in (first, second):
                got = getattr(self, name)
                raise AggregationError(f"got {name} {got!r}, expected {first} or {second}")
        for name in ("probe", "rejects_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise AggregationError(f"got {name} {getattr(self, name)!r}, expected a bool")
        if self.record is not None:
            object.__setattr__(self, "record", _checked_path(self.record))
        object.__setattr__(self, "shadow", _checked_names(self.shadow))
        self.shadows  # noqa: B018  a name that is not known is refused here

    @property
    def shadows(self) -> dict[str, Aggregation]:
        """The aggregation of each name in :attr:`shadow`."""
        found = {}
        for name in self.shadow:
            try:
                found[name] = parsed_aggregation(name)
            except AggregationError as error:
                raise AggregationError(
                    f"--loss-aggregation-shadow (Options.shadow): {error}"
                ) from None
        return found

    def of_step(self, forward_only: bool) -> Options:
        """Return the options of a step: an evaluation without an active token is not an error."""
        return replace(self, empty_step="zero") if forward_only else self

    @staticmethod
    def from_args(args: argparse.Namespace) -> Options:
        """Read the flags; one that ``args`` lacks, or has as None, has its default."""
        given = {
            field.name: getattr(args, f"loss_aggregation_{field.name}", None)
            for field in fields(Options)
        }
        return Options(**{name: value for name, value in given.items() if value is not None})


def _checked_path(path: object) -> str:
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise AggregationError(f"got record {path!r}, expected the path of a file")
    return str(os.fspath(path))


def _checked_names(names: object) -> tuple[str, ...]:
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",")]
    if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) and n for n in names):
        raise AggregationError(
            f"got shadow {names!r}, expected names of modes: write such as token_mean,constant:4096"
        )
    if len(set(names)) < len(names):
        raise AggregationError(f"got shadow {names!r}, expected each name once")
    return tuple(names)
