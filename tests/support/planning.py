"""Plans over this worker's ranks, and what every rank refuses together."""

import gc
import re

import torch.distributed as dist
from check_runner import run_checks

from megatron_lossagg import Aggregation, Sequences, plan_step

TOKEN_MEAN = Aggregation("token_mean")


def of(**sequences):
    return TOKEN_MEAN, Sequences(**sequences)


def planned(aggregation=TOKEN_MEAN, **sequences):
    """Plan this rank's sequences over all ranks."""
    return plan_step(aggregation, Sequences(**sequences), group=dist.group.WORLD)


def refused_everywhere(message, aggregation, sequences):
    """Assert that every rank refuses to plan, with the same message."""
    raised_everywhere(message, plan_step, aggregation, sequences, group=dist.group.WORLD)


def raised_everywhere(message, call, *arguments, **options):
    """Assert that every rank raises the same message; all compare before any of them fails."""
    raised = None
    try:
        call(*arguments, **options)
    except Exception as error:
        raised = type(error).__name__, str(error)
    raised_by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(raised_by_rank, raised)
    assert len(set(raised_by_rank)) == 1, raised_by_rank
    assert raised is not None
    assert raised[0] == "PlanError", raised_by_rank
    assert re.search(message, raised[1]), raised_by_rank


def lengths(sequences):
    return [len(sequence) for sequence in sequences]


def run_worker(namespace):
    """Run a worker's checks over all ranks."""
    dist.init_process_group("gloo")
    run_checks(namespace)
    gc.collect()  # caught errors hold frames, and these the group, whose threads end with it
    dist.destroy_process_group()
