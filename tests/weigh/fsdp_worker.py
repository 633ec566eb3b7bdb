"""The table of programs on Megatron-FSDP, on two processes and on four.

In float32, as it keeps gradients.
"""

from functools import partial

import numpy as np
import pytest
import tiny_gpt
import torch
from engines import FSDP, fsdp
from program_table import ROWS, main, row
from programs_worker import (
    BF16,
    FINALIZE,
    MEANS,
    SP,
    aggregated,
    at_cp_2,
    compiles,
    finalized,
    fused,
    gpt_row,
    num,
    repeated,
    second_call,
    ties,
    toy,
    zeroed_inside,
)

from megatron_lossagg import LossAggregator
from megatron_lossagg.contract.engine import engine_of
from megatron_lossagg.errors import ContractError
from megatron_lossagg.reduction.aggregation import Options

ROWS.clear()  # of DistributedDataParallel
SCALINGS = {False: "average", True: "per-token"}
GRADS, FULL = "optim_grads", "optim_grads_params"


def scalings(name):
    """Return what a strategy can be trained in: Megatron refuses a mean of a sum."""
    return [False] if "collective" in name else [*SCALINGS]


for name in FSDP:
    ddp = fsdp(name)
    for (per_token, of), (function, f, says) in FINALIZE.items():
        if per_token in scalings(name):
            row(
                f"{name}, {SCALINGS[per_token]}, {of}",
                on=2,
                trains={"plain": says.split()[-1], "drops num_tokens": "token_sum"}.get(of),
                says=says,
            )(partial(finalized, per_token=per_token, finalize=function, f=f, ddp=ddp))
    for per_token in scalings(name):
        our = {"per_token": per_token, "ddp": ddp}
        for inside in (False, True):
            of = f"{SCALINGS[per_token]}, from {'inside' if inside else 'outside'}"
            row(f"{name}, our sample_mean, {of}", on=2, trains="sample_mean")(
                partial(aggregated, inside=inside, **our)
            )
        if name != "no_shard":  # where it is refused
            row(f"{name}, our deferred mode, {SCALINGS[per_token]}", on=2, trains="token_mean")(
                partial(aggregated, mode="token_mean", inside=False, deferred=True, **our)
            )
    row(f"{name}, zeroed inside of the block", on=2, trains="microbatch_token_mean")(
        partial(zeroed_inside, ddp=ddp)
    )
    row(f"{name}, the second of two schedule calls", on=2, says="was not zero", is_known=False)(
        partial(second_call, ddp=ddp, has_weights=name != "optim")
    )
for name in (GRADS, FULL):
    row(f"{name}, a kernel adds the gradient", on=2, trains="token_mean", is_measured=False)(
        partial(fused, ddp=fsdp(name))
    )
for name in ("optim", GRADS, FULL):
    row(f"{name}, a step that was repeated", on=2, trains="token_mean", is_zeroed=True)(
        partial(repeated, ddp=fsdp(name))
    )


@row("no_shard without no_sync_func", on=2, says="nothing was reduced", is_known=False)
def unreduced():
    found, rank = toy.sequences(), toy.dist.get_rank()
    chunk = toy.chunk_of(toy.total(found), ddp=fsdp("no_shard"))
    chunk.config.no_sync_func = None
    weighing = toy.weighed_step(chunk, found)[0]
    (gradient,) = engine_of(chunk).gradients()
    own = toy.by_hand(found, lambda s: (s.rank == rank) / (toy.M * s.n_mb))
    return weighing, gradient[: len(own)].double().numpy(), own


# Norms and biases of a GPT, which a rank has whole or not at all.

for name in FSDP:
    gpt_row(f"{name}, average", on=2, ddp=fsdp(name), **MEANS)
for name in (GRADS, FULL):
    three = {"shapes": ((2, 4), (1, 12), (1, 3)), "ddp": fsdp(name), "on": 2}
    gpt_row(f"{name}, M 3", **three)
    gpt_row(f"{name}, M 3, repeated", repeats=True, **three)
    gpt_row(f"{name}, bf16", on=2, ddp=fsdp(name, grad_reduce_in_fp32=False), **BF16)
    gpt_row(f"{name}, bf16 in float32", on=2, ddp=fsdp(name, grad_reduce_in_fp32=True), **BF16)
    gpt_row(f"{name}, TP 2, sequence parallel", on=4, ddp=fsdp(name), **SP)
gpt_row("tied embeddings", on=2, ddp=fsdp(GRADS), changed=ties)
gpt_row("compiled", on=2, ddp=fsdp(GRADS), changed=compiles)
gpt_row("full recomputation", on=2, ddp=fsdp(FULL), recompute_granularity="full",
        recompute_method="uniform", recompute_num_layers=1)  # fmt: skip

# Context parallelism, and several instances of the optimizer.

for on, dp in ((2, 1), (4, 2)):
    for name in FSDP:
        at_cp_2(
            f"{name}, DP {dp}, stock",
            lambda x, found, parts: (x.sum(), num(x), {}),
            lambda s, part, found, n, dp=dp: 1 / (toy.M * 2 * dp * n),
            on=on,
            ddp=fsdp(name),
            says="cause: a mean of one token mean per microbatch and context-parallel rank",
        )
        if True in scalings(name):
            at_cp_2(
                f"{name}, DP {dp}, a right token mean",
                lambda x, found, parts: (x.sum(), num(x), {}),
                lambda s, part, found, n: 1 / toy.total(found),
                on=on,
                ddp=fsdp(name),
                per_token=True,
                trains="token_mean",
            )
TWO = {"num_distributed_optimizer_instances": 2}


@row("optim, two instances", on=4, sizes=TWO, says="over some of the ranks", is_known=False)
def not_over_instances():
    found = toy.sequences()
    chunk = toy.chunk_of(toy.total(found), ddp=fsdp("optim", **TWO))
    with pytest.raises(ContractError, match="within each instance only"):
        LossAggregator([chunk], "token_mean", options=Options(probe=False))
    weighing, gradient = toy.weighed_step(chunk, found)
    right = toy.by_hand(found, lambda s: 1 / (toy.M * toy.world() * s.n_mb))
    assert not np.allclose(gradient, right)
    return weighing, None, None


for name in (name for name in FSDP if name != "optim"):
    for more in ({}, {"outer_dp_sharding_strategy": "optim"})[: 2 if name == FULL else 1]:
        for per_token in scalings(name):
            function, f, says = FINALIZE[per_token, "plain"]
            hybrid = fsdp(name, **TWO, **more)
            row(
                f"{name}, two instances, {SCALINGS[per_token]}{', outer' if more else ''}",
                on=4,
                sizes=TWO,
                trains=says.split()[-1],
            )(partial(finalized, per_token=per_token, finalize=function, f=f, ddp=hybrid))


if __name__ == "__main__":
    tiny_gpt.start(dtype=torch.float32)
    main()
