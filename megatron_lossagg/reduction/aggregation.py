"""Which loss is configured: the modes, their formulas, and the names other systems give them.

Symbols (``docs/math.md``): a sequence s has n_s active tokens, its sample n_b, its prompt
n_p; the step has N active tokens, B samples and P prompts; M microbatches on this
rank, DP data-parallel ranks; the divisor is L or C. Every mode is one weight per sequence::

    loss = sum_s w_s * sum_{t in s} m_t * x_t
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Any, Literal

from megatron_lossagg.errors import AggregationError

__all__ = [
    "ALIASES",
    "COUNTS",
    "CUSTOM",
    "MODES",
    "Aggregation",
    "Alias",
    "Count",
    "Mode",
    "parsed_aggregation",
    "require_mask_count",
]

_DivisorRule = Literal["required", "optional", "none"]
Count = Literal["mask", "weights"]

COUNTS: dict[Count, str] = {
    "mask": "the tokens of the loss mask",
    "weights": "the sums of token weights",
}
"""What the denominators count; see :attr:`Aggregation.count`."""

CUSTOM = "custom"


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One line of the table of modes."""

    name: str
    weight: str
    """w_s as a format string over B, P, L, C and a; ``--help`` and the start of a run print it."""
    divisor: _DivisorRule
    meaning: str
    denominator: Callable[[Any], Any] | None
    """1 / w_s from the step's counts (``mode_counts.ModeCounts``); None for a custom reducer."""
    expected: Callable[[Any], float] | None
    """The sum of w_s n_s over a step that has an active token, likewise."""
    has_exponent: bool = False
    """Whether it needs the exponent a."""

    @property
    def formula(self) -> str:
        """w_s in the letters of ``docs/math.md``, such as ``1/(B L)``."""
        return self.weight.format(B="B", P="P", L="L", C="C", a="a")


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode(
            name="token_mean",
            weight="1/N",
            divisor="none",
            meaning="mean over all active tokens of the step (DAPO)",
            denominator=lambda c: c.active_tokens,
            expected=lambda c: c.active_tokens / c.active_tokens,
        ),
        Mode(
            name="sample_mean",
            weight="1/({B} n_b)",
            divisor="none",
            meaning="mean over samples of each sample's token mean (GRPO)",
            denominator=lambda c: c.sample_tokens * c.samples,
            expected=lambda c: c.active_samples / c.samples,
        ),
        Mode(
            name="prompt_mean",
            weight="1/({P} n_p)",
            divisor="none",
            meaning="mean over prompts of each prompt's token mean (ScaleRL)",
            denominator=lambda c: c.prompt_tokens * c.prompts,
            expected=lambda c: c.active_prompts / c.prompts,
        ),
        Mode(
            name="constant",
            weight="1/({B} {L})",
            divisor="required",
            meaning="token sums over a constant length L, mean over samples (Dr.GRPO)",
            denominator=lambda c: c.samples * c.divisor,
            expected=lambda c: c.active_tokens / (c.samples * c.divisor),
        ),
        Mode(
            name="sample_sum",
            weight="1/{B}",
            divisor="none",
            meaning="token sums, mean over samples",
            denominator=lambda c: c.samples,
            expected=lambda c: c.active_tokens / c.samples,
        ),
        Mode(
            name="token_sum",
            weight="1/{C}",
            divisor="optional",
            meaning="sum over all active tokens, over a constant C (1 by default)",
            denominator=lambda c: c.divisor,
            expected=lambda c: c.active_tokens / c.divisor,
        ),
        Mode(
            name="length_power",
            weight="1/(n_b^{a} Z)",
            divisor="none",
            has_exponent=True,
            meaning="samples by a power of their length, over the sum Z of n_b^(1-a): all weights "
            "w_s n_s sum to 1; a = 0 is token_mean, a = 1 sample_mean without empty samples",
            denominator=lambda c: c.length_power * c.length_power_sum,
            expected=lambda c: 1.0,
        ),
        Mode(
            name="microbatch_token_mean",
            weight="1/(M DP n_mb)",
            divisor="none",
            meaning=(
                "mean of microbatch token means; depends on the layout, "
                "kept only to reproduce old runs"
            ),
            denominator=lambda c: c.microbatch_tokens * c.num_microbatches * c.data_parallel_size,
            expected=lambda c: c.microbatch_means / c.data_parallel_size,
        ),
        Mode(
            name=CUSTOM,
            weight="known to the custom reducer",
            divisor="none",
            meaning="what the factory at --loss-aggregation-reducer-path returns",
            denominator=None,
            expected=None,
        ),
    )
}

_PAPERS = {
    "grpo": "sample_mean",
    "dapo": "token_mean",
    "drgrpo": "constant",
    "scalerl": "prompt_mean",
    "seqmeantokenmean": "sample_mean",
    "seqmeantokensum": "sample_sum",
    "seqmeantokensumnorm": "constant",
    "sequencemean": "sample_mean",
}
"""Common names of modes, without punctuation: suggested, never accepted."""


@dataclass(frozen=True)
class Alias:
    """The mode that another system's name means."""

    mode: str
    note: str = ""
    """Which number is the divisor, and when that system's own loss is this one."""
    count_empty: bool = True


_EQUALLY_MANY = "if microbatches have equally many samples"
_SWIFT_TOKENS = "of its Megatron trainer, from 4.6.0 on"
_TRL_TOKENS = "if steps_per_generation = gradient_accumulation_steps"
_EMPTY_LEAVES = "a fully masked sample does not count"

# Sources: the systems' own code, listed with commits in docs/evidence.md.
ALIASES: dict[str, Alias] = {
    "areal:default": Alias("token_mean"),
    "megatron:calculate-per-token-loss": Alias("token_mean"),
    "megatron:default": Alias("microbatch_token_mean", "equal at CP = 1"),
    "miles:calculate-per-token-loss": Alias(
        "token_mean", "without the phantom token of a fully masked sample"
    ),
    "miles:default": Alias("sample_mean", "pass rollout ids as sample"),
    "ms-swift:bnpo": Alias("token_mean", _SWIFT_TOKENS),
    "ms-swift:cispo": Alias("token_mean", _SWIFT_TOKENS),
    "ms-swift:dapo": Alias("token_mean", _SWIFT_TOKENS),
    "ms-swift:dr_grpo": Alias("constant", f"L = max_completion_length; {_EQUALLY_MANY}"),
    "ms-swift:fipo": Alias("token_mean", _SWIFT_TOKENS),
    "ms-swift:grpo": Alias("sample_mean", _EQUALLY_MANY),
    "ms-swift:sapo": Alias("sample_mean", _EQUALLY_MANY),
    "nemo-rl:token_level_loss=False": Alias(
        "sample_mean", "leave out sequences whose sample_mask is 0"
    ),
    "nemo-rl:token_level_loss=True": Alias("token_mean"),
    "open-instruct:number": Alias("token_sum", "C = loss_denominator; no 1/B"),
    "open-instruct:token": Alias("token_mean"),
    "openrlhf:token_level_loss=False": Alias("sample_mean", _EMPTY_LEAVES, count_empty=False),
    "openrlhf:token_level_loss=True": Alias("token_mean"),
    "prime-rl:default": Alias("token_mean"),
    "roll:seq-mean-token-mean": Alias("sample_mean", _EMPTY_LEAVES, count_empty=False),
    "roll:seq-mean-token-sum": Alias("sample_sum", _EMPTY_LEAVES, count_empty=False),
    "roll:seq-mean-token-sum-norm": Alias("token_sum", "C = padded width; no 1/B"),
    "roll:token-mean": Alias(
        "token_mean", "if losses outside of the mask are 0: ROLL masks the divisor only"
    ),
    "scalerl:prompt-average": Alias("prompt_mean"),
    "skyrl:prompt_mean": Alias("prompt_mean"),
    "skyrl:seq_mean_token_sum_norm": Alias("constant", "L = max_seq_len"),
    "skyrl:sequence_mean": Alias("sample_mean"),
    "skyrl:token_mean": Alias("token_mean"),
    "skyrl:token_mean_legacy": Alias("microbatch_token_mean"),
    "slime:calculate-per-token-loss": Alias(
        "token_mean", "without the phantom token of a fully masked sample"
    ),
    "slime:default": Alias("sample_mean", "pass rollout ids as sample"),
    "tinker:sum": Alias("token_sum"),
    "trl:bnpo": Alias("microbatch_token_mean"),
    "trl:cispo": Alias("token_mean", _TRL_TOKENS),
    "trl:dapo": Alias("token_mean", _TRL_TOKENS),
    "trl:dr_grpo": Alias("constant", f"L = max_completion_length; {_EQUALLY_MANY}"),
    "trl:grpo": Alias("sample_mean", _EQUALLY_MANY),
    "trl:luspo": Alias(
        "sample_sum", f"{_EQUALLY_MANY}; with beta or token-level ratios from 1.10.0 on"
    ),
    "trl:sapo": Alias("sample_mean", _EQUALLY_MANY),
    "trl:vespo": Alias("token_mean", _TRL_TOKENS),
    "verl:seq-mean-token-mean": Alias("sample_mean"),
    "verl:seq-mean-token-sum": Alias("sample_sum"),
    "verl:seq-mean-token-sum-norm": Alias("constant", "L = loss_scale_factor"),
    "verl:token-mean": Alias("token_mean"),
    "verl:token-sum": Alias("token_sum"),
}


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

    Raises:
        AggregationError: For an unknown mode; for a divisor or exponent that is missing, not
            finite, or passed to a mode that takes none, and a divisor that is not positive; for a
            ``count_empty`` that contradicts an alias; for a ``count`` that the mode does not take;
            for a reducer path that is not a string or is passed with a mode.

    Examples:
        >>> aggregation = Aggregation("constant", divisor=4096)
        >>> print(aggregation)
        constant: w_s = 1/(B 4096)
        >>> Aggregation("trl:dr_grpo", divisor=4096) == aggregation
        True
    """

    mode: str
    _: KW_ONLY
    divisor: float | None = None
    exponent: float | None = None
    count_empty: bool | None = None
    reducer_path: str | None = None
    count: Count = "mask"

    def __post_init__(self) -> None:
        alias = _known(self.mode)
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
        if count_empty is None:
            count_empty = alias.count_empty
        if not isinstance(count_empty, bool):
            raise AggregationError(f"got count_empty {count_empty!r}, expected True or False")
        if self.mode in ALIASES and count_empty != alias.count_empty:
            raise AggregationError(
                f"{self.mode!r} means mode {mode.name!r} with count_empty={alias.count_empty}, got "
                f"count_empty={count_empty}: drop it, or name the mode {mode.name!r} instead"
            )
        _check_count(mode, self.count)
        object.__setattr__(self, "mode", mode.name)
        object.__setattr__(self, "count_empty", count_empty)
        object.__setattr__(self, "divisor", _checked_divisor(mode, self.divisor))
        object.__setattr__(self, "exponent", _checked_exponent(mode, self.exponent))

    @property
    def formula(self) -> str:
        """w_s with this object's divisor and counts, such as ``1/(B 4096)``."""
        counts = {"B": "B", "P": "P"} if self.count_empty else {"B": "V", "P": "Q"}
        divisor = repr(self.divisor or 1.0).removesuffix(".0")
        exponent = repr(self.exponent).removesuffix(".0")
        return MODES[self.mode].weight.format(**counts, L=divisor, C=divisor, a=exponent)

    def __str__(self) -> str:
        """Mode and formula on one line."""
        name = self.mode if self.reducer_path is None else f"{self.mode} {self.reducer_path}"
        counts = "" if self.count == "mask" else f", which counts {COUNTS[self.count]}"
        return f"{name}: w_s = {self.formula}{counts}"


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
        raise AggregationError(f"unknown name {spelling!r}{_nearest(spelling)}; {_known_names()}")
    mode = MODES[_known(name).mode]
    takes = "exponent" if mode.has_exponent else "divisor"
    if mode.name == CUSTOM or (number and mode.divisor == "none" and not mode.has_exponent):
        raise AggregationError(
            f"got {spelling!r}, expected a mode"
            + (" of the table: drop it" if mode.name == CUSTOM else " that takes a number: drop it")
        )
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


def _known(name: object) -> Alias:
    """Look up what a name means; a mode means itself."""
    if not isinstance(name, str):
        raise AggregationError(f"got {name!r}, expected the name of a mode; {_known_names()}")
    if name in MODES:
        return Alias(name)
    if name in ALIASES:
        return ALIASES[name]
    what = "name" if ":" in name else "mode"
    raise AggregationError(f"unknown {what} {name!r}{_nearest(name)}; {_known_names()}")


def _nearest(name: str) -> str:
    """Suggest names: the mode of a paper, the names of a system, close spellings."""
    known = [*MODES, *ALIASES]
    letters = _letters(name)
    names = [other for other in known if _letters(other) == letters]
    if not names and letters in _PAPERS:
        names = [_PAPERS[letters]]
    if not names and ":" in name:
        names = [other for other in ALIASES if other.startswith(name.lower().split(":")[0] + ":")]
    if not names:
        names = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    return f", did you mean {' or '.join(map(repr, names))}?" if names else ""


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def _known_names() -> str:
    return f"modes are {', '.join(MODES)}; other systems' names are written system:name"


def _checked_divisor(mode: Mode, divisor: float | None) -> float | None:
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


def _checked_exponent(mode: Mode, exponent: float | None) -> float | None:
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


def _check_count(mode: Mode, count: object) -> None:
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
