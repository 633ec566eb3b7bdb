"""The tables: each goal with what was measured, and the numbers behind it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.command import machine_of
from benchmarks.tables import filled, section

Results = dict[str, Any]

AHEAD_OF_LOOP = 1.0
WITH_MANY_SAMPLES = ("A", "B", "C")
"""Not D: a loop over few long samples costs little, and checks nothing (decision 0043)."""
PLANNING_MS = {"4096": 1.0, "1000000": 60.0}
COLLECTIVES = 2
SHARE_OF_STEP = 0.005
CHECK_MS = 0.2


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
        *_microbatch_goals(results["workloads"]),
        *_planning_goals(results),
        *(_step_goals(**results["live"]) if results["live"] else ()),
    ]


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


def _spread(spread: Results) -> str:
    return f"{spread['median']:.3g} ({spread['low']:.3g} to {spread['high']:.3g})"


TIMES = [("call", "ours"), ("build", "ours"), ("microbatch", "ours"), ("microbatch", "loop")]


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
