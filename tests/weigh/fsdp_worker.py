"""The table of programs on Megatron-FSDP, on two processes and on four; in float32, as it keeps
gradients.
"""

from functools import partial

import tiny_gpt
import torch
from engines import FSDP, fsdp
from program_table import ROWS, main, row
from programs_worker import (
    FINALIZE,
    aggregated,
    finalized,
    second_call,
    zeroed_inside,
)

ROWS.clear()  # of DistributedDataParallel
SHARDS = "optim_grads", "optim_grads_params"

for name, (per_token, of) in ((name, key) for name in FSDP for key in FINALIZE):
    if per_token and "collective" in name:
        continue  # which Megatron refuses
    function, f, says = FINALIZE[per_token, of]
    scaling = "per-token" if per_token else "average"
    row(
        f"{name}, {scaling}, {of}",
        on=2,
        trains={"plain": says.split()[-1], "drops num_tokens": "token_sum"}.get(of),
        says=says,
    )(partial(finalized, per_token=per_token, finalize=function, f=f, ddp=fsdp(name)))

for name in FSDP:
    ddp = fsdp(name)
    row(f"{name}, the second of two schedule calls", on=2, says="was not zero", is_known=False)(
        partial(second_call, ddp=ddp)
    )
    row(f"{name}, zeroed inside of the block", on=2, trains="microbatch_token_mean")(
        partial(zeroed_inside, ddp=ddp)
    )
    for per_token in (False, True)[: 1 if "collective" in name else 2]:
        scaling = "per-token" if per_token else "average"
        for inside in (False, True):
            where = "inside" if inside else "outside"
            row(f"{name}, our sample_mean, {scaling}, from {where}", on=2, trains="sample_mean")(
                partial(aggregated, per_token=per_token, inside=inside, ddp=ddp)
            )
        if name != "no_shard":  # where it is refused
            row(f"{name}, our deferred token_mean, {scaling}", on=2, trains="token_mean")(
                partial(
                    aggregated,
                    per_token=per_token,
                    mode="token_mean",
                    inside=False,
                    deferred=True,
                    ddp=ddp,
                )
            )


if __name__ == "__main__":
    tiny_gpt.start(dtype=torch.float32)
    main()
