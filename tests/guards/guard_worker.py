"""Runs each program of ``faults.FILES``; prints whether it ended with its row's message.

``guard_worker.py STRATEGY``: on Megatron-FSDP, which shards gradients.
"""

import functools
import itertools
import re
import sys
from dataclasses import replace

import pytest
import torch.distributed as dist
from faults import FILES, LAYOUTS, rows_of
from ranks import begin, each_told
from training_steps import Training

from megatron_lossagg import LossAggregationError
from megatron_lossagg.errors import ContractError
from megatron_lossagg.verify.world import split_world

OF_DDP = {"scaled_bucket", "overlap_with", "backward_twice"}
"""``loop/engine_worker.py`` has the like of two; a second backward pass stock ends by itself."""
OF_NO_ENGINE = {
    "previous_step", "numbers", "missing_plan", "plan_of_another_step", "aggregation_of_one_rank",
    "agree", "unknown_divisor",
}  # fmt: skip
OF_THE_CONTRACT = {"Finalized", "GradientBuffers"}
"""Guards of what Megatron does with the gradients, whatever the loss is."""
ACCUMULATED = {"deferred_and_accumulated", "declared_late", "one_call_too_many"}
REFUSED = r"accumulates=\w+ with (the distributed opt|--calculate-per-to).*, where Megatron may"
"""What comes before a fault of ``accumulates=``, for gradients are sharded."""


def on_fsdp(strategy):
    """Return the rows whose fault can be made there and has to do with an engine, and layouts."""
    more = {"megatron_fsdp": strategy, "float32": True}
    layouts = {
        name: replace(layout, **more)
        for name, layout in LAYOUTS.items()
        if layout.pp * layout.tp * layout.ep == 1 and not layout.bf16
    }
    rows = []
    for row in rows_of(*FILES):
        program = row.program.__name__
        if row.layout in layouts and program not in OF_DDP and row.guard not in OF_NO_ENGINE:
            is_before = program in ACCUMULATED or program.startswith("accumul")
            rows.append(replace(row, message=REFUSED) if is_before else row)
    return rows, layouts


def check(layouts, row):
    training = Training(layouts[row.layout], per_token=row.per_token)
    program = functools.partial(row.program, training, *row.arguments)
    if dist.get_rank() not in row.ranks:
        program()
        return
    kind = ContractError if row.guard in OF_THE_CONTRACT else LossAggregationError
    with pytest.raises(kind, match=re.compile(row.message, re.DOTALL)):
        program()


def each_row(rows, check, layouts=LAYOUTS):
    """Check the rows of each layout on its groups."""
    in_order = sorted(rows, key=lambda row: row.layout)
    for layout, rows in itertools.groupby(in_order, lambda row: row.layout):
        with split_world(layouts[layout]):
            for row in rows:
                each_told(str(row), functools.partial(check, row))


def main(rows=None, layouts=LAYOUTS):
    begin()
    rows = rows_of(*FILES) if rows is None else rows
    each_row(rows, functools.partial(check, layouts), layouts)


if __name__ == "__main__":
    main(*(on_fsdp(sys.argv[1]) if sys.argv[1:] else ()))
