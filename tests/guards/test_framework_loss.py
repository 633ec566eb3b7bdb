"""The comparison with a framework's loss, where the model's output is not in the losses."""

import torch
from torch.autograd.graph import get_gradient_edge

from megatron_lossagg.guards.framework_loss import compare_with_framework


def test_losses_that_the_models_output_does_not_reach_have_no_gradient_there():
    output = torch.ones(2, requires_grad=True) * 2
    losses = torch.ones(2, requires_grad=True) * 3
    edge = get_gradient_edge(output)
    values, describe = compare_with_framework(
        losses.sum(), losses, torch.ones(2), None, output=edge
    )
    assert not describe([float(one.detach()) for one in values])
