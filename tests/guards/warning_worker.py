"""Runs each fault of a running step under ``guards="warn"``; says whether it trains on, warned."""

import functools
import re
import warnings
from contextlib import nullcontext

import pytest
import torch.distributed as dist
from faults import LAYOUTS, rows_of
from guard_worker import each_row
from ranks import begin, each_told
from training_steps import Training

from megatron_lossagg import LossAggregationError, LossAggregator, Options
from megatron_lossagg.reduction import faults
from megatron_lossagg.verify.world import split_world

STAYS = {
    "a microbatch of an earlier call": RuntimeError,  # torch's: its graph is used twice
    "an evaluation that trains": LossAggregationError,  # nothing is trained otherwise
}
"""Faults that end the step all the same; and those of Split, which checks what was passed."""
OTHERS = (
    "a rank that failed by itself",
    "a rank that failed by itself, where guards warn",
    "a custom reducer through numpy",
    "dropped at M 1",
)
"""Programs with an aggregator of their own, or with a second fault."""


OF_ONE_GUARD = ("two schedule calls", "another model's schedule")
"""Two kinds of fault that one guard finds."""


def check(row):
    training = Training(LAYOUTS[row.layout], per_token=row.per_token)
    options = Options(probe=False, guards="warn")
    training.aggregator = LossAggregator(training.chunks, "sample_mean", options=options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = LossAggregationError if row.guard == "Split" else STAYS.get(row.fault)
        with nullcontext() if error is None else pytest.raises(error):
            row.program(training, *row.arguments)
    if error is not None:
        return
    found = [str(one.message) for one in caught if "guards warn" in str(one.message)]
    if dist.get_rank() in row.ranks:
        assert any(re.search(row.message, one, re.DOTALL) for one in found), found
    assert len({one.split(":")[0] for one in found}) == len(found)


def check_alone(row):
    faults._warned.clear()
    check(row)


def main():
    begin()
    kept = [row for row in rows_of("faults_in_a_step") if not row.fault.endswith(OTHERS)]
    each_row(kept, check_alone)
    faults._warned.clear()  # and not between them
    for row in [row for row in kept if row.fault in OF_ONE_GUARD]:
        with split_world(LAYOUTS[row.layout]):
            each_told(f"{row}, next to others", functools.partial(check, row))


if __name__ == "__main__":
    main()
