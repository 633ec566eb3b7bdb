"""One optimizer step, counted over the data-parallel group.

Counting makes one all-gather of a few integers per rank. A second one of a few numbers per
sequence follows if ids or token weights are passed or the mode is ``length_power``; a third one
only brings an error's message to every rank.

Shape suffixes: S = sequences of this data-parallel rank in the step; W = ranks of the group;
A = sequences of all ranks; I = distinct ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NoReturn, TypeVar

import numpy as np

from megatron_lossagg.errors import PlanError
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.exchange import Exchange
from megatron_lossagg.reduction.faults import warn_once
from megatron_lossagg.reduction.integers import Ints, first_few, is_integer
from megatron_lossagg.reduction.modes import MODES
from megatron_lossagg.reduction.sequences import (
    ID_KINDS,
    CheckedSequences,
    Floats,
    Kind,
    check_sum,
    hashed,
)

__all__ = ["StepTotals", "WeightTotals", "count_step", "known_step"]

_Numbers = TypeVar("_Numbers", Ints, Floats)


@dataclass(frozen=True, kw_only=True)
class WeightTotals:
    """The step's sums of token weights, under the names of :class:`StepTotals`.

    An active sample or prompt is one whose sum is not 0. Each sum over sequences is rounded once,
    so that it depends neither on their order nor on how ranks share them.
    """

    active_tokens: float
    samples: int
    active_samples: int
    prompts: int | None = None
    active_prompts: int | None = None
    microbatch_means: float | None
    data_parallel_size: int | None
    sample_lengths: Floats
    sample_tokens: Floats
    prompt_tokens: Floats | None = None
    microbatch_tokens: Floats | None

    def __post_init__(self) -> None:
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                value.flags.writeable = False  # the weights follow from them


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Counts of the whole step over the data-parallel group; None if not known.

    Passed to :func:`plan_step` they replace the collectives: a mode raises
    :class:`PlanError` for what they lack. What follows ``microbatch_means`` is never passed.
    """

    active_tokens: int | None = None
    """N: active tokens."""
    samples: int | None = None
    """B: samples."""
    prompts: int | None = None
    """P: prompts."""
    active_samples: int | None = None
    """V: samples with an active token."""
    active_prompts: int | None = None
    """Q: prompts with an active token."""
    microbatch_means: float | None = None
    """Sum over ranks of (microbatches with an active token) / (M of the rank)."""
    data_parallel_size: int | None = field(default=None, repr=False, compare=False)
    """DP; None if totals were passed without a group in a job of several processes."""
    longest_sample: int | None = field(default=None, repr=False)
    """The largest n_b; of this rank if totals were passed."""
    sample_lengths: Ints | None = field(default=None, repr=False, compare=False)
    """n_b of every sample of the step, int64; None if lengths were not gathered."""
    sample_tokens: Ints | None = field(default=None, repr=False, compare=False)
    """n_b of each of this rank's sequences, int64 ``[S]``."""
    prompt_tokens: Ints | None = field(default=None, repr=False, compare=False)
    """n_p likewise; None without prompt ids."""
    microbatch_tokens: Ints | None = field(default=None, repr=False, compare=False)
    """n_mb of each of this rank's sequences' microbatch; None without ``Sequences.microbatch``."""
    weighted: WeightTotals | None = field(default=None, repr=False, compare=False)
    """The same in token weights; None without ``Sequences.token_weight_sums``."""

    def __post_init__(self) -> None:
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                value.flags.writeable = False  # the weights follow from them


def known_step(
    sequences: CheckedSequences, totals: StepTotals, data_parallel_size: int | None
) -> StepTotals:
    """Complete totals that the caller knows, without a collective; raises :class:`PlanError`."""
    n_S = sequences.active_tokens
    if sequences.token_weight_sums is not None:
        raise PlanError(
            "got totals= and token_weight_sums=, but only counting sums the weights of other "
            "ranks: drop one of them"
        )
    for kind in ID_KINDS:
        if getattr(sequences, kind) is not None:
            raise PlanError(
                f"got totals= and {kind}=, but only counting finds a {kind}'s sequences on other "
                f"ranks: drop totals= or {kind}="
            )
    least = {
        "active_tokens": int(n_S.sum()),
        "samples": len(n_S),
        "prompts": 0,
        "active_samples": int(np.count_nonzero(n_S)),
        "active_prompts": 0,
    }
    for name, lowest in least.items():
        value = getattr(totals, name)
        if value is not None and not is_integer(value, lowest=lowest):
            raise PlanError(
                f"got StepTotals({name}={value!r}), expected an integer from {lowest}, "
                "which this rank's sequences have: pass the count of the whole step"
            )
    return replace(
        totals,
        data_parallel_size=data_parallel_size,
        longest_sample=int(n_S.max(initial=0)),
        sample_lengths=None,
        sample_tokens=n_S,
        prompt_tokens=None,
        microbatch_tokens=_count_microbatches(sequences, n_S)[0],
        weighted=None,
    )


def _count_microbatches(
    sequences: CheckedSequences, tokens_S: _Numbers | None
) -> tuple[_Numbers | None, int]:
    """Count n_mb of each sequence's microbatch, ``[S]``, and microbatches with a token.

    None and 0 if ``Sequences.microbatch`` or ``tokens_S`` is not passed.
    """
    if sequences.microbatch is None or tokens_S is None:
        return None, 0
    microbatches = _Groups.of(sequences.microbatch)
    tokens_I = microbatches.sums(tokens_S)
    return tokens_I[microbatches.index_A], int(np.count_nonzero(tokens_I))


def count_step(
    aggregation: Aggregation,
    sequences: CheckedSequences,
    fault: str,
    exchange: Exchange,
    settings: Iterable[str] = (),
    *,
    shadows: Iterable[Aggregation] = (),
) -> StepTotals:
    """Count over the group; every rank raises the same :class:`PlanError` or none does.

    ``settings``: what else must be the same on every rank, in words. ``shadows``: aggregations for
    which is counted too.
    """
    settings = [f"{aggregation} ({aggregation!r})", *settings]
    n_S, v_S = sequences.active_tokens, sequences.token_weight_sums
    n_mb_S, active_microbatches = _count_microbatches(sequences, n_S)
    v_mb_S, weighted_microbatches = _count_microbatches(sequences, v_S)
    ids = {kind: getattr(sequences, kind) for kind in ID_KINDS}
    columns = {"tokens": n_S} | {kind: id_S for kind, id_S in ids.items() if id_S is not None}
    if v_S is not None:
        columns[_WEIGHTS] = v_S.view(np.int64)  # all columns travel as integers
    given = [*columns, *["microbatch"] * (n_mb_S is not None)]
    own = {
        "has_fault": bool(fault),
        # The same on every rank: the aggregation, the options and which ids are passed.
        "fingerprint": hashed(_BETWEEN.join([*settings, *given])),
        "samples_per_prompt": sequences.samples_per_prompt or 0,
        # A bit per kind of id that is passed as strings; -1 if there are no sequences.
        "string_ids": sum(1 << ID_KINDS.index(k) for k in sequences.string_ids) if len(n_S) else -1,
        "sequences": len(n_S),
        "tokens": int(n_S.sum()),
        "active_sequences": int(np.count_nonzero(n_S)),
        "active_microbatches": active_microbatches,
        "weighted_microbatches": weighted_microbatches,
        "num_microbatches": 0 if n_mb_S is None else sequences.num_microbatches or 0,
        "longest": int(n_S.max(initial=0)),
    }
    gathered = exchange.integers(np.array([*own.values()], dtype=np.int64)).T
    of_ranks = dict(zip(own, gathered, strict=True))  # int64 [W] each
    strings = of_ranks["string_ids"]
    same = (of_ranks["fingerprint"], of_ranks["samples_per_prompt"], strings[strings >= 0])
    if of_ranks["has_fault"].any() or any((values != values[:1]).any() for values in same):
        _raise_together(settings, sequences, given, fault, exchange)
    check_sum(f"Sequences.active_tokens of all {exchange.size} ranks", of_ranks["tokens"])
    sequences_W = of_ranks["sequences"]
    counted = StepTotals(
        active_tokens=int(of_ranks["tokens"].sum()),
        samples=int(sequences_W.sum()),
        active_samples=int(of_ranks["active_sequences"].sum()),
        microbatch_means=_microbatch_means(of_ranks, "active_microbatches"),
        data_parallel_size=exchange.size,
        longest_sample=int(of_ranks["longest"].max()),
        sample_lengths=n_S if exchange.size == 1 else None,
        sample_tokens=n_S,
        microbatch_tokens=n_mb_S,
    )
    needs_lengths = any(MODES[one.mode].has_exponent for one in (aggregation, *shadows))
    if len(columns) == 1 and not needs_lengths:
        return counted
    gathered_columns = exchange.ragged([*columns.values()], sequences_W)
    table = dict(zip(columns, gathered_columns, strict=True))
    first = int(sequences_W[: exchange.rank].sum())
    own_A = slice(first, first + len(n_S))
    groups = {kind: _Groups.of(table[kind]) for kind in ID_KINDS if kind in table}
    of_ids = _count_ids(groups, table["tokens"], own_A)
    _check_ids(table, groups, sequences.samples_per_prompt)
    if sequences.samples_per_prompt is None:
        for what, doubt in _doubts(table, groups, sequences_W):
            warn_once(what, doubt)
    weighted = None
    if v_S is not None:
        v_A = table[_WEIGHTS].view(np.float64)
        each: dict[str, Any] = {
            "samples": len(v_A),
            "active_samples": int(np.count_nonzero(v_A)),
            "sample_tokens": v_S,
        }
        weighted = WeightTotals(
            active_tokens=math.fsum(v_A),
            microbatch_means=_microbatch_means(of_ranks, "weighted_microbatches"),
            data_parallel_size=exchange.size,
            microbatch_tokens=v_mb_S,
            **each | _count_ids(groups, v_A, own_A),
        )
    longest = int(of_ids["sample_lengths"].max(initial=0))
    return replace(counted, longest_sample=longest, weighted=weighted, **of_ids)


_WEIGHTS = "token_weight_sums"


def _microbatch_means(of_ranks: Mapping[str, Ints], active: str) -> float | None:
    """Sum, over ranks, the fraction of microbatches that are active; None if M is not known."""
    m_W = of_ranks["num_microbatches"]
    return float((of_ranks[active] / m_W).sum()) if m_W.all() else None


def _count_ids(groups: Mapping[Kind, _Groups], tokens_A: _Numbers, own_A: slice) -> dict[str, Any]:
    """Count samples and prompts of all ranks' sequences, and the tokens of this rank's."""
    found: dict[str, Any] = {"sample_lengths": tokens_A}
    for kind, ids in groups.items():
        tokens_I = ids.sums(tokens_A)
        found[f"{kind}s"], found[f"active_{kind}s"] = ids.num, int(np.count_nonzero(tokens_I))
        found[f"{kind}_tokens"] = tokens_I[ids.index_A[own_A]]
        if kind == "sample":
            found["sample_lengths"] = tokens_I
    return found


def _check_ids(
    table: dict[str, Ints], groups: Mapping[Kind, _Groups], samples_per_prompt: int | None
) -> None:
    if len(groups) == 2:
        _check_one_prompt(table, groups["sample"])
    if samples_per_prompt is not None:
        _check_samples_per_prompt(table, groups.get("sample"), samples_per_prompt)


def _doubts(
    table: dict[str, Ints], groups: Mapping[Kind, _Groups], sequences_W: Ints
) -> Iterator[tuple[str, str]]:
    """Describe ids that look like placeholders, or like numbers that start anew on every rank."""
    for kind, ids in groups.items():
        ids_A = table[kind]
        if len(ids_A) > 1 and (ids_A == ids_A[0]).all():
            yield (
                f"one {kind} id",
                f"all {len(ids_A)} sequences of the step have one {kind} id, so one {kind} has all "
                f"tokens: if the id is a placeholder, leave {kind}= out",
            )
        elif _is_every_id_on_one_rank(ids_A, ids.num, sequences_W):
            yield (
                f"{kind} ids of every rank",
                f"the data-parallel ranks have the same {kind} ids, which merges {kind}s if "
                "numbers start at 0 on every rank: add an offset per rank, or pass "
                "samples_per_prompt= to have it checked",
            )


def _is_every_id_on_one_rank(ids_A: Ints, num_ids: int, sequences_W: Ints) -> bool:
    """Whether several ranks have sequences and one of them has every id of the step.

    Such a rank has the lowest and the highest id, so the ids of other ranks are not grouped.
    """
    ends = np.cumsum(sequences_W)[sequences_W > 0]
    starts = ends - sequences_W[sequences_W > 0]
    if len(starts) < 2:
        return False
    lowest, highest = np.minimum.reduceat(ids_A, starts), np.maximum.reduceat(ids_A, starts)
    has_both = (lowest == lowest.min()) & (highest == highest.max())
    return any(
        len(np.unique(ids_A[start:end])) == num_ids
        for start, end in zip(starts[has_both], ends[has_both], strict=True)
    )


@dataclass(frozen=True)
class _Groups:
    """Sequences grouped by id."""

    index_A: Ints
    """Index of each sequence's id among I candidates, not all of which need occur."""
    num_sequences_I: Ints
    """How many sequences have it."""

    @staticmethod
    def of(id_A: Ints) -> _Groups:
        """Group by id: in one pass if the ids are close to one another, else by sorting."""
        if not len(id_A):
            return _Groups(id_A, id_A)
        low, high = int(id_A.min()), int(id_A.max())
        if high - low > 4 * len(id_A) + 64:
            _, index_A = np.unique(id_A, return_inverse=True)
        else:
            index_A = id_A - low if low else id_A
        return _Groups(index_A, np.bincount(index_A))

    @property
    def num(self) -> int:
        """Number of distinct ids."""
        return int(np.count_nonzero(self.num_sequences_I))

    def sums(self, values_A: _Numbers) -> _Numbers:
        """Sum by id, ``[I]``: integers below 2^53 exactly, floats rounded once."""
        if values_A.dtype.kind == "f":
            sorted_A = values_A[np.argsort(self.index_A, kind="stable")].tolist()
            offsets: list[int] = [0, *np.cumsum(self.num_sequences_I).tolist()]
            return np.array([math.fsum(sorted_A[a:b]) for a, b in pairwise(offsets)])
        sums_I = np.bincount(self.index_A, values_A, minlength=len(self.num_sequences_I))
        return sums_I.astype(np.int64)

    def one_of(self, values_A: Ints) -> Ints:
        """Pick one sequence's value per id, int64 ``[I]``."""
        picked_I = np.zeros(len(self.num_sequences_I), dtype=np.int64)
        picked_I[self.index_A] = values_A
        return picked_I


def _check_one_prompt(table: dict[str, Ints], samples: _Groups) -> None:
    sample_A, prompt_A = table["sample"], table["prompt"]
    wrong = np.flatnonzero(prompt_A != samples.one_of(prompt_A)[samples.index_A])
    if len(wrong):
        sample = sample_A[wrong].min()
        found = np.unique(prompt_A[sample_A == sample])
        raise PlanError(
            f"sample {sample} has sequences under {len(found)} prompts ({first_few(found, 4)}): a "
            "sample belongs to one prompt; ids are global over the data-parallel group"
        )


def _check_samples_per_prompt(table: dict[str, Ints], samples: _Groups | None, number: int) -> None:
    prompt_of_sample = table["prompt"]
    if samples is not None:
        prompt_of_sample = samples.one_of(prompt_of_sample)[samples.num_sequences_I > 0]
    prompts = _Groups.of(prompt_of_sample)
    wrong = np.flatnonzero((prompts.num_sequences_I != number) & (prompts.num_sequences_I > 0))
    if len(wrong):
        prompt = prompts.one_of(prompt_of_sample)[wrong[0]]
        raise PlanError(
            f"prompt {prompt} has {prompts.num_sequences_I[wrong[0]]} samples over the step, "
            f"samples_per_prompt is {number}: ids are global over the data-parallel group, and "
            "numbers that start at 0 on every rank merge prompts; add rank * prompts per rank"
        )


def _raise_together(
    settings: list[str],
    sequences: CheckedSequences,
    given: list[str],
    fault: str,
    exchange: Exchange,
) -> NoReturn:
    """Bring the first faulty rank's message to all ranks and raise it on each."""
    others = ("tokens", _WEIGHTS)
    ids = [f"{n} (strings)" if n in sequences.string_ids else n for n in given if n not in others]
    parts = [*settings, f"{', '.join(ids) or 'no'} ids"]
    parts.append(_WEIGHTS if _WEIGHTS in given else f"no {_WEIGHTS}")
    parts.append(f"samples_per_prompt {sequences.samples_per_prompt}")
    texts = exchange.messages(f"!{fault}" if fault else _BETWEEN.join(parts))
    for rank, text in enumerate(texts):
        if text.startswith("!"):
            raise PlanError(f"{exchange.name(rank)}: {text[1:]}")
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), 0)
    pairs = zip(texts[0].split(_BETWEEN), texts[other].split(_BETWEEN), strict=False)
    differing = [pair for pair in pairs if pair[0] != pair[1]]
    raise PlanError(
        f"ranks of the data-parallel group disagree: rank 0 has "
        f"{' and '.join(first for first, _ in differing)}, rank {other} has "
        f"{' and '.join(second for _, second in differing)}: start all ranks with the same flags "
        "and pass the same ids on all of them"
    )


_BETWEEN = "\n"
