"""Which losses were divided by a count of their microbatch before they were reduced."""

import pytest
import torch

from megatron_lossagg.guards import outcome
from megatron_lossagg.guards.outcome import divisors_of, nodes_of

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"),
    reason="before torch 2.13 nothing is read: it does not say what a hook has packed",
)

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
def test_only_a_loss_per_token_counts_as_divided(name):
    loss, is_divided = LOSSES[name]
    divisors = divisors_of(loss(torch.rand(2, 4, requires_grad=True)))
    assert (5 in [float(one) for one in divisors]) == is_divided


def test_what_a_hook_has_packed_is_not_unpacked():
    """Of a checkpoint it would run the model again, of an offload it may free what is saved."""
    unpacked = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one, unpacked.append):
        losses = torch.rand(2, 4, requires_grad=True) * MASK / N
    assert divisors_of(losses) == []
    assert [kind for kind, _ in nodes_of(losses.grad_fn, 8, by_numbers=True)] == ["Div"]
    assert unpacked == []


def test_a_graph_whose_buffers_are_freed_has_no_divisors():
    leaf = torch.rand(2, 4, requires_grad=True)
    losses = leaf * MASK / N
    losses.sum().backward()
    assert divisors_of(losses) == []
    assert [kind for kind, _ in nodes_of(losses.grad_fn, 8, by_numbers=True)] == ["Div"]


def test_a_torch_that_does_not_say_what_is_packed_is_not_followed():
    made = (torch.rand(2, 4, requires_grad=True) / N).grad_fn

    class Node:
        """A node as torch makes it, without the private names."""

        _saved_other = property(lambda self: made._saved_other)

    assert outcome._saved(made, "other").item() == N
    assert outcome._saved(Node(), "other") is outcome._UNREAD
