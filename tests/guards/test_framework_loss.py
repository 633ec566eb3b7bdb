"""The comparison with a framework's loss, where the model's output is not in the losses."""

import torch
from torch.autograd.graph import get_gradient_edge

from megatron_lossagg.guards.framework_loss import compare_with_framework
from megatron_lossagg.reduction.faults import Faults


def test_losses_that_the_models_output_does_not_reach_have_no_gradient_there():
    output = torch.ones(2, requires_grad=True) * 2
    losses = torch.ones(2, requires_grad=True) * 3
    faults = Faults()
    compare_with_framework(
        losses.sum(),
        losses,
        torch.ones(2),
        None,
        output=get_gradient_edge(output),
        faults=faults,
        microbatch=0,
    )
    faults.raise_first()
