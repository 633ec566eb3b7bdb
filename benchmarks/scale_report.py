"""The table of ``benchmarks.scale``."""

from __future__ import annotations

from typing import Any

from benchmarks.command import machine_of
from benchmarks.tables import filled, section

Results = dict[str, Any]

NO_IDS, WITH_IDS, A_MILLION = (
    "64 sequences per rank, no ids",
    "64 sequences per rank, prompt ids",
    "1,000,000 sequences in all, prompt ids",
)
"""The workloads, as their columns are called."""


def markdown(results: Results) -> str:
    """Lay out what was measured."""
    per_rank, per_sequence = constants(results)
    parts = [
        filled(
            f"Measured by {machine_of(results)}. **Not measured on a GPU, and not over a network.**"
        ),
        "",
        filled(
            f"`plan_step` brings a rank {per_rank:.0f} bytes per rank of the group, and "
            f"{per_sequence:.0f} per sequence with ids. Every rank is padded to the sequences of "
            "the rank that has most. `aggregator.begin` and `finish` bring nothing at CP 1."
        ),
        _cpu_times(results["one rank"]),
    ]
    return "\n".join(parts)


def constants(results: Results) -> tuple[float, float]:
    """Bytes that ``plan_step`` brings per rank of the group, and per sequence of it with ids."""
    plain, with_ids = (results["one rank"][name][-1] for name in (NO_IDS, WITH_IDS))
    more = with_ids["plan_step"]["bytes"] - plain["plan_step"]["bytes"]
    return plain["plan_step"]["bytes"] / plain["ranks"], more / with_ids["sequences"]


def _cpu_times(of_one_rank: Results) -> str:
    """Lay out one line for each number of ranks."""
    plans = [(name, "plan_step") for name in of_one_rank]
    columns = [*plans, *((WITH_IDS, call) for call in ("read", "begin", "finish"))]
    lines = []
    for points in zip(*of_one_rank.values(), strict=True):
        by_name = dict(zip(of_one_rank, points, strict=True))
        cells = [_ms(by_name[name][call]["cpu"]) for name, call in columns]
        lines.append([f"{points[0]['ranks']:,}", *cells])
    return section(
        "CPU milliseconds on one rank",
        ["ranks", *(f"{call}: {name}" for name, call in columns)],
        lines,
        "The median of five, of one rank of a fake group; waiting for others is not in it. `read` "
        "is called once per run; `begin` is `aggregator.begin`.",
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"
