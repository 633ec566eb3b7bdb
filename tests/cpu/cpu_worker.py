"""What the tests of ``megatron_lossagg.cpu`` run on each rank; ``test_cpu_model.py`` launches it.

``cpu_worker.py SCENARIO,... DIRECTORY`` runs scenarios at every layout of its world size
and prints one JSON object, from rank 0. The one-process run leaves its losses, gradients
and logits in DIRECTORY; runs on more processes compare themselves with them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import cpu_attention_checks
import cpu_needed_checks
import megatron.core
import torch
import torch.distributed as dist
from cpu_step import Layout, batches, step
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron_lossagg.cpu import named_shards

MEGATRON = tuple(int(part) for part in megatron.core.__version__.split(".")[:2])
GRADIENT_LAYOUTS = {
    1: {"one": {}, "moe": {"moe": True}, "mtp": {"mtp": True}},
    2: {
        "dp2": {},
        "cp2": {"cp": 2},
        "pp2": {"pp": 2},
        "pp2 vpp2": {"pp": 2, "vpp": 2},
        "tp2": {"tp": 2},
        "tp2 sp": {"tp": 2, "sp": True},
        "moe ep2": {"moe": True, "ep": 2},
        "moe ep2 cp2": {"moe": True, "ep": 2, "cp": 2},
        "mtp pp2": {"mtp": True, "pp": 2},
    },
    4: {
        "cp2 pp2": {"cp": 2, "pp": 2},
        "mtp cp2 tp2 sp": {"mtp": True, "cp": 2, "tp": 2, "sp": True},
        "cp2 tp2 sp": {"cp": 2, "tp": 2, "sp": True},
        "moe tp2 sp ep2 cp2": {"moe": True, "tp": 2, "sp": True, "ep": 2, "cp": 2},
    },
}
TRAINED_LAYOUTS = {
    1: {"one": {}},
    2: {
        "dp2": {},
        "dp2 sharded": {"sharded": True},
        "cp2 sharded": {"cp": 2, "sharded": True},
        "pp2": {"pp": 2},
    },
}


def gradients(directory):
    """Compare losses and gradients of every layout with the one-process run's."""
    errors = {}
    for name, sizes in GRADIENT_LAYOUTS[dist.get_world_size()].items():
        with Layout(**sizes) as layout:
            chunks = layout.chunks(torch.float64)
            for form, microbatches in batches().items():
                if layout.mtp and form == "thd" and MEGATRON < (0, 16):
                    continue  # refused by Megatron-Core itself
                for chunk in chunks:
                    chunk.zero_grad_buffer()
                loss = step(layout, chunks, microbatches)
                found = {"loss": torch.tensor(loss, dtype=torch.float64)}
                found |= {s.name: s.parameter.main_grad.clone() for s in named_shards(chunks)}
                stored = Path(directory) / f"{layout.kind} {form}.pt"
                if dist.get_world_size() == 1:
                    torch.save(found, stored)
                errors[f"{name} {form}"] = worst_error(found, torch.load(stored), chunks)
    return errors


def worst_error(found, reference, chunks):
    """Return a tensor's largest error over all ranks, relative to its largest entry."""
    cuts = {shard.name: shard.cut for shard in named_shards(chunks)}
    assert dist.get_world_size() > 1 or found.keys() == reference.keys()
    worst = torch.zeros((), dtype=torch.float64)
    for name, value in found.items():
        whole = reference[name]
        assert whole.abs().max() > 0, f"{name} has no gradient"
        expected = cuts[name](whole) if name in cuts else whole
        worst = torch.maximum(worst, (value - expected).abs().max() / whole.abs().max())
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def train(directory):
    """Train a few steps with Megatron's optimizers; return loss and norm of each step."""
    del directory
    curves = {}
    for name, sizes in TRAINED_LAYOUTS[dist.get_world_size()].items():
        with Layout(**sizes) as layout:
            chunks = layout.chunks(torch.float32)
            optimizer = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam",
                    lr=5e-3,
                    clip_grad=1.0,
                    params_dtype=torch.float32,
                    use_distributed_optimizer=layout.sharded,
                ),
                chunks,
            )
            curves[name] = [train_step(layout, chunks, optimizer) for _ in range(5)]
    return curves


def train_step(layout, chunks, optimizer):
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    loss = step(layout, chunks, batches()["thd"])
    succeeded, grad_norm, _ = optimizer.step()
    assert succeeded
    return loss, float(grad_norm)


SCENARIOS = {
    "version": lambda directory: megatron.core.__version__,
    "gradients": gradients,
    "train": train,
    "attention": cpu_attention_checks.run,
    "needed": cpu_needed_checks.run,
}


def main(scenarios, directory):
    dist.init_process_group("gloo")
    reports = {name: SCENARIOS[name](directory) for name in scenarios.split(",")}
    if dist.get_rank() == 0:
        print(json.dumps(reports))
    sys.stdout.flush()
    os._exit(0)  # A check that fails on purpose leaves gloo waiting for its peers.


if __name__ == "__main__":
    main(*sys.argv[1:])
