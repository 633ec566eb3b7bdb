"""``bridge_worker.py LOSSES``: Bridge's loss function, from its file, in a host's loop; DP 2."""

import importlib.util
import sys

import schedule_worker as worker
import tiny_gpt
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func


def main(path):
    spec = importlib.util.spec_from_file_location("losses_of_bridge", path)
    losses = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(losses)
    tiny_gpt.start(dtype=torch.float32)
    chunk = tiny_gpt.wrapped(tiny_gpt.config_of())
    of_ranks = [worker.batches(rank, cuts=[0, 3, 8]) for rank in (0, 1)]

    def forward_step(iterator, model):
        output, loss_func = worker.forward_step(iterator, model)
        (mask,) = loss_func.args
        return output, losses.create_masked_next_token_loss_function(mask, True, False)

    data = [dict(batch) for batch in of_ranks[dist.get_rank()]]
    for batch in data:
        batch["cu_seqlens_q"] = batch.pop("cu_seqlens")
    schedule = worker.a_hook().aggregated(get_forward_backward_func())
    reports = worker.run(schedule, chunk, data, forward_step_func=forward_step)
    worker.assert_trains_by_hand(chunk, reports, of_ranks)
    if dist.get_rank() == 0:
        print("BRIDGE equals the loops", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
