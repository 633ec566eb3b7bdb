"""The integers of one optimizer step, counted over the data-parallel group.

Counting makes one all-gather of a few integers a rank and, where ids are given, one of
(sample, prompt, tokens) rows; a third one only brings an error's message to every rank.

Shape suffixes: S = rows of this data-parallel rank in the step; W = ranks of the group;
K = pairs of ids, over the group.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import NoReturn

import numpy as np
from torch import Tensor

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.errors import PlanError
from megatron_lossagg.exchange import Exchange
from megatron_lossagg.layout import Ints, IntsLike


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The rows this data-parallel rank trains on in one optimizer step.

    Each field holds one whole number a row, int64 ``[S]``, on the CPU: a list, a numpy
    array or a tensor. Counts are complete over context parallelism. Filler rows are left
    out. This class only stores; :func:`plan_step` checks, so that all ranks fail together.
    """

    active_tokens: IntsLike
    """n_s: tokens whose counting mask is 1."""
    sample: IntsLike | None = None
    """Id of the row's sample, global over the data-parallel group; None: each row its own."""
    prompt: IntsLike | None = None
    """Id of the row's prompt, global over the data-parallel group."""
    microbatch: IntsLike | None = None
    """Index of the row's microbatch on this rank; wanted by ``microbatch_token_mean``."""
    sample_tokens: IntsLike | None = None
    """n_b of the row's sample over the whole step, where the caller knows it."""
    prompt_tokens: IntsLike | None = None
    """n_p of the row's prompt over the whole step, where the caller knows it."""
    num_microbatches: int | None = None
    """M, microbatches without rows included; None: the largest ``microbatch`` plus one."""


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Counts of the whole step over the data-parallel group; None where not known.

    Handed to :func:`plan_step` it replaces the collectives: a mode raises
    :class:`PlanError` for what it lacks.
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

    def need(self, name: str, aggregation: Aggregation) -> int:
        """Return a total, or raise :class:`PlanError` if it is not known."""
        value = getattr(self, name)
        if value is None:
            raise PlanError(
                f"{aggregation} needs StepTotals({name}=...) of the whole step, which was not "
                "given: give it, or let plan_step count (drop totals=)"
            )
        return int(value)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The step's totals, and what each local row's sample and prompt count in it."""

    totals: StepTotals
    sample_tokens: Ints | None
    prompt_tokens: Ints | None


MOST_TOKENS = 2**53
"""The largest count: whole numbers up to it are exact in the float64 of a weight."""

_UNKNOWN = -1
_FIELDS = ("sample", "prompt", "microbatch")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The checked fields of :class:`Sequences`; int64 ``[S]`` each."""

    active_tokens: Ints
    sample: Ints | None
    prompt: Ints | None
    microbatch: Ints | None
    sample_tokens: Ints | None
    prompt_tokens: Ints | None
    num_microbatches: int | None

    @staticmethod
    def checked(sequences: Sequences) -> Rows:
        """Convert and check; raises :class:`PlanError`."""
        n_S = _checked_ints("active_tokens", sequences.active_tokens, None, lowest=0)
        _check_sum(f"Sequences.active_tokens of {len(n_S)} rows", n_S)
        fields = {
            name: _checked_ints(name, getattr(sequences, name), len(n_S), lowest=lowest)
            for name, lowest in (
                ("sample", None),
                ("prompt", None),
                ("microbatch", 0),
                ("sample_tokens", 0),
                ("prompt_tokens", 0),
            )
            if getattr(sequences, name) is not None
        }
        microbatch_S, m = fields.get("microbatch"), sequences.num_microbatches
        if m is not None and (not _is_count(m) or m > MOST_TOKENS):
            raise PlanError(
                f"Sequences.num_microbatches is a whole number from 0 to 2^53, got {m!r}: give the "
                "schedule's num_microbatches"
            )
        if microbatch_S is not None:
            least = int(microbatch_S.max(initial=-1)) + 1
            m = least if m is None else m
            if m < least:
                raise PlanError(
                    f"microbatch names microbatch {least - 1}, num_microbatches is {m}: indices "
                    "run from 0 to num_microbatches - 1"
                )
        if fields.get("sample") is None and fields.get("sample_tokens") is not None:
            wrong = np.flatnonzero(fields["sample_tokens"] != n_S)
            if len(wrong):
                raise PlanError(
                    f"row {wrong[0]} is a sample of its own with {n_S[wrong[0]]} active tokens, "
                    f"sample_tokens says {fields['sample_tokens'][wrong[0]]}: give sample= for a "
                    "sample that was cut into rows"
                )
        names = (*_FIELDS, "sample_tokens", "prompt_tokens")
        return Rows(
            active_tokens=n_S,
            num_microbatches=m,
            **{name: fields.get(name) for name in names},
        )

    @property
    def given(self) -> list[str]:
        """Which ids this rank has: all ranks must have the same."""
        return [name for name in _FIELDS if getattr(self, name) is not None]

    @cached_property
    def microbatch_tokens(self) -> Ints | None:
        """n_mb of each row's microbatch."""
        if self.microbatch is None:
            return None
        used, inverse = np.unique(self.microbatch, return_inverse=True)
        tokens = np.zeros(len(used), dtype=np.int64)
        np.add.at(tokens, inverse, self.active_tokens)
        return tokens[inverse]

    @property
    def microbatch_means(self) -> tuple[int, int]:
        """Microbatches with an active token, and M; 0 and 0 where not given."""
        if self.microbatch is None or not self.num_microbatches:
            return 0, 0
        return len(np.unique(self.microbatch[self.active_tokens > 0])), self.num_microbatches

    def with_totals(self, totals: StepTotals) -> Counts:
        """Counts where the caller knows the step's totals; raises where ids need more."""
        for ids, tokens in (("sample", "sample_tokens"), ("prompt", "prompt_tokens")):
            if getattr(self, ids) is not None and getattr(self, tokens) is None:
                raise PlanError(
                    f"totals= makes no collective, and a {ids} may have rows on other ranks: give "
                    f"Sequences({tokens}=...), each {ids}'s active tokens over the step, or drop "
                    "totals="
                )
        self._check_totals(totals)
        return Counts(
            totals=totals,
            sample_tokens=self.active_tokens if self.sample is None else self.sample_tokens,
            prompt_tokens=self.prompt_tokens,
        )

    def _check_totals(self, totals: StepTotals) -> None:
        """Raise where the step's totals, or its ids' tokens, cannot hold the rows that are here."""
        pairs_K = self.pairs()
        here = {"active_tokens": int(self.active_tokens.sum())}
        for kind, id_S in (("sample", self.sample), ("prompt", self.prompt)):
            tokens = self.active_tokens
            if id_S is not None:
                tokens, _ = _tokens_by_id(kind, pairs_K, id_S, whole=False)
            if kind == "sample" or id_S is not None:
                here[f"{kind}s"] = len(tokens)
                here[f"active_{kind}s"] = int((tokens > 0).sum())
        if self.sample is not None:
            _check_one_prompt(pairs_K)
        for name in ("active_tokens", "samples", "prompts", "active_samples", "active_prompts"):
            value = getattr(totals, name)
            if value is not None and (not _is_count(value) or value < here.get(name, 0)):
                raise PlanError(
                    f"StepTotals({name}={value!r}) is no count of a step whose rows here have "
                    f"{here.get(name, 0)}: give the whole number counted over the whole step"
                )

    def pairs(self) -> Ints:
        """Rows summed by their ids: int64 ``[k, 5]`` of sample, prompt, n, n_b, n_p.

        n_b and n_p are the caller's claims; -1 stands for an id or claim that is not given.
        """
        unknown_S = np.full(len(self.active_tokens), _UNKNOWN, dtype=np.int64)
        claim_S = None if self.sample is None else self.sample_tokens
        columns = (self.sample, self.prompt, claim_S, self.prompt_tokens)
        keys = np.stack([unknown_S if c is None else c for c in columns], axis=1)
        unique, inverse = np.unique(keys, axis=0, return_inverse=True)
        tokens = np.zeros(len(unique), dtype=np.int64)
        np.add.at(tokens, inverse.ravel(), self.active_tokens)
        return np.insert(unique, 2, tokens, axis=1)


def count_step(aggregation: Aggregation, rows: Rows, fault: str, exchange: Exchange) -> Counts:
    """Count over the group; every rank raises the same :class:`PlanError` or none does."""
    n_S = rows.active_tokens
    has_ids = rows.sample is not None or rows.prompt is not None
    mine_K = rows.pairs() if has_ids else np.zeros((0, 5), dtype=np.int64)
    same = [_fingerprint(aggregation), *(name in rows.given for name in _FIELDS)]
    counts = [len(n_S), n_S.sum(), (n_S > 0).sum(), len(mine_K), *rows.microbatch_means]
    told = exchange.integers(np.array([bool(fault), *counts, *same], dtype=np.int64))
    fault_W, rows_W, tokens_W, active_W, pairs_W, microbatches_W, m_W = told.T[:7]
    if fault_W.any() or (told[:, 7:] != told[0, 7:]).any():
        _raise_together(aggregation, rows, fault, exchange)
    _check_sum(f"Sequences.active_tokens of all {len(tokens_W)} ranks", tokens_W)
    totals = StepTotals(
        active_tokens=int(tokens_W.sum()),
        samples=int(rows_W.sum()),
        active_samples=int(active_W.sum()),
        microbatch_means=float((microbatches_W / m_W).sum()) if m_W.all() else None,
    )
    if not has_ids:
        return Counts(totals=totals, sample_tokens=n_S, prompt_tokens=None)

    pairs_K = exchange.rows(mine_K, pairs_W)
    sample_tokens, prompt_tokens = n_S, None
    if rows.sample is not None:
        samples, sample_tokens = _tokens_by_id("sample", pairs_K, rows.sample)
        _check_one_prompt(pairs_K)
        totals = replace(totals, samples=len(samples), active_samples=int((samples > 0).sum()))
    if rows.prompt is not None:
        prompts, prompt_tokens = _tokens_by_id("prompt", pairs_K, rows.prompt)
        totals = replace(totals, prompts=len(prompts), active_prompts=int((prompts > 0).sum()))
    return Counts(totals=totals, sample_tokens=sample_tokens, prompt_tokens=prompt_tokens)


def _tokens_by_id(kind: str, pairs_K: Ints, id_S: Ints, *, whole: bool = True) -> tuple[Ints, Ints]:
    """Sum tokens by id: of every id, and looked up for the local rows.

    ``whole``: the pairs are the whole step's, and a claim must equal the sum; else it may
    not be below it, and must be one claim for an id.
    """
    id_K = pairs_K[:, 0 if kind == "sample" else 1]
    ids, inverse = np.unique(id_K, return_inverse=True)
    tokens = np.zeros(len(ids), dtype=np.int64)
    np.add.at(tokens, inverse, pairs_K[:, 2])
    claim_K = pairs_K[:, 3 if kind == "sample" else 4]
    one_claim = np.zeros_like(tokens)
    one_claim[inverse] = claim_K
    differs = claim_K != tokens[inverse]
    if not whole:
        differs = (claim_K < tokens[inverse]) | (claim_K != one_claim[inverse])
    wrong = np.flatnonzero((claim_K != _UNKNOWN) & differs)
    if len(wrong):
        raise PlanError(
            f"{kind} {id_K[wrong[0]]} has {tokens[inverse[wrong[0]]]} active tokens "
            f"{'in the step' if whole else 'here alone'}, "
            f"Sequences.{kind}_tokens says {claim_K[wrong[0]]}: all its rows belong to one step"
        )
    return tokens, tokens[np.searchsorted(ids, id_S)]


def _check_one_prompt(pairs_K: Ints) -> None:
    prompt_of_sample = np.unique(pairs_K[:, :2], axis=0)
    samples, prompts = np.unique(prompt_of_sample[:, 0], return_counts=True)
    if (prompts > 1).any():
        sample = samples[prompts > 1][0]
        found = prompt_of_sample[prompt_of_sample[:, 0] == sample, 1]
        raise PlanError(
            f"sample {sample} has rows under {len(found)} prompts ({_listed(found)}): a sample "
            "belongs to one prompt; ids are global over the data-parallel group"
        )


def _raise_together(
    aggregation: Aggregation, rows: Rows, fault: str, exchange: Exchange
) -> NoReturn:
    """Bring the first faulty rank's message to all ranks and raise it on each."""
    given = f"{aggregation} ({aggregation!r}) with {', '.join(rows.given) or 'no'} ids"
    texts = exchange.messages(f"!{fault}" if fault else given)
    for rank, text in enumerate(texts):
        if text.startswith("!"):
            raise PlanError(f"{exchange.name(rank)}: {text[1:]}")
    other = next(rank for rank, text in enumerate(texts) if text != texts[0])
    raise PlanError(
        f"ranks of the data-parallel group disagree: rank 0 has {texts[0]}, rank {other} has "
        f"{texts[other]}: start all ranks with the same flags and give all of them the same ids"
    )


def _fingerprint(aggregation: Aggregation) -> int:
    return int.from_bytes(hashlib.sha256(repr(aggregation).encode()).digest()[:7], "big")


def _check_sum(what: str, tokens: Ints) -> None:
    total = sum(tokens.tolist())  # Python's integers do not wrap
    if total > MOST_TOKENS:
        raise PlanError(
            f"{what} sum to {total}, the most that a step can count exactly is 2^53: give the "
            "number of mask positions that are 1"
        )


def _listed(values: Ints) -> str:
    return ", ".join(map(str, values[:4])) + (", ..." if len(values) > 4 else "")


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _checked_ints(name: str, values: IntsLike, length: int | None, *, lowest: int | None) -> Ints:
    if isinstance(values, Tensor) and values.device.type != "cpu":
        raise PlanError(
            f"Sequences.{name} is on {values.device}: counts and ids are host integers, pass a "
            "list or a CPU tensor"
        )
    array = np.asarray(values.detach() if isinstance(values, Tensor) else values)
    if array.size == 0 and array.ndim == 1:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise PlanError(
            f"Sequences.{name} holds one whole number a row, got "
            f"{array.dtype} of shape {array.shape}"
        )
    if length is not None and len(array) != length:
        raise PlanError(
            f"Sequences.{name} has {len(array)} entries, active_tokens has {length}: one "
            "entry a row"
        )
    if len(array) and array.max() > np.iinfo(np.int64).max:
        raise PlanError(f"Sequences.{name} is {array.max()}: the largest is 2^63 - 1")
    if lowest is not None and len(array) and array.min() < lowest:
        raise PlanError(
            f"Sequences.{name} is {array.min()} for row {array.argmin()}: the smallest is {lowest}"
        )
    return array.astype(np.int64)
