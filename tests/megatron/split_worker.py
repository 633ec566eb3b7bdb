"""Packed sequences at CP 2 through the schedule hook, split as ``cp_partition_mode`` says; JSON.

``split_worker.py MODE``: prints the relative error of the gradient against the mean over sequences
by hand, or the refusal. The contiguous split is that of Megatron-Core's ``get_cp_slice_for_thd``
and of Megatron-Bridge's ``_partition_packed_batch_contiguous``. One weight per token is the model:
who holds which token is all that matters.
"""

import functools
import itertools
import json
import sys

import tiny_gpt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from token_model import error_of, masked_sum, mean_by_hand, wrapped

from megatron_lossagg import Aggregation, Layout
from megatron_lossagg.errors import ContractError
from megatron_lossagg.integrations.bridge import BridgeIntegration
from megatron_lossagg.options import Options
from megatron_lossagg.schedule import ScheduleHook

OFFSETS = (0, 4, 12, 16)
MASK = (1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1)
TOKENS = len(MASK)


def positions_here(mode):
    size = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    if mode == "zigzag":
        return Layout.thd_zigzag(list(OFFSETS), cp_size=size, cp_rank=rank).positions
    held = TOKENS // size
    return torch.arange(rank * held, (rank + 1) * held)


def main():
    (mode,) = sys.argv[1:]
    tiny_gpt.start(cp=2, dtype=torch.float32)
    config = tiny_gpt.config_of()
    config.cp_partition_mode = mode
    chunk = wrapped(config, TOKENS)
    held = positions_here(mode)
    batch = {
        "loss_mask": torch.tensor(MASK)[None].float(),
        "cu_seqlens": torch.tensor([OFFSETS], dtype=torch.int32),
    }

    def forward_step(iterator, model):
        mask = next(iterator)["loss_mask"][0, held]
        return model(held), functools.partial(masked_sum, mask)

    hook = ScheduleHook(
        Aggregation("sample_mean"), BridgeIntegration(), options=Options(probe=False)
    )
    found = {"rank": dist.get_rank()}
    try:
        hook.wrap(get_forward_backward_func())(
            forward_step_func=forward_step,
            data_iterator=iter([batch]),
            model=[chunk],
            num_microbatches=1,
            seq_length=TOKENS,
            micro_batch_size=1,
        )
    except ContractError as error:
        found["refused"] = str(error)
    else:
        trained = [
            [t for t in range(start, end) if MASK[t]] for start, end in itertools.pairwise(OFFSETS)
        ]
        wanted = mean_by_hand(trained, TOKENS, "sample_mean")
        found["error"] = error_of(chunk.module.weight.main_grad, wanted)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
