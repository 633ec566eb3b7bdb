"""A rank that does not come to the first exchange is named by one that waits; two ranks."""

import contextlib
import io
import time
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch.distributed as dist
from check_runner import run_checks

from megatron_lossagg.contract import waiting
from megatron_lossagg.contract.waiting import said_if_waiting
from megatron_lossagg.errors import ContractError
from megatron_lossagg.guards.agreement import agree

TIMEOUT = timedelta(seconds=1)
"""Of the process group in the last check, for which a rank never comes."""


def check_ranks_that_come_in_time_are_not_named():
    said = io.StringIO()
    with patch.object(waiting, "_PATIENCE", 20.0), contextlib.redirect_stderr(said):
        agree("", "the same")
        with pytest.raises(ContractError, match="rank 0 has mode 0, rank 1 has mode 1: start all"):
            agree("", f"mode {dist.get_rank()}")
    assert said.getvalue() == ""


def check_a_rank_that_comes_late_is_named_and_waited_for():
    said = io.StringIO()
    with patch.object(waiting, "_PATIENCE", 0.5), contextlib.redirect_stderr(said):
        if dist.get_rank() == 1:
            time.sleep(1.5)
        agree("", "the same")
    line = "lossagg: rank 0 has waited 0.5 s for rank 1 to begin the loss aggregation; a rank "
    assert said.getvalue().startswith(line) == (dist.get_rank() == 0)
    assert said.getvalue().count("\n") == (dist.get_rank() == 0)


def check_a_rank_that_waits_for_others_to_begin_a_step_says_so():
    said = io.StringIO()
    with patch.object(waiting, "_PATIENCE", 0.5), contextlib.redirect_stderr(said):
        with said_if_waiting("an evaluation"):
            pass
        if dist.get_rank() == 1:  # the other one is in its model
            time.sleep(1.5)
        with said_if_waiting("a training step"):
            dist.barrier()
    line = "lossagg: rank 0 has waited 0.5 s for other ranks to begin a training step: a step that"
    assert said.getvalue().startswith(line) == (dist.get_rank() == 0)
    assert said.getvalue().count("\n") == (dist.get_rank() == 0)


def check_the_error_of_an_exchange_names_the_rank_that_never_came():  # the last: it ends the group
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(TIMEOUT.total_seconds() + 2)
        return
    dist.distributed_c10d._set_pg_timeout(TIMEOUT, dist.group.WORLD)
    with pytest.raises(ContractError, match=r"^rank 1 began no loss aggregation, expected every"):
        agree("", "the same")


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    run_checks(globals())


if __name__ == "__main__":
    main()
