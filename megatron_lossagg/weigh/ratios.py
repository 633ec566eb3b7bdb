"""Factors between measured weights and those of a mode, and the quotients that they equal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple


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
