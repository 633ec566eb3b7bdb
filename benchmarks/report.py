"""The tables: each goal with what was measured, and the numbers behind it."""

from __future__ import annotations

from collections.abc import Iterator
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
    measured: str
    goal: str
    reached: bool | None
    """None if there is no goal."""

    @property
    def cells(self) -> list[str]:
        """Return its line of the table."""
        verdict = {True: "yes", False: "NO", None: "-"}[self.reached]
        return [self.what, self.measured, self.goal, verdict]


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
    for what, aggregations in HELD_OF.items():
        most = aggregations * HELD_BYTES
        yield Goal(
            what=f"bytes per token held for backward: {what}",
            measured=f"{counts['held'][what]:.1f}",
            goal=f"{most:.0f}",
            reached=counts["held"][what] <= most + SLACK_BYTES,
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
    for size, found in results["planning"].items():
        most = PLANNING_MS[size]
        for ids, milliseconds in found.items():
            yield Goal(
                what=f"planning {int(size):,} sequences, ids: {ids}",
                measured=f"{milliseconds:.2f} ms",
                goal=f"{most:g} ms",
                reached=milliseconds <= most,
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
    found = goals(results)
    missed = sum(goal.reached is False for goal in found)
    unknown = sum(goal.reached is None for goal in found)
    return "\n".join(
        [
            filled(f"Measured by {machine_of(results)}. **Not measured on a GPU.**"),
            section(
                "Goals",
                ["what", "measured", "goal", "reached"],
                [goal.cells for goal in found],
                f"{missed} of {len(found)} goals missed, {unknown} without a goal. Ratios: median "
                "(quartiles) of rounds side by side.",
            ),
            section(
                "Times of a workload",
                ["workload", "local tokens", *(f"{what}, {who}" for what, who in TIMES)],
                lines,
                "CPU microseconds, medians. A call is forward and backward; a microbatch is "
                "building, one forward and backward, and five forwards under three aggregations.",
            ),
            section("Operations of a call", ["device", "forward", "backward"], operations),
        ]
    )
