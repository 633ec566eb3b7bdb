"""Which losses were divided by a count of their microbatch before they were reduced."""

import types

import pytest
import torch

from megatron_lossagg.guards.divided_losses import warn_of_divided_losses
from megatron_lossagg.reduction import faults

MASK = torch.tensor([[1.0, 1, 1, 0], [1, 1, 0, 0]])
N = MASK.sum()
LOSSES = {
    "divided": (lambda x: x * MASK / N, True),
    "divided, reshaped and scaled": (lambda x: 0.5 * (x / N).view(-1), True),
    "divided, and expanded to its shape": (lambda x: (x / N).expand(2, 4), True),
    "not divided": (lambda x: x * MASK, False),
    "divided by a temperature": (lambda x: x / torch.tensor(0.7), False),
    "a mean for each token": (lambda x: ((x * MASK).sum() / N).expand(2, 4), False),
    "a mean by a product": (lambda x: (x * MASK).sum() / N * MASK, False),
    "a mean by where": (lambda x: torch.where(MASK > 0, (x * MASK).sum() / N, 0), False),
    "a mean of each sequence": (lambda x: ((x * MASK).sum(1) / N)[:, None] * MASK, False),
}


@pytest.mark.parametrize("name", LOSSES)
def test_only_a_loss_per_token_counts_as_divided(name, monkeypatch, recwarn):
    monkeypatch.setattr(faults, "_warned", set())
    loss, is_warned = LOSSES[name]
    microbatch = types.SimpleNamespace(keep=MASK > 0)
    reducer = types.SimpleNamespace(counted_tokens=int(N), microbatch=microbatch)
    warn_of_divided_losses(reducer, loss(torch.rand(2, 4, requires_grad=True)))
    assert [str(one.message)[:26] for one in recwarn] == ["losses were divided by 5, "] * is_warned
