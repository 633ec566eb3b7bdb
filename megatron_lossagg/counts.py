"""One optimizer step, counted over the data-parallel group.

Counting makes one all-gather of a few integers per rank and, if ids are passed, one of
a few integers per sequence; a third one only brings an error's message to every rank.

Shape suffixes: S = sequences of this data-parallel rank in the step; W = ranks of the group;
A = sequences of all ranks; I = distinct ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.errors import PlanError
from megatron_lossagg.exchange import Exchange
from megatron_lossagg.faults import warn_once
from megatron_lossagg.integers import Ints, first_few, is_integer
from megatron_lossagg.sequences import ID_KINDS, Sequences, check_sum, hashed

__all__ = ["StepTotals", "count_microbatches", "count_step", "known_step"]


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Counts of the whole step over the data-parallel group; None where not known.

    Passed to :func:`plan_step` they replace the collectives: a mode raises
    :class:`PlanError` for what they lack. The last three are never passed.
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
    longest_sample: int | None = field(default=None, repr=False)
    """The largest n_b; of this rank if totals were passed."""
    sample_tokens: Ints | None = field(default=None, repr=False, compare=False)
    """n_b of each of this rank's sequences, int64 ``[S]``."""
    prompt_tokens: Ints | None = field(default=None, repr=False, compare=False)
    """n_p likewise; None without prompt ids."""

    def __post_init__(self) -> None:
        for array in (self.sample_tokens, self.prompt_tokens):
            if array is not None:
                array.flags.writeable = False  # the weights follow from them


def known_step(sequences: Sequences, totals: StepTotals) -> StepTotals:
    """Complete totals that the caller knows, without a collective; raises :class:`PlanError`."""
    n_S: Ints = sequences.active_tokens  # type: ignore[assignment]
    for kind in ID_KINDS:
        if getattr(sequences, kind) is not None:
            raise PlanError(
                f"got totals= and {kind}=, but only counting finds a {kind}'s sequences on other "
                f"ranks: drop totals= or {kind}="
            )
    least = {
        "active_tokens": int(n_S.sum()),
        "samples": len(n_S),
        "active_samples": int(np.count_nonzero(n_S)),
    }
    for name in ("active_tokens", "samples", "prompts", "active_samples", "active_prompts"):
        value = getattr(totals, name)
        if value is not None and not is_integer(value, lowest=least.get(name, 0)):
            raise PlanError(
                f"got StepTotals({name}={value!r}), expected an integer from {least.get(name, 0)}, "
                "which this rank's sequences have: pass the count of the whole step"
            )
    return replace(
        totals, longest_sample=int(n_S.max(initial=0)), sample_tokens=n_S, prompt_tokens=None
    )


def count_microbatches(sequences: Sequences) -> tuple[Ints, int] | None:
    """Count n_mb of each sequence's microbatch, int64 ``[S]``, and microbatches with a token."""
    if sequences.microbatch is None:
        return None
    n_S, microbatch_S = np.asarray(sequences.active_tokens), np.asarray(sequences.microbatch)
    microbatches = _Groups.of(microbatch_S)
    tokens_I = microbatches.sums(n_S)
    tokens_S = tokens_I[microbatches.index_A]
    tokens_S.flags.writeable = False  # the weights follow from them
    return tokens_S, int(np.count_nonzero(tokens_I))


def count_step(
    aggregation: Aggregation,
    sequences: Sequences,
    fault: str,
    exchange: Exchange,
    settings: Iterable[str] = (),
) -> StepTotals:
    """Count over the group; every rank raises the same :class:`PlanError` or none does.

    ``settings``: what else must be the same on every rank, in words.
    """
    settings = [f"{aggregation} ({aggregation!r})", *settings]
    n_S: Ints = sequences.active_tokens  # type: ignore[assignment]
    ids = {kind: getattr(sequences, kind) for kind in ID_KINDS}
    columns = {"tokens": n_S} | {kind: id_S for kind, id_S in ids.items() if id_S is not None}
    of_microbatches = count_microbatches(sequences)
    given = [*columns, *["microbatch"] * (of_microbatches is not None)]
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
        "active_microbatches": of_microbatches[1] if of_microbatches else 0,
        "num_microbatches": (sequences.num_microbatches or 0) if of_microbatches else 0,
        "longest": int(n_S.max(initial=0)),
    }
    gathered = exchange.integers(np.array([*own.values()], dtype=np.int64)).T
    of_ranks = dict(zip(own, gathered, strict=True))  # int64 [W] each
    strings = of_ranks["string_ids"]
    same = (of_ranks["fingerprint"], of_ranks["samples_per_prompt"], strings[strings >= 0])
    if of_ranks["has_fault"].any() or any((values != values[:1]).any() for values in same):
        _raise_together(settings, sequences, given, fault, exchange)
    check_sum(f"Sequences.active_tokens of all {exchange.size} ranks", of_ranks["tokens"])
    m_W, sequences_W = of_ranks["num_microbatches"], of_ranks["sequences"]
    found: dict[str, Any] = {
        "active_tokens": int(of_ranks["tokens"].sum()),
        "samples": int(sequences_W.sum()),
        "active_samples": int(of_ranks["active_sequences"].sum()),
        "longest_sample": int(of_ranks["longest"].max()),
        "sample_tokens": n_S,
    }
    if m_W.all():
        found["microbatch_means"] = float((of_ranks["active_microbatches"] / m_W).sum())
    if len(columns) > 1:
        table = dict(
            zip(columns, exchange.sequences([*columns.values()], sequences_W), strict=True)
        )
        first = int(sequences_W[: exchange.rank].sum())
        own_sequences = slice(first, first + len(n_S))
        found |= _count_ids(table, sequences.samples_per_prompt, own_sequences)
        if sequences.samples_per_prompt is None:
            for what, doubt in _doubts(table, sequences_W):
                warn_once(what, doubt)
    return StepTotals(**found)


def _count_ids(
    table: dict[str, Ints], samples_per_prompt: int | None, own: slice
) -> dict[str, Any]:
    """Count samples and prompts of all ranks' sequences, and the tokens of the own ones'."""
    found: dict[str, Any] = {}
    groups = {kind: _Groups.of(table[kind]) for kind in ID_KINDS if kind in table}
    for kind, ids in groups.items():
        tokens_I = ids.sums(table["tokens"])
        found[f"{kind}s"], found[f"active_{kind}s"] = ids.num, int(np.count_nonzero(tokens_I))
        found[f"{kind}_tokens"] = tokens_I[ids.index_A[own]]
        if kind == "sample":
            found["longest_sample"] = int(tokens_I.max(initial=0))
    if len(groups) == 2:
        _check_one_prompt(table, groups["sample"])
    if samples_per_prompt is not None:
        _check_samples_per_prompt(table, groups.get("sample"), samples_per_prompt)
    return found


def _doubts(table: dict[str, Ints], sequences_W: Ints) -> Iterator[tuple[str, str]]:
    """Describe ids that look like placeholders, or like numbers that start anew on every rank."""
    for kind in ID_KINDS:
        if kind not in table:
            continue
        ids_A = table[kind]
        of_ranks = [np.unique(i) for i in np.split(ids_A, np.cumsum(sequences_W)[:-1]) if len(i)]
        if len(ids_A) > 1 and (ids_A == ids_A[0]).all():
            yield (
                f"one {kind} id",
                f"all {len(ids_A)} sequences of the step have one {kind} id, so one {kind} has all "
                f"tokens: if the id is a placeholder, leave {kind}= out",
            )
        elif len(of_ranks) > 1 and len(np.unique(ids_A)) == max(map(len, of_ranks)):
            yield (
                f"{kind} ids of every rank",
                f"the data-parallel ranks have the same {kind} ids, which merges {kind}s if "
                "numbers start at 0 on every rank: add an offset per rank, or pass "
                "samples_per_prompt= to have it checked",
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

    def sums(self, values_A: Ints) -> Ints:
        """Sum integers by id, int64 ``[I]``; exact below 2^53, which counts are."""
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
    settings: list[str], sequences: Sequences, given: list[str], fault: str, exchange: Exchange
) -> NoReturn:
    """Bring the first faulty rank's message to all ranks and raise it on each."""
    ids = [f"{n} (strings)" if n in sequences.string_ids else n for n in given if n != "tokens"]
    parts = [*settings, f"{', '.join(ids) or 'no'} ids"]
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
