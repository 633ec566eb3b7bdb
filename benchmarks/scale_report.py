"""The tables of ``benchmarks.scale``: what was measured, and 16,384 ranks on paper."""

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

BYTES_PER_SECOND = 10e9
SECONDS_PER_HOP = 5e-6
PAPER_RANKS = 16_384
PAPER_SPLITS = {1: "none", 8: "TP 8", 64: "TP 8, PP 8", 256: "TP 8, PP 8, CP 4"}


def markdown(results: Results) -> str:
    """Lay out all tables."""
    of_one_rank = results["one rank"]
    per_rank, per_sequence = constants(results)
    parts = [
        filled(
            f"Measured by {machine_of(results)}. **Not measured on a GPU, and not over a network.**"
        ),
        "",
        filled(
            f"`plan_step` brings a rank {per_rank:.0f} bytes per rank of the group, and "
            f"{per_sequence:.0f} per sequence with ids. Every rank is padded to the sequences of "
            "the rank that has most. `aggregator.begin` and `finish` bring nothing."
        ),
        _cpu_times(of_one_rank),
    ]
    by_ranks = {point["ranks"]: point for point in of_one_rank[WITH_IDS]}
    if PAPER_RANKS in by_ranks:
        parts.append(_paper(by_ranks))
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


def _paper(measured: dict[int, Results]) -> str:
    """Add the wire, on paper, to the CPU's time at the sizes that were measured."""
    lines = []
    for model_size, split in PAPER_SPLITS.items():
        dp = PAPER_RANKS // model_size
        received, cpu = (measured[dp]["plan_step"][key] for key in ("bytes", "cpu"))
        wire = received / BYTES_PER_SECOND + 2 * (dp - 1) * SECONDS_PER_HOP
        lines.append([split, f"{dp:,}", _size(received), *map(_ms, (wire, cpu, wire + cpu))])
    return section(
        f"One step on {PAPER_RANKS:,} ranks",
        ["split over", "DP", "received per rank", "wire, on paper", "CPU, measured", "ms in all"],
        lines,
        "64 sequences per rank with prompt ids. Milliseconds. Bytes and the CPU's time are those "
        "of one rank of a fake group of that size. The wire is arithmetic: bytes / "
        f"({BYTES_PER_SECOND / 1e9:.0f} GB/s) + 2 (DP - 1) x {SECONDS_PER_HOP * 1e6:.0f} "
        "microseconds, two all-gathers by the slowest algorithm, a ring. Both are assumptions; a "
        "tree has log2(DP) hops instead of DP - 1.",
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def _size(count: float) -> str:
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
