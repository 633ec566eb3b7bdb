"""The integers of one optimizer step, counted over the data-parallel group.

Counting makes one all-gather of a few integers per rank and, where ids are given, one of
a few integers per sequence; a third one only brings an error's message to every rank.

Shape suffixes: S = sequences of this data-parallel rank in the step; W = ranks of the group;
A = sequences of all ranks; I = distinct ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.errors import PlanError
from megatron_lossagg.exchange import Exchange
from megatron_lossagg.integers import Ints, IntsLike, checked_integers, first_few, is_integer

__all__ = ["MOST_TOKENS", "Counts", "Ids", "Rows", "Sequences", "StepTotals", "count_step"]

Ids = IntsLike | Sequence[str] | npt.NDArray[np.str_]
_Kind = Literal["sample", "prompt"]

MOST_TOKENS = 2**53
"""The largest count: integers up to it are exact in the float64 of a weight."""

_UNKNOWN = -1
_ID_KINDS: tuple[_Kind, _Kind] = ("sample", "prompt")


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The sequences this data-parallel rank trains on in one optimizer step.

    Each field but the last two holds one integer per sequence, int64 ``[S]``, on the CPU: a list,
    a numpy array or a tensor. Counts are complete over context parallelism. Padding sequence
    sequences are
    left out. This class only stores; :func:`plan_step` checks, so that all ranks fail
    together.
    """

    active_tokens: IntsLike
    """n_s: tokens whose counting mask is 1."""
    sample: Ids | None = None
    """Id of the sequence's sample, integer or string; None: each sequence is its own sample.

    Ids are global over the data-parallel group: equal ids on two ranks are one sample.
    """
    prompt: Ids | None = None
    """Id of the sequence's prompt, integer or string, global likewise."""
    microbatch: IntsLike | None = None
    """Index of the sequence's microbatch on this rank; needed by ``microbatch_token_mean``."""
    sample_tokens: IntsLike | None = None
    """n_b of the sequence's sample over the whole step, where the caller knows it."""
    prompt_tokens: IntsLike | None = None
    """n_p of the sequence's prompt over the whole step, where the caller knows it."""
    num_microbatches: int | None = None
    """M, microbatches with no sequences included; None: the largest ``microbatch`` plus one."""
    samples_per_prompt: int | None = None
    """How many samples each prompt has over the step; a check that ids are global, if given."""


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Counts of the whole step over the data-parallel group; None where not known.

    Given to :func:`plan_step` it replaces the collectives: a mode raises
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


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The step's totals, and the tokens of each local sequence's sample and prompt in it."""

    totals: StepTotals
    sample_tokens: Ints | None
    prompt_tokens: Ints | None
    longest_sample: int
    """The largest n_b that is known."""
    doubts: tuple[tuple[str, str], ...] = ()
    """What is probably wrong in the ids, a kind and a text each, the same on every rank."""


class _RankCounts(NamedTuple):
    """What a rank sends in the first all-gather: an int64 each, then gathered int64 ``[W]``."""

    has_fault: Any
    fingerprint: Any
    """Of the aggregation, the options and which ids are given: the same on every rank."""
    samples_per_prompt: Any
    string_ids: Any
    """A bit per kind of id that is given as strings; -1 where there are no sequences."""
    sequences: Any
    tokens: Any
    active_sequences: Any
    active_microbatches: Any
    num_microbatches: Any
    longest: Any
    """The largest n_s."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The checked fields of :class:`Sequences`; int64 ``[S]`` each."""

    active_tokens: Ints
    sample: Ints | None = None
    prompt: Ints | None = None
    microbatch: Ints | None = None
    sample_tokens: Ints | None = None
    prompt_tokens: Ints | None = None
    num_microbatches: int | None = None
    samples_per_prompt: int | None = None
    string_ids: tuple[str, ...] = ()
    """Which of the ids were strings."""

    @staticmethod
    def empty() -> Rows:
        """Return no sequences: what a rank counts that has only a fault to report."""
        return Rows(active_tokens=np.zeros(0, dtype=np.int64))

    @staticmethod
    def checked(given: Sequences) -> Rows:
        """Convert and check; raises :class:`PlanError`."""
        n_S = _checked("active_tokens", given.active_tokens, None, lowest=0)
        assert n_S is not None
        _check_sum(f"Sequences.active_tokens of {len(n_S)} sequences", n_S)
        rows = Rows(
            active_tokens=n_S,
            sample=_checked_ids("sample", given.sample, len(n_S)),
            prompt=_checked_ids("prompt", given.prompt, len(n_S)),
            microbatch=_checked("microbatch", given.microbatch, len(n_S), lowest=0),
            sample_tokens=_checked("sample_tokens", given.sample_tokens, len(n_S), lowest=0),
            prompt_tokens=_checked("prompt_tokens", given.prompt_tokens, len(n_S), lowest=0),
            num_microbatches=given.num_microbatches,
            samples_per_prompt=given.samples_per_prompt,
            string_ids=tuple(n for n in _ID_KINDS if _are_strings(getattr(given, n))),
        )
        rows._check_own_samples()
        rows._check_samples_per_prompt()
        return replace(rows, num_microbatches=rows._checked_num_microbatches())

    @property
    def given(self) -> list[str]:
        """The ids that this rank has: all ranks must have the same."""
        return [
            name for name in ("sample", "prompt", "microbatch") if getattr(self, name) is not None
        ]

    @cached_property
    def microbatch_tokens(self) -> Ints | None:
        """n_mb of each sequence's microbatch."""
        if self.microbatch is None:
            return None
        microbatches = _Groups.of(self.microbatch)
        return microbatches.sums(self.active_tokens)[microbatches.index_A]

    @property
    def active_microbatches(self) -> int:
        """Microbatches with an active token; 0 where ``microbatch`` is not given."""
        if self.microbatch is None:
            return 0
        return _Groups.of(self.microbatch[self.active_tokens > 0]).num

    @property
    def table(self) -> _Table:
        """Ids, tokens and claims of each sequence."""
        unknown_S = np.full(len(self.active_tokens), _UNKNOWN, dtype=np.int64)
        claim = None if self.sample is None else self.sample_tokens
        columns = (self.sample, self.prompt, self.active_tokens, claim, self.prompt_tokens)
        return _Table(*(unknown_S if column is None else column for column in columns))

    def with_totals(self, totals: StepTotals) -> Counts:
        """Count where the caller knows the step's totals; raises where ids need more."""
        for kind in ("sample", "prompt"):
            if getattr(self, kind) is not None and getattr(self, f"{kind}_tokens") is None:
                raise PlanError(
                    f"totals= makes no collective, and a {kind} may have sequences on other "
                    f"ranks: give "
                    f"Sequences({kind}_tokens=...), each {kind}'s active tokens over the step, or "
                    "drop totals="
                )
        if self.samples_per_prompt is not None:
            raise PlanError(
                "totals= makes no collective, and samples_per_prompt is checked over the whole "
                "step: drop one of them"
            )
        self._check_totals(totals)
        sample_tokens = self.active_tokens if self.sample is None else self.sample_tokens
        return Counts(
            totals=totals,
            sample_tokens=sample_tokens,
            prompt_tokens=self.prompt_tokens,
            longest_sample=0 if sample_tokens is None else int(sample_tokens.max(initial=0)),
        )

    def _checked_num_microbatches(self) -> int | None:
        m = self.num_microbatches
        if m is not None and not is_integer(m, highest=MOST_TOKENS):
            raise PlanError(
                f"got num_microbatches {m!r}, expected an integer from 0 to 2^53: give the "
                "schedule's num_microbatches"
            )
        if self.microbatch is None:
            return m
        least = int(self.microbatch.max(initial=-1)) + 1
        if m is not None and m < least:
            raise PlanError(
                f"microbatch names microbatch {least - 1}, num_microbatches is {m}: indices "
                "run from 0 to num_microbatches - 1"
            )
        return least if m is None else m

    def _check_samples_per_prompt(self) -> None:
        number = self.samples_per_prompt
        if number is not None and not is_integer(number, lowest=1):
            raise PlanError(
                f"got samples_per_prompt {number!r}, expected an integer from 1: give the number "
                "of samples drawn for each prompt, or leave it out"
            )
        if number is not None and self.prompt is None:
            raise PlanError(f"got samples_per_prompt {number} and no prompt ids: give prompt=")

    def _check_own_samples(self) -> None:
        if self.sample is not None or self.sample_tokens is None:
            return
        wrong = np.flatnonzero(self.sample_tokens != self.active_tokens)
        if len(wrong):
            raise PlanError(
                f"sequence {wrong[0]} is a sample of its own with "
                f"{self.active_tokens[wrong[0]]} active "
                f"tokens, its sample_tokens is {self.sample_tokens[wrong[0]]}: give sample= for a "
                "sample that was split into sequences"
            )

    def _check_totals(self, totals: StepTotals) -> None:
        """Raise where the step's totals, or its ids' tokens, are below those of this rank."""
        table = self.table
        least = {
            "active_tokens": int(self.active_tokens.sum()),
            "samples": len(self.active_tokens),
            "active_samples": int(np.count_nonzero(self.active_tokens)),
        }
        for kind in _ID_KINDS:
            if getattr(self, kind) is not None:
                groups = _Groups.of(getattr(self, kind))
                tokens = _tokens_by_id(kind, table, groups, is_whole=False)
                least |= {f"{kind}s": tokens.num, f"active_{kind}s": tokens.num_active}
                if kind == "sample":
                    _check_one_prompt(table, groups)
        for name in ("active_tokens", "samples", "prompts", "active_samples", "active_prompts"):
            value = getattr(totals, name)
            if value is not None and not is_integer(value, lowest=least.get(name, 0)):
                raise PlanError(
                    f"got StepTotals({name}={value!r}) for a step whose sequences on this "
                    f"rank have "
                    f"{least.get(name, 0)}: give the integer counted over the whole step"
                )


def count_step(
    aggregation: Aggregation,
    sequences: Rows,
    fault: str,
    exchange: Exchange,
    options: Sequence[str] = (),
) -> Counts:
    """Count over the group; every rank raises the same :class:`PlanError` or none does.

    ``options``: what else must be the same on every rank, in words.
    """
    settings = [f"{aggregation} ({aggregation!r})", *options]
    n_S = sequences.active_tokens
    has_ids = sequences.sample is not None or sequences.prompt is not None
    own = _RankCounts(
        has_fault=bool(fault),
        fingerprint=_hashed(_BETWEEN.join([*settings, *sequences.given])),
        samples_per_prompt=sequences.samples_per_prompt or 0,
        string_ids=sum(1 << _ID_KINDS.index(n) for n in sequences.string_ids) if len(n_S) else -1,
        sequences=len(n_S),
        tokens=int(n_S.sum()),
        active_sequences=int((n_S > 0).sum()),
        active_microbatches=sequences.active_microbatches,
        num_microbatches=0 if sequences.microbatch is None else sequences.num_microbatches or 0,
        longest=n_S.max(initial=0),
    )
    gathered = _RankCounts(*exchange.integers(np.array(own, dtype=np.int64)).T)  # int64 [W] each
    of_sequences = gathered.string_ids[gathered.string_ids >= 0]
    same = (gathered.fingerprint, gathered.samples_per_prompt, of_sequences)
    if np.any(gathered.has_fault) or any((values != values[:1]).any() for values in same):
        _raise_together(settings, sequences, fault, exchange)
    _check_sum(f"Sequences.active_tokens of all {exchange.size} ranks", gathered.tokens)
    m_W = gathered.num_microbatches
    means = float((gathered.active_microbatches / m_W).sum()) if np.all(m_W) else None
    totals = StepTotals(
        active_tokens=int(np.sum(gathered.tokens)),
        samples=int(np.sum(gathered.sequences)),
        active_samples=int(np.sum(gathered.active_sequences)),
        microbatch_means=means,
    )
    if not has_ids:
        return Counts(
            totals=totals,
            sample_tokens=n_S,
            prompt_tokens=None,
            longest_sample=int(gathered.longest.max()),
        )

    table = _Table(*exchange.sequences(sequences.table, gathered.sequences))
    first = int(np.sum(gathered.sequences[: exchange.rank]))
    own_sequences = slice(first, first + len(n_S))
    samples, sample_tokens, prompt_tokens = None, n_S, None
    longest = int(gathered.longest.max())
    if sequences.sample is not None:
        samples = _Groups.of(table.sample)
        by_sample = _tokens_by_id("sample", table, samples)
        _check_one_prompt(table, samples)
        sample_tokens = by_sample.of_sequences[own_sequences].copy()  # a view would keep all ranks'
        longest = int(by_sample.of_sequences.max(initial=0))
        totals = replace(totals, samples=by_sample.num, active_samples=by_sample.num_active)
    if sequences.prompt is not None:
        by_prompt = _tokens_by_id("prompt", table, _Groups.of(table.prompt))
        prompt_tokens = by_prompt.of_sequences[own_sequences].copy()
        totals = replace(totals, prompts=by_prompt.num, active_prompts=by_prompt.num_active)
        if sequences.samples_per_prompt is not None:
            _check_samples_per_prompt(table, samples, sequences.samples_per_prompt)
    return Counts(
        totals=totals,
        sample_tokens=sample_tokens,
        prompt_tokens=prompt_tokens,
        longest_sample=longest,
        doubts=tuple(_doubts(sequences, table, gathered.sequences)),
    )


def _doubts(sequences: Rows, table: _Table, sequences_W: Ints) -> Iterator[tuple[str, str]]:
    """Describe ids that look like placeholders, or like numbers that start anew on every rank."""
    if sequences.samples_per_prompt is not None:  # which was checked
        return
    ends_W = np.cumsum(sequences_W)
    for kind in _ID_KINDS:
        if getattr(sequences, kind) is None:
            continue
        ids_A: Ints = getattr(table, kind)
        of_ranks = [np.unique(ids) for ids in np.split(ids_A, ends_W[:-1]) if len(ids)]
        if len(ids_A) > 1 and (ids_A == ids_A[0]).all():
            yield (
                f"one {kind} id",
                f"all {len(ids_A)} sequences of the step have one {kind} id: if that is a "
                f"placeholder, "
                f"leave {kind}= out; one {kind} then has all tokens",
            )
        elif len(of_ranks) > 1 and len(np.unique(ids_A)) == max(map(len, of_ranks)):
            yield (
                f"{kind} ids of every rank",
                f"the data-parallel ranks have the same {kind} ids: ids are global, and numbers "
                f"that start at 0 on every rank merge {kind}s; add an offset per rank, or pass "
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
        """Group by id: in one pass where the ids are close to one another, else by sorting."""
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


class _Table(NamedTuple):
    """What is known of sequences, int64 ``[A]`` each; -1 for an id or claim that is not given."""

    sample: Ints
    prompt: Ints
    tokens: Ints
    sample_tokens: Ints
    """Claimed n_b."""
    prompt_tokens: Ints
    """Claimed n_p."""


class _Tokens(NamedTuple):
    """Active tokens of each id that occurs, and of each sequence's id."""

    num: int
    num_active: int
    of_sequences: Ints


def _tokens_by_id(kind: _Kind, table: _Table, groups: _Groups, *, is_whole: bool = True) -> _Tokens:
    """Sum tokens by id.

    ``is_whole``: the sequences are the whole step's, and a claim must equal the sum; else it may
    not be below it, and must be one claim per id.
    """
    claim_A: Ints = getattr(table, f"{kind}_tokens")
    tokens_I = groups.sums(table.tokens)
    sum_A = tokens_I[groups.index_A]
    differs_A = claim_A != sum_A
    if not is_whole:
        differs_A = (claim_A < sum_A) | (claim_A != groups.one_of(claim_A)[groups.index_A])
    wrong = np.flatnonzero(differs_A & (claim_A != _UNKNOWN))
    if len(wrong):
        raise PlanError(
            f"{kind} {getattr(table, kind)[wrong[0]]} has {sum_A[wrong[0]]} active tokens "
            f"{'in the step' if is_whole else 'on this rank alone'}, "
            f"Sequences.{kind}_tokens is {claim_A[wrong[0]]}: all its sequences belong to one step"
        )
    return _Tokens(groups.num, int(np.count_nonzero(tokens_I)), sum_A)


def _check_one_prompt(table: _Table, samples: _Groups) -> None:
    wrong = np.flatnonzero(table.prompt != samples.one_of(table.prompt)[samples.index_A])
    if len(wrong):
        sample = table.sample[wrong].min()
        found = np.unique(table.prompt[table.sample == sample])
        raise PlanError(
            f"sample {sample} has sequences under {len(found)} prompts ({first_few(found, 4)}): a "
            "sample belongs to one prompt; ids are global over the data-parallel group"
        )


def _check_samples_per_prompt(table: _Table, samples: _Groups | None, number: int) -> None:
    prompt_of_sample = table.prompt
    if samples is not None:
        prompt_of_sample = samples.one_of(table.prompt)[samples.num_sequences_I > 0]
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
    settings: list[str], sequences: Rows, fault: str, exchange: Exchange
) -> NoReturn:
    """Bring the first faulty rank's message to all ranks and raise it on each."""
    ids = [f"{n} (strings)" if n in sequences.string_ids else n for n in sequences.given]
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
        "and give all of them the same ids"
    )


_BETWEEN = "\n"


def _hashed(text: str) -> int:
    encoded = text.encode(errors="surrogatepass")
    return int.from_bytes(hashlib.sha256(encoded).digest()[:8], "big") >> 1


def _check_sum(what: str, tokens: npt.NDArray[np.int64] | int) -> None:
    array = np.asarray(tokens)
    if len(array) * int(array.max(initial=0)) <= MOST_TOKENS:
        return
    total = sum(array.tolist())  # Python's integers do not wrap
    if total > MOST_TOKENS:
        raise PlanError(
            f"{what} sum to {total}, the most that a step can count exactly is 2^53: give the "
            "number of mask positions that are 1"
        )


def _checked(
    name: str, values: IntsLike | None, length: int | None, *, lowest: int | None = None
) -> Ints | None:
    if values is None and length is not None:
        return None
    if isinstance(values, Tensor) and values.device.type != "cpu":
        raise PlanError(
            f"Sequences.{name} is on {values.device}: counts and ids are host integers, pass a "
            "list or a CPU tensor"
        )
    return checked_integers(f"Sequences.{name}", values, PlanError, lowest=lowest, length=length)


def _checked_ids(name: _Kind, ids: Ids | None, length: int) -> Ints | None:
    """Check ids; strings become 63-bit hashes, the same on every rank."""
    if not _are_strings(ids):
        checked = _checked(name, ids, length)  # type: ignore[arg-type]
        if checked is not None and (checked == _UNKNOWN).any():
            raise PlanError(
                f"Sequences.{name}: got the id -1 at index {(checked == _UNKNOWN).argmax()}, which "
                f"frameworks use for an unknown one: give every sequence the id of its "
                f"{name}, or leave "
                f"{name}= out"
            )
        return checked
    array = np.asarray(ids)
    texts, index = np.unique(array.astype(np.str_), return_inverse=True)
    hashes = np.array([_hashed(text) for text in texts.tolist()], dtype=np.int64)
    if len(np.unique(hashes)) < len(texts):
        raise PlanError(f"Sequences.{name}: two strings have one 63-bit hash: pass integer ids")
    return _checked(name, hashes[index.ravel()].reshape(array.shape), length)


def _are_strings(ids: object) -> bool:
    """Whether all of some ids are strings; a mixture is left to be refused as no integers."""
    if isinstance(ids, np.ndarray):
        ids = ids.ravel().tolist() if ids.dtype.kind in "UO" else ()
    if not isinstance(ids, Sequence) or not len(ids):
        return False
    return all(isinstance(one, str) for one in ids)
