"""What is timed in this process, on one thread: calls, building, whole microbatches, planning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.baselines import SampleLoop
from benchmarks.timing import Effort, Times, ratio, spread
from benchmarks.workloads import AGGREGATION, TOKEN_MEAN, Workload
from megatron_lossagg import Sequences, plan_step
from megatron_lossagg.reduction.microbatch import Microbatch

Json = dict[str, Any]
IDS = ("none", "prompt", "sample and prompt")


class Package:
    """The package's reducer under three aggregations, in the words of the loop."""

    def __init__(self, workload: Workload) -> None:
        self.sample_mean = built(workload)
        self.token_mean = self.sample_mean.under(TOKEN_MEAN)
        self.constant = self.sample_mean.under(workload.constant)


CONTENDERS: dict[str, Callable[[Workload], Any]] = {"ours": Package, "loop": SampleLoop}


def built(workload: Workload) -> Microbatch:
    """Build the package's reducer, packing the masks included."""
    sequences = range(workload.num_sequences)
    return workload.plan.reducer(sequences, torch.cat(workload.masks), workload.layout())


def forward_backward(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Call, and take the gradient with respect to the losses."""
    (gradient,) = torch.autograd.grad(call(x), x)
    return gradient


def microbatch(contender: Callable[[Workload], Any], workload: Workload) -> None:
    """Build, one forward and backward, and five forwards of metrics under three aggregations."""
    made = contender(workload)
    forward_backward(made.sample_mean, workload.x_T)
    metric_T = workload.x_T.detach()
    own, token_mean, constant = made.sample_mean, made.token_mean, made.constant
    for metric in (own, own, token_mean, token_mean, constant):
        metric(metric_T)


def check_values(workload: Workload) -> None:
    """Compare the values first: code that computes another loss is not a baseline."""
    x_T = workload.x_T.detach()
    ours, loop = (contender(workload) for contender in CONTENDERS.values())
    for name in ("sample_mean", "token_mean", "constant"):
        theirs, own = getattr(loop, name)(x_T), getattr(ours, name)(x_T)
        torch.testing.assert_close(theirs, own, rtol=1e-4, atol=1e-5)


def of_workload(workload: Workload, effort: Effort) -> Json:
    """Time a call, building, and a whole microbatch."""
    check_values(workload)
    reducer, x_T = built(workload), workload.x_T
    call = effort.compare({"ours": lambda: forward_backward(reducer, x_T)})
    build = effort.compare({"ours": lambda: built(workload)})
    whole = effort.compare(
        {
            name: lambda contender=contender: microbatch(contender, workload)
            for name, contender in CONTENDERS.items()
        }
    )
    return {
        "local_tokens": workload.num_local_tokens,
        "call": _medians(call),
        "build": _medians(build),
        "microbatch": _medians(whole),
        "ahead of loop": ratio(whole, "loop", "ours"),
    }


def _medians(times: Times) -> Json:
    microseconds = {name: spread(seconds)["median"] * 1e6 for name, seconds in times.items()}
    return {"rounds": len(times["ours"]), "microseconds": microseconds}


def planning(num_sequences: int, effort: Effort) -> Json:
    """Time ``plan_step`` in one process, without its collectives, by which ids are given."""
    random = np.random.default_rng(1)
    active_S = random.integers(0, 2048, num_sequences)
    prompt_S = np.arange(num_sequences) // 8
    given = {
        "none": {},
        "prompt": {"prompt": prompt_S},
        "sample and prompt": {"sample": np.arange(num_sequences), "prompt": prompt_S},
    }
    pieces = {
        ids: lambda ids=ids: (
            plan_step(AGGREGATION, Sequences(active_tokens=active_S, **given[ids])).weights
        )
        for ids in IDS
    }
    times = effort.compare(pieces)
    return {ids: spread(times[ids])["median"] * 1e3 for ids in IDS}
