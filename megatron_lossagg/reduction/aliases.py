"""The names that other systems and papers give to modes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import takewhile
from operator import eq

from megatron_lossagg.errors import AggregationError
from megatron_lossagg.reduction.modes import CUSTOM, MODES, OWN_WEIGHTS

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
