"""What the checks of released frameworks share."""

import ast
import importlib.util
from pathlib import Path

import torch
from framework_folders import ROOT

from megatron_lossagg.cpu import launch


def assert_same(got, want, leaves, *, bound=1e-6):
    """Assert equal losses and equal gradients, relative to the wanted ones."""
    grads = [torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (got, want)]
    assert abs(got.item() - want.item()) <= bound * max(abs(want.item()), 1e-3)
    for got_grad, want_grad in zip(*grads, strict=True):
        assert (got_grad - want_grad).norm() <= bound * max(want_grad.norm().item(), 1e-6)
    assert any(grad.norm() > 1e-3 for grad in grads[1])


def launched(script, *arguments, processes):
    """Run a worker, by its path in ``tests/frameworks``; returns what it printed."""
    command = [str(ROOT / "tests" / "frameworks" / script), *map(str, arguments)]
    done = launch(command, processes=processes, timeout=600)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


def check_of(outcomes, name):
    """Return one outcome of a framework's checks."""
    return next(outcome for outcome in outcomes if outcome["check"] == name)


def tree_of(package, *parts):
    """Parse a file of a package without importing it: it needs ray and more."""
    folder = Path(importlib.util.find_spec(package).origin).parent
    return ast.parse(folder.joinpath(*parts).read_text())
