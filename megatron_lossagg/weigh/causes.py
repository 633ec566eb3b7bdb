"""What makes the weights of a step: a kind of mean times a factor, which explains every token.

A kind is a mode, or a mean over places (microbatches, ranks, all) of means, each place with its
share; a factor is a quotient of the sizes and counts of the step. Of all that explain a step, and
the step before it, those with the fewest factors are named.

And f, measured: what became of the gradients that backward passes have added to a parameter. The
step's gradient of a parameter is f times the sum, over the ranks that add up their gradients, of
what their backward passes added. Both are heard at some entries of a few small parameters
(``factors.py``), so that nothing is assumed of what reduces, averages, scales or divides them.

NumPy only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

_SMALL = 64
"""A count below it may equal a number by chance."""
_MOST, _NAMES = 2, 4
_MANY = 3
"""Of so many factors it may be written down if it is round."""
_COARSE = 1e-3
"""Of a coarser tolerance many quotients equal a number by chance."""
PLACE = ("dp_rank", "microbatch", "sequence")
"""What tells a sequence from another."""
_LAST = 9
"""How many factors a number of the script's own counts as: it explains any."""
OWN = "a number of the script's own"
Array = np.ndarray[Any, Any]
LEAST = 1e-5
"""The least that a gradient may be off, relative, if its dtype has no larger rounding."""
_ROUNDINGS = 4
"""How many roundings of its dtype it may be off."""
_ROUNDED = 0.02
"""The residual of a gradient that was rounded, at most; with more it is another gradient."""
_NOT_ZERO = (
    "the gradient buffer was not zero before the step: what was there is trained with it; zero "
    "gradients before the step, or weigh the first of several schedule calls"
)
_NOT_REDUCED = (
    "nothing was reduced: each rank has the gradient of its own tokens, as under no_sync in every "
    "microbatch, or with a forward pass that goes by the wrapper"
)
_NO_MULTIPLE = (
    "the gradients are no multiple of what backward passes added: they were reduced over some of "
    "the ranks, or changed afterwards"
)


class Quotient(NamedTuple):
    """A quotient of sizes and counts, such as ``N/(M DP CP)``."""

    value: float
    powers: Mapping[str, int]

    @property
    def number(self) -> int:
        """How many factors it has."""
        return sum(map(abs, self.powers.values()))

    @property
    def is_product(self) -> bool:
        """Whether it is a product of different ones, or one over it."""
        return {*self.powers.values()} in ({1}, {-1})

    @property
    def name(self) -> str:
        """Write it on a line."""
        above, below = (
            " ".join(
                name if abs(power) == 1 else f"{name}^{abs(power)}"
                for name, power in self.powers.items()
                if power * sign > 0
            )
            for sign in (1, -1)
        )
        under = f"({below})" if " " in below else below
        return (above or "1") + (f"/{under}" if below else "")


def quotients(
    sizes: Mapping[str, float], counts: Mapping[str, float], *, most: int = 4
) -> list[Quotient]:
    """List the quotients of at most so many factors.

    A size may stand in it twice, one count above and one below the line.
    """
    found = [Quotient(1.0, {})]
    for name, value in [*sizes.items(), *counts.items()]:
        powers = (1, -1) if name in counts else (1, -1, 2, -2)
        found += [
            Quotient(one.value * value**power, {**one.powers, name: power})
            for one in found
            for power in powers
            if value > 1
            and one.number + abs(power) <= most
            and not (name in counts and power in [one.powers.get(other) for other in counts])
        ]
    return found[1:]


def near(factor: float, among: Iterable[Quotient], tolerance: float) -> list[Quotient]:
    """List those that equal a factor: the fewest factors first, then the shortest name.

    None equals 1, which needs no name.
    """
    if is_near(factor, 1, tolerance):
        return []
    found = [one for one in among if is_near(factor, one.value, tolerance)]
    return sorted(found, key=lambda one: (one.number, one.name.count("^"), len(one.name)))


def equal_to(
    factor: float,
    sizes: Mapping[str, float],
    counts: Mapping[str, float],
    *,
    tolerance: float,
    only_products: bool = False,
) -> list[str]:
    """Name the quotients with the fewest factors that equal a factor."""
    among = [one for one in quotients(sizes, counts) if one.is_product or not only_products]
    equal = near(factor, among, tolerance)
    return [one.name for one in equal if one.number == equal[0].number]


def written(factor: float, equal: Sequence[str]) -> str:
    """Write a factor, and what it equals: ``0.25 = 1/(M DP)``."""
    return " = ".join([f"{factor:.6g}", *equal])


def counted_empty(at: float | None, v: int, num_empty: int, tolerance: float) -> int:
    """Return how many empty sequences B counts if it makes a factor of ``at``: V / (V + k), or 0.

    ``v``: how many sequences have a token. ``tolerance``: relative, of ``at``. If it is too coarse
    to tell k from k + 1, only k = ``num_empty`` is tried.
    """
    if at is None or not v / (v + num_empty + 1) < at < 1:
        return 0
    k = round(v / at) - v if tolerance * (v + num_empty) < 0.5 else num_empty
    return k if 0 < k <= num_empty and is_near(at * (v + k) / v, 1, tolerance) else 0


def constant(low: float, high: float, tolerance: float) -> float | None:
    """Return what lies between two ratios that are one but for ``tolerance``, else None."""
    middle = (low + high) / 2
    is_one = math.isfinite(middle) and abs(high - low) <= tolerance * abs(middle)
    return middle if middle and is_one else None


def is_near(value: float, wanted: float, tolerance: float) -> bool:
    """Whether a number is another but for ``tolerance``, relative to that."""
    return abs(value / wanted - 1) <= tolerance


def spread(low: float, high: float) -> float:
    """Return the larger weight over the smaller, by size; infinite if one is 0 or they differ in
    sign.
    """
    small, large = sorted((abs(low), abs(high)))
    if not math.isfinite(low + high) or low * high <= 0:
        return math.inf if low != high or low else 1.0
    return large / small


@dataclass(frozen=True, kw_only=True)
class Step:
    """The parts of sequences with a weight, and the sizes of the step."""

    parts: Array
    """Rows of ``compare.PART``, ``[P]``."""
    sizes: Mapping[str, int]
    counts: Mapping[str, float]

    @staticmethod
    def of(parts: Array, sizes: Mapping[str, int], num_tokens: float) -> Step:
        """Count; ``parts``: those without a weight too."""
        trained = parts[parts["tokens"] > 0]
        padded = float(parts["padded"][numbered(parts, _LOSSES)[1]].sum())
        masked, n = float((parts["missed"] - parts["outside"]).sum()), float(trained["n"].sum())
        counts = {
            "N": n,
            "B": len(numbered(trained, PLACE)[1]),
            "padded tokens": padded,
            "num_tokens": num_tokens if num_tokens != n else 0,
            "tokens of the mask": n + masked if masked else 0,
        }
        return Step(parts=trained, sizes=sizes, counts=counts)

    @property
    def masked_P(self) -> Array:
        """Tokens of the mask."""
        masked: Array = self.parts["tokens"] - self.parts["outside"] + self.parts["missed"]
        return masked


class Kind(NamedTuple):
    """A kind of mean."""

    words: str
    weight_P: Array
    cost: int = 0
    note: str = ""
    """What to add if it is trained as it is."""
    is_mode: bool = False


class _Place(NamedTuple):
    words: str
    columns: tuple[str, ...]
    """What parts of one place have in common."""
    sizes: tuple[str, ...]
    """How many places there are: the product of these."""
    only_if: str = ""
    """The size that tells it from another place, if it is not 1."""


_LOSSES = ("dp_rank", "microbatch", "cp_rank")
"""What parts of the losses of one rank have in common."""
PLACES = (
    _Place("microbatch", ("dp_rank", "microbatch"), ("M", "DP")),
    _Place("microbatch and context-parallel rank", _LOSSES, ("M", "DP", "CP"), "CP"),
    _Place("microbatch of all ranks", ("microbatch",), ("M",), "DP"),
    _Place("data-parallel rank", ("dp_rank",), ("DP",), "DP"),
    _Place("data- and context-parallel rank", ("dp_rank", "cp_rank"), ("DP", "CP"), "CP"),
)


def kinds(step: Step, modes: Mapping[str, Array]) -> Iterator[Kind]:
    """List the kinds of means, with the weight of a token of each part.

    ``modes``: the weight of a token of each sequence with a weight, in the order of their places.
    """
    sequence, _ = numbered(step.parts, PLACE)
    for name, weight_S in modes.items():
        if not name.startswith("microbatch"):  # which is one of the others
            yield Kind(name, weight_S[sequence], cost="_sum" in name, is_mode=True)
    b = float(sequence.max() + 1)
    length_P = step.parts["length"]
    for name, count_P in (("the mask's counts", step.masked_P), ("padded lengths", length_P)):
        if (count_P != step.parts["n"]).any():
            of_sample = np.maximum(_sums(sequence, count_P), 1)
            yield Kind(f"sample_mean of {name}", 1 / (b * of_sample), cost=1)
    for place in PLACES:
        if not place.only_if or step.sizes.get(place.only_if, 1) > 1:  # else it is another
            yield from _means_of(place, step, sequence)


def _means_of(place: _Place, step: Step, sequence: Array) -> Iterator[Kind]:
    """List the means over the places of one kind: each as one, or with its share."""
    n_P, m_P = step.parts["n"], step.parts["m"]
    number, first = numbered(step.parts, place.columns)
    n, b = _sums(number, n_P), _distinct(number, sequence)
    of_samples = b * _sums(numbered(step.parts, (*place.columns, *PLACE))[0], n_P)
    padded = _sums_of_places(number, step.parts)
    masked = np.maximum(_sums(number, step.masked_P), 1)
    ranks = math.prod(step.sizes.get(name, 1) for name in place.sizes if name != "M")
    means = ranks * (m_P if "M" in place.sizes else np.ones(len(n_P)))
    found, total = int(number.max()) + 1, round(float(means.max()))
    has_less = bool((means == means[0]).all()) and found < total
    note = f"; {total - found} of {total} have no token" * has_less
    for words, divisor, cost in (
        ("token mean", n, 0),
        ("sample mean", of_samples, 0),
        ("mean of samples' sums", b, 1),
        ("token mean, divided by its tokens again,", n * n, 1),
        ("mean over padded tokens", padded, 2),
        ("mean over the mask's tokens", masked, 2),
    ):
        if not words.startswith("mean over") or ((divisor != n).any() and divisor.all()):
            yield Kind(
                f"a mean of one {words} per {place.words}", 1 / (means * divisor), cost, note
            )
    each = f"each {place.words}"
    for words, divisor, share, by in (
        ("token means", n, b, "samples"),
        ("token means", n, padded, "padded tokens"),
        ("sample means", of_samples, n, "tokens"),
    ):
        if by == "tokens" or (place.words.startswith("microbatch") and share.any()):
            whole = share[first].sum()
            yield Kind(f"{words} of {each}, weighted by its {by}", share / whole / divisor, cost=1)
        if "dp_rank" in place.columns and step.sizes.get("DP", 1) > 1 and share.all():
            rank = step.parts["dp_rank"]
            whole = step.sizes["DP"] * np.bincount(rank[first], share[first])[rank]
            kind = f"{words} of {each}, weighted by its {by} among its rank's"
            yield Kind(kind, share / whole / divisor, cost=2)


def _by_own_m(kind: Kind, step: Step) -> list[Kind]:
    """Return a kind, and what ranks make of it that multiply or divide by their own M."""
    found, m_P = [kind], step.parts["m"]
    if (m_P != m_P[0]).any():
        times = (("times", m_P), ("over", 1 / m_P))
        found += [
            Kind(f"{kind.words}, {words} its rank's M", kind.weight_P * by, kind.cost + 1)
            for words, by in times
        ]
    return found


class Explanation(NamedTuple):
    """A kind and a factor whose product is the weight of every token of a step."""

    kind: str
    name: str
    """Of the factor; empty if it is 1."""
    factor: float
    cost: int
    """How many factors it has; a kind counts as some too."""
    is_mode: bool
    note: str

    @property
    def needs_b(self) -> bool:
        """Whether it counts samples of several microbatches of a rank."""
        is_of_one = "per microbatch" in self.kind and "all ranks" not in self.kind
        return "sample" in self.kind and not is_of_one

    @property
    def form(self) -> str:
        """The kind, over whatever places it is."""
        return re.sub("(per|each) [^,]+", "", self.kind)


def explanations(step: Step, modes: Mapping[str, Array], tolerance: float) -> list[Explanation]:
    """List what explains the weights of all tokens; ``modes`` as for :func:`kinds`."""
    among = quotients(step.sizes, step.counts, most=4 if tolerance <= _COARSE else 2)
    found = []
    for kind in (one for each in kinds(step, modes) for one in _by_own_m(each, step)):
        low, high = (step.parts[end] / kind.weight_P for end in ("lowest", "highest"))
        factor = constant(float(low.min()), float(high.max()), tolerance)
        if factor is None:
            continue
        named = [(one.name, one.number) for one in near(factor, among, tolerance)]
        as_it_is = [("", 0)] if is_near(factor, 1, tolerance) else []
        found += [
            Explanation(kind.words, name, factor, kind.cost + cost, kind.is_mode, kind.note)
            for name, cost in [*as_it_is, *named, (OWN, _LAST)]
        ]
    return found


def common(
    now: Sequence[Explanation], before: Sequence[Explanation], tolerance: float
) -> list[Explanation]:
    """Return those of a step that explain the step before it too."""
    earlier = {(one.kind, one.name): one.factor for one in before}

    def explains(one: Explanation) -> bool:
        factor = earlier.get((one.kind, one.name))
        return factor is not None and (one.name != OWN or is_near(one.factor, factor, tolerance))

    return [one for one in now if explains(one)]


def likely(found: Sequence[Explanation], *, is_mode: bool) -> list[str]:
    """Name what explains a step with the fewest factors.

    ``is_mode``: only what it is besides, if a mode is trained as it is.
    """
    able = [one for one in found if one.name or not one.is_mode]  # which is the verdict
    if is_mode:
        return [one.kind + one.note for one in able if not one.name][:1]
    least = min((one.cost for one in able), default=0)
    of_kind: dict[str, list[Explanation]] = {}
    for one in able:
        if one.cost == least:
            of_kind.setdefault(one.kind, []).append(one)
    # A number on two kinds is one cause, and so is a mean over places that are the same here.
    alike = {its[0].name or its[0].form: kind for kind, its in reversed(of_kind.items())}
    texts = [_text(its, found) for kind, its in of_kind.items() if kind in alike.values()]
    texts = texts[: _MOST if least < _LAST else 1]
    return [f"or {text}" if number else text for number, text in enumerate(texts)]


def _text(its: Sequence[Explanation], found: Sequence[Explanation]) -> str:
    """Say in words what a kind is multiplied by; ``found``: everything that explains the step."""
    first, names = its[0], [one.name for one in its]
    if not first.name:
        return first.kind + first.note
    of = f"a constant factor on {first.kind}: " if first.is_mode else f"{first.kind}, times "
    if first.name == OWN:
        return of + written(first.factor, ())
    is_own = any((one.kind, one.name) == (first.kind, OWN) for one in found)
    more = [f"{len(names) - _NAMES} more quotients"] if len(names) > _NAMES else []
    more += [OWN] if is_own and _may_be_chance(first) else []
    others = f", or {' or '.join(more)}: weigh a second step" if more else ""
    return of + written(first.factor, names[:_NAMES]) + others


def _may_be_chance(one: Explanation) -> bool:
    """Whether a factor that sizes and counts explain may be a number that was written down."""
    is_small = 1 / _SMALL < one.factor < _SMALL and one.name.removeprefix("1/") in ("N", "B")
    is_round = float(f"{one.factor:.2g}") == float(f"{one.factor:.6g}")
    is_simple = one.cost < _MANY and not any(name in one.name for name in ("N", "B", "tokens"))
    return is_small or (is_round and not is_simple)


def numbered(parts: Array, columns: Sequence[str]) -> tuple[Array, Array]:
    """Number the parts by what they have in common; and the first of each number."""
    rows = np.stack([parts[name] for name in columns])
    _, first, number = np.unique(rows, axis=1, return_index=True, return_inverse=True)
    return number.reshape(-1), first


def bounds(numbers: Array, values: Array, size: int) -> tuple[Array, Array]:
    """Return the smallest and the largest value of each number, 0 of none; a NaN stays one."""
    smallest, largest = np.full(size, np.inf), np.full(size, -np.inf)
    with np.errstate(invalid="ignore"):  # 0 / 0 in the script's loss
        np.minimum.at(smallest, numbers, values)
        np.maximum.at(largest, numbers, values)
    has = np.bincount(numbers, minlength=size) > 0
    return np.where(has, smallest, 0.0), np.where(has, largest, 0.0)


def _sums(numbers: Array, values: Array) -> Array:
    """Sum over the parts with the same number, for each part."""
    sums: Array = np.bincount(numbers, values)[numbers]
    return sums


def _distinct(numbers: Array, of: Array) -> Array:
    """Count the distinct values of the parts with the same number, for each part."""
    pairs = np.unique(np.stack([numbers, of]), axis=1)
    counts: Array = np.bincount(pairs[0])[numbers]
    return counts.astype(float)


def _sums_of_places(numbers: Array, parts: Array) -> Array:
    """Sum the losses of each microbatch on a rank over the places it is in, for each part."""
    at = numbered(parts, _LOSSES)[1]
    sums: Array = np.bincount(numbers[at], parts["padded"][at], numbers.max() + 1)[numbers]
    return sums


@dataclass(frozen=True, kw_only=True)
class Added:
    """Some entries of the gradient of a parameter on one rank."""

    place: tuple[int, ...]
    """Ranks with the same one add up their gradients."""
    name: str
    added: Array
    """By this rank's backward passes, since the gradient was last zero."""
    size: Array
    """As ``added``, of absolute values."""
    before: Array
    """What was there when the first of them began; NaN if another rank has the entry."""
    after: Array
    """What is there after the step; NaN likewise."""
    eps: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """f as it was measured."""

    value: float
    noise: float
    """How far it may be off, relative."""
    fault: str = ""
    """Why the gradient is not f times what was added."""

    def agrees(self, f: float) -> bool:
        """Whether another f is the same within the noise."""
        return abs(self.value - f) <= self.noise * abs(f)


def measure(heard: Iterable[Added]) -> Measured | None:
    """Return f by the first parameter whose gradient is large enough; None if there is none.

    ``heard``: by all ranks.
    """
    of_parameter: dict[tuple[str, tuple[int, ...]], list[Added]] = {}
    for one in heard:
        of_parameter.setdefault((one.name, one.place), []).append(one)
    found = (_of_parameter(ranks) for ranks in of_parameter.values())
    return next((one for one in found if one is not None), None)


def _of_parameter(ranks: Sequence[Added]) -> Measured | None:
    """Compare the gradient of one parameter with what its ranks have added to it."""
    added, size = sum(one.added for one in ranks), sum(one.size for one in ranks)
    after = np.stack([one.after for one in ranks])
    owned = ~np.isnan(after)
    norm, eps = float(np.linalg.norm(added)), max(one.eps for one in ranks)
    if not norm or not owned.any(0).all() or not np.isfinite(after[owned]).all():
        return None
    noise = max(LEAST, _ROUNDINGS * eps * float(np.linalg.norm(size)) / norm)
    if not noise < 0.1:  # the sum is what rounding has left of it
        return None
    if any(np.nan_to_num(one.before).any() for one in ranks):
        return Measured(value=np.nan, noise=noise, fault=_NOT_ZERO)
    every = np.broadcast_to(added, after.shape)
    f, residual = _multiple(after[owned], every[owned])
    if residual <= max(noise, _ROUNDED):
        return Measured(value=f, noise=max(noise, 3 * residual))
    own = np.stack([one.added for one in ranks])
    _, residual = _multiple(after[owned], own[owned])
    fault = _NOT_REDUCED if residual <= max(noise, _ROUNDED) else _NO_MULTIPLE
    return Measured(value=np.nan, noise=noise, fault=fault)


def _multiple(values: Array, of: Array) -> tuple[float, float]:
    """Return which multiple of an array another is closest to, and how far it is, relative."""
    f = float(values @ of / (of @ of))
    return f, float(np.linalg.norm(values - f * of) / (np.linalg.norm(values) or 1.0))
