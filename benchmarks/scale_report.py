"""The tables of ``benchmarks.scale``: what was measured, and 16,384 ranks on paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.report import filled, machine_of, section, write_between

Results = dict[str, Any]

BEGIN = "<!-- scale: begin; written by `python -m benchmarks.scale --doc`, not by hand -->"
END = "<!-- scale: end -->"

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
    parts = [
        filled(
            f"Measured by {machine_of(results)}. **Not measured on a GPU, and not over a network.**"
        ),
        _bytes(results),
        _times(results),
        _around(results),
    ]
    if results["late"] is not None:
        parts.append(_late(results["late"]))
    paper = _paper(results)
    return "\n".join([*parts, paper] if paper else parts)


def write_into(path: Path, results: Results) -> None:
    """Write the tables between their markers in a Markdown file."""
    write_between(path, BEGIN, END, markdown(results))


def constants(results: Results) -> tuple[float, float]:
    """Bytes that ``plan_step`` brings per rank of the group, and per sequence of it with ids."""
    plain, with_ids = (results["threads"][name][-1] for name in (NO_IDS, WITH_IDS))
    fixed = plain["plan_step"]["bytes"] / plain["ranks"]
    per_sequence = (with_ids["plan_step"]["bytes"] - plain["plan_step"]["bytes"]) / with_ids[
        "sequences"
    ]
    return fixed, per_sequence


def _by_ranks(points: list[Results]) -> dict[int, Results]:
    return {point["ranks"]: point for point in points}


def _all_ranks(results: Results) -> list[int]:
    sides = (results["threads"], results["alone"])
    return sorted({p["ranks"] for side in sides for points in side.values() for p in points})


def _bytes(results: Results) -> str:
    lines = []
    for ranks in _all_ranks(results):
        cells = [f"{ranks:,}"]
        for name in results["threads"]:
            found = [_by_ranks(results[side][name]).get(ranks) for side in ("threads", "alone")]
            counts = {p["plan_step"]["bytes"] for p in found if p is not None}
            if len(counts) > 1:
                raise SystemExit(f"{ranks} ranks, {name}: threads and trace differ, {counts}")
            cells.append(_size(counts.pop()) if counts else "-")
        read = _by_ranks(results["threads"][NO_IDS]).get(ranks)
        cells.append("-" if read is None else _size(read["read"]["bytes"]))
        lines.append(cells)
    fixed, per_sequence = constants(results)
    return section(
        "Bytes that a rank receives",
        ["ranks", *(f"plan_step: {name}" for name in results["threads"]), "read"],
        lines,
        f"`plan_step` makes one all-gather without ids and two with them: {fixed:.0f} bytes per "
        f"rank of the group, and {per_sequence:.0f} per sequence with ids. Every rank is padded to "
        "the sequences of the rank that has most. `aggregator.begin` and `finish` receive nothing. "
        "`read` makes four all-gathers here, once per run: an `all_gather_object` (two) and two "
        "of a flag, by which the probe finds that these groups are not Megatron's.",
    )


def _times(results: Results) -> str:
    lines = []
    for ranks in _all_ranks(results):
        cells = [f"{ranks:,}"]
        for name in results["threads"]:
            for side in ("threads", "alone"):
                point = _by_ranks(results[side][name]).get(ranks)
                cells.append("-" if point is None else _ms(point["plan_step"]["cpu"]))
        lines.append(cells)
    columns = [f"{name}: {side}" for name in results["threads"] for side in ("threads", "alone")]
    return section(
        "CPU milliseconds of plan_step on one rank",
        ["ranks", *columns],
        lines,
        "Threads: the median over all ranks, without the copying that stands for the network. "
        "Alone: one rank of a fake group, the median of five; its group copies as many tensors as "
        "there are ranks, which is counted here. Waiting for others is in neither.",
    )


def _around(results: Results) -> str:
    lines = []
    for ranks in _all_ranks(results):
        points = [_by_ranks(results[side][WITH_IDS]).get(ranks) for side in ("threads", "alone")]
        cells = [
            "-" if point is None else _ms(point[call]["cpu"])
            for call in ("read", "step", "finish")
            for point in points
        ]
        lines.append([f"{ranks:,}", *cells])
    columns = [
        f"{call}: {side}"
        for call in ("read", "aggregator.begin", "finish")
        for side in ("threads", "alone")
    ]
    return section(
        "CPU milliseconds of read, aggregator.begin and finish on one rank",
        ["ranks", *columns],
        lines,
        "64 sequences per rank with prompt ids, one microbatch. `read` is called once per run and "
        "reads a message from every rank; `aggregator.begin` compares the group's ranks; `finish` "
        "does not depend on the number of ranks.",
    )


def _late(late: Results) -> str:
    lines = []
    for rank in late["late"]:
        steps = rank["steps"]
        cells = [_ms(step["plan_step"]) for step in steps]
        rest = max(step["step"] + step["finish"] for step in steps)
        lines.append([str(rank["rank"]), *cells, _ms(rest)])
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


def _paper(results: Results) -> str:
    """Add the wire, on paper, to the CPU's time at the sizes that were measured."""
    measured = _by_ranks(results["alone"][WITH_IDS])
    if PAPER_RANKS not in measured:
        return ""
    lines = []
    for model_size, split in PAPER_SPLITS.items():
        dp = PAPER_RANKS // model_size
        point = measured[dp]
        received = point["plan_step"]["bytes"]
        wire = received / BYTES_PER_SECOND + 2 * (dp - 1) * SECONDS_PER_HOP
        lines.append(
            [
                split,
                f"{dp:,}",
                _size(received),
                _ms(wire),
                _ms(point["plan_step"]["cpu"]),
                _ms(wire + point["plan_step"]["cpu"]),
            ]
        )
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
