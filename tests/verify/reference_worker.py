"""Prints how far the reference's losses of bfloat16 weights are from those of float64 weights."""

from dataclasses import replace

import torch.distributed as dist

from megatron_lossagg.cpu import install

install()

from megatron_lossagg.verify.parallelism import Parallelism  # noqa: E402
from megatron_lossagg.verify.reference_gradient import compute  # noqa: E402
from megatron_lossagg.verify.world import join_world, split_world  # noqa: E402

join_world()
layout = Parallelism()
with split_world(layout):
    exact, rounded = (
        compute(replace(layout.shape, bf16=bf16), copies=1, padded=2).losses_Y
        for bf16 in (False, True)
    )
print(((rounded - exact).norm() / exact.norm()).item())
dist.destroy_process_group()
