"""CPU times of pieces of code that run in turn in this process, and the ratios of two of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

SHORTEST = 1e-3
"""Seconds of one sample: a shorter piece of code is repeated within it."""

Times = Mapping[str, list[float]]
"""CPU seconds of each piece of code, one sample of each per round."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long a comparison may take: ``rounds``, or ``seconds`` and the ``fewest`` rounds."""

    rounds: int
    seconds: float
    fewest: int = 5

    def compare(self, pieces: Mapping[str, Callable[[], object]]) -> Times:
        """Measure pieces of code side by side; their order turns with each round.

        CPU time of this process, so that other processes do not count: set one thread.
        """
        repeats = {name: _repeats(piece) for name, piece in pieces.items()}
        taken: dict[str, list[float]] = {name: [] for name in pieces}
        names, ends = list(pieces), time.perf_counter() + self.seconds
        gc.collect()
        gc.disable()
        try:
            for number in range(self.rounds):
                if number >= self.fewest and time.perf_counter() > ends:
                    break
                turn = number % len(names)
                for name in names[turn:] + names[:turn]:
                    taken[name].append(_sample(pieces[name], repeats[name]))
        finally:
            gc.enable()
        return taken


FULL = Effort(rounds=200, seconds=3.0)
QUICK = Effort(rounds=30, seconds=0.2, fewest=3)


def spread(values: list[float]) -> dict[str, float]:
    """Return the median and the quartiles."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def ratio(times: Times, name: str, to: str) -> dict[str, float]:
    """Return how many times longer ``name`` takes than ``to``, by round."""
    return spread([a / b for a, b in zip(times[name], times[to], strict=True)])


def _repeats(piece: Callable[[], object]) -> int:
    _sample(piece, 1)  # warm
    return max(1, round(SHORTEST / max(_sample(piece, 1), 1e-7)))


def _sample(piece: Callable[[], object], repeats: int) -> float:
    start = time.process_time()
    for _ in range(repeats):
        piece()
    return (time.process_time() - start) / repeats
