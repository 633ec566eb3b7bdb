"""Ratios of two pieces of code that are measured side by side."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

SHORTEST = 1e-3
"""Seconds of one sample: a shorter piece of code is repeated within it."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        """Return what a JSON file holds."""
        return {"median": self.median, "low": self.low, "high": self.high}

    @staticmethod
    def of(values: list[float]) -> Spread:
        """Summarize values."""
        if len(values) == 1:
            return Spread(median=values[0], low=values[0], high=values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(median=median, low=low, high=high)


@dataclass(frozen=True, kw_only=True)
class Times:
    """CPU seconds of each piece of code, one sample of each per round."""

    seconds: Mapping[str, list[float]]

    def of(self, name: str) -> Spread:
        """Return the time of one piece of code."""
        return Spread.of(self.seconds[name])

    def ratio(self, name: str, to: str) -> Spread:
        """Return how many times longer ``name`` takes than ``to``, by round."""
        pairs = zip(self.seconds[name], self.seconds[to], strict=True)
        return Spread.of([a / b for a, b in pairs])


def side_by_side(
    pieces: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    seconds: float,
    fewest: int = 5,
) -> Times:
    """Measure pieces of code in turn, ``rounds`` times or until ``seconds`` are over.

    At least ``fewest`` rounds; the order turns with each. CPU time of this process, so that
    other processes do not count: set one thread.
    """
    repeats = {name: _repeats(piece) for name, piece in pieces.items()}
    taken: dict[str, list[float]] = {name: [] for name in pieces}
    names, ends = list(pieces), time.perf_counter() + seconds
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            if number >= fewest and time.perf_counter() > ends:
                break
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                taken[name].append(_sample(pieces[name], repeats[name]))
    finally:
        gc.enable()
    return Times(seconds=taken)


def _repeats(piece: Callable[[], object]) -> int:
    _sample(piece, 1)  # warm
    return max(1, round(SHORTEST / max(_sample(piece, 1), 1e-7)))


def _sample(piece: Callable[[], object], repeats: int) -> float:
    start = time.process_time()
    for _ in range(repeats):
        piece()
    return (time.process_time() - start) / repeats
