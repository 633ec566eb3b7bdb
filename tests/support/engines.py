"""A model in one of Megatron's engines, for launched workers: they import Megatron."""

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from megatron_lossagg.contract.megatron_options import megatron_release

FSDP = {
    "no_shard": {"overlap_grad_reduce": True},
    "optim": {},
    "optim_grads": {},
    "optim_grads_params": {},
    "optim_grads, in the collective": {"average_in_collective": True},
}
"""Each sharding strategy of Megatron-FSDP as this release reduces it."""
if megatron_release() > (0, 16):  # stock does not build it without experts
    del FSDP["optim_grads, in the collective"]


def fsdp(name, **more):
    """Return the options of one of ``FSDP``."""
    return {"data_parallel_sharding_strategy": name.partition(",")[0], **FSDP[name], **more}


def wrapped(config, model, *, unit=None, **ddp):
    """Wrap a model in DistributedDataParallel or, with a sharding strategy, in Megatron-FSDP.

    ``unit``: the class of its submodules that are gathered and freed as a whole.
    """
    is_sharded = "data_parallel_sharding_strategy" in ddp
    ddp_config = DistributedDataParallelConfig(use_megatron_fsdp=is_sharded, **ddp)
    if not is_sharded:
        return DistributedDataParallel(config, ddp_config, model)
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    units = None if unit is None else [unit]
    return FullyShardedDataParallel(config, ddp_config, model, fsdp_unit_modules=units)
