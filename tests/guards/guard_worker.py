"""Runs each program of ``fault_table.py``; prints whether it ended with its row's message."""

import functools
import itertools
import re

import accumulation_programs
import deferred_programs
import fault_programs
import pytest
import running_fault_programs
import torch.distributed as dist
from fault_table import LAYOUTS, ROWS
from ranks import begin
from training_steps import Training, each_told

from megatron_lossagg import LossAggregationError
from megatron_lossagg.verify.world import split_world

PROGRAMS = {
    **vars(fault_programs),
    **vars(running_fault_programs),
    **vars(accumulation_programs),
    **vars(deferred_programs),
}


def check(row):
    training = Training(LAYOUTS[row.layout], per_token=row.per_token)
    program = functools.partial(PROGRAMS[row.program], training, *row.arguments)
    if dist.get_rank() not in row.ranks:
        program()
        return
    with pytest.raises(LossAggregationError, match=re.compile(row.message, re.DOTALL)):
        program()


def main(rows=ROWS):
    begin()
    in_order = sorted(rows, key=lambda row: row.layout)
    for layout, rows in itertools.groupby(in_order, lambda row: row.layout):
        with split_world(LAYOUTS[layout]):
            for row in rows:
                each_told(str(row), functools.partial(check, row))


if __name__ == "__main__":
    main()
