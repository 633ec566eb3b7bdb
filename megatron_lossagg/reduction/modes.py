"""The table of modes: the formula of each, the weight per sequence that it gives, its other names.

``table.py`` has the counts, and divides by a mode's denominator. CONTRIBUTING.md lists what one
more mode costs.

Symbols (``docs/which-mode.md``): a sequence s has n_s active tokens, its sample n_b, its prompt
n_p, its sample's group n_c; the step has N active tokens, B samples and P prompts; sample b
has R_b sequences, group c has k_c samples; M microbatches on this rank, DP data-parallel ranks; the
divisor is L or C. Every mode is one weight per sequence::

    loss = sum_s w_s * sum_{t in s} m_t * x_t

``ALIASES`` has the names that other systems and papers give to modes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from typing import Any, Literal

from megatron_lossagg.errors import AggregationError

_DivisorRule = Literal["required", "optional", "none"]
Count = Literal["mask", "weights"]
Ids = Literal["prompt", "group"]

COUNTS: dict[Count, str] = {
    "mask": "the tokens of the loss mask",
    "weights": "the sums of token weights",
}
"""What the denominators count; see :attr:`Aggregation.count`."""

CUSTOM = "custom"
OWN_WEIGHTS = "own_weights"


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One line of the table of modes."""

    name: str
    weight: str
    """w_s as a format string over B, P, L, C and a; ``--help`` and the start of a run print it."""
    divisor: _DivisorRule
    meaning: str
    denominator: Callable[[Any], Any] | None
    """1 / w_s from the step's counts (``table.StepCounts``); None for a user's own."""
    expected: Callable[[Any], float] | None = None
    """The sum of w_s n_s over a step that has an active token, likewise; None: it is summed."""
    has_exponent: bool = False
    """Whether it needs the exponent a."""
    needs: tuple[Ids, ...] = ()
    """The kinds of ids that must be passed; ids of samples never: by default each is a sample."""
    needs_all: bool = False
    """Whether every rank needs the sequences of all ranks."""
    total: str | None = None
    """The one count of the whole step in the denominator, by its letter, such as N: a deferred step
    divides by it at its end. None: there is none."""

    @property
    def formula(self) -> str:
        """w_s in the letters of ``docs/which-mode.md``, such as ``1/(B L)``."""
        return self.weight.format(B="B", P="P", L="L", C="C", a="a")


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode(
            name="token_mean",
            weight="1/N",
            divisor="none",
            meaning="mean over all active tokens of the step (DAPO)",
            total="N",
            denominator=lambda c: c.N,
            expected=lambda c: c.N / c.N,
        ),
        Mode(
            name="sample_mean",
            weight="1/({B} n_b)",
            divisor="none",
            meaning="mean over samples of each sample's token mean (GRPO)",
            total="B",
            denominator=lambda c: c.n_b * c.B,
            expected=lambda c: c.V / c.B,
        ),
        Mode(
            name="prompt_mean",
            weight="1/({P} n_p)",
            divisor="none",
            needs=("prompt",),
            meaning="mean over prompts of each prompt's token mean (ScaleRL)",
            total="P",
            denominator=lambda c: c.n_p * c.P,
            expected=lambda c: c.Q / c.P,
        ),
        Mode(
            name="constant",
            weight="1/({B} {L})",
            divisor="required",
            meaning="token sums over a constant length L, mean over samples (Dr.GRPO)",
            total="B",
            denominator=lambda c: c.B * c.L,
            expected=lambda c: c.N / (c.B * c.L),
        ),
        Mode(
            name="sample_sum",
            weight="1/{B}",
            divisor="none",
            meaning="token sums, mean over samples",
            total="B",
            denominator=lambda c: c.B,
            expected=lambda c: c.N / c.B,
        ),
        Mode(
            name="token_sum",
            weight="1/{C}",
            divisor="optional",
            meaning="sum over all active tokens, over a constant C (1 by default)",
            total="L",
            denominator=lambda c: c.L,
            expected=lambda c: c.N / c.L,
        ),
        Mode(
            name="length_power",
            weight="1/(n_b^{a} Z)",
            divisor="none",
            has_exponent=True,
            needs_all=True,
            meaning="samples by a power of their length, over the sum Z of n_b^(1-a): all weights "
            "w_s n_s sum to 1; a = 0 is token_mean, a = 1 sample_mean without empty samples",
            total="Z",
            denominator=lambda c: c.n_b_to_a * c.Z,
            expected=lambda c: 1.0,
        ),
        Mode(
            name="balanced",
            weight="k_c/({B} n_c)",
            divisor="none",
            needs=("group",),
            needs_all=True,
            meaning="token means of groups c, such as prompt and sign of the advantage, weighted "
            "by their samples k_c",
            total="B",
            denominator=lambda c: c.n_c / c.k_c * c.B,
        ),
        Mode(
            name="row_mean",
            weight="1/({B} R_b n_s)",
            divisor="none",
            needs_all=True,
            meaning="mean over samples of the mean of their R_b sequences' token means (sessions)",
            total="B",
            denominator=lambda c: c.n_s * c.R_b * c.B,
        ),
        Mode(
            name="microbatch_token_mean",
            weight="1/(M DP n_mb)",
            divisor="none",
            meaning=(
                "mean of microbatch token means; depends on the layout, "
                "kept only to reproduce old runs"
            ),
            denominator=lambda c: c.n_mb * c.M * c.DP,
            expected=lambda c: c.microbatch_means / c.DP,
        ),
        Mode(
            name=CUSTOM,
            weight="known to the custom reducer",
            divisor="none",
            meaning="what the factory at --loss-aggregation-reducer-path returns",
            denominator=None,
        ),
        Mode(
            name=OWN_WEIGHTS,
            weight="known to the weights function",
            divisor="none",
            needs_all=True,
            meaning="what the function at --loss-aggregation-weights-path returns",
            denominator=None,
        ),
    )
}


_NO_MODE = {
    "dapo": "names two losses: token_mean, over all tokens of the step, as frameworks do under "
    "this name, and prompt_mean, over the tokens of each prompt's group, as the paper's formula "
    "says",
    "gspo": "is a policy loss and no aggregation. Its paper takes the mean over responses, "
    "sample_mean",
    "cispo": "is a policy loss and no aggregation. Its paper's formula takes the mean over the "
    "tokens of each prompt's group, prompt_mean; TRL and ms-swift over all tokens of the step, "
    "token_mean",
    "gmpo": "is a policy loss and no aggregation: one loss per response. Its paper takes the mean "
    "over responses, sample_mean",
    "sapo": "is a policy loss and no aggregation. Its paper takes the mean over responses of each "
    "one's token mean, sample_mean, and so do TRL and ms-swift",
    "vespo": "is a policy loss and no aggregation. TRL takes the mean over all tokens of the step, "
    "token_mean",
}
"""Names, without punctuation, that have no single mode."""
_OF_PAIRS = ("dpo", "ipo", "orpo", "simpo", "cpo", "rpo", "slic", "rewardmodel")
"""Names, without punctuation, of losses of a pair of sequences, whatever system names them."""
_ABBREVIATION = 6
"""The most letters of a name in which a different letter makes a different paper's name."""


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
_TUNIX = "from main c7d8950f on"
_RLINF_SEQUENCES = f"{_EQUALLY_MANY} and use_valid_token_scale is off"

# Sources: the systems' own code, listed with commits in docs/reference/names.md.
ALIASES: dict[str, Alias] = {
    # Papers: docs/decisions/0065-names-of-papers.md.
    "dr_grpo": Alias("constant", "L = the longest response that generation allows"),
    "drgrpo": Alias("constant", "L = the longest response that generation allows"),
    "grpo": Alias("sample_mean", "if all groups have the same number of samples"),
    "scalerl": Alias("prompt_mean"),
    # Systems.
    "agent-lightning:per_rollout_mean": Alias(
        "sample_mean", "if each rollout is one row; else pass rollout ids as sample"
    ),
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
    "rlinf:seq-mean-token-mean": Alias("sample_mean", _RLINF_SEQUENCES),
    "rlinf:seq-mean-token-sum": Alias("sample_sum", _RLINF_SEQUENCES),
    "rlinf:token-mean": Alias("token_mean", "if use_valid_token_scale is on"),
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
    "torchrl:prompt_mean": Alias("sample_mean", f"{_EQUALLY_MANY}; a mean over samples"),
    "torchrl:token_mean": Alias("token_mean", "if microbatches have equally many tokens"),
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
    "tunix:seq-mean-token-sum": Alias(
        "sample_sum", f"{_TUNIX}; {_EMPTY_LEAVES}", count_empty=False
    ),
    "tunix:sequence-mean-token-mean": Alias(
        "sample_mean", f"{_TUNIX}; {_EMPTY_LEAVES}", count_empty=False
    ),
    "tunix:sequence-mean-token-scale": Alias(
        "constant", f"L = norm; {_TUNIX}; {_EMPTY_LEAVES}", count_empty=False
    ),
    "tunix:sequence-mean-token-sum-norm": Alias(
        "sample_sum", f"if no norm is passed; {_TUNIX}; {_EMPTY_LEAVES}", count_empty=False
    ),
    "tunix:token-mean": Alias("token_mean", _TUNIX),
    "unsloth:bnpo": Alias("microbatch_token_mean"),
    "unsloth:cispo": Alias("token_mean", _TRL_TOKENS),
    "unsloth:dapo": Alias("token_mean", _TRL_TOKENS),
    "unsloth:dr_grpo": Alias("constant", f"L = max_completion_length; {_EQUALLY_MANY}"),
    "unsloth:grpo": Alias("sample_mean", _EQUALLY_MANY),
    "unsloth:luspo": Alias(
        "sample_sum", f"{_EQUALLY_MANY}; with beta or token-level ratios from 2026.10.9 on"
    ),
    "unsloth:sapo": Alias("sample_mean", _EQUALLY_MANY),
    "unsloth:vespo": Alias("token_mean", _TRL_TOKENS),
    "verl:seq-mean-token-mean": Alias("sample_mean"),
    "verl:seq-mean-token-sum": Alias("sample_sum"),
    "verl:seq-mean-token-sum-norm": Alias("constant", "L = loss_scale_factor"),
    "verl:token-mean": Alias("token_mean"),
    "verl:token-sum": Alias("token_sum"),
}


def alias_of(name: object) -> Alias:
    """Look up what a name means; a mode means itself."""
    if not isinstance(name, str):
        raise AggregationError(f"got {name!r}, expected the name of a mode. {_known_names()}")
    if name in MODES:
        return Alias(name)
    if name in ALIASES:
        return ALIASES[name]
    raise unknown_name("name" if ":" in name else "mode", name)


def unknown_name(what: str, name: str) -> AggregationError:
    """Make the error of a name that means no mode, with the name that it may be meant to be.

    What is suggested is a misspelling of the same system's name, and never a different loss: equal
    names have other formulas elsewhere, and near ones are other papers'.
    """
    if _letters(name) in _NO_MODE:
        return AggregationError(f"{name!r} {_NO_MODE[_letters(name)]}. Name the mode")
    system, _, of_system = name.lower().rpartition(":")
    if _letters(of_system) in _OF_PAIRS:
        return AggregationError(
            f"{name!r} is a loss of pairs and no aggregation: examples/pairs.py shows how a "
            "loop of your own trains one"
        )
    if system in MODES or system in ALIASES:
        return AggregationError(
            f"got {name!r}, expected {system!r} alone: pass its number as divisor= or exponent= "
            "(--loss-aggregation-divisor or -exponent; of explain --divisor or --exponent)"
        )
    if system and system not in _systems():
        return AggregationError(
            f"unknown system in {name!r}, expected one of {', '.join(_systems())}: look up its "
            f"formula in its code, and name the mode. {_known_names()}"
        )
    own = [other for other in [*MODES, *ALIASES] if other.rpartition(":")[0] == system]
    near = [other for other in own if _letters(other) == _letters(name)]
    near = near or [other for other in own if _is_misspelt(name, other)]
    if near:
        answer = f": did you mean {' or '.join(map(repr, near))}?"
    elif in_full := _in_full(system, of_system):
        answer = f", in full {in_full}."
    elif system:
        answer = ": look up its formula in its code, and name the mode."
    else:
        answer = "."
    return AggregationError(f"unknown {what} {name!r}{answer} {_known_names()}")


def _systems() -> list[str]:
    return sorted({name.partition(":")[0] for name in ALIASES if ":" in name})


def _in_full(system: str, setting: str) -> str:
    """List the names of a system, or of each if it is empty, that a setting has, with their modes:
    itself, and with each of its values.
    """
    found = []
    for name, alias in ALIASES.items():
        of, colon, other = name.partition(":")
        names = map(_letters, (other, other.partition("=")[0]))
        if colon and system in ("", of) and _letters(setting) in names:
            empty = "" if alias.count_empty else ", count_empty=False"
            found.append(f"{name!r} ({alias.mode}{empty})")
    return " or ".join(found)


def _is_misspelt(name: str, real: str) -> bool:
    """Tell whether each word of a name is a word of the real one but for one letter, or two that
    are swapped; in an abbreviation two that are swapped: ``dpo`` and ``orpo`` are not ``grpo``.
    """
    words, right = (re.findall("[a-z0-9]+", n.lower().rpartition(":")[2]) for n in (name, real))
    if len(words) != len(right):
        words, right = ["".join(words)], ["".join(right)]
    is_abbreviation = len("".join(right)) <= _ABBREVIATION
    return all(
        _is_swapped(*rest) or (len(max(rest, key=len)) < 2 and not is_abbreviation)
        for rest in map(_apart, words, right)
        if any(rest)
    )


def _apart(one: str, other: str) -> tuple[str, str]:
    """Return what is left of two words without the beginning and the end that they share."""
    begun = sum(takewhile(bool, map(eq, one, other)))
    one, other = one[begun:], other[begun:]
    ended = sum(takewhile(bool, map(eq, one[::-1], other[::-1])))
    return one[: len(one) - ended], other[: len(other) - ended]


def _is_swapped(one: str, other: str) -> bool:
    return len(one) == 2 and one == other[::-1]


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def _known_names() -> str:
    modes = [mode for mode in MODES if mode not in (CUSTOM, OWN_WEIGHTS)]  # given by a path
    return f"Modes are {', '.join(modes)}; other systems' names are written system:name"
