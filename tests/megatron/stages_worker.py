"""A loss scaling that is flipped after the first step, seen by both stages of PP 2; JSON."""

import contextlib
import json

import tiny_gpt
import torch
import torch.distributed as dist
from token_model import OneWeightPerToken

from megatron_lossagg import Aggregation
from megatron_lossagg.errors import ContractError
from megatron_lossagg.integrations.bridge import BridgeIntegration
from megatron_lossagg.options import Options
from megatron_lossagg.schedule import ScheduleHook


class EndedError(Exception):
    """Ends a step as soon as its schedule is reached."""


def main():
    tiny_gpt.start(pp=2, dtype=torch.float32)
    config = tiny_gpt.config_of()
    chunk = tiny_gpt.DistributedDataParallel(
        config, tiny_gpt.DistributedDataParallelConfig(), OneWeightPerToken(1)
    )
    hook = ScheduleHook(
        Aggregation("sample_mean"), BridgeIntegration(), options=Options(probe=False)
    )
    found = {"rank": dist.get_rank(), "reached": 0}

    def schedule(**call):
        found["reached"] += 1
        raise EndedError

    def step():
        hook.wrap(schedule)(
            forward_step_func=None,
            data_iterator=iter([{"loss_mask": torch.ones(1, 4)}]),
            model=[chunk],
            num_microbatches=1,
        )

    with contextlib.suppress(EndedError):
        step()
    config.calculate_per_token_loss = True
    try:
        step()
    except ContractError as error:
        found["refused"] = str(error)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
