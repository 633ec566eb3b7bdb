"""What is timed in this process, on one thread: calls, building, whole microbatches, planning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import baselines
from benchmarks.timing import Times, side_by_side
from benchmarks.workloads import AGGREGATION, TOKEN_MEAN, Workload, forget_layouts
from megatron_lossagg import Reducer, Sequences, plan_step

Json = dict[str, Any]

NUM_METRICS = 5
"""Forwards of a microbatch beside the loss's: clip fraction, KL, entropy and the like."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long each comparison may take."""

    rounds: int
    seconds: float
    fewest: int = 5

    def compare(self, pieces: Mapping[str, Callable[[], object]]) -> Times:
        """Measure side by side; every microbatch has lengths that were not seen before."""
        return side_by_side(
            pieces,
            rounds=self.rounds,
            seconds=self.seconds,
            fewest=self.fewest,
            before=forget_layouts,
        )


FULL = Effort(rounds=200, seconds=3.0)
QUICK = Effort(rounds=30, seconds=0.2, fewest=3)


class Contenders:
    """The package and the baselines on one workload."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.weight_S = workload.plan.weights.float()
        self.denominators = baselines.denominators_of(workload)
        self.metric_T = workload.x_T.detach()
        self.has_padded = workload.cp_size == 1
        if self.has_padded:
            self.padded = baselines.PaddedLosses(workload)
        self._check_values()

    def build(self) -> Reducer:
        """Build the package's reducer, packing the masks included."""
        work = self.workload
        return work.plan.reducer(range(work.num_sequences), torch.cat(work.masks), work.layout())

    def build_floor(self) -> baselines.Floor:
        """Build the floor's weights."""
        return baselines.Floor(self.workload, self.weight_S)

    def microbatch(self) -> None:
        """Build, one forward and backward, five forwards under three aggregations: the package."""
        reducer = self.build()
        forward_backward(reducer, self.workload.x_T)
        token_mean = reducer.under(TOKEN_MEAN)
        constant = reducer.under(self.workload.constant)
        for metric in (reducer, reducer, token_mean, token_mean, constant):
            metric(self.metric_T)

    def microbatch_floor(self) -> None:
        """Do the same with a weight vector and nothing else."""
        floor = self.build_floor()
        forward_backward(floor, self.workload.x_T)
        token_mean, constant = floor.under_token_mean(), floor.under_constant()
        for metric in (floor, floor, token_mean, token_mean, constant):
            metric(self.metric_T)

    def microbatch_loop(self) -> None:
        """Do the same with the loop over samples."""
        loop = baselines.SampleLoop(self.workload, self.denominators)
        forward_backward(loop.sample_mean, self.workload.x_T)
        for metric in (
            loop.sample_mean,
            loop.sample_mean,
            loop.token_mean,
            loop.token_mean,
            loop.constant,
        ):
            metric(self.metric_T)

    def microbatch_padded(self) -> None:
        """Do the same with a padded matrix, the losses padded already."""
        matrix = baselines.PaddedMatrix(self.workload)
        forward_backward(matrix.sample_mean, self.padded.x_SW)
        for metric in (
            matrix.sample_mean,
            matrix.sample_mean,
            matrix.token_mean,
            matrix.token_mean,
            matrix.constant,
        ):
            metric(self.padded.metric_SW)

    def microbatch_scaled(self) -> None:
        """Do the same with scaled advantages, the losses padded and scaled already."""
        scaled = baselines.ScaledAdvantages(self.workload, self.padded.metric_SW)
        forward_backward(scaled, self.padded.x_SW)
        for _ in range(NUM_METRICS):
            scaled(self.padded.metric_SW)

    def microbatches(self) -> Mapping[str, Callable[[], object]]:
        """Name every contender that can do this workload."""
        pieces = {
            "ours": self.microbatch,
            "floor": self.microbatch_floor,
            "loop": self.microbatch_loop,
        }
        if self.has_padded:
            pieces |= {"padded": self.microbatch_padded, "scaled": self.microbatch_scaled}
        return pieces

    def _check_values(self) -> None:
        """Compare the values first: a baseline of another loss is none."""
        work, x_T = self.workload, self.metric_T
        reducer, floor = self.build(), self.build_floor()
        loop = baselines.SampleLoop(work, self.denominators)
        token_mean, constant = reducer.under(TOKEN_MEAN), reducer.under(work.constant)
        pairs = [
            (floor(x_T), reducer(x_T)),
            (floor.under_token_mean()(x_T), token_mean(x_T)),
            (floor.under_constant()(x_T), constant(x_T)),
            (loop.sample_mean(x_T), reducer(x_T)),
            (loop.token_mean(x_T), token_mean(x_T)),
            (loop.constant(x_T), constant(x_T)),
        ]
        if self.has_padded:
            matrix, x_SW = baselines.PaddedMatrix(work), self.padded.metric_SW
            scaled = baselines.ScaledAdvantages(work, x_SW)
            pairs += [
                (matrix.sample_mean(x_SW), reducer(x_T)),
                (matrix.token_mean(x_SW), token_mean(x_T)),
                (matrix.constant(x_SW), constant(x_T)),
                (scaled(scaled.scaled_SW), reducer(x_T)),
            ]
        for theirs, ours in pairs:
            torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


def forward_backward(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Call, and take the gradient with respect to the losses."""
    (gradient,) = torch.autograd.grad(call(x), x)
    return gradient


def of_workload(workload: Workload, effort: Effort) -> Json:
    """Time a call, building, and a whole microbatch."""
    contenders = Contenders(workload)
    reducer, floor = contenders.build(), contenders.build_floor()
    x_T = workload.x_T
    call = effort.compare(
        {
            "ours": lambda: forward_backward(reducer, x_T),
            "floor": lambda: forward_backward(floor, x_T),
        }
    )
    forward = effort.compare(
        {"ours": lambda: reducer(contenders.metric_T), "floor": lambda: floor(contenders.metric_T)}
    )
    build = effort.compare({"ours": contenders.build, "floor": contenders.build_floor})
    whole = effort.compare(contenders.microbatches())
    return {
        "local_tokens": workload.num_local_tokens,
        "positions": workload.num_positions,
        "call": _compared(call, "floor"),
        "forward": _compared(forward, "floor"),
        "build": _compared(build, "floor"),
        "microbatch": _compared(whole, "floor"),
        "ahead": {
            name: whole.ratio(name, "ours").to_json() for name in whole.seconds if name != "ours"
        },
    }


def _compared(times: Times, to: str) -> Json:
    return {
        "rounds": len(times.seconds["ours"]),
        "microseconds": {name: times.of(name).median * 1e6 for name in times.seconds},
        f"ours / {to}": times.ratio("ours", to).to_json(),
    }


def against_number_of_rows(counts: list[int], effort: Effort) -> Json:
    """Time whole microbatches of rows of 256 tokens in the mean; the picture's numbers."""
    curves: Json = {}
    for cp in (1, 8):
        points = []
        for num_sequences in counts:
            workload = Workload(
                name="rows", num_sequences=num_sequences, mean_tokens=256, cp_size=cp
            )
            pieces = Contenders(workload).microbatches()
            times = effort.compare({name: pieces[name] for name in ("ours", "floor", "loop")})
            microseconds = {name: times.of(name).median * 1e6 for name in times.seconds}
            points.append({"rows": num_sequences, **microseconds})
        curves[f"CP {cp}"] = points
    return curves


IDS = ("none", "prompt", "sample and prompt")


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
    return {ids: times.of(ids).median * 1e3 for ids in IDS}
