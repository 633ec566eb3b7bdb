"""The tables: each goal with what was measured, and the numbers behind it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import IDS
from benchmarks.workloads import CP_SIZES

Results = dict[str, Any]

BEGIN = "<!-- benchmarks: begin; written by `python benchmarks/run.py --doc`, not by hand -->"
END = "<!-- benchmarks: end -->"

CALL_OPERATIONS = (5, 2)
CALL_BYTES = (33.0, 8.0)
SLACK_BYTES = 0.1
"""For the few bytes of 0-dim tensors, shared by the tokens of a small microbatch."""
BUILD_BYTES = 20.0
HELD_BYTES = 4.0
LARGE = 50_000
"""Local tokens from which a call has a goal; workload A, nominally 64k, drew somewhat fewer."""
CALL_RATIO = 1.3
BUILD_RATIO = 1.5
AHEAD_OF_LOOP = {"A": 5.0, "B": 14.0, "C": 50.0, "D": 1.5}
PLANNING_MS = {"4096": 1.0, "1000000": 60.0}
COLLECTIVES = 2
SHARE_OF_STEP = 0.005
CHECK_MS = 0.2
ERROR = 1e-7

CONTENDERS = {
    "ours": "this package",
    "floor": "floor",
    "loop": "loop over samples",
    "padded": "padded matrix",
    "scaled": "scaled advantages",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One goal."""

    what: str
    measured: str
    goal: str
    reached: bool | None
    """None: not measured, or nothing to reach."""

    @property
    def verdict(self) -> str:
        """Say it in a word."""
        return {True: "yes", False: "NO", None: "-"}[self.reached]


def goals(results: Results) -> list[Row]:
    """Compare every goal with what was measured."""
    return [
        *_counted_goals(results["counts"], results["live"]),
        *_call_goals(results["workloads"]),
        *_build_goals(results),
        *_microbatch_goals(results["workloads"]),
        *_planning_goals(results),
        *_held_goals(results["counts"]["held"]),
        _step_goal(results["live"]),
        _check_goal(results["live"]),
        *_accuracy_goals(results["accuracy"]),
    ]


def _counted_goals(counts: Results, live: Results | None) -> Iterator[Row]:
    calls = counts["calls"]
    for path, name in (("cpu", "CPU"), ("device", "CUDA path")):
        seen = sorted({tuple(v["operations"]) for k, v in calls.items() if k.endswith(path)})
        yield Row(
            what=f"operations of a call, forward + backward, {name}; 1, 64, 4096 rows",
            measured=", ".join(f"{forward} + {backward}" for forward, backward in seen),
            goal="4 + 2, for any number of rows",
            reached=len(seen) == 1 and _within(seen[0], CALL_OPERATIONS),
        )
    for path, name, has_goal in (("device", "CUDA path", True), ("cpu", "CPU", False)):
        bytes_per_token = calls[f"4096 {path}"]["bytes_per_token"]
        yield Row(
            what=f"bytes per local token of a call, fp32, forward + backward, {name}",
            measured=" + ".join(f"{value:.1f}" for value in bytes_per_token),
            goal="25 + 8" if has_goal else "-",
            reached=_within(bytes_per_token, [b + SLACK_BYTES for b in CALL_BYTES])
            if has_goal
            else None,
        )
    device = calls["4096 device"]
    reads = [*device["reads"], device["reads_backward"]]
    yield Row(
        what="host syncs on the CUDA path: plan.reducer, call, backward",
        measured=", ".join(map(str, reads)),
        goal="0, 0, 0",
        reached=not any(reads),
    )
    yield Row(
        what="host syncs of StepContract.returns on the CUDA path",
        measured="not measured" if live is None else str(live["counts"]["returns"]["reads"]),
        goal="0",
        reached=None if live is None else live["counts"]["returns"]["reads"] == 0,
    )
    scalars = calls["4096 cpu"]["reads"][1]
    yield Row(
        what="scalars read by a call on CPU", measured=str(scalars), goal="1", reached=scalars <= 1
    )


def _call_goals(workloads: Results) -> Iterator[Row]:
    for name, found in workloads.items():
        ratio = found["call"]["ours / floor"]
        large = found["local_tokens"] >= LARGE
        yield Row(
            what=f"a call, forward + backward, against (x * w).sum(): {name}, "
            f"{found['local_tokens']:,} tokens",
            measured=f"{_spread(ratio)} x",
            goal=f"{CALL_RATIO} x" if large else "- (below 64k tokens)",
            reached=ratio["median"] <= CALL_RATIO if large else None,
        )


def _build_goals(results: Results) -> Iterator[Row]:
    for name, found in results["workloads"].items():
        ratio = found["build"]["ours / floor"]
        yield Row(
            what=f"building a reducer against cat + gather + multiply: {name}",
            measured=f"{_spread(ratio)} x",
            goal=f"{BUILD_RATIO} x",
            reached=ratio["median"] <= BUILD_RATIO,
        )
    for path, title in (("cpu", "CPU"), ("device", "CUDA path")):
        for cp in CP_SIZES:
            found = {
                mask: results["counts"]["build"][f"CP {cp} {mask} {path}"]["bytes_per_position"]
                for mask in ("bool", "int32", "float32")
            }
            yield Row(
                what=f"bytes per mask position to build, {title}, CP {cp}: bool, int32, float32",
                measured=", ".join(f"{value:.1f}" for value in found.values()),
                goal=f"{BUILD_BYTES:.0f}",
                reached=max(found.values()) <= BUILD_BYTES + SLACK_BYTES,
            )


def _microbatch_goals(workloads: Results) -> Iterator[Row]:
    for name, found in workloads.items():
        ahead, wanted = found["ahead"]["loop"], AHEAD_OF_LOOP[name[0]]
        yield Row(
            what=f"a whole microbatch ahead of the loop over samples: {name}",
            measured=f"{_spread(ahead)} x",
            goal=f"{wanted:g} x",
            reached=ahead["median"] >= wanted,
        )


def _planning_goals(results: Results) -> Iterator[Row]:
    for size, wanted in PLANNING_MS.items():
        found = results["planning"].get(size)
        for ids in IDS:
            yield Row(
                what=f"planning {int(size):,} rows, ids: {ids}",
                measured="not measured" if found is None else f"{found[ids]:.2f} ms",
                goal=f"{wanted:g} ms",
                reached=None if found is None else found[ids] <= wanted,
            )
    found = results["collectives"]
    most = None if found is None else max(found[ids]["collectives"] for ids in IDS)
    yield Row(
        what="collectives of plan_step",
        measured="not measured" if most is None else str(most),
        goal=f"{COLLECTIVES} at most",
        reached=None if most is None else most <= COLLECTIVES,
    )


def _held_goals(held: Results) -> Iterator[Row]:
    for key, what in (
        ("one_call", "one call"),
        ("six_calls", "six calls of one reducer"),
        ("six_calls_under", "six calls, each by under with the same aggregation"),
    ):
        yield Row(
            what=f"bytes per token held for backward: {what}",
            measured=f"{held[key]:.1f}",
            goal=f"{HELD_BYTES:.0f}",
            reached=held[key] <= HELD_BYTES + SLACK_BYTES,
        )
    yield Row(
        what="bytes per token held for backward: six calls under three aggregations",
        measured=f"{held['three_aggregations']:.1f}",
        goal=f"{3 * HELD_BYTES:.0f}",
        reached=held["three_aggregations"] <= 3 * HELD_BYTES + SLACK_BYTES,
    )


def _step_goal(live: Results | None) -> Row:
    measured, reached = "not measured", None
    if live is not None:
        time = live["time"]
        share = time["share"]["median"]
        reached = share < SHARE_OF_STEP
        measured = (
            f"{share:.2%} ({time['package_ms']['median']:.2f} of "
            f"{time['step_ms']['median']:.1f} ms, {time['microbatches']} microbatches)"
        )
    return Row(
        what="share of a training step of the example, CPU time of one process",
        measured=measured,
        goal=f"below {SHARE_OF_STEP:.1%}",
        reached=reached,
    )


def _check_goal(live: Results | None) -> Row:
    measured, reached = "not measured", None
    if live is not None:
        check = live["check"]
        reached = check["check_ms"]["median"] < CHECK_MS
        measured = (
            f"{check['check_ms']['median']:.3f} ms ({check['read_ms']:.0f} ms once, when the "
            "contract is read)"
        )
    return Row(
        what="comparing a live model of 50,000 modules, in each step",
        measured=measured,
        goal=f"below {CHECK_MS} ms",
        reached=reached,
    )


def _accuracy_goals(accuracy: Results) -> Iterator[Row]:
    for key, what in (
        ("error", "error against float64 over sum abs(w x)"),
        ("cp", "CP 8 against CP 1 over sum abs(w x)"),
    ):
        worst = max(accuracy, key=lambda name: accuracy[name][key])
        yield Row(
            what=f"{what}, fp32 and bf16 losses",
            measured=f"{accuracy[worst][key]:.1e} at worst ({worst} tokens)",
            goal=f"{ERROR:.0e}",
            reached=accuracy[worst][key] <= ERROR,
        )


def _within(values: Sequence[float], limits: Sequence[float]) -> bool:
    return all(value <= limit for value, limit in zip(values, limits, strict=True))


def _spread(spread: Results) -> str:
    return f"{spread['median']:.3g} ({spread['low']:.3g} to {spread['high']:.3g})"


def text(results: Results) -> str:
    """Lay the goals out for a terminal."""
    rows = goals(results)
    cells = [("what", "measured", "goal", "reached")]
    cells += [(row.what, row.measured, row.goal, row.verdict) for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(4)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    missed = sum(row.reached is False for row in rows)
    open_ = sum(row.reached is None and row.measured == "not measured" for row in rows)
    end = f"{missed} of {len(rows)} goals missed, {open_} not measured; {_machine(results)}"
    return "\n".join([*lines, "", end, "Ratios: median (quartiles) of rounds side by side."])


def _machine(results: Results) -> str:
    found = results["machine"]
    return (
        f"{found['command']}, {found['date']}, {found['processor']}, {found['cores']} cores of "
        f"which one is used, Python {found['python']}, torch {found['torch']}, "
        f"load {found['load_at_start']:.1f} to {found['load_at_end']:.1f}"
    )


# --------------------------------------------------------------------------------------
# The document


def write_into(path: Path, results: Results) -> None:
    """Write the tables between their markers in a Markdown file."""
    write_between(path, BEGIN, END, markdown(results))


def write_between(path: Path, begin: str, end: str, text: str) -> None:
    """Replace what stands between two markers of a file."""
    before, begun, rest = path.read_text().partition(begin)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        raise SystemExit(f"{path} has no lines {begin!r} and {end!r}: add them around the tables")
    path.write_text(f"{before}{begin}\n\n{text}\n{end}{after}")


def markdown(results: Results) -> str:
    """Lay out the goals and the numbers behind them."""
    command, machine = _machine(results).split(", ", 1)
    parts = [
        filled(f"Measured by `{command}` on {machine}. **Not measured on a GPU.**"),
        section("Goals", ["what", "measured", "goal", "reached"], _goal_cells(results)),
        section(
            "Times of a workload",
            ["workload", "local tokens", *_time_columns()],
            _time_cells(results["workloads"]),
            "CPU microseconds, medians. A call is forward and backward; a microbatch is building, "
            "one forward and backward, and five forwards under three aggregations.",
        ),
        section(
            "A whole microbatch, times this package's",
            ["workload", *(CONTENDERS[name] for name in list(CONTENDERS)[1:])],
            _ahead_cells(results["workloads"]),
            "Above 1 this package is faster. Padded matrix and scaled advantages get losses that "
            "are padded already.",
        ),
        section(
            "Operations of a call",
            ["path", "forward", "backward"],
            _operation_cells(results["counts"]["calls"]),
        ),
        section(
            "Errors over sum abs(w x)",
            ["losses", "this package", "CP 8 against CP 1", "loop over samples"],
            _accuracy_cells(results["accuracy"]),
            "The worst of sample_mean and token_mean, of losses around zero and above it; one "
            "draw each.",
        ),
    ]
    if results["live"] is not None:
        parts.append(
            section(
                "A training step of the example",
                ["call", "ms per step"],
                [[f"`{k}`", f"{v:.3f}"] for k, v in results["live"]["time"]["ms_by_call"].items()],
                "One process; backward is that of all the reducers' calls.",
            )
        )
    return "\n".join(parts)


def _goal_cells(results: Results) -> list[list[str]]:
    return [[row.what, row.measured, row.goal, row.verdict] for row in goals(results)]


def _time_columns() -> list[str]:
    return [
        "call",
        "call, floor",
        "build",
        "build, floor",
        "microbatch",
        "microbatch, floor",
        "microbatch, loop",
    ]


def _time_cells(workloads: Results) -> list[list[str]]:
    lines = []
    for name, found in workloads.items():
        times = [
            found[what]["microseconds"][who]
            for what, who in (
                ("call", "ours"),
                ("call", "floor"),
                ("build", "ours"),
                ("build", "floor"),
                ("microbatch", "ours"),
                ("microbatch", "floor"),
                ("microbatch", "loop"),
            )
        ]
        lines.append([name, f"{found['local_tokens']:,}", *(f"{t:,.0f}" for t in times)])
    return lines


def _ahead_cells(workloads: Results) -> list[list[str]]:
    return [
        [
            name,
            *(
                _spread(found["ahead"][other]) if other in found["ahead"] else "-"
                for other in list(CONTENDERS)[1:]
            ),
        ]
        for name, found in workloads.items()
    ]


def _operation_cells(calls: Results) -> list[list[str]]:
    lines = []
    for path, name in (("cpu", "CPU"), ("device", "CUDA path")):
        by_name = calls[f"4096 {path}"]["by_name"]
        cells = [", ".join(f"{n} x {op}" for op, n in found.items()) for found in by_name]
        lines.append([name, *cells])
    return lines


def _accuracy_cells(accuracy: Results) -> list[list[str]]:
    return [
        [
            name,
            f"{found['error']:.1e}",
            f"{found['cp']:.1e}",
            "-" if found["loop"] is None else f"{found['loop']:.1e}",
        ]
        for name, found in accuracy.items()
    ]


def filled(note: str) -> str:
    """Wrap a paragraph."""
    return textwrap.fill(note, 138, break_long_words=False, break_on_hyphens=False)


def section(title: str, columns: list[str], lines: list[list[str]], note: str = "") -> str:
    """Lay out a heading, a note and a table."""
    table = [
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
        *("| " + " | ".join(line) + " |" for line in lines),
    ]
    return "\n".join([f"\n### {title}\n", *([filled(note), ""] if note else []), *table])
