"""The tables: each goal with what was measured, and the numbers behind it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.command import machine_of
from benchmarks.counts import HELD_OF
from benchmarks.tables import filled, section

Results = dict[str, Any]

CALL_OPERATIONS = (5, 2)
CALL_BYTES = (33.0, 8.0)
SLACK_BYTES = 0.1
"""For the few bytes of 0-dim tensors, shared by the tokens of a small microbatch."""
BUILD_BYTES = 43.0
HELD_BYTES = 4.0
AHEAD_OF_LOOP = 1.0
WITH_MANY_SAMPLES = ("A", "B", "C")
"""Not D: a loop over few long samples costs little, and checks nothing (decision 0043)."""
PLANNING_MS = {"4096": 1.0, "1000000": 60.0}
COLLECTIVES = 2
SHARE_OF_STEP = 0.005
CHECK_MS = 0.2

DEVICE_NAMES = {"cpu": "CPU", "meta": "any device"}


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One goal and what was measured of it."""

    what: str
    measured: str
    goal: str
    reached: bool

    @property
    def cells(self) -> list[str]:
        """Return its line of the table."""
        return [self.what, self.measured, self.goal, "yes" if self.reached else "NO"]


def goals(results: Results) -> list[Goal]:
    """Compare what was measured with its goals."""
    return [
        *_counted_goals(results["counts"]),
        *_microbatch_goals(results["workloads"]),
        *_planning_goals(results),
        *(_step_goals(**results["live"]) if results["live"] else ()),
    ]


def _counted_goals(counts: Results) -> Iterator[Goal]:
    calls, numbers = counts["calls"], ", ".join(counts["sequences"])
    found = {
        name: [calls[f"{number} {device}"] for number in counts["sequences"]]
        for device, name in DEVICE_NAMES.items()
    }
    operations = {name: {tuple(c["operations"]) for c in each} for name, each in found.items()}
    moved = {name: each[-1]["bytes_per_token"] for name, each in found.items()}
    yield Goal(
        what=f"operations of a call, forward + backward; {numbers} sequences",
        measured=_by_device({n: ", ".join(map(_sum, sorted(o))) for n, o in operations.items()}),
        goal=f"{_sum(CALL_OPERATIONS)}, for any number of sequences",
        reached=all(
            len(each) == 1 and _within(next(iter(each)), CALL_OPERATIONS)
            for each in operations.values()
        ),
    )
    yield Goal(
        what="bytes per local token of a call, fp32, forward + backward",
        measured=_by_device({n: _sum(f"{b:.1f}" for b in both) for n, both in moved.items()}),
        goal=_sum(f"{b:.0f}" for b in CALL_BYTES),
        reached=all(_within(both, CALL_BYTES, SLACK_BYTES) for both in moved.values()),
    )
    yield Goal(
        what="host syncs of building, a call and its backward, any device",
        measured="none: they ran on tensors without values, where a read raises",
        goal="0",
        reached=True,
    )
    built = {name: counts["build"][device] for device, name in DEVICE_NAMES.items()}
    for cp, masks in next(iter(built.values())).items():
        yield Goal(
            what=f"bytes per mask position to build, {cp}: {', '.join(masks)}",
            measured=_by_device(
                {n: ", ".join(f"{b:.1f}" for b in by_cp[cp].values()) for n, by_cp in built.items()}
            ),
            goal=f"{BUILD_BYTES:.0f}",
            reached=all(
                max(by_cp[cp].values()) <= BUILD_BYTES + SLACK_BYTES for by_cp in built.values()
            ),
        )
    held = [counts["held"][what] for what in HELD_OF]
    most = [aggregations * HELD_BYTES for aggregations in HELD_OF.values()]
    yield Goal(
        what=f"bytes per token held for backward: {'; '.join(HELD_OF)}",
        measured="; ".join(f"{value:.1f}" for value in held),
        goal="; ".join(f"{value:.0f}" for value in most),
        reached=_within(held, most, SLACK_BYTES),
    )


def _microbatch_goals(workloads: Results) -> Iterator[Goal]:
    medians = [
        found["ahead of loop"]["median"]
        for name, found in workloads.items()
        if name.split()[0] in WITH_MANY_SAMPLES
    ]
    yield Goal(
        what=f"a whole microbatch of {', '.join(WITH_MANY_SAMPLES)}: the loop's time over ours",
        measured=f"{min(medians):.3g} at least",
        goal=f"{AHEAD_OF_LOOP:g}",
        reached=min(medians) >= AHEAD_OF_LOOP,
    )


def _planning_goals(results: Results) -> Iterator[Goal]:
    for size, found in results["planning"].items():
        most = PLANNING_MS[size]
        yield Goal(
            what=f"planning {int(size):,} sequences; ids: {', '.join(found)}",
            measured=f"{', '.join(f'{milliseconds:.2f}' for milliseconds in found.values())} ms",
            goal=f"{most:g} ms",
            reached=max(found.values()) <= most,
        )
    yield Goal(
        what="collectives of plan_step",
        measured=str(results["collectives"]),
        goal=f"{COLLECTIVES} at most",
        reached=results["collectives"] <= COLLECTIVES,
    )


def _step_goals(time: Results, check: Results) -> Iterator[Goal]:
    share, milliseconds = time["share"]["median"], check["check_ms"]["median"]
    yield Goal(
        what="part of a training step of the example, CPU time of one process",
        measured=f"{share:.2%} ({time['package_ms']['median']:.2f} of "
        f"{time['step_ms']['median']:.1f} ms, {time['microbatches']} microbatches)",
        goal=f"below {SHARE_OF_STEP:.1%}",
        reached=share < SHARE_OF_STEP,
    )
    yield Goal(
        what="comparing a live model of 50,000 modules, in each step",
        measured=f"{milliseconds:.3f} ms ({check['read_ms']:.0f} once)",
        goal=f"below {CHECK_MS} ms",
        reached=milliseconds < CHECK_MS,
    )


def _by_device(measured: dict[str, str]) -> str:
    return "; ".join(f"{name} {value}" for name, value in measured.items())


def _sum(parts: Iterable[object]) -> str:
    return " + ".join(map(str, parts))


def _within(found: Sequence[float], most: Sequence[float], slack: float = 0.0) -> bool:
    return all(n <= limit + slack for n, limit in zip(found, most, strict=True))


def _spread(spread: Results) -> str:
    return f"{spread['median']:.3g} ({spread['low']:.3g} to {spread['high']:.3g})"


TIMES = [
    (what, who)
    for what in ("call", "build", "microbatch")
    for who in ("ours", "floor", "loop")
    if who != "loop" or what == "microbatch"
]


def markdown(results: Results) -> str:
    """Lay out the goals and the numbers behind them."""
    lines = [
        [name, f"{found['local_tokens']:,}"]
        + [f"{found[what]['microseconds'][who]:,.0f}" for what, who in TIMES]
        + [_spread(found["ahead of loop"])]
        for name, found in results["workloads"].items()
    ]
    found = goals(results)
    missed = sum(not goal.reached for goal in found)
    return "\n".join(
        [
            filled(f"Measured by {machine_of(results)}. **Not measured on a GPU.**"),
            section(
                "Goals",
                ["what", "measured", "goal", "reached"],
                [goal.cells for goal in found],
                f"{missed} of {len(found)} goals missed.",
            ),
            section(
                "Times of a workload",
                [
                    "workload",
                    "local tokens",
                    *(f"{what}, {who}" for what, who in TIMES),
                    "loop / ours",
                ],
                lines,
                "CPU microseconds, medians. A call is forward and backward; a microbatch is "
                "building, one forward and backward, and five forwards under three aggregations. "
                "The last column: median (quartiles) of rounds side by side.",
            ),
        ]
    )
