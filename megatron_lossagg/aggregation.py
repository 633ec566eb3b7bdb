"""Which loss is configured: the modes, their formulas, and the names other systems give them.

Symbols (``docs/math.md``): a sequence s has n_s active tokens, its sample n_b, its prompt
n_p; the step has N active tokens, B samples and P prompts; M microbatches on this
rank, DP data-parallel ranks; the divisor is L or C. Every mode is one weight per sequence::

    loss = sum_s w_s * sum_{t in s} m_t * x_t
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Any, Literal

from megatron_lossagg.errors import AggregationError

__all__ = [
    "ALIASES",
    "CUSTOM",
    "MODES",
    "Aggregation",
    "Alias",
    "Mode",
    "alias_lines",
    "mode_lines",
]

_DivisorRule = Literal["required", "optional", "none"]

CUSTOM = "custom"


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One sequence of the table of modes."""

    name: str
    weight: str
    """w_s as a format string over B, P, L and C; ``--help`` and the start of a run print it."""
    divisor: _DivisorRule
    meaning: str
    denominator: Callable[[Any], Any] | None
    """1 / w_s from the step's counts (``plan.StepCounts``); None for a custom reducer."""
    expected: Callable[[Any], float] | None
    """The sum of w_s n_s over a step that has an active token, likewise."""


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
            meaning="sum over all active tokens, over a constant C (1 if none is given)",
            denominator=lambda c: c.divisor,
            expected=lambda c: c.active_tokens / c.divisor,
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
            weight="given by the reducer path",
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


@dataclass(frozen=True, kw_only=True)
class Alias:
    """The mode that another system's name means."""

    mode: str
    count_empty: bool = True
    note: str = ""
    """Which number is the divisor, and when that system's own loss is this one."""


_EQUALLY_MANY = "if microbatches have equally many samples"
_SWIFT_TOKENS = "of its Megatron trainer, from 4.6.0 on"
_TRL_TOKENS = "if steps_per_generation = gradient_accumulation_steps"
_EMPTY_LEAVES = "a fully masked sample does not count"

# Sources: the systems' own code, listed with commits in docs/math.md.
ALIASES: dict[str, Alias] = {
    "areal:default": Alias(mode="token_mean"),
    "megatron:calculate-per-token-loss": Alias(mode="token_mean"),
    "megatron:default": Alias(mode="microbatch_token_mean", note="equal at CP = 1"),
    "miles:calculate-per-token-loss": Alias(
        mode="token_mean", note="without the phantom token of a fully masked sample"
    ),
    "miles:default": Alias(mode="sample_mean", note="give rollout ids as sample"),
    "ms-swift:bnpo": Alias(mode="token_mean", note=_SWIFT_TOKENS),
    "ms-swift:dapo": Alias(mode="token_mean", note=_SWIFT_TOKENS),
    "ms-swift:dr_grpo": Alias(mode="constant", note=f"L = max_completion_length; {_EQUALLY_MANY}"),
    "ms-swift:grpo": Alias(mode="sample_mean", note=_EQUALLY_MANY),
    "nemo-rl:token_level_loss=False": Alias(
        mode="sample_mean", note="leave out sequences whose sample_mask is 0"
    ),
    "nemo-rl:token_level_loss=True": Alias(mode="token_mean"),
    "open-instruct:number": Alias(mode="token_sum", note="C = loss_denominator; no 1/B"),
    "open-instruct:token": Alias(mode="token_mean"),
    "openrlhf:token_level_loss=False": Alias(
        mode="sample_mean", count_empty=False, note=_EMPTY_LEAVES
    ),
    "openrlhf:token_level_loss=True": Alias(mode="token_mean"),
    "prime-rl:default": Alias(mode="token_mean"),
    "roll:seq-mean-token-mean": Alias(mode="sample_mean", count_empty=False, note=_EMPTY_LEAVES),
    "roll:seq-mean-token-sum": Alias(mode="sample_sum", count_empty=False, note=_EMPTY_LEAVES),
    "roll:seq-mean-token-sum-norm": Alias(mode="token_sum", note="C = padded width; no 1/B"),
    "roll:token-mean": Alias(
        mode="token_mean", note="if losses outside of the mask are 0: ROLL masks the divisor only"
    ),
    "scalerl:prompt-average": Alias(mode="prompt_mean"),
    "skyrl:prompt_mean": Alias(mode="prompt_mean"),
    "skyrl:seq_mean_token_sum_norm": Alias(mode="constant", note="L = max_seq_len"),
    "skyrl:sequence_mean": Alias(mode="sample_mean"),
    "skyrl:token_mean": Alias(mode="token_mean"),
    "skyrl:token_mean_legacy": Alias(mode="microbatch_token_mean"),
    "slime:calculate-per-token-loss": Alias(
        mode="token_mean", note="without the phantom token of a fully masked sample"
    ),
    "slime:default": Alias(mode="sample_mean", note="give rollout ids as sample"),
    "tinker:sum": Alias(mode="token_sum"),
    "trl:bnpo": Alias(mode="microbatch_token_mean"),
    "trl:cispo": Alias(mode="token_mean", note=_TRL_TOKENS),
    "trl:dapo": Alias(mode="token_mean", note=_TRL_TOKENS),
    "trl:dr_grpo": Alias(mode="constant", note=f"L = max_completion_length; {_EQUALLY_MANY}"),
    "trl:grpo": Alias(mode="sample_mean", note=_EQUALLY_MANY),
    "trl:luspo": Alias(
        mode="sample_sum",
        note=f"{_EQUALLY_MANY}; with beta or token-level ratios from 1.10.0 on",
    ),
    "trl:sapo": Alias(mode="sample_mean", note=_EQUALLY_MANY),
    "trl:vespo": Alias(mode="token_mean", note=_TRL_TOKENS),
    "verl:seq-mean-token-mean": Alias(mode="sample_mean"),
    "verl:seq-mean-token-sum": Alias(mode="sample_sum"),
    "verl:seq-mean-token-sum-norm": Alias(mode="constant", note="L = loss_scale_factor"),
    "verl:token-mean": Alias(mode="token_mean"),
    "verl:token-sum": Alias(mode="token_sum"),
}


@dataclass(frozen=True)
class Aggregation:
    """How per-token losses become one scalar, and with which divisor.

    Raises :class:`AggregationError` for an unknown mode, for a divisor that is missing, not
    a finite positive number, or passed to a mode that takes none, for a ``count_empty`` that
    contradicts an alias, and for a reducer path that is not a string or is passed with a mode.
    An invalid object cannot exist.
    """

    mode: str
    """A name of ``MODES``; another system's ``system:name`` becomes the mode that it means."""
    _: KW_ONLY
    divisor: float | None = None
    """L of ``constant`` (required) or C of ``token_sum`` (1 if not given), in tokens."""
    count_empty: bool | None = None
    """Whether a sample or prompt with no active tokens still counts toward B or P.

    None becomes what the alias means, and True for a mode.
    """
    reducer_path: str | None = None
    """``pkg.mod:name`` of the factory; only with, and required by, mode ``custom``."""

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
        object.__setattr__(self, "mode", mode.name)
        object.__setattr__(self, "count_empty", count_empty)
        object.__setattr__(self, "divisor", _checked_divisor(mode, self.divisor))

    @property
    def formula(self) -> str:
        """w_s with this object's divisor and counts, such as ``1/(B 4096)``."""
        counts = {"B": "B", "P": "P"} if self.count_empty else {"B": "V", "P": "Q"}
        divisor = repr(self.divisor or 1.0).removesuffix(".0")
        return MODES[self.mode].weight.format(**counts, L=divisor, C=divisor)

    def __str__(self) -> str:
        """Mode and formula on one line."""
        name = self.mode if self.reducer_path is None else f"{self.mode} {self.reducer_path}"
        return f"{name}: w_s = {self.formula}"


def mode_lines() -> Iterator[str]:
    """Yield one line per mode, with its formula."""
    divisor = {"required": ", needs a divisor", "optional": ", may have a divisor", "none": ""}
    width = max(len(name) for name in MODES)
    for mode in MODES.values():
        weight = mode.weight.format(B="B", P="P", L="L", C="C")
        yield f"{mode.name:<{width}}  w_s = {weight:<24}  {mode.meaning}{divisor[mode.divisor]}"


def alias_lines() -> Iterator[str]:
    """Yield one line per name of another system, with the mode that it means."""
    width = max(len(name) for name in ALIASES)
    for name, alias in ALIASES.items():
        empty = "" if alias.count_empty else ", count_empty=False"
        note = f"  ({alias.note})" if alias.note else ""
        yield f"{name:<{width}}  {alias.mode}{empty}{note}"


def _known(name: object) -> Alias:
    """Look up what a name means; a mode means itself."""
    if not isinstance(name, str):
        raise AggregationError(f"got {name!r}, expected the name of a mode; {_known_names()}")
    if name in MODES:
        return Alias(mode=name)
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
                f"mode {mode.name!r} divides by a constant length and got none: give the longest "
                "response that generation allows as --loss-aggregation-divisor (divisor=)"
            )
        return None
    if mode.divisor == "none":
        raise AggregationError(
            f"mode {mode.name!r} takes no divisor, got {divisor!r}: drop "
            "--loss-aggregation-divisor (divisor=), or choose constant or token_sum"
        )
    number = math.nan
    if isinstance(divisor, Real) and not isinstance(divisor, bool):
        with suppress(OverflowError):  # an integer beyond float64 is not finite either
            number = float(divisor)
    if not math.isfinite(number) or number <= 0:
        raise AggregationError(
            f"got divisor {divisor!r}, expected a finite number above 0: "
            "change --loss-aggregation-divisor (divisor=)"
        )
    return number
