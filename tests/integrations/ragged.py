"""One step of ragged sequences on simulated ranks, and its loss under one of our aggregations."""

from pathlib import Path

import torch

from megatron_lossagg import Aggregation, Layout, Sequences, plan_step
from megatron_lossagg.cpu import launch
from megatron_lossagg.plan import StepPlan
from megatron_lossagg.verify.frameworks import step

LENGTHS = [
    [[5, 1, 3], [2, 7, 4]],
    [[6, 6, 2], [1, 3, 5]],
]
"""Active tokens per data-parallel rank, microbatch and sequence."""
MASKED = step.LENGTHS
"""A step with fully masked sequences."""
STEPS = {"all active": LENGTHS, "some masked": MASKED}


class Step(step.Step):
    """The drawn step of ``lossagg verify --framework``, with the shares of our reducers."""

    def plan(self, aggregation: Aggregation) -> StepPlan:
        """Plan the whole step in this process: the ranks of a step are simulated."""
        microbatch = [n for n, mb in enumerate(self.microbatches) for _ in mb.sequences]
        sequences = Sequences(
            active_tokens=self.lengths, prompt=self.prompts, microbatch=microbatch
        )
        return plan_step(aggregation, sequences)

    def loss(self, aggregation: Aggregation, losses=None):
        """Sum the shares of all microbatches; ``losses``: per-token losses, x by default."""
        plan = self.plan(aggregation)
        shares = []
        for number, mb in enumerate(self.microbatches):
            layout = Layout.bshd_zigzag(*mb.mask.shape, cp_size=1, cp_rank=0)
            x = mb.log_probs if losses is None else losses[number]
            shares.append(plan.reducer(mb.sequences, mb.mask, layout)(x))
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


def check_of(outcomes, name):
    """Return one outcome of a framework's checks."""
    return next(outcome for outcome in outcomes if outcome["check"] == name)
