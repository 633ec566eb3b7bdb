"""Say what a mode means on rows you can check by hand, before you train with it.

Prints the formula; the weight of every row; the factors between loss_func and the gradient, in
Megatron-Core's regime and your layout; and the losses to expect on the dashboard beside those of
the other modes. Nothing is trained, and Megatron-Core is not needed. Rows are written as active
tokens a sample: "," separates samples, "/" separates prompts, 0 is a fully masked sample. They
are dealt in turn to the data-parallel ranks' microbatches. Exit status: 0, or 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor

from megatron_lossagg.aggregation import ALIASES, CUSTOM, MODES, Aggregation
from megatron_lossagg.counts import Sequences, StepTotals
from megatron_lossagg.errors import LossAggregationError
from megatron_lossagg.plan import StepPlan, plan_step
from megatron_lossagg.verify.job import REGIMES

EXAMPLE = "12,3,40/5,0,20"
"""Uneven lengths, a fully masked sample, two prompts."""

_WIDTH = 100
_MOST_PER_TOKEN = 2**31 - 1  # Megatron-Core sums num_tokens in int32


class ExplainError(LossAggregationError, ValueError):
    """A mode, rows or sizes that cannot be explained."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """How Megatron splits the step, and how it scales: what K depends on."""

    regime: str = "average"
    microbatches: int = 2
    """M of every data-parallel rank."""
    dp: int = 2
    cp: int = 2

    def __post_init__(self) -> None:
        for flag in ("microbatches", "dp", "cp"):
            size = getattr(self, flag)
            if size < 1:
                raise ExplainError(f"--{flag} is a whole number from 1, got {size}: change it")
        if self.regime not in REGIMES:
            raise ExplainError(f"--regime is {' or '.join(REGIMES)}, got {self.regime!r}")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the step, which is one sample here, and what the mode makes of it."""

    prompt: int
    rank: int
    """The data-parallel rank that it is dealt to."""
    microbatch: int
    """Index on that rank."""
    n_s: int
    n_b: int
    n_p: int
    n_mb: int
    w_s: float
    part: float
    """w_s n_s over the sum of it: how much of the step's weight the row has."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """One place between share and gradient, and what it multiplies by."""

    where: str
    does: str
    factor: Fraction
    so_far: Fraction


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A mode on the same rows; numbers are None where it lacks a divisor."""

    mode: str
    w_s: str
    ones: float | None = None
    """The loss where every token's is 1."""
    ones_ratio: float | None = None
    rising: float | None = None
    """The loss where token t of a row, from 1, has t over the longest row's tokens."""
    rising_ratio: float | None = None
    scales_only: bool | None = None
    """Whether on these rows its gradient is the explained mode's times a number."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Everything that ``lossagg explain`` says."""

    name: str
    """As asked for: a mode, or another system's name."""
    note: str
    """What an alias has to add."""
    mode: str
    formula: str
    meaning: str
    flags: str
    """What trains it."""
    divisor: float | None
    """The one given, whether or not this mode takes it."""
    split: Split
    totals: StepTotals
    rows: tuple[Row, ...]
    total_weight: float
    """The sum of w_s n_s."""
    chain: tuple[Link, ...]
    factor: int
    """K."""
    num_tokens: tuple[int, ...]
    """What loss_func returns: by microbatch with rows (CP rank 0) per-token, 1 in average."""
    undone_not: str
    """The factor left by a loss_func that returns the bare share, in symbols."""
    beside: tuple[Beside, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``lossagg explain``; a training run's spellings work as well."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("mode", metavar="MODE", help="a mode, or another system's system:name")
    parser.add_argument(
        "--divisor",
        "--loss-aggregation-divisor",
        type=float,
        metavar="L",
        dest="divisor",
        help="L of constant (required), C of token_sum; for the modes beside this one too",
    )
    parser.add_argument(
        "--count-empty",
        "--loss-aggregation-count-empty",
        action=argparse.BooleanOptionalAction,
        dest="count_empty",
        help="whether a fully masked sample or prompt keeps its place in B or P "
        "(default: it does; an alias brings its own)",
    )
    parser.add_argument(
        "--lengths",
        default=EXAMPLE,
        metavar="N,N/N",
        help=f"active tokens of each sample (default {EXAMPLE})",
    )
    sizes = Split()
    for name, text in (
        ("dp", "data-parallel size, without context parallelism"),
        ("cp", "context-parallel size"),
        ("microbatches", "M, microbatches of the step on each data-parallel rank"),
    ):
        default = getattr(sizes, name)
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default {default})"
        )
    parser.add_argument(
        "--regime",
        choices=REGIMES,
        default=sizes.regime,
        help=f"per-token is Megatron's --calculate-per-token-loss (default {sizes.regime})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same as JSON")


def run(args: argparse.Namespace) -> int:
    """Explain the mode named; returns 0. Raises :class:`LossAggregationError` for wrong usage."""
    explanation = explain(
        args.mode,
        prompts=read_lengths(args.lengths),
        split=Split(regime=args.regime, microbatches=args.microbatches, dp=args.dp, cp=args.cp),
        divisor=args.divisor,
        count_empty=args.count_empty,
    )
    if args.json is not None:
        _write(args.json, explanation)
    print(*lines(explanation), sep="\n")
    return 0


def read_lengths(text: str) -> list[list[int]]:
    """Active tokens by prompt and sample, of text such as ``3,5,9/2,0``."""
    prompts = [[n.strip() for n in prompt.split(",")] for prompt in text.split("/")]
    for n in (n for prompt in prompts for n in prompt):
        if not n.isdecimal() or len(n) > 16:
            raise ExplainError(
                f"--lengths {text!r} has {n!r} where a sample's active tokens should be: write "
                f"whole numbers from 0, ',' between samples, '/' between prompts, as {EXAMPLE}"
            )
    return [[int(n) for n in prompt] for prompt in prompts]


def explain(
    name: str,
    *,
    prompts: Sequence[Sequence[int]],
    split: Split,
    divisor: float | None = None,
    count_empty: bool | None = None,
) -> Explanation:
    """Work out everything that is printed. ``prompts``: active tokens by prompt and sample.

    ``divisor`` is for the modes that take one, be it this one or one beside it. Raises
    :class:`LossAggregationError` for what names no mode, no step or no split.
    """
    alias = ALIASES.get(name)
    mode = alias.mode if alias else name
    if mode == CUSTOM:
        raise ExplainError(
            "custom has no formula to explain: its loss is what the factory of "
            "--loss-aggregation-reducer-path returns. Name one of "
            f"{', '.join(other for other in MODES if other != CUSTOM)}"
        )
    taken = None if mode in MODES and MODES[mode].divisor == "none" else divisor
    aggregation = Aggregation.named(name, divisor=taken, count_empty=count_empty)
    plan = _planned(aggregation, prompts, split)
    chain, factor = _chain(plan, split)
    beside = tuple(_beside(plan, divisor))
    total_weight = next(b.ones for b in beside if b.mode == mode)
    assert total_weight is not None
    rows = tuple(_rows(plan, prompts, split, total_weight))
    counted = Counter[tuple[int, int]]()
    for row in rows:
        counted[row.microbatch, row.rank] += row.n_s
    return Explanation(
        name=name,
        note=alias.note if alias else "",
        mode=mode,
        formula=aggregation.formula,
        meaning=MODES[mode].meaning,
        flags=_flags(name, taken, count_empty),
        divisor=divisor,
        split=split,
        totals=plan.totals,
        rows=rows,
        total_weight=total_weight,
        chain=chain,
        factor=factor,
        num_tokens=(1,) if split.regime == "average" else tuple(counted.values()),
        undone_not="1/(M DP CP)" if split.regime == "average" else "1/N",
        beside=beside,
    )


def _planned(aggregation: Aggregation, prompts: Sequence[Sequence[int]], split: Split) -> StepPlan:
    tokens = [n for prompt in prompts for n in prompt]
    if not any(tokens):
        raise ExplainError(
            f"--lengths has {len(tokens)} fully masked samples and no active token, so every "
            "weight is 0: give at least one sample above 0"
        )
    if split.regime == "per-token" and sum(tokens) > _MOST_PER_TOKEN:
        raise ExplainError(
            f"--lengths has {sum(tokens)} active tokens, Megatron-Core counts them in int32 in the "
            "per-token regime: give fewer, or --regime average"
        )
    # One process plans for all: M DP microbatches on one rank weigh as M on each of DP ranks.
    slots = split.microbatches * split.dp
    return plan_step(
        aggregation,
        Sequences(
            active_tokens=tokens,
            prompt=[p for p, prompt in enumerate(prompts) for _ in prompt],
            microbatch=[s % slots for s in range(len(tokens))],
            num_microbatches=slots,
        ),
    )


def _rows(
    plan: StepPlan, prompts: Sequence[Sequence[int]], split: Split, total_weight: float
) -> Iterator[Row]:
    ids = [p for p, prompt in enumerate(prompts) for _ in prompt]
    counts = (plan.sample_tokens, plan.prompt_tokens, plan.microbatch_tokens, plan.microbatch)
    n_b_S, n_p_S, n_mb_S, slot_S = (c.tolist() for c in counts if c is not None)
    n_S, w_S = plan.active_tokens.tolist(), plan.weights.tolist()
    for p, n_s, n_b, n_p, n_mb, slot, w_s in zip(
        ids, n_S, n_b_S, n_p_S, n_mb_S, slot_S, w_S, strict=True
    ):
        yield Row(
            prompt=p,
            rank=slot % split.dp,
            microbatch=slot // split.dp,
            n_s=n_s,
            n_b=n_b,
            n_p=n_p,
            n_mb=n_mb,
            w_s=w_s,
            part=w_s * n_s / total_weight,
        )


def _chain(plan: StepPlan, split: Split) -> tuple[tuple[Link, ...], int]:
    """The table of docs/megatron-contract.md, "Two regimes", with numbers; and K."""
    m, ranks, n = split.microbatches, split.dp * split.cp, plan.totals.active_tokens or 0
    if split.regime == "average":
        k = m * ranks
        places = [
            ("loss_func", "returns share * K, K = M DP CP", Fraction(k)),
            ("schedule", "/ num_tokens, which is 1; / M", Fraction(1, m)),
            ("DDP", "mean over the DP CP ranks: their sum / (DP CP)", Fraction(1, ranks)),
            ("finalize_model_grads", "nothing", Fraction(1)),
        ]
    else:
        k = n
        places = [
            ("loss_func", "returns share * K, K = N", Fraction(k)),
            ("schedule", "nothing", Fraction(1)),
            ("DDP", "sum over the DP CP ranks", Fraction(1)),
            ("finalize_model_grads", "/ sum of the step's num_tokens, which is N", Fraction(1, n)),
        ]
    links, so_far = [], Fraction(1)
    for where, does, factor in places:
        so_far *= factor
        links.append(Link(where=where, does=does, factor=factor, so_far=so_far))
    return tuple(links), k


def _beside(plan: StepPlan, divisor: float | None) -> Iterator[Beside]:
    """Every mode on the plan's rows, with the plan's own ``count_empty``."""
    n_S = torch.from_numpy(plan.active_tokens).double()
    rising_S = n_S * (n_S + 1) / 2 / n_S.max()  # sum over t = 1..n_s of t / max n_s
    ones, rising = _loss(plan, n_S), _loss(plan, rising_S)
    for mode in (mode for mode in MODES.values() if mode.name != CUSTOM):
        if mode.divisor == "required" and divisor is None:
            yield Beside(mode=mode.name, w_s=mode.weight.format(B="B", L="L"))
            continue
        other = plan.under(
            Aggregation.named(
                mode.name,
                divisor=None if mode.divisor == "none" else divisor,
                count_empty=plan.aggregation.count_empty,
            )
        )
        other_ones, other_rising = _loss(other, n_S), _loss(other, rising_S)
        scaled_S = plan.weights * (other_ones / ones)
        yield Beside(
            mode=mode.name,
            w_s=other.aggregation.formula,
            ones=other_ones,
            ones_ratio=other_ones / ones,
            rising=other_rising,
            rising_ratio=other_rising / rising,
            scales_only=torch.allclose(other.weights, scaled_S, rtol=1e-9, atol=0),
        )


def _loss(plan: StepPlan, sum_S: Tensor) -> float:
    """The step's loss, of the sum of each row's per-token losses."""
    loss = float((plan.weights * sum_S).sum())
    if not 0 < loss < math.inf:
        raise ExplainError(
            f"{plan.aggregation} gives a loss of {loss} where every token's is positive: float64 "
            "does not hold it, give a --divisor of the size of a response"
        )
    return loss


def _flags(name: str, divisor: float | None, count_empty: bool | None) -> str:
    flags = [f"--loss-aggregation {name}"]
    if divisor is not None:
        flags.append(f"--loss-aggregation-divisor {_exact(divisor)}")
    if count_empty is not None:
        flags.append(f"--{'' if count_empty else 'no-'}loss-aggregation-count-empty")
    return " ".join(flags)


def _write(path: Path, explanation: Explanation) -> None:
    text = json.dumps(asdict(explanation), indent=1, allow_nan=False, default=str)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ExplainError(
            f"--json {path} cannot be written ({error.strerror}): name a file in a folder that "
            "exists"
        ) from None


def lines(explanation: Explanation) -> Iterator[str]:
    """An explanation as text of at most 100 columns, but for long names and flags."""
    yield from _about_the_mode(explanation)
    yield from ("", "WEIGHTS")
    yield from _about_the_weights(explanation)
    yield from ("", "FROM LOSS TO GRADIENT")
    yield from _about_the_factors(explanation)
    yield from ("", "ON THE DASHBOARD")
    yield from _about_the_dashboard(explanation)


def _about_the_mode(e: Explanation) -> Iterator[str]:
    yield f"{e.mode}: w_s = {e.formula}"
    article = "The " if e.meaning.startswith("mean") else ""
    meaning = article + e.meaning
    yield from _text(f"{meaning[0].upper()}{meaning[1:]}.")
    if e.name != e.mode:
        yield from _text(f"{e.name} stands for it{f': {e.note}' if e.note else ''}.")
    if e.divisor is not None and MODES[e.mode].divisor == "none":
        yield from _text(
            f"It takes no divisor: {_exact(e.divisor)} is for the modes beside it, below."
        )
    yield from _text(f"Train it with  {e.flags}")


def _about_the_weights(e: Explanation) -> Iterator[str]:
    t = e.totals
    yield from _text("loss = sum over rows s of w_s * (sum of the row's per-token losses)")
    yield from _text(
        f"N = {t.active_tokens} active tokens, B = {t.samples} samples (V = {t.active_samples} "
        f"with an active token), P = {t.prompts} prompts (Q = {t.active_prompts})"
    )
    yield ""
    by_microbatch = e.mode == "microbatch_token_mean"
    head = ["row", "prompt", "n_s", "n_b", "n_p", "w_s", "w_s n_s", "of the whole"]
    if by_microbatch:
        head[2:2] = ["DP rank", "microbatch"]
        head[7:7] = ["n_mb"]
    table = [head]
    for s, row in enumerate(e.rows):
        cells = [s, row.prompt, row.n_s, row.n_b, row.n_p]
        if by_microbatch:
            cells[2:2] = [row.rank, row.microbatch]
            cells.append(row.n_mb)
        weight = [_number(row.w_s), _number(row.w_s * row.n_s), f"{row.part:.1%}"]
        table.append([*map(str, cells), *weight])
    table.append(["sum", *[""] * (len(head) - 3), _number(e.total_weight), "100.0%"])
    yield from _table(table, left=0)
    yield ""
    yield from _text(
        "n_s, n_b, n_p: active tokens of the row, its sample, its prompt (here a row is a sample)"
        f"{'; n_mb: of its microbatch' if by_microbatch else ''}. A run reports the sum as "
        "lossagg/weight_expected."
    )


def _about_the_factors(e: Explanation) -> Iterator[str]:
    s = e.split
    yield from _text(
        f"regime {s.regime}, M = {s.microbatches} microbatches a rank, DP = {s.dp}, CP = {s.cp}"
    )
    yield ""
    table = [["where", "what happens to a share", "factor", "so far"]]
    table += [[x.where, x.does, str(x.factor), str(x.so_far)] for x in e.chain]
    yield from _table(table, left=2)
    yield ""
    if s.regime == "average":
        tokens = "1"
    else:
        some = " + ".join(map(str, e.num_tokens[:8])) + (" + ..." if e.num_tokens[8:] else "")
        tokens = (
            "the counted tokens of the microbatch's rows on CP rank 0 and 0 on other CP ranks "
            f"({some} = {e.totals.active_tokens})"
        )
    yield from _text(f"loss_func returns share * {e.factor}, and as num_tokens {tokens}.")
    if e.factor == 1:
        yield from _text("K is 1 here, so one that returns the bare share is right too.")
    else:
        yield from _text(
            f"One that returns the bare share beside the same num_tokens trains {e.undone_not} = "
            f"1/{e.factor} of this loss, without an error."
        )
    yield from _text(
        "K does not depend on the mode: M DP CP in the average regime, N in the per-token one."
    )


def _about_the_dashboard(e: Explanation) -> Iterator[str]:
    yield from _text(
        "The same rows under every mode, with every token's loss 1, and with losses that rise "
        "along a row (token t of a row has t / longest row). A curve that jumps by such a ratio "
        "after a switch is no bug: NovaSky-AI/SkyRL#1296 saw 0.322, 0.065 and 0.001 for the "
        "same data."
    )
    yield ""
    table = [["mode", "w_s", "all 1", "ratio", "rising", "ratio", "gradient"]]
    for b in e.beside:
        if b.ones is None:
            cells = ["needs --divisor", "", "", "", ""]
        elif b.mode == e.mode:
            cells = [_number(b.ones), "1", _number(b.rising), "1", "this mode"]
        else:
            ratios = [_ratio(b.ones_ratio), _number(b.rising), _ratio(b.rising_ratio)]
            cells = [_number(b.ones), *ratios, "scaled" if b.scales_only else "reweighted"]
        table.append([b.mode, b.w_s, *cells])
    yield from _table(table, left=2)
    yield ""
    yield from _text(
        f"ratio: to {e.mode}. microbatch_token_mean has the rows dealt in turn to {e.split.dp} "
        f"ranks x {e.split.microbatches} microbatches, and changes with them."
    )
    yield from _text(
        "grad_norm is that of the loss named, so curves of two modes cannot be compared, and a "
        "clipping threshold does not carry over: where the gradient is only scaled, multiply it by "
        "the ratio; where rows have other weights, look at the new grad_norm first. Under Adam the "
        "scale changes only clipping, epsilon, and the balance with side losses, weight decay and "
        "losses under another mode (KL, entropy). More: docs/math.md."
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _exact(divisor: float) -> str:
    return repr(divisor).removesuffix(".0")


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _text(text: str) -> list[str]:
    indent = "  "
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _table(table: Sequence[Sequence[str]], *, left: int) -> Iterator[str]:
    """Aligned lines: the first ``left`` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()
