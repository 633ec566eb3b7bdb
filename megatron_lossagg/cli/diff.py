"""Say whether two runs trained the same loss, and from which step on not.

Reads two files that --loss-aggregation-record wrote. The runs may differ in
their parallelism, in their microbatches and in how often they were resumed:
a step is the same if mode, divisor, exponent, count, totals and weights are.
A custom reducer's weights are not recorded, so its steps are not compared.
Exit status: 0 for the same loss, 1 for a different one, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_lossagg.cli.files import printable
from megatron_lossagg.record.step_record import RecordError, StepRecord, read_record
from megatron_lossagg.reduction.modes import CUSTOM
from megatron_lossagg.verify.text import number_of

__all__ = ["add_arguments", "run"]

_COMPARED = {
    "mode": "mode",
    "divisor": "divisor",
    "exponent": "exponent",
    "count_empty": "count_empty",
    "count": "count",
    "active_tokens": "N",
    "samples": "B",
    "prompts": "P",
    "weights": "weights",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``lossagg diff``."""
    parser.add_argument("first", type=Path, metavar="A", help="the record of one run")
    parser.add_argument("second", type=Path, metavar="B", help="the record of the other run")


def run(args: argparse.Namespace) -> int:
    """Print one line; return 1 if the runs trained different losses in a common step."""
    first, second = read_record(args.first), read_record(args.second)
    common = sorted(first.keys() & second.keys())
    if not common:
        raise RecordError(
            f"{args.first} ({_span(first)}) and {args.second} ({_span(second)}) have no step in "
            "common"
        )
    for place, step in enumerate(common):
        found = _differences(first[step], second[step])
        if found:
            same = f"the same loss in {number_of(place, 'step')}, then " if place else ""
            print(printable(f"{same}a different loss from step {step} on: {found}"))
            return 1
        if first[step].mode == CUSTOM:
            raise RecordError(
                f"{args.first} and {args.second} have a custom reducer in step {step}, whose "
                "weights no record has, so that nothing shows whether they trained the same loss: "
                "compare the reducers' code, and the reported losses"
            )
    where = " and ".join(
        f"{_span(steps)} at {_parallelism(steps[common[0]])}" for steps in (first, second)
    )
    print(printable(f"the same loss in {number_of(len(common), 'step')} ({where})"))
    return 0


def _differences(one: StepRecord, other: StepRecord) -> str:
    """Name what differs of two steps; the weights only if nothing explains them."""
    pairs = {
        name: (getattr(one, field), getattr(other, field)) for field, name in _COMPARED.items()
    }
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if len(differing) > 1:
        differing.pop("weights", None)
    if "weights" in differing:
        return "the weights of sequences differ, mode and counts do not"
    return ", ".join(f"{name} {a} and {b}" for name, (a, b) in differing.items())


def _span(steps: dict[int, StepRecord]) -> str:
    return f"steps {min(steps)} to {max(steps)}" if steps else "no steps"


def _parallelism(record: StepRecord) -> str:
    return f"DP {record.data_parallel_size} CP {record.context_parallel_size}"
