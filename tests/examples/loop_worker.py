"""The first step of examples/loop.py by loops over texts, on one process; prints it as a row."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import loop
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from ranks import begin, print_row
from torch.nn.functional import cross_entropy

begin()
parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(1)
gpt = loop.build(1).module
parameters = list(gpt.parameters())
means = []
for token, mask in loop.draw(0):
    logits = gpt(token[None], torch.arange(len(token))[None], None)[0]
    losses = [cross_entropy(logits[at], token[at + 1]) for at in range(len(token)) if mask[at] == 1]
    means.append(sum(losses) / len(losses))
loss = sum(means) / len(means)
gradients = torch.autograd.grad(loss, parameters)
norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
print_row([loss.item(), norm.item()])
dist.destroy_process_group()
