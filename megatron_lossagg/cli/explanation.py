"""Compute what ``lossagg explain`` prints: weights, losses under every mode, and K.

The plan is of a step that is described on the command line, under any mode.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_lossagg.contract.scaling import MOST_TOKENS_PER_TOKEN, Factor, LossScaling, Scaling
from megatron_lossagg.errors import AggregationError, LossAggregationError
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.modes import ALIASES, CUSTOM, MODES, OWN_WEIGHTS, Mode
from megatron_lossagg.reduction.sequences import Sequences
from megatron_lossagg.reduction.table import count_step
from megatron_lossagg.reduction.weighted import StepWeights, check_divisor
from megatron_lossagg.verify.text import number_of

EXPONENT = 0.5
"""Of ``length_power`` if none is given: half way from ``token_mean`` to ``sample_mean``."""
_ONLY_ITSELF = (CUSTOM, OWN_WEIGHTS, "balanced", "row_mean")
"""Modes with which no other is compared."""
_MOST_SIZE = 2**31 - 1
"""The product of two is an int64."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """The parallelism of a step and how Megatron scales its loss: what K depends on."""

    loss_scaling: LossScaling = "average"
    microbatches: int = 2
    """M of every data-parallel rank."""
    dp: int = 2
    cp: int = 1

    def __post_init__(self) -> None:
        for flag in ("microbatches", "dp", "cp"):
            size = getattr(self, flag)
            if not 1 <= size <= _MOST_SIZE:
                raise LossAggregationError(
                    f"--{flag}: got {size}, expected an integer from 1 to {_MOST_SIZE}"
                )


def plan_of(step: Mapping[str, Any], aggregation: Aggregation, split: Split) -> StepWeights:
    """Plan a step, given by column, with its sequences assigned alternately to the microbatches.

    One process plans for all: M DP microbatches on one rank weigh as M on each of DP ranks.
    """
    slots = split.microbatches * split.dp
    sequences = Sequences(
        active_tokens=np.asarray(step["active_tokens"]),
        sample=np.asarray(step["sample"]) if "sample" in step else None,
        prompt=np.asarray(step["prompt"]) if "prompt" in step else None,
        group=np.asarray(step["group"]) if "group" in step else None,
        left_out=np.asarray(step["left_out"]) if "left_out" in step else None,
        microbatch=np.arange(len(step["active_tokens"])) % slots,
        num_microbatches=slots,
    ).checked()
    table = count_step(aggregation, sequences)
    plan = StepWeights(aggregation=aggregation, sequences=sequences, table=table)
    check_divisor(plan)
    return plan


def modes_of(plan: StepWeights) -> Iterator[Mode]:
    """Yield the plan's mode, and those that can be compared with it by the ids of the step."""
    for mode in MODES.values():
        lacks_prompts = "prompt" in mode.needs and plan.sequences.prompt is None
        if mode.name == plan.aggregation.mode or not (mode.name in _ONLY_ITSELF or lacks_prompts):
            yield mode


def aggregation_of(
    name: str,
    divisor: float | None,
    exponent: float | None,
    count_empty: bool | None = None,
    weights: str | None = None,
) -> Aggregation:
    """Read a name; a number that its mode does not take is for other modes."""
    mode = MODES.get(ALIASES[name].mode if name in ALIASES else name)
    if mode is not None:
        divisor = None if mode.divisor == "none" else divisor
        exponent = exponent if mode.has_exponent else None
    elif weights is not None:
        divisor = exponent = None
    try:
        return Aggregation(
            name, divisor=divisor, exponent=exponent, count_empty=count_empty, weights=weights
        )
    except AggregationError as error:
        raise AggregationError(with_own_flags(str(error))) from None


def with_own_flags(message: str) -> str:
    """Name the flags in a message as these commands call them, such as ``--divisor``."""
    return re.sub(r"--loss-aggregation-(divisor|exponent|count-empty) \(\w+=\)", r"--\1", message)


DEFAULT_LENGTHS = "2000,500,8000,1500/3000,1000,0,4000"
"""Uneven lengths as reasoning models write them, a fully masked sample, two prompts."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A mode on the same sequences; numbers are None if it lacks a divisor."""

    mode: str
    w_s: str
    loss: float | None = None
    """The loss if every token's is 1."""
    ratio: float | None = None
    """To the loss of the explained mode."""
    side: float | None = None
    """How many times as much a side loss weighs against the main loss as under a mean: 1 / W."""
    gradient: str = "no divisor"
    """What becomes of the explained mode's: ``this mode``; ``scaled``, by one number;
    ``reweighted``, by no single number."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Everything that ``lossagg explain`` prints."""

    name: str
    """The name that was given: a mode, or another system's name."""
    mode: str
    formula: str
    flags: str
    """The flags of a training run."""
    divisor: float | None
    """The one that was given, even if this mode takes none."""
    exponent: float | None
    """Likewise."""
    split: Split
    counts: dict[str, float | None]
    """N, B, V, P and Q, and Z of ``length_power``."""
    sequences: list[dict[str, float]]
    """Of each sequence, which is one sample: its prompt, where it is assigned, its counts and
    weight, and its share of the step's w_s n_s."""
    comparisons: tuple[Comparison, ...]
    """Every mode on the same sequences, this one too."""
    chain: tuple[Factor, ...]
    """What multiplies a partial loss on its way to the gradient."""
    k: int
    num_tokens: tuple[int, ...]
    """Of loss_func on CP rank 0, for each microbatch that has sequences."""


def read_lengths(text: str) -> dict[str, list[int]]:
    """Read a step, by column, from its prompts' samples, such as ``3,5-,9/2,0``.

    Samples of one prompt, with or without a minus, are one group. One with an x, such as ``7x`` or
    ``7-x``, leaves the counts: the column ``left_out`` says so, if there is one.
    """
    step: dict[str, list[int]] = {"active_tokens": [], "prompt": [], "group": [], "left_out": []}
    for prompt, samples in enumerate(text.split("/")):
        for written in map(str.strip, samples.split(",")):
            signed = written.removesuffix("x")
            n = signed.removesuffix("-")
            if not n.isdecimal() or len(n) > 16:
                raise LossAggregationError(
                    f"--lengths {text!r}: got {written!r}, expected a sample's active tokens, as "
                    f"in {DEFAULT_LENGTHS}"
                )
            step["active_tokens"].append(int(n))
            step["prompt"].append(prompt)
            step["group"].append(2 * prompt + (n != signed))
            step["left_out"].append(int(signed != written))
    kind = "fully masked or left out" if any(step["left_out"]) else "fully masked"
    pairs = [*zip(step["active_tokens"], step["left_out"], strict=True)]
    if kind == "fully masked":
        del step["left_out"]
    if not any(tokens for tokens, is_left_out in pairs if not is_left_out):
        masked = number_of(len(step["prompt"]), f"{kind} sample")
        raise LossAggregationError(
            f"--lengths: got {masked} and no active token, expected one or more"
        )
    return step


def explain(
    name: str,
    step: dict[str, list[int]],
    split: Split,
    *,
    divisor: float | None = None,
    exponent: float | None = None,
    count_empty: bool | None = None,
    weights: str | None = None,
) -> Explanation:
    """Compute everything that is printed.

    ``step``: of :func:`read_lengths`. ``divisor`` and ``exponent`` are for the modes that take one:
    this one, or those that it is compared with. Without an exponent ``length_power`` is compared at
    ``EXPONENT``. ``weights``: the path of a weights function, with no name. Raises
    :class:`LossAggregationError` for an unknown mode, and for sequences or sizes that do not
    describe a step.
    """
    if not (name or weights):
        raise LossAggregationError("got no MODE: give one of those that --list prints")
    if name == CUSTOM:
        raise LossAggregationError(
            "custom has no formula to explain: its loss is what the factory of "
            "--loss-aggregation-reducer-path returns"
        )
    aggregation = aggregation_of(name, divisor, exponent, count_empty, weights)
    num_tokens = sum(step["active_tokens"])
    if split.loss_scaling == "per_token" and num_tokens > MOST_TOKENS_PER_TOKEN:
        raise LossAggregationError(
            f"--lengths: got {num_tokens} active tokens in a step, expected at most "
            f"{MOST_TOKENS_PER_TOKEN}, because Megatron-Core sums them in int32 with the loss "
            "scaling per_token. Give fewer, or --loss-scaling average"
        )
    plan = plan_of(step, aggregation, split)
    scaling = Scaling(
        loss_scaling=split.loss_scaling,
        num_microbatches=split.microbatches,
        dp_cp_size=split.dp * split.cp,
        active_tokens=plan.totals.active_tokens,
    )
    # Assigned alternately: the first sequence of each microbatch comes before the second of any.
    of_microbatch = plan.table.counts.n_mb[: split.microbatches * split.dp].astype(int).tolist()
    compared_at = EXPONENT if exponent is None else exponent
    return Explanation(
        name=name,
        mode=aggregation.mode,
        formula=aggregation.formula,
        flags=_flags(name, aggregation, count_empty),
        divisor=divisor,
        exponent=exponent,
        split=split,
        counts=_counts(plan),
        sequences=_sequences(plan, split),
        comparisons=tuple(_comparisons(plan, divisor, compared_at)),
        chain=tuple(scaling.factors()),
        k=scaling.k,
        num_tokens=tuple(scaling.num_tokens(tokens, cp_rank=0) for tokens in of_microbatch),
    )


def _flags(name: str, aggregation: Aggregation, count_empty: bool | None) -> str:
    """Write the flags of a training run; ``count_empty`` only if it was given."""
    flags = [f"--loss-aggregation {name}"]
    if aggregation.weights_function is not None:
        flags = [f"--loss-aggregation-weights-path {aggregation.weights_function.path}"]
    for option in ("divisor", "exponent"):
        if (value := getattr(aggregation, option)) is not None:
            flags.append(f"--loss-aggregation-{option} {value!r}".removesuffix(".0"))
    if count_empty is not None:
        flags.append(f"--{'' if count_empty else 'no-'}loss-aggregation-count-empty")
    return " ".join(flags)


def _counts(plan: StepWeights) -> dict[str, float | None]:
    counted = plan.counted_table.counts  # B and P have the empty ones, whatever is counted
    counts: dict[str, float | None] = {letter: counted.known(letter) for letter in "NBVPQ"}
    if MODES[plan.aggregation.mode].has_exponent:
        counts["Z"] = plan.counts.Z
    return counts


def _sequences(plan: StepWeights, split: Split) -> list[dict[str, float]]:
    counts, weights = plan.counts, plan.weight_S
    slot = np.asarray(plan.sequences.microbatch)

    def of_all(counted: Any) -> Any:
        """Give 0 to the sequences that are left out."""
        if plan.is_left_out_S is None:
            return counted
        column = np.zeros(len(weights), dtype=np.asarray(counted).dtype)
        column[~plan.is_left_out_S] = counted
        return column

    columns = {
        "prompt": plan.sequences.prompt,
        "rank": slot % split.dp,
        "microbatch": slot // split.dp,
        "n_s": plan.active_tokens,
        "n_b": of_all(counts.n_b.astype(np.int64)),
        "n_p": of_all(counts.n_p.astype(np.int64)),
        "n_mb": of_all(counts.n_mb.astype(np.int64)),
        "n_c": of_all(counts.n_c),
        "k_c": of_all(counts.k_c),
        "R_b": of_all(counts.R_b),
        "w_s": weights,
        "share": weights * plan.active_tokens / _loss(plan),
    }
    rows = zip(*(np.asarray(column).tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _comparisons(plan: StepWeights, divisor: float | None, exponent: float) -> Iterator[Comparison]:
    """Compare every mode on the plan's sequences, with the plan's own ``count_empty``."""
    own, own_loss = plan.aggregation, _loss(plan)
    for mode in modes_of(plan):
        if mode.divisor == "required" and divisor is None:
            yield Comparison(mode=mode.name, w_s=mode.formula)
            continue
        other = plan
        if mode.name != own.mode:
            other = plan.under(aggregation_of(mode.name, divisor, exponent, own.count_empty))
        loss = _loss(other)
        ratio = loss / own_loss
        if mode.name == own.mode:
            gradient = "this mode"
        else:
            scales = np.allclose(other.weight_S, plan.weight_S * ratio, rtol=1e-9, atol=0)
            gradient = "scaled" if scales else "reweighted"
        yield Comparison(
            mode=mode.name,
            w_s=other.aggregation.formula,
            loss=loss,
            ratio=ratio,
            side=1 / loss,
            gradient=gradient,
        )


def _loss(plan: StepWeights) -> float:
    """Compute a plan's loss if the loss of every token is 1."""
    loss = float((plan.weight_S * plan.active_tokens).sum())
    if not 0 < loss < math.inf:
        raise LossAggregationError(
            f"{plan.aggregation}: got a loss of {loss}, expected a positive float64: give a "
            "--divisor of the size of a response"
        )
    return loss
