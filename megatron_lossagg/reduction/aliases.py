"""The names that other systems and papers give to modes."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from megatron_lossagg.errors import AggregationError
from megatron_lossagg.reduction.modes import CUSTOM, MODES, OWN_WEIGHTS

_COMMON = {
    "seqmeantokenmean": "sample_mean",
    "seqmeantokensum": "sample_sum",
    "seqmeantokensumnorm": "constant",
    "sequencemean": "sample_mean",
}
"""Common names of modes, without punctuation: suggested, never accepted."""
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
    """Make the error of a name that means no mode, with the names that are near.

    No loss of one system is suggested for a name of another: equal names have other formulas.
    """
    if _letters(name) in _NO_MODE:
        return AggregationError(f"{name!r} {_NO_MODE[_letters(name)]}. Name the mode")
    system, colon, _ = name.lower().partition(":")
    if colon and system not in _systems():
        return AggregationError(
            f"unknown system in {name!r}, expected one of {', '.join(_systems())}: look up its "
            f"formula in its code, and name the mode. {_known_names()}"
        )
    return AggregationError(f"unknown {what} {name!r}{_nearest(name)} {_known_names()}")


def _systems() -> list[str]:
    return sorted({name.partition(":")[0] for name in ALIASES if ":" in name})


def _nearest(name: str) -> str:
    """Suggest names: other spellings, the systems that have it, close spellings of its own kind."""
    system, colon, _ = name.lower().partition(":")
    letters = _letters(name)
    names = [other for other in [*MODES, *ALIASES] if _letters(other) == letters]
    if not names and not colon:
        names = [other for other in ALIASES if _letters(other.partition(":")[2]) == letters]
    if not names and letters in _COMMON:
        names = [_COMMON[letters]]
    if not names and colon:
        names = [other for other in ALIASES if other.startswith(f"{system}:")]
    if not names:
        papers = [other for other in ALIASES if ":" not in other]
        names = difflib.get_close_matches(name.lower(), [*MODES, *papers], n=3, cutoff=0.5)
    return f": did you mean {' or '.join(map(repr, names))}?" if names else "."


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def _known_names() -> str:
    modes = [mode for mode in MODES if mode not in (CUSTOM, OWN_WEIGHTS)]  # given by a path
    return f"Modes are {', '.join(modes)}; other systems' names are written system:name"
