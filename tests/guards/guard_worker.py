"""Runs each program of ``fault_programs.py``; prints whether it ended with its row's message."""

import functools
import itertools
import re

import fault_programs
import pytest
import torch.distributed as dist
from fault_table import LAYOUTS, ROWS
from training_steps import Training, begin, each_told

from megatron_lossagg import LossAggregationError
from megatron_lossagg.verify.world import split_world


def check(row):
    training = Training(LAYOUTS[row.layout], per_token=row.per_token)
    program = functools.partial(getattr(fault_programs, row.program), training, *row.arguments)
    if dist.get_rank() not in row.ranks:
        program()
        return
    with pytest.raises(LossAggregationError, match=re.compile(row.message, re.DOTALL)):
        program()


def main():
    begin()
    in_order = sorted(ROWS, key=lambda row: row.layout)
    for layout, rows in itertools.groupby(in_order, lambda row: row.layout):
        with split_world(LAYOUTS[layout]):
            for row in rows:
                each_told(str(row), functools.partial(check, row))


if __name__ == "__main__":
    main()
