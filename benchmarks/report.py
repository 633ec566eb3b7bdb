"""The tables: each goal with what was measured, and the numbers behind it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.command import machine_of
from benchmarks.measure import IDS
from benchmarks.tables import filled, section

Results = dict[str, Any]

CALL_OPERATIONS = (5, 2)
CALL_BYTES = (33.0, 8.0)
SLACK_BYTES = 0.1
"""For the few bytes of 0-dim tensors, shared by the tokens of a small microbatch."""
BUILD_BYTES = 43.0
HELD_BYTES = 4.0
AHEAD_OF_LOOP = {"A": 1.0, "B": 1.0, "C": 1.0}
"""None at D: a loop over few long samples costs little, and checks nothing (decision 0043)."""
PLANNING_MS = {"4096": 1.0, "1000000": 60.0}
COLLECTIVES = 2
SHARE_OF_STEP = 0.005
CHECK_MS = 0.2

DEVICE_NAMES = {"cpu": "CPU", "meta": "any device"}


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One goal and what was measured of it."""

    what: str
    measured: str = "not measured"
    goal: str
    reached: bool | None = None
    """None: not measured, or no goal."""

    @property
    def cells(self) -> list[str]:
        """Return its line of the table."""
        verdict = {True: "yes", False: "NO", None: "-"}[self.reached]
        return [self.what, self.measured, self.goal, verdict]


def goals(results: Results) -> list[Goal]:
    """Compare every goal with what was measured."""
    return [
        *_counted_goals(results["counts"]),
        *_microbatch_goals(results["workloads"]),
        *_planning_goals(results),
        *_step_goals(results["live"]),
    ]


def _counted_goals(counts: Results) -> Iterator[Goal]:
    calls, numbers = counts["calls"], ", ".join(counts["sequences"])
    for device, name in DEVICE_NAMES.items():
        found = [calls[f"{number} {device}"] for number in counts["sequences"]]
        operations = sorted({tuple(call["operations"]) for call in found})
        forward, backward = CALL_OPERATIONS
        yield Goal(
            what=f"operations of a call, forward + backward, {name}; {numbers} sequences",
            measured=", ".join(f"{f} + {b}" for f, b in operations),
            goal=f"{forward} + {backward}, for any number of sequences",
            reached=len(operations) == 1
            and all(n <= most for n, most in zip(operations[0], CALL_OPERATIONS, strict=True)),
        )
        forward_bytes, backward_bytes = found[-1]["bytes_per_token"]
        most_forward, most_backward = CALL_BYTES
        yield Goal(
            what=f"bytes per local token of a call, fp32, forward + backward, {name}",
            measured=f"{forward_bytes:.1f} + {backward_bytes:.1f}",
            goal=f"{most_forward:.0f} + {most_backward:.0f}",
            reached=forward_bytes <= most_forward + SLACK_BYTES
            and backward_bytes <= most_backward + SLACK_BYTES,
        )
    yield Goal(
        what="host syncs of building, a call and its backward, any device",
        measured="none: they ran on tensors without values, where a read raises",
        goal="0",
        reached=True,
    )
    for device, name in DEVICE_NAMES.items():
        for cp, masks in counts["build"][device].items():
            yield Goal(
                what=f"bytes per mask position to build, {name}, {cp}: {', '.join(masks)}",
                measured=", ".join(f"{value:.1f}" for value in masks.values()),
                goal=f"{BUILD_BYTES:.0f}",
                reached=max(masks.values()) <= BUILD_BYTES + SLACK_BYTES,
            )
    for key, (what, times) in {
        "one_call": ("one call", 1),
        "six_calls": ("six calls of one reducer", 1),
        "six_calls_under": ("six calls, each by under with the same aggregation", 1),
        "three_aggregations": ("six calls under three aggregations", 3),
    }.items():
        yield Goal(
            what=f"bytes per token held for backward: {what}",
            measured=f"{counts['held'][key]:.1f}",
            goal=f"{times * HELD_BYTES:.0f}",
            reached=counts["held"][key] <= times * HELD_BYTES + SLACK_BYTES,
        )


def _microbatch_goals(workloads: Results) -> Iterator[Goal]:
    for name, found in workloads.items():
        ahead, least = found["ahead of loop"], AHEAD_OF_LOOP.get(name.split()[0])
        yield Goal(
            what=f"a whole microbatch on the CPU, ahead of slime's loop over samples: {name}",
            measured=f"{_spread(ahead)} x",
            goal="-" if least is None else f"{least:g} x",
            reached=None if least is None else ahead["median"] >= least,
        )


def _planning_goals(results: Results) -> Iterator[Goal]:
    for size, most in PLANNING_MS.items():
        found = results["planning"].get(size)
        for ids in IDS:
            what, goal = f"planning {int(size):,} sequences, ids: {ids}", f"{most:g} ms"
            if found is None:
                yield Goal(what=what, goal=goal)
            else:
                measured = f"{found[ids]:.2f} ms"
                yield Goal(what=what, measured=measured, goal=goal, reached=found[ids] <= most)
    yield Goal(
        what="collectives of plan_step",
        measured=str(results["collectives"]),
        goal=f"{COLLECTIVES} at most",
        reached=results["collectives"] <= COLLECTIVES,
    )


def _step_goals(live: Results | None) -> Iterator[Goal]:
    share, check = {}, {}
    if live is not None:
        time, compared = live["time"], live["check"]
        share = {
            "measured": f"{time['share']['median']:.2%} ({time['package_ms']['median']:.2f} of "
            f"{time['step_ms']['median']:.1f} ms, {time['microbatches']} microbatches)",
            "reached": time["share"]["median"] < SHARE_OF_STEP,
        }
        check = {
            "measured": f"{compared['check_ms']['median']:.3f} ms ({compared['read_ms']:.0f} once)",
            "reached": compared["check_ms"]["median"] < CHECK_MS,
        }
    yield Goal(
        what="part of a training step of the example, CPU time of one process",
        goal=f"below {SHARE_OF_STEP:.1%}",
        **share,
    )
    yield Goal(
        what="comparing a live model of 50,000 modules, in each step",
        goal=f"below {CHECK_MS} ms",
        **check,
    )


def _spread(spread: Results) -> str:
    return f"{spread['median']:.3g} ({spread['low']:.3g} to {spread['high']:.3g})"


def show(results: Results) -> None:
    """Print the goals."""
    found = goals(results)
    table = Table("what", "measured", "goal", "reached", box=None)
    for goal in found:
        table.add_row(*goal.cells)
    missed = sum(goal.reached is False for goal in found)
    unknown = sum(goal.reached is None for goal in found)
    end = f"{missed} of {len(found)} goals missed, {unknown} not measured or without a goal; "
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    console.print(table)
    console.print(f"{end}{machine_of(results)}. Ratios: median (quartiles) of rounds side by side.")


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
        for name, found in results["workloads"].items()
    ]
    last = results["counts"]["sequences"][-1]
    operations = [
        [name, *(", ".join(f"{n} x {op}" for op, n in side.items()) for side in by_name)]
        for device, name in DEVICE_NAMES.items()
        for by_name in [results["counts"]["calls"][f"{last} {device}"]["by_name"]]
    ]
    parts = [
        filled(f"Measured by {machine_of(results)}. **Not measured on a GPU.**"),
        section(
            "Goals",
            ["what", "measured", "goal", "reached"],
            [goal.cells for goal in goals(results)],
        ),
        section(
            "Times of a workload",
            ["workload", "local tokens", *(f"{what}, {who}" for what, who in TIMES)],
            lines,
            "CPU microseconds, medians. A call is forward and backward; a microbatch is building, "
            "one forward and backward, and five forwards under three aggregations.",
        ),
        section("Operations of a call", ["device", "forward", "backward"], operations),
    ]
    if results["live"] is not None:
        calls = results["live"]["time"]["ms_by_call"].items()
        parts.append(
            section(
                "A training step of the example",
                ["function of the package", "ms per step"],
                [[f"`{name}`", f"{ms:.3f}"] for name, ms in calls if ms >= 0.001],
                "One process. Functions that the example or autograd calls.",
            )
        )
    return "\n".join(parts)
