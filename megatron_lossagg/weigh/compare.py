"""From what all ranks have heard to sequences, modes, a verdict and its cause.

NumPy only; knows no groups.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import isclose
from typing import Any

import numpy as np

from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.modes import MODES
from megatron_lossagg.reduction.sequences import Sequences
from megatron_lossagg.reduction.table import StepCounts, Table
from megatron_lossagg.weigh.causes import (
    OWN,
    PLACE,
    Added,
    Array,
    Explanation,
    Step,
    bounds,
    common,
    constant,
    counted_empty,
    equal_to,
    explanations,
    is_near,
    likely,
    measure,
    numbered,
    spread,
    written,
)

COMPARED = ("token_mean", "sample_mean", "sample_sum", "token_sum", "microbatch_token_mean")
"""The modes that need nothing but the tokens of sequences and microbatches."""
NEEDS = {
    "prompt_mean": "prompt",
    "row_mean": "sample",
    "balanced": "group",
    "constant": "divisor",
    "length_power": "exponent",
}
"""What each of the others needs, by its name in :meth:`Weighing.losses` or :class:`Weighing`."""
_IDS = ("sample", "prompt", "group")
_NOT_FINALIZED = (
    "it was not finalized: config.finalize_model_grads_func was not called while it ran, or "
    "was set inside of the block, or a deferred step holds it"
)
_UNHEARD = (
    "its loss does not follow from what was heard: on a rank parameters have a gradient, and no "
    "token's loss has one; compute the loss there from what losses() returns"
)
_APART = (
    "tensor-parallel ranks weigh the same tokens differently: compute the loss from the same mask "
    "and the same numbers on each of them"
)
_OTHER_IDS = (
    "context-parallel ranks have different ids for a sequence: pass a microbatch's sequences in "
    "the same order on each of them"
)
OVER_SAMPLES = ("sample_mean", "sample_sum")
"""Those of them that divide by B, which may count sequences without a token."""
TOLERANCE = 1e-4
"""Relative, of float32 losses: a few roundings of the script's own."""
_FINEST = 1e-6
"""Relative: how well a weight in float32 is known at best."""


@dataclass(frozen=True, kw_only=True)
class WeighedSequence:
    """One sequence, whole over its context-parallel ranks; weights are a_t."""

    dp_rank: int
    """With dynamic context parallelism: the first rank of its microbatch's group."""
    microbatch: int
    sequence: int
    """Its segment in the microbatch."""
    name: str = ""
    """What a framework calls it, if it has a name for it."""
    tokens: int
    """Those with a weight."""
    weight_sum: float
    weight_min: float
    weight_max: float
    lowest: float
    """The smallest of what has to be w_s: weights over those of the token and the sequence in the
    loss."""
    highest: float
    """The largest."""
    outside: int = 0
    """Those of its tokens that are not in the mask."""
    missed: int = 0
    """Tokens of the mask without a weight."""
    n: float
    """What a mode counts of it: its tokens, or the sum of their weights in the loss; by the step
    that was told, with tokens that were rejected since."""
    sample: Hashable = None
    prompt: Hashable = None
    group: Hashable = None

    @property
    def is_plain(self) -> bool:
        """Whether a weight is what has to be w_s."""
        return (self.lowest, self.highest) == (self.weight_min, self.weight_max)

    @property
    def mean(self) -> float:
        """The mean of what has to be w_s; of weights of tokens the middle."""
        return self.weight_sum / self.tokens if self.is_plain else (self.lowest + self.highest) / 2


PART = np.dtype(
    [
        *((name, int) for name in ("dp_rank", "cp_rank", "microbatch", "sequence", "m")),
        *((name, int) for name in ("tokens", "outside", "missed", "length", "padded")),
        *((name, float) for name in ("weight_sum", "weight_min", "weight_max", "moment")),
        *((name, float) for name in ("lowest", "highest", "n", "told")),
        *((name, object) for name in ("name", "shown", *_IDS)),
    ]
)
"""What one rank holds of one sequence of a microbatch; weights are g_t, 0 of no token.

As of :class:`WeighedSequence`; and ``m``: M of the rank; ``moment``: the sum of absolute weights,
each times its position in the losses; ``length``, ``padded``: losses of the sequence and of its
microbatch here, padding included; ``told``: ``n`` of the whole sequence, by the step that was told,
else NaN; ``shown``: its positions, if it is short: which have a weight, and which the mask has.
"""


def parts_of(num: int, **columns: Any) -> Array:
    """Make rows of ``PART``; of a column that is not passed nothing is known."""
    nothing = {"told": np.nan, **dict.fromkeys(("name", "shown"), [""] * num)}
    found = np.zeros(num, PART)
    for name, values in {**nothing, **dict.fromkeys(_IDS, [None] * num), **columns}.items():
        # An id may be a tuple.
        found[name] = np.fromiter(values, object, num) if PART[name].hasobject else values
    return found


@dataclass(frozen=True, kw_only=True)
class RankWeights:
    """What one rank has heard; ``sizes``: M, DP, CP, TP and PP."""

    sizes: Mapping[str, int]
    parts: Array
    """Rows of ``PART``."""
    place: tuple[int, int] = (0, 0)
    """Its data- and its context-parallel rank."""
    moment: float | None = None
    """That of all its tokens, which tensor-parallel ranks have in common; None if it has no loss.
    """
    num_tokens: float | None
    """What this rank passed to Megatron's finalize function, which divides by the sum of ranks that
    count; None if it passed none."""
    is_finalized: bool
    counts: bool
    """Whether this rank's tokens count: last pipeline stage, first tensor-parallel rank."""
    tolerance: float
    """Relative: how far apart weights may be that are one."""
    factor: float = 1.0
    """What f should be but for the division by num_tokens."""
    added: Sequence[Added] = ()
    """The gradients of some parameters, at which f is measured."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """``divisor`` and ``exponent``, if they were passed, and the run's own ``mode``, of
    ``token_sum`` with its ``C``.
    """
    has_graph: bool = True
    """Whether its losses had a graph."""
    unheard: int = 0
    """Of how many microbatches it heard nothing."""
    zeroed: int = 0
    """How many calls are not counted, for gradients were zeroed after they trained."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """What was not compared, and why."""

    @property
    def has_gradient(self) -> bool:
        """Whether its backward passes added to a parameter."""
        return any(one.added.any() for one in self.added)


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """A weighed step."""

    sizes: Mapping[str, int]
    sequences: Sequence[WeighedSequence]
    """Those with a trained token."""
    num_empty: int
    """How many sequences, or segments of padding, have none."""
    counted_empty: int
    """How many of them the trained mode counts: those with the id of a sample of their own."""
    weight_sum: float
    modes: Mapping[str, tuple[float, float]]
    """Smallest and largest a_t / w_s of each mode that was compared."""
    lacks: Mapping[str, str]
    """What each mode, or what else was not compared, needs."""
    trains: str | None
    """The mode that is trained, if a_t / w_s is 1; the first of ``fits``. None if tokens outside of
    the mask have a weight, or some of the mask have none.
    """
    fits: Sequence[str]
    """All modes of which a_t / w_s is 1: in a step of equally long sequences, several."""
    unknown: str
    """Why the gradients are not those of these weights, in short, a colon, and in full; then
    ``fits`` is empty.
    """
    is_measured: bool
    """Whether f was measured; if not, it is what Megatron's or torch's own code does."""
    nearest: str
    """The mode whose ratios are closest to one another."""
    factors: Mapping[str, float]
    """a_t / w_s of each mode for which it is the same for all tokens."""
    relative: Sequence[float]
    """Each sequence's mean weight of a token over that of ``nearest``."""
    inside: float
    """The largest weight over the smallest in one sequence."""
    outside: int = 0
    """Tokens with a weight that are not in the mask."""
    missed: int = 0
    """Tokens of the mask without a weight."""
    shown: str = ""
    """The positions of a short sequence."""
    unheard: str = ""
    """Of how many microbatches nothing was heard: B is not known then."""
    zeroed: int = 0
    """How many calls of a rank are not counted, for gradients were zeroed after they trained."""
    faults: Sequence[str] = ()
    """Why gradients are not what they should be."""
    explained: Sequence[Explanation] = field(default=(), repr=False)
    """What explains the weight of every token of this step, and of those before it."""
    hints: Sequence[str] = ()
    """What would explain them if more were known."""
    steps: int = 1
    """How many steps ``explained`` explains."""
    is_per_token: bool = False
    """Whether Megatron divides by num_tokens."""

    @property
    def causes(self) -> tuple[str, ...]:
        """What explains the numbers, by name."""
        found: list[str] = []
        if not self.fits or self.fits[0].startswith("microbatch_token_mean"):
            found = likely(self.explained, is_mode=bool(self.fits))
            found = [f"{one}, in {self.steps} steps" if self.steps > 1 else one for one in found]
        return *self.faults, *found, *self.hints

    def after(self, before: Weighed | None) -> Weighed:
        """Return it with only those explanations that explain the step before it too."""
        if before is None or not (before.explained and self.explained):
            return self
        found = common(self.explained, before.explained, TOLERANCE)
        if not found:
            return replace(self, hints=(*self.hints, "no cause explains the step before it too"))
        return replace(self, explained=found, steps=before.steps + 1)

    def __str__(self) -> str:
        """Return the report that ``lossagg weigh`` prints."""
        from megatron_lossagg.weigh.report import text

        return text(self, advises=False)

    def fits_mode(self, mode: str) -> bool:
        """Whether it is trained, or one that this step does not tell from it."""
        return self.trains is not None and mode in {_mode_of(name) for name in self.fits}

    def alike(self, mode: str) -> list[str]:
        """Name the other modes that this step does not tell from one, and a later one may."""
        is_one = self.sizes["M"] * self.sizes["DP"] == 1
        same = {"token_mean", "microbatch_token_mean"} if is_one else set()
        found = dict.fromkeys(_mode_of(name) for name in self.fits)
        return [name for name in found if name != mode and not {name, mode} <= same]

    @property
    def factor(self) -> float | None:
        """a_t over the weight of ``nearest`` if it is the same for all tokens, else None."""
        return self.factors.get(self.nearest)

    @property
    def verdict(self) -> str:
        """Say in a line what is trained."""
        if self.unknown:
            return f"not known, for {self.unknown.split(':')[0]}"
        if all(one.weight_min == one.weight_max == 0 for one in self.sequences):
            return "trains nothing: no token has a weight"
        return self._trained + self._beside_the_mask

    @property
    def _trained(self) -> str:
        if self.fits:
            others = f", and so {' and '.join(self.fits[1:])}: this step cannot tell them apart"
            return f"trains {self.fits[0]}{others * (len(self.fits) > 1)}"
        if self.factor is not None:
            unknown = self.unheard and self.nearest in OVER_SAMPLES
            heard = f", if B counts no sample of {self.unheard}" if unknown else ""
            return f"trains {self.factor:.6g} times {self.nearest}{heard}"
        low, high = self.modes[self.nearest]
        at = f"{low:.4g} to {high:.4g} times its weights"
        return f"trains no mode; nearest is {self.nearest}, {at}"

    @property
    def _beside_the_mask(self) -> str:
        words = f" of {self.tokens:,} tokens, of which {self.outside:,} are outside of the mask"
        missed = f"; {self.missed:,} tokens of the mask have no weight"
        return words * (self.outside > 0) + missed * (self.missed > 0)

    @property
    def tokens(self) -> int:
        """N: the tokens of all sequences."""
        return sum(sequence.tokens for sequence in self.sequences)


def _mode_of(name: str) -> str:
    """Return the mode of a name such as ``sample_mean without its 3 empty``."""
    return name.split(" ")[0]


def compare(ranks: Sequence[RankWeights], *, is_heard: bool = True) -> Weighed:
    """Compare the weights of a step with every mode; ``ranks``: of the whole world.

    ``is_heard``: whether what trains came by losses, of this term or of another.
    """
    counted = [rank for rank in ranks if rank.counts]
    f, unheard = _F.of(ranks), _unheard(counted)
    parts = _parts(counted, f.value)
    every = _put_together(parts)
    if unheard:  # nobody knows which other samples, prompts and groups there are
        for kind in _IDS:
            every[kind] = None
    rows = every[every["tokens"] > 0]
    empty = every[(every["tokens"] == 0) & (every["missed"] == 0)]
    m_of_ranks = dict(zip(parts["dp_rank"].tolist(), parts["m"].tolist(), strict=True))
    sizes = {**counted[0].sizes, "M": max(rank.sizes["M"] for rank in counted)}
    tolerance = max(rank.tolerance for rank in counted)
    weights, lacks, known_empty = _weights(rows, empty, m_of_ranks, counted)
    lowest_S, highest_S, sequences = rows["lowest"], rows["highest"], _sequences(rows)
    modes = {
        name: (float((lowest_S / weight_S).min()), float((highest_S / weight_S).max()))
        for name, weight_S in weights.items()
    }
    found = {name: constant(low, high, tolerance) for name, (low, high) in modes.items()}
    outside, missed = int(every["outside"].sum()), int(every["missed"].sum())
    unknown = f.unknown or ("" if is_heard else _UNHEARD)
    unknown = unknown or _APART * _are_apart(ranks, tolerance)
    if not any(found.values()):  # else ids may be of no matter
        unknown = unknown or _OTHER_IDS * _mixes_ids(parts)
    if not_finite := int((~np.isfinite(rows["weight_sum"])).sum()):
        unknown = f"weights of {not_finite} sequences are not finite: does its loss divide by 0?"
    fits = [name for name, at in found.items() if at and is_near(at, 1, tolerance)]
    fits = [] if unknown else fits
    apart = {name: float(f"{spread(*bounds):.6g}") for name, bounds in modes.items()}
    nearest = min(apart, key=lambda name: apart[name], default="token_mean")
    nearest = fits[0] if fits else nearest
    step = Weighed(
        sizes=sizes,
        sequences=sequences,
        num_empty=len(empty),
        counted_empty=known_empty if known_empty and fits and " without " not in fits[0] else 0,
        weight_sum=float(rows["weight_sum"].sum()),
        modes=modes,
        lacks=lacks,
        trains=fits[0] if fits and not outside and not missed else None,
        fits=fits,
        unknown=unknown,
        is_measured=f.is_measured,
        nearest=nearest,
        factors={name: at for name, at in found.items() if at is not None},
        relative=[
            one.mean / weight
            for one, weight in zip(sequences, weights.get(nearest, ()), strict=True)
        ],
        inside=max(map(spread, lowest_S.tolist(), highest_S.tolist()), default=1.0),
        outside=outside,
        missed=missed,
        unheard=unheard,
        zeroed=max(rank.zeroed for rank in ranks),
        shown=_shown(parts),
        is_per_token=any(rank.num_tokens is not None for rank in counted),
    )
    return _explained(step, counted, parts, f, weights, tolerance, has_ids=known_empty is not None)


def _are_apart(ranks: Sequence[RankWeights], tolerance: float) -> bool:
    """Whether tensor-parallel ranks, which have the same tokens, weigh them differently."""
    of_place: dict[tuple[int, int], list[float]] = {}
    for rank in ranks:
        of_place.setdefault(rank.place, []).extend([] if rank.moment is None else [rank.moment])
    return any(
        not isclose(one, other, rel_tol=tolerance)
        for one, *others in filter(None, of_place.values())
        for other in others
    )


def _mixes_ids(parts: Array) -> bool:
    """Whether parts that are put together have different ids."""
    number, first = numbered(parts, PLACE)
    pairs = (zip(parts[kind], parts[first][kind][number], strict=True) for kind in _IDS)
    return any(None not in (one, other) and one != other for one, other in chain(*pairs))


def _unheard(ranks: Sequence[RankWeights]) -> str:
    """Say of how many microbatches nothing was heard; context-parallel ranks hear the same ones."""
    cp_size = ranks[0].sizes["CP"]
    unheard, m = (
        sum(of) // cp_size for of in zip(*((r.unheard, r.sizes["M"]) for r in ranks), strict=True)
    )
    return f"{unheard} of {m} microbatches, of which nothing was heard" if unheard else ""


def _shown(parts: Array) -> str:
    """Return the positions of the shortest sequence with some, which is off the mask if one is."""
    able = parts[parts["shown"].astype(bool)]
    if not len(able):
        return ""
    is_right, length = able["outside"] + able["missed"] == 0, [*map(len, able["shown"])]
    one = able[np.lexsort((length, is_right))[0]]
    place = "/".join(str(one[name]) for name in PLACE)
    return f"{place} (rank/microbatch/number): {one['shown']}"


@dataclass(frozen=True, kw_only=True)
class _F:
    """f of a step."""

    value: float
    read: float
    is_measured: bool
    num_tokens: float
    """What finalize divides by, of all ranks; 0 if it should not divide, or by nothing."""
    unknown: str = ""
    """Why it is not one number."""

    @staticmethod
    def of(ranks: Sequence[RankWeights]) -> _F:
        """Measure f, and compare it with what it should be."""
        counted = [rank for rank in ranks if rank.counts]
        num_tokens = max(sum(rank.num_tokens or 0.0 for rank in counted), 0.0)
        read = counted[0].factor / (num_tokens or 1.0)
        others = [rank for rank in ranks if not rank.counts]
        found = measure(one for rank in (*counted, *others) for one in rank.added)
        f = _F(value=read, read=read, is_measured=found is not None, num_tokens=num_tokens)
        if not any(rank.is_finalized for rank in ranks):
            return replace(f, unknown=_NOT_FINALIZED)
        if found is None or found.agrees(read):
            return f
        return replace(f, unknown=found.fault) if found.fault else replace(f, value=found.value)

    def difference(self, tolerance: float) -> list[str]:
        """Say why f is not what it should be, if it is not."""
        if self.value == self.read:
            return []
        times, n = self.value / self.read, self.num_tokens
        if n and is_near(times, n, tolerance):
            return [f"finalize was called with num_tokens {n:g} and did not divide"]
        names = equal_to(times, {}, {"num_tokens": n}, tolerance=tolerance)
        return [
            f"gradients were multiplied by {self.value:.6g} after the losses, as measured, "
            f"{written(times, names[:1])} times what Megatron's or torch's own code does"
        ]


def whole(ranks: Sequence[RankWeights]) -> list[WeighedSequence]:
    """Put the parts of sequences together over context-parallel ranks; ``ranks``: of the world.

    Sequences without a trained token are left out.
    """
    rows = _put_together(_parts(ranks, _F.of(ranks).value))
    return _sequences(rows[rows["tokens"] > 0])


def _parts(ranks: Sequence[RankWeights], f: float) -> Array:
    """Return the parts of all ranks, of which weights are a_t."""
    parts = np.concatenate([rank.parts for rank in ranks])
    parts["m"] = np.repeat([rank.sizes["M"] for rank in ranks], [len(rank.parts) for rank in ranks])
    for name in ("weight_sum", "weight_min", "weight_max", "lowest", "highest"):
        parts[name] *= f
    return parts


def _put_together(parts: Array) -> Array:
    """Return a row of ``PART`` for each sequence, whole over context-parallel ranks."""
    number, first = numbered(parts, PLACE)
    rows, has = parts[first], parts["tokens"] > 0
    for name in ("tokens", "outside", "missed", "weight_sum", "n"):
        rows[name] = np.bincount(number, parts[name], len(rows))
    for names in (("weight_min", "weight_max"), ("lowest", "highest")):
        for end, name in enumerate(names):
            rows[name] = bounds(number[has], parts[name][has], len(rows))[end]
    rows["n"] = np.where(np.isnan(rows["told"]), rows["n"], rows["told"])
    return rows


def _sequences(rows: Array) -> list[WeighedSequence]:
    names = [*WeighedSequence.__dataclass_fields__]
    return [WeighedSequence(**dict(zip(names, row, strict=True))) for row in rows[names].tolist()]


_Weights = dict[str, Array]


def _weights(
    rows: Array, empty: Array, m_of_ranks: Mapping[int, int], ranks: Sequence[RankWeights]
) -> tuple[_Weights, dict[str, str], int | None]:
    """Return w_s of each sequence under each mode, by the formulas of ``MODES``; what the other
    modes lack; and how many samples have no token, None if no ids of samples were passed.
    """
    given = {name: value for rank in ranks for name, value in rank.given.items()}
    known = [kind for kind in _IDS if _has(rows, kind).all()]
    lacks = {name: what for name, what in NEEDS.items() if what not in (*known, *given)}
    for rank in ranks:
        lacks |= rank.lacks
    if not len(rows):
        return {}, lacks, None
    others, known_empty, num = empty[:0], None, len(rows)
    compared = [name for name in (*COMPARED, *NEEDS) if name not in lacks]
    if "sample" in known:
        others = empty[np.all([_has(empty, kind) for kind in known], axis=0)]
        known_empty = len({*others["sample"][others["n"] == 0]} - {*rows["sample"]})
        if len({*rows["sample"]}) == num:
            compared.remove("row_mean")  # it is sample_mean
    table = _table(np.concatenate([rows, others]), m_of_ranks, ranks[0].sizes["DP"])
    ones = np.ones(num + len(others))
    weights: _Weights = {}
    for mode in sorted(compared, key=lambda name: name != given.get("mode")):
        denominator: Any = MODES[mode].denominator
        by_count = [
            1 / (ones * denominator(StepCounts(table, one)))[:num]
            for one in _aggregations(mode, given)
        ]
        weights[mode] = by_count[0]
        if not np.array_equal(*by_count):
            weights[f"{mode} without its {known_empty} empty"] = by_count[1]
    if len({*m_of_ranks.values()}) > 1:  # ranks have as many, or heard fewer
        by_own = weights["microbatch_token_mean"]
        weights["microbatch_token_mean by the largest M"] = by_own * rows["m"] / max(table.m_W)
    return weights, lacks, known_empty


def _has(rows: Array, kind: str) -> Array:
    """Whether each sequence has an id."""
    return np.array([one is not None for one in rows[kind]], dtype=bool)


def _aggregations(mode: str, given: Mapping[str, Any]) -> list[Aggregation]:
    """Return a mode that counts samples without a token, and one that does not."""
    needed = {name: given[name] for name in ("divisor", "exponent") if NEEDS.get(mode) == name}
    if mode == "token_sum":
        needed["divisor"] = given.get("C", 1.0)
    return [
        Aggregation(mode, count="weights", count_empty=counts, **needed) for counts in (True, False)
    ]


def _table(rows: Array, m_of_ranks: Mapping[int, int], dp_size: int) -> Table:
    """Return the sequences of all ranks as the formulas of modes read them."""
    places = [*m_of_ranks]

    def numbers(kind: str) -> list[int] | None:
        ids = rows[kind].tolist()
        if None in ids:  # then each sequence is a sample
            return None
        first = {one: number for number, one in reversed([*enumerate(ids)])}
        return [first[one] for one in ids]

    sequences = Sequences(
        active_tokens=(rows["n"] > 0).astype(int),
        token_weight_sums=rows["n"],
        microbatch=rows["microbatch"],
        sample=numbers("sample"),
        prompt=numbers("prompt"),
        group=numbers("group"),
    ).checked()
    return Table(
        rows=sequences,
        own=slice(0, len(rows)),
        rank_A=np.array([places.index(rank) for rank in rows["dp_rank"].tolist()]),
        m_W=np.array([*m_of_ranks.values()]),
        size=dp_size,
        num=len(rows),
    )


def _explained(
    step: Weighed,
    ranks: Sequence[RankWeights],
    parts: Array,
    f: _F,
    weights: _Weights,
    tolerance: float,
    *,
    has_ids: bool,
) -> Weighed:
    """Add what explains the weights."""
    if step.unknown:
        return replace(step, faults=[step.unknown])
    if not step.sequences:
        return step
    if "token_sum" in step.fits and step.is_per_token and not f.num_tokens:
        return replace(step, faults=["num_tokens is 0: finalize divides by nothing"])
    # What changes no weight is not named: a deferred step of this package divides by itself.
    is_undone = any(is_near(at * f.read / f.value, 1, tolerance) for at in step.factors.values())
    faults = f.difference(tolerance) if step.trains is None or is_undone else []
    faults += _unweighted(step, ranks)
    names = {"DP", "CP", "TP", "M" if len({rank.sizes["M"] for rank in ranks}) == 1 else ""}
    sizes = {name: size for name, size in step.sizes.items() if name in names}
    found = explanations(Step.of(parts, sizes, f.num_tokens), weights, tolerance)
    if step.unheard:
        found = [one for one in found if not one.needs_b]
    hints = [] if has_ids or step.fits else _hints(step, tolerance)
    own = next((one for one in found if (one.kind, one.name) == ("sample_sum", OWN)), None)
    if own is not None and own.factor > 0 and not step.fits:
        divisor = 1 / own.factor
        if is_near(divisor, max(round(divisor), 1), tolerance):
            times = step.factors.get("constant")
            if times is None:
                hints.append(f"or constant, if L is {divisor:.6g}: pass divisor= (--divisor)")
            else:
                hints.append(f"or {times:.6g} times constant, which it is if L is {divisor:.6g}")
    return replace(step, faults=faults, explained=found, hints=hints)


def _unweighted(step: Weighed, ranks: Sequence[RankWeights]) -> list[str]:
    """Say if a mode is trained without the weights of tokens and sequences that the run has."""
    if step.fits or all(one.is_plain for one in step.sequences):
        return []
    plain = [replace(rank, parts=rank.parts.copy()) for rank in ranks]
    for parts in (rank.parts for rank in plain):
        parts["lowest"], parts["highest"] = parts["weight_min"], parts["weight_max"]
        parts["n"], parts["told"] = parts["tokens"], np.nan
    fits = compare(plain).fits
    return [f"without its weights of tokens and sequences it is {fits[0]}"] if fits else []


def _hints(step: Weighed, tolerance: float) -> list[str]:
    """Say if a mean over samples would be right if B counted some without a token."""
    hints, v = [], len(step.sequences)
    most, whose = step.num_empty, f"of {step.num_empty} empty sequences: pass sample="
    if step.unheard:
        most, whose = 10 * v, f"samples of {step.unheard}"
    for name in (name for name in OVER_SAMPLES if name in step.factors):
        apart = tolerance
        if tolerance == TOLERANCE:  # of float32, whose weights are known better
            apart = max(spread(*step.modes[name]) - 1, _FINEST)
        if k := counted_empty(step.factors[name], v, most, apart):
            hints.append(f"or {name}, if B counts {k} {whose}")
        elif most and name == step.nearest:
            hints.append(f"or another factor, if B counts some {whose}")
    return hints
