"""Plans over this worker's ranks, and what every rank refuses together."""

import re

import torch.distributed as dist
from ranks import raised_by_rank

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
    raised = raised_by_rank(call, *arguments, **options)
    assert len(set(raised)) == 1, raised
    assert raised[0] is not None
    assert raised[0][0] == "PlanError", raised
    assert re.search(message, raised[0][1]), raised


def lengths(sequences):
    return [len(sequence) for sequence in sequences]
