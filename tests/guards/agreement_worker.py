"""All ranks fail together, and one that does not come is named by one that waits; three ranks."""

import contextlib
import io
import re
import time
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch.distributed as dist
from ranks import run_worker

from benchmarks.counting import counted
from megatron_lossagg.errors import ContractError, LayoutError, PlanError
from megatron_lossagg.guards.frozen import agreed
from megatron_lossagg.reduction import exchange as waits
from megatron_lossagg.reduction.exchange import together

TIMEOUT = timedelta(seconds=1)
"""Of the process group in the last check, for which a rank never comes."""


def agree(settings):
    with agreed() as ranks:
        ranks.own = settings


def tell(own, **options):
    with together(dist.group.WORLD, "tell", **options) as ranks:
        ranks.own = own
    return ranks.of_ranks


def check_ranks_that_come_in_time_are_not_named():
    said = io.StringIO()
    with patch.object(waits, "PATIENCE", 20.0), contextlib.redirect_stderr(said):
        agree("the same")
        with pytest.raises(ContractError, match="rank 0 has mode 0, rank 1 has mode 1: start all"):
            agree(f"mode {dist.get_rank()}")
    assert said.getvalue() == ""


def check_what_is_told_arrives_in_one_gather_and_a_long_one_in_two():
    rank = dist.get_rank()
    for sizes, gathers in {(9, 1990, 1): 1, (2040, 9, 9): 2, (2041, 2050, 7): 2}.items():
        with counted() as seen:
            assert tell("x" * sizes[rank]) == ["x" * size for size in sizes]
        assert seen.num_collectives == gathers, (sizes, seen)


def check_the_error_of_one_rank_is_raised_on_all_and_caused_by_its_own():
    def fails(error):
        with together(dist.group.WORLD, "tell", named="stage {}", raises=PlanError):
            raise error

    for error, text in {
        LayoutError("got 1\ud800"): r"got 1\?$",  # half of a pair, which UTF-8 cannot encode
        ValueError("x" * 5000): r"ValueError\('x{5000}'\)$",
        StopIteration(): r"StopIteration\(\)$",
    }.items():
        own = dist.get_rank() == 1
        with pytest.raises(PlanError, match=f"^stage 1: {text}") as caught:
            fails(error) if own else tell(1, named="stage {}", raises=PlanError)
        assert (caught.value.__cause__ is error) == own
    with pytest.raises(ContractError, match=r"^rank 0: .*pickle"):
        tell((lambda: 0) if dist.get_rank() == 0 else 1)
    assert tell(dist.get_rank()) == [0, 1, 2]  # nothing is left over


def said_of_a_late_rank(exchange):
    """Let the last rank come late to an exchange; returns what all ranks print."""
    said = io.StringIO()
    dist.barrier()
    with patch.object(waits, "PATIENCE", 1), contextlib.redirect_stderr(said):
        if dist.get_rank() == 2:  # the others begin, and it is in its model
            time.sleep(3)
        exchange()
    return "".join(tell(said.getvalue()))


def check_a_rank_that_comes_late_is_named_once_and_waited_for():
    line = r"lossagg: rank [01] has waited 1 s for rank 2 to begin the loss aggregation; a rank .*"
    assert re.fullmatch(line + "\n", said_of_a_late_rank(lambda: agree("the same")))


def check_a_rank_that_waits_for_others_to_begin_a_step_says_so():
    def begins():
        with together(dist.group.WORLD, waits.to_begin(forward_only=False)):
            pass

    line = r"lossagg: rank [01] has waited 1 s for rank 2 to begin a training step; a step that.*"
    assert re.fullmatch(line + "\n", said_of_a_late_rank(begins))


def check_the_error_of_an_exchange_names_the_rank_that_never_came():  # the last: it ends the group
    dist.barrier()
    if dist.get_rank() == 2:
        time.sleep(TIMEOUT.total_seconds() + 2)
        return
    dist.distributed_c10d._set_pg_timeout(TIMEOUT, dist.group.WORLD)
    with (
        patch.object(waits, "PATIENCE", 0.5),
        pytest.raises(ContractError, match=r"^rank 2 did not come in time, expected every rank to"),
    ):
        agree("the same")


if __name__ == "__main__":
    with patch.object(waits, "TICK", 0.05):
        run_worker(globals(), timeout=timedelta(seconds=60))
