"""The sequences of one step, of all data-parallel ranks, and the counts that they give.

:func:`count_step` makes one all-gather of a few integers per rank. A second one of the columns
follows if some beyond counts are passed or a mode needs every sequence; a third one only brings an
error's message to every rank. :class:`StepCounts` has the letters of ``docs/which-mode.md``, which
``modes.py`` and a function of one's own read. Imports NumPy and no torch.

Shape suffixes: S = sequences of this data-parallel rank in the step; A = of the table: all ranks',
or this rank's; W = ranks of the group; I = distinct ids.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar, cast

import numpy as np

from megatron_lossagg.errors import PlanError
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.integers import Ints, is_integer
from megatron_lossagg.reduction.modes import MODES
from megatron_lossagg.reduction.sequences import (
    Checked,
    Floats,
    check_ids,
    check_sample_count,
    check_sum,
    columns_of,
    hashed,
    ids_of,
)

if TYPE_CHECKING:
    from megatron_lossagg.reduction.exchange import Exchange

_Numbers = TypeVar("_Numbers", Ints, Floats)
_BETWEEN = "\n"
_EVERYTHING = Aggregation("token_sum", count_left_out=True)
"""Counts all tokens, samples and prompts that were passed."""


class WhichStep(NamedTuple):
    """Which step is planned, as far as that is known; ranks of a group plan the same."""

    kind: int = 0
    """0 if it is not known, 1 if it trains, 2 if it evaluates."""
    number: int = 0
    """Of a training step, from 1; 0 if it is not known."""

    @staticmethod
    def of(forward_only: bool | None, iteration: object) -> WhichStep:
        """Return it; others refuse what is no number of a step."""
        kind = 0 if forward_only is None else 1 + bool(forward_only)
        is_number = kind == 1 and is_integer(iteration, lowest=1, highest=2**62)
        return WhichStep(kind, cast(int, iteration) if is_number else 0)

    def __str__(self) -> str:
        """Name it in a message."""
        if self.number:
            return f"training step {self.number}"
        return ("a plan", "a training step", "an evaluation")[self.kind]


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Counts of the whole step over the data-parallel group; None if not known.

    Passed to :func:`plan_step` they replace the collectives: a mode raises :class:`PlanError` for
    what they lack.

    Examples:
        >>> totals = StepTotals(active_tokens=8, samples=4)
        >>> sequences = Sequences(active_tokens=[3, 1])
        >>> plan_step(Aggregation("sample_sum"), sequences, totals=totals).weights.tolist()
        [0.25, 0.25]
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


class Counted(dict[str, int]):
    """How much was counted of what, and how much of it is empty: for a line and a record.

    Numbers over all ranks by name; what is not known is not in it, and padding is in none.

    Examples:
        >>> plan = plan_step(Aggregation("sample_mean"), Sequences(active_tokens=[3, 0, 2]))
        >>> print(plan.counted)
        5 active tokens, 3 sequences (1 empty), 3 samples (1 empty), each sequence one
        >>> plan.counted["empty_samples"]
        1
    """

    @staticmethod
    def of_all(each: Sequence[Counted], unknown: Collection[str] = ()) -> Counted:
        """Add up what several plans of one step counted.

        ``unknown``: the kinds of ids, such as ``sample``, that two plans share.
        """
        names = [name for name in each[0] if all(name in one for one in each)]
        known = [name for name in names if not any(kind in name for kind in unknown)]
        return Counted({name: sum(one[name] for one in each) for name in known})

    def __str__(self) -> str:
        """Write the numbers on one line."""
        parts = []
        for kind in ("active_tokens", "sequences", "samples", "prompts", "groups"):
            if kind in self:
                empty = self.get(f"empty_{kind}")
                in_all = f" ({empty} empty)" if empty else ""
                parts.append(f"{self[kind]} {kind.replace('_', ' ')}{in_all}")
            if kind == "samples" and kind in self and self[kind] == self.get("sequences"):
                parts.append("each sequence one")
        if "left_out" in self:
            parts.append(f"{self['left_out']} sequences left out")
        if "padding" in self:
            parts.append(f"{self['padding']} of padding")
        return ", ".join(parts)


@dataclass(frozen=True)
class IdGroups:
    """Sequences grouped by id: how many have each, and sums over them."""

    index_A: Ints
    """Index of each sequence's id among I candidates, not all of which need occur."""
    num_sequences_I: Ints
    """How many sequences have it."""
    is_each: bool = False
    """Whether each sequence has an id of its own, in their order."""

    @staticmethod
    def of(id_A: Ints) -> IdGroups:
        """Group by id: in one pass if the ids are close to one another, else by sorting."""
        if not len(id_A):
            return IdGroups(id_A, id_A)
        low, high = int(id_A.min()), int(id_A.max())
        if high - low > 4 * len(id_A) + 64:
            _, index_A = np.unique(id_A, return_inverse=True)
        else:
            index_A = id_A - low if low else id_A
        return IdGroups(index_A, np.bincount(index_A))

    @staticmethod
    def each(num: int) -> IdGroups:
        """Give each of so many sequences an id of its own."""
        return IdGroups(np.arange(num), np.ones(num, dtype=np.int64), is_each=True)

    @property
    def num(self) -> int:
        """Number of distinct ids."""
        return int(np.count_nonzero(self.num_sequences_I))

    def sums(self, values_A: _Numbers) -> _Numbers:
        """Sum by id, ``[I]``: integers below 2^53 exactly, floats rounded once."""
        if self.is_each:
            return values_A
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """One row per sequence, in the order of the ranks."""

    rows: Checked
    """The columns, ``[A]``."""
    own: slice
    """This rank's rows."""
    rank_A: Ints
    m_W: Ints
    """M of each rank; 0 if it passed no microbatches."""
    size: int | None = 1
    """DP; None if totals were passed without a group in a job of several processes."""
    known: StepTotals | None = None
    """What is known in place of the other ranks' rows, which are not here then."""
    longest: int = 0
    """The largest n_b of the ranks whose rows are not here."""
    num: int | None = None
    """Sequences of all ranks; None if totals were passed."""
    num_left_out: int | None = None
    """How many more there are, which are left out."""
    padding: int | None = None
    """Padding sequences, if every rank says how many it left out."""
    _ids: dict[str, IdGroups | None] = field(default_factory=dict, init=False, repr=False)

    @staticmethod
    def of_rank(sequences: Checked) -> Table:
        """Make the table of one rank."""
        num, m = len(sequences.active_tokens), sequences.num_microbatches or 0
        return Table(
            rows=sequences,
            own=slice(0, num),
            rank_A=np.zeros(num, dtype=np.int64),
            m_W=np.array([0 if sequences.microbatch is None else m]),
        )

    @property
    def kept(self) -> Table:
        """Without the sequences that are left out."""
        # Cached only if it is another: a table in its own cache would wait for the collector.
        return self if self.rows.left_out is None else self._kept

    @cached_property
    def _kept(self) -> Table:
        left_A = self.rows.left_out
        first = int(np.count_nonzero(~left_A[: self.own.start]))
        own = slice(first, first + int(np.count_nonzero(~left_A[self.own])))
        num_left = int(np.count_nonzero(left_A))
        return replace(
            self,
            rows=self.rows.kept,
            own=own,
            rank_A=self.rank_A[~left_A],
            num=len(left_A) - num_left,
            num_left_out=num_left,
        )

    def ids(self, kind: str) -> IdGroups | None:
        """Group the rows by a kind of id; None if none was passed. Each sequence is a sample."""
        if kind not in self._ids:
            id_A: Any = getattr(self.rows, kind)
            if kind == "microbatch" and id_A is not None:  # a microbatch is a rank's
                id_A = id_A + (np.cumsum(self.m_W) - self.m_W)[self.rank_A]
            without = IdGroups.each(len(self.rank_A)) if kind == "sample" else None
            self._ids[kind] = without if id_A is None else IdGroups.of(id_A)
        return self._ids[kind]

    @property
    def counts(self) -> StepCounts:
        """Its counts in tokens, whatever an aggregation counts."""
        return StepCounts(self)

    @cached_property
    def totals(self) -> StepTotals:
        """Those of the whole step."""
        names, counts = vars(StepTotals()), self.counts
        return self.known or StepTotals(**{name: counts.total(name) for name in names})

    @cached_property
    def counted(self) -> Counted:
        """How much it has of what."""
        counts, numbers = self.counts, {"sequences": self.num}
        of = vars(self.totals) | {n: counts.total(n) for n in ("groups", "active_groups")}
        if self.num is not None:
            active: Any = of["active_samples"]  # each sequence is one, without their rows
            if self.known is None:
                active = int(np.count_nonzero(self.rows.active_tokens))
            numbers["empty_sequences"] = self.num - active
        for kind in ("samples", "prompts", "groups"):
            numbers[kind] = of[kind]
            if of[kind] is not None and self.num is not None:
                numbers[f"empty_{kind}"] = of[kind] - of[f"active_{kind}"]
        numbers = {"active_tokens": of["active_tokens"], **numbers}
        numbers |= {"left_out": self.num_left_out or None, "padding": self.padding}
        return Counted({name: number for name, number in numbers.items() if number is not None})


def known_step(sequences: Checked, totals: StepTotals, size: int | None) -> Table:
    """Make a rank's table with totals that the caller knows; raises :class:`PlanError`."""
    for name, one in columns_of(type(sequences)).items():
        if not (one.with_totals or one.is_alone or getattr(sequences, name) is None):
            raise PlanError(
                f"got totals= and {name}=, but only counting finds what other ranks have of it: "
                f"drop totals= or {name}="
            )
    n_S = sequences.active_tokens
    least = {"active_tokens": int(n_S.sum()), "samples": len(n_S)}
    least["active_samples"] = int(np.count_nonzero(n_S))
    for name in ("active_tokens", "samples", "prompts", "active_samples", "active_prompts"):
        value, lowest = getattr(totals, name), least.get(name, 0)
        if value is not None and not is_integer(value, lowest=lowest):
            raise PlanError(
                f"got StepTotals({name}={value!r}), expected an integer from {lowest}, "
                "which this rank's sequences have: pass the count of the whole step"
            )
    check_sample_count(sequences.sample_count, totals.samples, has_ids=True)
    return replace(Table.of_rank(sequences), known=totals, size=size)


def check_totals(given: StepTotals, counted: StepTotals) -> None:
    """Raise :class:`PlanError` for totals that are not those of the group's sequences."""
    for name, value in vars(given).items():
        found = getattr(counted, name)
        if value is None or found is None:
            continue
        # A sum of fractions may differ in its last bit.
        if not (isinstance(value, Real) and math.isclose(value, found, rel_tol=1e-9)):
            raise PlanError(
                f"got StepTotals({name}={value!r}), the group's sequences have {found}: pass the "
                "totals of the whole step over the data-parallel group, or drop totals="
            )


def count_step(
    aggregation: Aggregation,
    sequences: Checked,
    fault: Exception | None = None,
    exchange: Exchange | None = None,
    settings: Iterable[str] = (),
    which: WhichStep = WhichStep(),  # noqa: B008  a constant
    *,
    shadows: Iterable[Aggregation] = (),
) -> Table:
    """Count over the group; every rank raises the same :class:`PlanError` or none does.

    ``fault``: why this rank has no sequences. ``exchange``: None is this process only.
    ``settings``: what else must be the same on every rank, in words. ``which``: the step, by its
    kind and number. ``shadows``: aggregations for which is counted too.
    """
    own, n_S = Table.of_rank(sequences), sequences.active_tokens
    settings = [f"{aggregation} ({aggregation!r})", *settings]
    entries = sequences.entries()
    strings = [kind in sequences.string_ids for kind in ids_of(type(sequences))]
    sent = {
        "has_fault": fault is not None,
        # The same on every rank: the aggregation, the options, and what is passed.
        "same": hashed(_BETWEEN.join([*settings, *sequences.said(strings=False), *entries])),
        # A bit per kind of id that is passed as strings; -1 if there are no sequences.
        "strings": sum(1 << n for n, one in enumerate(strings) if one) if len(n_S) else -1,
        **which._asdict(),
        "sequences": len(n_S),
        "tokens": int(n_S.sum()),
        "active_sequences": int(np.count_nonzero(n_S)),
        "active_microbatches": own.counts.active_microbatches_W[0],
        "m": own.m_W[0],
        "longest": int(n_S.max(initial=0)),
        "padding": -1 if sequences.num_padding is None else sequences.num_padding,
    }
    sent_K = np.array([*sent.values()], dtype=np.int64)
    numbers_WK = sent_K[None] if exchange is None else exchange.integers(sent_K)
    of_ranks = dict(zip(sent, numbers_WK.T, strict=True))
    strings_W, *known = (of_ranks[name] for name in ("strings", "kind", "number"))
    same = [of_ranks["same"], strings_W[strings_W >= 0], *(one[one > 0] for one in known)]
    if of_ranks["has_fault"].any() or any((values != values[:1]).any() for values in same):
        assert exchange is not None
        said = [str(which), *settings, *sequences.said(strings=True)]
        _raise_together(said, fault, exchange)
    size, num_W, padding_W = len(numbers_WK), of_ranks["sequences"], of_ranks["padding"]
    check_sum(f"Sequences.active_tokens of all {size} ranks", of_ranks["tokens"])
    padding = int(padding_W.sum()) if (padding_W >= 0).all() else None
    about = {"m_W": of_ranks["m"], "size": size, "num": int(num_W.sum()), "padding": padding}
    needs_all = any(MODES[one.mode].needs_all for one in (aggregation, *shadows))
    if size == 1 or needs_all or entries.keys() - {"active_tokens", "microbatch"}:
        rows = sequences
        if size > 1:
            assert exchange is not None
            rows = sequences.with_entries(_gathered(entries, of_ranks, exchange))
        first = int(num_W[: exchange.rank].sum()) if exchange else 0
        rank_A = np.repeat(np.arange(size), num_W)
        table = replace(own, rows=rows, own=slice(first, first + len(n_S)), rank_A=rank_A, **about)
        check_ids(table, sequences.samples_per_prompt)
    else:
        totals = StepTotals(
            active_tokens=int(of_ranks["tokens"].sum()),
            samples=int(num_W.sum()),
            active_samples=int(of_ranks["active_sequences"].sum()),
            microbatch_means=_means(of_ranks["active_microbatches"], of_ranks["m"]),
        )
        assert exchange is not None
        rank_A = np.full(len(n_S), exchange.rank)  # of this rank's rows only, among all ranks' M
        longest = int(of_ranks["longest"].max())
        table = replace(own, known=totals, longest=longest, rank_A=rank_A, **about)
    found, has_ids = table.totals.samples, sequences.sample is not None
    check_sample_count(sequences.sample_count, found, has_ids=has_ids)
    return table


def _gathered(
    entries: Mapping[str, Any], of_ranks: Mapping[str, Ints], exchange: Exchange
) -> dict[str, Any]:
    """Gather the entries of all ranks, which travel as integers.

    A sequence's microbatch travels with its tokens, as one number.
    """
    own = {
        name: one.astype(np.int64) if one.dtype == bool else one.view(np.int64)
        for name, one in entries.items()
    }
    base = int(of_ranks["longest"].max()) + 1
    is_packed = "microbatch" in own and base * (int(of_ranks["m"].max()) + 1) < 2**62
    if is_packed:
        own["active_tokens"] = own["active_tokens"] + base * own.pop("microbatch")
    columns = exchange.ragged([*own.values()], of_ranks["sequences"])
    found = dict(zip(own, columns, strict=True))
    if is_packed:
        found["microbatch"], found["active_tokens"] = np.divmod(found["active_tokens"], base)
    return {
        name: found[name].astype(bool) if one.dtype == bool else found[name].view(one.dtype)
        for name, one in entries.items()
    }


def _means(active_W: Ints, m_W: Ints) -> float | None:
    """Sum, over ranks, the fraction of microbatches that are active; None if M is not known."""
    return float((active_W / m_W).sum()) if m_W.all() else None


def _raise_together(said: list[str], fault: Exception | None, exchange: Exchange) -> NoReturn:
    """Raise on all ranks what one has found, or in what they differ."""
    with exchange.together() as ranks:
        if fault is not None:
            raise fault
        ranks.own = said
    first = ranks.of_ranks[0]
    other = next((rank for rank, own in enumerate(ranks.of_ranks) if own != first), 0)
    pairs = zip(first, ranks.of_ranks[other], strict=False)
    differing = [pair for pair in pairs if pair[0] != pair[1]]
    raise PlanError(
        f"ranks of the data-parallel group disagree: rank 0 has "
        f"{' and '.join(first for first, _ in differing)}, rank {other} has "
        f"{' and '.join(second for _, second in differing)}: start all ranks with the same flags, "
        "pass the same ids on all of them, and begin the same steps in the same order"
    )


class StepCounts:
    """One step's counts as an aggregation counts them, by the letters of the math page.

    What the modes' formulas and a weights function read. N, B, P, V, Q, R, Z, L, C, a and DP are
    numbers; the others are float64 ``[A]``, one entry per sequence of the step, in the same order
    on every rank. With ``count_empty=False`` only samples, prompts and sequences with active tokens
    are counted; with ``count="weights"`` tokens are token weights. What was not passed raises
    :class:`PlanError`.

    Examples:
        The mean of each prompt's mean over samples, of samples' token means:

        >>> def weights(counts):
        ...     return 1 / (counts.P * counts.k_p * counts.n_b)
        >>> sequences = Sequences(active_tokens=[4, 1, 5], prompt=["a", "a", "b"])
        >>> plan_step(Aggregation(weights=weights), sequences).weights.tolist()
        [0.0625, 0.25, 0.1]
    """

    def __init__(
        self,
        table: Table,
        aggregation: Aggregation = _EVERYTHING,
        given: Mapping[str, float] | None = None,
    ) -> None:
        self._table = table if aggregation.count_left_out else table.kept
        self._of = aggregation
        self._given = given or {}
        """Numbers that stand in place of counts, by letter."""
        self._found: dict[str, Any] = {}
        self._counts_empty = bool(aggregation.count_empty)
        name = "token_weight_sums" if aggregation.count == "weights" else "active_tokens"
        self._counted_A: Any = getattr(self._table.rows, name)
        if self._counted_A is None:
            raise self._lacks_column(name)

    def total(self, name: str) -> Any:
        """Return a count of the step by its name in :class:`StepTotals`; None if not known."""
        if name not in self._found:
            self._found[name] = self._total(name)
        return self._found[name]

    def _total(self, name: str) -> Any:
        if self._table.known is not None:
            return getattr(self._table.known, name, None)
        if name == "active_tokens":
            is_float = self._counted_A.dtype.kind == "f"
            return math.fsum(self._counted_A) if is_float else int(self._counted_A.sum())
        if name == "microbatch_means":
            return _means(self.active_microbatches_W, self._table.m_W)
        ids = self._table.ids(name.removeprefix("active_").removesuffix("s"))
        if ids is not None and name.startswith("active_"):
            return int(np.count_nonzero(ids.sums(self._counted_A)))
        return None if ids is None else ids.num

    def known(self, letter: str) -> Any:
        """Return N, B, P, V or Q, or what stands in its place; None if it is not known."""
        return self._given.get(letter, self.total(self._name_of(letter)))

    def _name_of(self, letter: str) -> str:
        if letter in ("B", "P") and not self._counts_empty:
            letter = {"B": "V", "P": "Q"}[letter]
        return _NAMES[letter]

    def _number(self, letter: str) -> float:
        found, name = self.known(letter), self._name_of(letter)
        if found is None and name.endswith("prompts"):
            raise self._lacks_column("prompt")
        if found is None:
            raise self._lacks(f"StepTotals({name}=...) of the whole step")
        return float(found)

    @property
    def is_empty(self) -> bool:
        """Whether N is known to be 0."""
        return bool(self.total("active_tokens") == 0)

    @property
    def N(self) -> float:
        """Active tokens of the step."""
        return self._number("N")

    @property
    def B(self) -> float:
        """Samples of the step; V with ``count_empty=False``."""
        return self._number("B")

    @property
    def P(self) -> float:
        """Prompts of the step; Q with ``count_empty=False``."""
        return self._number("P")

    @property
    def V(self) -> float:
        """Samples with an active token."""
        return self._number("V")

    @property
    def Q(self) -> float:
        """Prompts with an active token."""
        return self._number("Q")

    @property
    def R(self) -> float:
        """Rows: sequences of the step."""
        return float(self._is_row_A.sum())

    @property
    def L(self) -> float:
        """The divisor, 1 by default."""
        return self._given.get("L", self._of.divisor or 1.0)

    @property
    def C(self) -> float:
        """The divisor under its name in ``token_sum``."""
        return self.L

    @property
    def a(self) -> float:
        """The exponent."""
        return self._of.exponent or 0.0

    @property
    def DP(self) -> int:
        """Data-parallel ranks."""
        if self._table.size is None:
            raise self._lacks("group=, also with totals=")
        return self._table.size

    @property
    def n_s(self) -> Floats:
        """Active tokens of the sequence."""
        return np.array(self._counted_A, dtype=np.float64)  # a copy, which a function may change

    @property
    def n_b(self) -> Floats:
        """Active tokens of its sample."""
        return self._sum_of("sample", self._counted_A)

    @property
    def n_p(self) -> Floats:
        """Active tokens of its prompt."""
        return self._sum_of("prompt", self._counted_A)

    @property
    def n_c(self) -> Floats:
        """Active tokens of its group, ``Sequences(group=...)``."""
        return self._sum_of("group", self._counted_A)

    @property
    def n_mb(self) -> Floats:
        """Active tokens of its microbatch."""
        return self._sum_of("microbatch", self._counted_A)

    @property
    def M(self) -> Floats:
        """Microbatches of its rank."""
        if self._table.rows.microbatch is None:
            raise self._lacks_column("microbatch")
        return self._table.m_W[self._table.rank_A].astype(np.float64)

    @property
    def R_b(self) -> Floats:
        """Rows: sequences of its sample."""
        return self._sum_of("sample", self._is_row_A)

    @property
    def k_p(self) -> Floats:
        """Samples of its prompt."""
        return self._sum_of("prompt", self._is_sample_A)

    @property
    def k_c(self) -> Floats:
        """Samples of its group."""
        return self._sum_of("group", self._is_sample_A)

    @property
    def columns(self) -> Mapping[str, Floats]:
        """The caller's own numbers by name, ``Sequences(columns=...)``; whole, empty ones too."""
        return _Columns(self.every().rows.columns or {})

    @property
    def n_b_to_a(self) -> Floats:
        """n_b^a."""
        return _powers(self.n_b, self.a)

    @property
    def Z(self) -> float:
        """The sum of n_b^(1-a) over the step's samples, rounded once.

        It depends neither on the order of samples nor on how ranks share them.
        """
        if "Z" in self._given:
            return self._given["Z"]
        samples: Any = self.every("the lengths of all ranks' samples").ids("sample")
        lengths, counts = np.unique(samples.sums(self._counted_A), return_counts=True)
        try:
            with np.errstate(over="ignore"):
                return math.fsum(_powers(lengths, 1 - self.a) * counts)
        except OverflowError:
            raise _beyond(lengths, 1 - self.a) from None

    @property
    def microbatch_means(self) -> float:
        """The sum over ranks of (microbatches with an active token) / (M of the rank)."""
        found = self.total("microbatch_means")
        if found is None:
            raise self._lacks_column("microbatch")
        return float(found)

    @property
    def active_microbatches_W(self) -> Ints:
        """Microbatches with an active token of each rank."""
        ids, num = self._table.ids("microbatch"), len(self._table.m_W)
        if ids is None:
            return np.zeros(num, dtype=np.int64)
        rank_I = ids.one_of(self._table.rank_A)
        active_W: Ints = np.bincount(rank_I[ids.sums(self._counted_A) > 0], minlength=num)
        return active_W

    def every(self, what: str = "the sequences of all ranks") -> Table:
        """Return the rows of all ranks; raises :class:`PlanError` if they were not gathered."""
        if self._table.known is not None:
            raise self._lacks(f"{what} (plan under it, without totals=)")
        return self._table

    @property
    def _is_row_A(self) -> Ints:
        """1 for each sequence that counts."""
        self.every()
        is_row_A: Ints = ((self._counted_A > 0) | self._counts_empty).astype(np.int64)
        return is_row_A

    @property
    def _is_sample_A(self) -> Ints:
        """1 for the first sequence of each sample that counts."""
        samples: Any = self.every().ids("sample")
        _, first = np.unique(samples.index_A, return_index=True)
        is_sample_A = np.zeros(len(self._counted_A), dtype=np.int64)
        counted_A = samples.sums(self._counted_A)[samples.index_A]
        is_sample_A[first] = (counted_A[first] > 0) | self._counts_empty
        return is_sample_A

    def _sum_of(self, kind: str, values_A: Any) -> Floats:
        """Sum over the sequences of one id, for each of them; exact up to 2^53."""
        ids = self._table.ids(kind)
        if ids is None:
            raise self._lacks_column(kind)
        sums = values_A if ids.is_each else ids.sums(values_A)[ids.index_A]
        return np.array(sums, dtype=np.float64)  # a copy, as of n_s

    def _lacks_column(self, name: str) -> PlanError:
        one = columns_of(type(self._table.rows))[name]
        return self._lacks(f"Sequences({name}=...){'' if one.with_totals else ' without totals='}")

    def _lacks(self, what: str) -> PlanError:
        return PlanError(f"{self._of} needs {what}, which was not passed")


_NAMES = {
    "N": "active_tokens",
    "B": "samples",
    "P": "prompts",
    "V": "active_samples",
    "Q": "active_prompts",
}
"""Of :class:`StepTotals`, by letter."""


class _Columns(dict[str, Any]):
    """The columns that were passed; another name is an error of the step."""

    def __missing__(self, name: str) -> Any:
        raise PlanError(
            f"the weights function reads the column {name!r}, and the step has "
            f"{', '.join(map(repr, self)) or 'none'}: pass Sequences(columns={{{name!r}: ...}}), "
            "one number per sequence"
        )


def _powers(length_A: Floats, exponent: float) -> Floats:
    """Raise lengths to a power, the same for a length wherever it stands; 0 for an empty one."""
    lengths, index = np.unique(length_A, return_inverse=True)
    try:
        powers = [math.pow(n, exponent) if n else 0.0 for n in lengths.tolist()]
    except OverflowError:
        powers = []
    if len(lengths) and np.count_nonzero(powers) < np.count_nonzero(lengths):
        raise _beyond(lengths, exponent)
    return np.array(powers, dtype=np.float64)[index.reshape(-1)]


def _beyond(lengths: Any, exponent: float) -> PlanError:
    return PlanError(
        f"samples of up to {lengths[-1]:g} tokens to the power {exponent:g} are beyond float64: "
        "change --loss-aggregation-exponent (exponent=)"
    )
