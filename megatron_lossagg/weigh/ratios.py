"""Factors between measured weights and those of a mode: what they are, and what explains them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import prod


def equal_products(
    factor: float, sizes: Mapping[str, int], others: Mapping[str, float], *, tolerance: float
) -> list[str]:
    """Name the products of ``sizes``, and ``others`` by themselves, that equal a factor.

    Also their inverse, as ``1/(M DP)``; the shortest first.
    """
    names = [name for name, size in sizes.items() if size > 1]
    products: dict[str, float] = {**others} | {
        " ".join(chosen): prod(sizes[name] for name in chosen)
        for number in range(1, len(names) + 1)
        for chosen in combinations(names, number)
    }
    found = [name for name, value in products.items() if abs(factor / value - 1) < tolerance]
    inverse = [
        f"1/({name})" if " " in name else f"1/{name}"
        for name, value in products.items()
        if abs(factor * value - 1) < tolerance
    ]
    return sorted(found + inverse, key=len)


def quotients(
    factor: float,
    sizes: Mapping[str, float],
    counts: Mapping[str, float],
    *,
    tolerance: float,
    most: int = 4,
) -> tuple[int, list[str]]:
    """Name the quotients of ``sizes`` and ``counts`` that equal a factor: ``N/(M DP CP)``.

    A size may stand in it twice, one count above and one below the line. Returns the fewest factors
    of which one is made, at most ``most``, and all of so many, the shortest name first.
    """
    terms = [(name, value, 2) for name, value in sizes.items() if value > 1]
    terms += [(name, value, 1) for name, value in counts.items() if value > 1]
    for number in range(1, most + 1):
        found = [
            _quotient(powers)
            for powers in _powers([(name, power) for name, _, power in terms], number)
            if sum(powers.get(name, 0) > 0 for name in counts) <= 1
            and sum(powers.get(name, 0) < 0 for name in counts) <= 1
            and is_near(
                prod(value ** powers.get(name, 0) for name, value, _ in terms), factor, tolerance
            )
        ]
        if found:
            return number, sorted(found, key=lambda name: (name.count("^"), len(name)))
    return 0, []


def _powers(terms: Sequence[tuple[str, int]], number: int) -> Iterator[dict[str, int]]:
    """List the powers of terms whose sizes sum to a number."""
    if not terms:
        if not number:
            yield {}
        return
    (name, most), *others = terms
    for power in range(-min(most, number), min(most, number) + 1):
        for rest in _powers(others, number - abs(power)):
            yield {name: power, **rest} if power else rest


def _quotient(powers: Mapping[str, int]) -> str:
    above, below = (
        [name if size == 1 else f"{name}^{size}" for name, size in of]
        for of in (
            [(name, power) for name, power in powers.items() if power > 0],
            [(name, -power) for name, power in powers.items() if power < 0],
        )
    )
    line = " ".join(above) or "1"
    under = " ".join(below)
    return line + (f"/({under})" if len(below) > 1 else f"/{under}" if below else "")


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
