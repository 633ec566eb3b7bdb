"""Say whether two runs trained the same loss function on the same batches.

Reads two files that --loss-aggregation-record wrote. The runs may differ in
their parallelism, in their microbatches and in how often they were resumed:
a step is the same if mode, divisor, exponent, count, totals and weights are.
The model's weights and the value of the loss are not compared. A custom
reducer's weights are not recorded, so its steps are not compared.
Exit status: 0 for the same, 1 for a difference, 2 for wrong usage, 3 for the
same as far as both records go, if one of them ends before the other.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_lossagg.cli.files import printable
from megatron_lossagg.record.step_record import (
    RecordDiff,
    RecordError,
    StepRecord,
    compare_records,
    read_record,
)
from megatron_lossagg.verify.text import number_of

_SAME = "the same loss function on the same batches"
_ENDS_EARLY = 3
"""Exit status for two records of which one has fewer steps."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``lossagg diff``."""
    parser.add_argument("first", type=Path, metavar="A", help="the record of one run")
    parser.add_argument("second", type=Path, metavar="B", help="the record of the other run")


def run(args: argparse.Namespace) -> int:
    """Print one line; return 1 for a difference in a common step, 3 if one record ends early."""
    first, second = read_record(args.first), read_record(args.second)
    found = compare_records(first, second)
    if not found.common:
        raise RecordError(
            f"{args.first} ({_span(first)}) and {args.second} ({_span(second)}) have no step in "
            "common"
        )
    if found.differences:
        print(printable(_different(found)))
        return 1
    if found.step is not None:
        raise RecordError(
            f"{args.first} and {args.second} have a custom reducer in step {found.step}, whose "
            "weights no record has, so that nothing shows whether they trained the same loss: "
            "compare the reducers' code, and the reported losses"
        )
    given = ((first, args.first), (second, args.second))
    where = " and ".join(
        f"{_span(steps)} at {_parallelism(steps[found.common[0]])}" for steps, _ in given
    )
    same = f"{_SAME} in {number_of(found.num_same, 'step')} ({where})"
    short, long = sorted((max(steps), path) for steps, path in given)
    if short[0] == long[0]:
        print(printable(same))
        return 0
    print(printable(f"{same}; {short[1]} ends at step {short[0]}, {long[1]} at step {long[0]}"))
    return _ENDS_EARLY


def _different(found: RecordDiff) -> str:
    same = ""
    if found.num_same:
        same = f"{_SAME} in {number_of(found.num_same, 'step')}, then "
    if "weights" in found.differences:
        words = "the weights of sequences differ, mode and counts do not"
    else:
        words = ", ".join(f"{name} {a} and {b}" for name, (a, b) in found.differences.items())
    return f"{same}a different loss function or other batches from step {found.step} on: {words}"


def _span(steps: dict[int, StepRecord]) -> str:
    return f"steps {min(steps)} to {max(steps)}" if steps else "no steps"


def _parallelism(record: StepRecord) -> str:
    return f"DP {record.data_parallel_size} CP {record.context_parallel_size}"
