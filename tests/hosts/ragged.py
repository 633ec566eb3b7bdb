"""One step of ragged rows on simulated ranks, and its loss under one of our aggregations."""

from pathlib import Path

import torch

from megatron_lossagg import Aggregation, Layout, Sequences, plan_step
from megatron_lossagg.cpu import launch
from megatron_lossagg.plan import StepPlan

LENGTHS = [
    [[5, 1, 3], [2, 7, 4]],
    [[6, 6, 2], [1, 3, 5]],
]
"""Active tokens per data-parallel rank, microbatch and row."""
MASKED = [
    [[5, 0, 3], [2, 0, 4]],
    [[6, 6, 0], [0, 0, 5]],
]
"""The same step with fully masked rows."""
STEPS = {"all active": LENGTHS, "some masked": MASKED}
PROMPTS = [0, 0, 1, 2, 1, 3, 2, 4, 3, 0, 1, 4]
"""Prompt of each row, in the order of the step; spread over ranks and microbatches."""


class Step:
    """Per-token losses ``[b, s]`` of each microbatch; masks have holes, widths differ."""

    def __init__(self, lengths, *, dtype=torch.float64):
        generator = torch.Generator().manual_seed(5)
        self.prompts = PROMPTS
        self.lengths = [length for rank in lengths for mb in rank for length in mb]
        self.dp_size, self.num_microbatches = len(lengths), len(lengths[0])
        self.microbatches, first = [], 0
        for number, mb in enumerate(mb for rank in lengths for mb in rank):
            width = max(mb) + 1 + number
            mask = torch.zeros(len(mb), width, dtype=torch.bool)
            for row, length in enumerate(mb):
                mask[row, torch.randperm(width, generator=generator)[:length]] = True
            drawn = torch.randn(3, len(mb), width, generator=generator, dtype=dtype)
            self.microbatches.append(
                {
                    "x": drawn[0].requires_grad_(),
                    "other": drawn[1],
                    "advantages": drawn[2],
                    "mask": mask,
                    "rows": range(first, first + len(mb)),
                }
            )
            first += len(mb)

    @property
    def leaves(self):
        return [mb["x"] for mb in self.microbatches]

    def plan(self, aggregation: Aggregation) -> StepPlan:
        """Plan the whole step in this process: the ranks of a step are simulated."""
        microbatch = [n for n, mb in enumerate(self.microbatches) for _ in mb["rows"]]
        prompt = self.prompts[: len(self.lengths)]
        rows = Sequences(active_tokens=self.lengths, prompt=prompt, microbatch=microbatch)
        return plan_step(aggregation, rows)

    def loss(self, aggregation: Aggregation, losses=None):
        """Sum the shares of all microbatches; ``losses``: per-token losses, x by default."""
        plan = self.plan(aggregation)
        shares = []
        for number, mb in enumerate(self.microbatches):
            layout = Layout.bshd_zigzag(*mb["mask"].shape, cp_size=1, cp_rank=0)
            x = mb["x"] if losses is None else losses[number]
            shares.append(plan.reducer(mb["rows"], mb["mask"], layout)(x))
        return torch.stack(shares).sum()


def assert_same(got, want, leaves, *, bound=1e-6):
    """Assert equal losses and equal gradients, relative to the wanted ones."""
    grads = [torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (got, want)]
    assert abs(got.item() - want.item()) <= bound * max(abs(want.item()), 1e-3)
    for got_grad, want_grad in zip(*grads, strict=True):
        assert (got_grad - want_grad).norm() <= bound * max(want_grad.norm().item(), 1e-6)
    assert any(grad.norm() > 1e-3 for grad in grads[1])


def launched(script, *arguments, processes):
    """Run a worker of this folder on several processes; returns what it printed."""
    command = [str(Path(__file__).with_name(script)), *map(str, arguments)]
    done = launch(command, processes=processes, timeout=600)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout
