"""Which loss is configured: a mode of the table with its numbers, own weights, or a reducer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from megatron_lossagg.errors import AggregationError
from megatron_lossagg.reduction.aliases import ALIASES, alias_of, unknown_name
from megatron_lossagg.reduction.checks.aggregation import (
    check_count,
    checked_divisor,
    checked_exponent,
)
from megatron_lossagg.reduction.modes import COUNTS, CUSTOM, MODES, OWN_WEIGHTS, Count, Ids
from megatron_lossagg.reduction.own_weights import WeightsFunction

if TYPE_CHECKING:
    from megatron_lossagg.reduction.table import StepCounts


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
        if (mode.name == OWN_WEIGHTS) != (self.weights is not None):
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
