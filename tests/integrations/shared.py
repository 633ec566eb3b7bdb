"""What the checks of released frameworks share."""

from pathlib import Path

import torch

from megatron_lossagg.cpu import launch


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
