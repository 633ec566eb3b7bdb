"""What the tests of ``megatron_lossagg.cpu`` run on each rank; ``test_cpu_model.py`` launches it.

``cpu_worker.py DIRECTORY`` prints one row. The one-process run leaves its
logits in DIRECTORY, with which the run on two compares.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import cpu_attention_checks
import cpu_needed_checks
import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from ranks import begin, print_row
from stock_step import run_of, stock_model, stock_step

from megatron_lossagg.verify.parallelism import Parallelism
from megatron_lossagg.verify.small_gpt import reported
from megatron_lossagg.verify.world import split_world

TRAINED = {
    1: {"one": {}},
    2: {
        "dp2": {"dp": 2},
        "dp2 sharded": {"dp": 2, "distributed_optimizer": True},
        "cp2 sharded": {"cp": 2, "distributed_optimizer": True},
        "pp2": {"pp": 2},
    },
}


class TwoLayers(Parallelism):
    """A layout whose model has a layer for each of two pipeline stages, split or not."""

    @property
    def shape(self):
        return replace(super().shape, num_layers=2)


def train(directory):
    """Train a few steps with Megatron's optimizers; return loss and norm of each step."""
    del directory
    curves = {}
    for name, sizes in TRAINED[dist.get_world_size()].items():
        layout = TwoLayers(float32=True, **sizes)
        with split_world(layout):
            chunks = stock_model(layout, per_token=True)
            options = OptimizerConfig(
                optimizer="adam",
                lr=5e-3,
                clip_grad=1.0,
                params_dtype=torch.float32,
                use_distributed_optimizer=layout.distributed_optimizer,
            )
            optimizer = get_megatron_optimizer(options, chunks)
            batches = run_of(layout, per_token=True).batches
            curves[name] = [train_step(layout, chunks, batches, optimizer) for _ in range(5)]
    return curves


def train_step(layout, chunks, batches, optimizer):
    optimizer.zero_grad()
    reports, _ = stock_step(chunks, batches, layout)
    loss = torch.tensor(reported(reports, "loss"))  # NaN on the first stage
    dist.broadcast(loss, src=dist.get_world_size() - 1)
    succeeded, grad_norm, _ = optimizer.step()
    assert succeeded
    return float(loss), float(grad_norm)


def main(directory):
    begin()
    scenarios = {"train": train, "attention": cpu_attention_checks.run}
    scenarios["needed"] = cpu_needed_checks.run  # last: what fails leaves messages unreceived
    reports = {name: run(Path(directory)) for name, run in scenarios.items()}
    print_row(reports)
    os._exit(0)  # A check that fails on purpose leaves gloo waiting for its peers.


if __name__ == "__main__":
    main(*sys.argv[1:])
