"""The tables of ``benchmarks.scale``: what was measured, and 16,384 ranks on paper."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.command import machine_of
from benchmarks.tables import filled, section

Results = dict[str, Any]
Column = tuple[str, str, str]
"""Of a table against ranks: side, workload and call."""

NO_IDS, WITH_IDS, A_MILLION = (
    "64 sequences per rank, no ids",
    "64 sequences per rank, prompt ids",
    "1,000,000 sequences in all, prompt ids",
)
"""The workloads, as their columns are called."""
SIDES = ("threads", "alone")

BYTES_PER_SECOND = 10e9
SECONDS_PER_HOP = 5e-6
PAPER_RANKS = 16_384
PAPER_SPLITS = {1: "none", 8: "TP 8", 64: "TP 8, PP 8", 256: "TP 8, PP 8, CP 4"}


def markdown(results: Results) -> str:
    """Lay out all tables."""
    names = list(results["threads"])
    fixed, per_sequence = constants(results)
    parts = [
        filled(
            f"Measured by {machine_of(results)}. **Not measured on a GPU, and not over a network.**"
        ),
        _against_ranks(
            results,
            "Bytes that a rank receives",
            [("alone", name, "plan_step") for name in names] + [("threads", NO_IDS, "read")],
            lambda point: _size(point["bytes"]),
            f"`plan_step` makes one all-gather without ids and two with them: {fixed:.0f} bytes "
            f"per rank of the group, and {per_sequence:.0f} per sequence with ids. Every rank is "
            "padded to the sequences of the rank that has most. `aggregator.begin` and `finish` "
            "receive nothing. `read` makes three all-gathers here, once per run: an "
            "`all_gather_object` (two) and one of two flags, by which the probe finds that these "
            "groups are not Megatron's.",
        ),
        _against_ranks(
            results,
            "CPU milliseconds of plan_step on one rank",
            [(side, name, "plan_step") for name in names for side in SIDES],
            lambda point: _ms(point["cpu"]),
            "Threads: the median over all ranks, without the copying that stands for the network. "
            "Alone: one rank of a fake group, the median of five; its group copies as many tensors "
            "as there are ranks, which is counted here. Waiting for others is in neither.",
        ),
        _against_ranks(
            results,
            "CPU milliseconds of read, aggregator.begin and finish on one rank",
            [(side, WITH_IDS, call) for call in ("read", "step", "finish") for side in SIDES],
            lambda point: _ms(point["cpu"]),
            "One microbatch. `read` is called once per run and reads a message from every rank; "
            "`step` is `aggregator.begin`, which compares the group's ranks; `finish` does not "
            "depend on the number of ranks.",
        ),
    ]
    if results["late"] is not None:
        parts.append(_late(results["late"]))
    alone = _by_ranks(results["alone"][WITH_IDS])
    if PAPER_RANKS in alone:
        parts.append(_paper(alone))
    return "\n".join(parts)


def constants(results: Results) -> tuple[float, float]:
    """Bytes that ``plan_step`` brings per rank of the group, and per sequence of it with ids."""
    plain, with_ids = (results["threads"][name][-1] for name in (NO_IDS, WITH_IDS))
    more = with_ids["plan_step"]["bytes"] - plain["plan_step"]["bytes"]
    return plain["plan_step"]["bytes"] / plain["ranks"], more / with_ids["sequences"]


def _by_ranks(points: Iterable[Results]) -> dict[int, Results]:
    return {point["ranks"]: point for point in points}


def _against_ranks(
    results: Results,
    title: str,
    columns: list[Column],
    written: Callable[[Results], str],
    note: str,
) -> str:
    """Lay out one line for each number of ranks; a column that lacks it gets a dash."""
    found = [(_by_ranks(results[side][name]), call) for side, name, call in columns]
    lines = [
        [f"{n:,}", *(written(points[n][call]) if n in points else "-" for points, call in found)]
        for n in sorted({n for points, _ in found for n in points})
    ]
    heads = [f"{call}: {name}, {side}" for side, name, call in columns]
    return section(title, ["ranks", *heads], lines, note)


def _late(late: Results) -> str:
    lines = [
        [
            str(rank["rank"]),
            *(_ms(step["plan_step"]) for step in rank["steps"]),
            _ms(max(step["step"] + step["finish"] for step in rank["steps"])),
        ]
        for rank in late["late"]
    ]
    lost = max(rank["seconds_to_error"] for rank in late["lost"])
    error = late["lost"][0]["error"].partition(". This is typically")[0].rpartition("] ")[2]
    return section(
        "A late and a lost rank, on gloo",
        ["rank", "plan_step 1", "plan_step 2", "plan_step 3", "aggregator.begin + finish, slowest"],
        lines,
        "Wall milliseconds of three steps on four ranks of this machine; rank 1 comes 1 second "
        "late to the second. Where rank 1 ends instead, the other three raise within "
        f"{lost:.2f} s: {error}.",
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
