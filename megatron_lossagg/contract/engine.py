"""What is asked of an engine: of what wraps a chunk and reduces its gradients.

Megatron-Core has two whose arithmetic is that of ``scaling.py``, ``DistributedDataParallel`` and
Megatron-FSDP: the mean over M and DP CP ranks, or the sum over N. They differ in where a gradient
lies and when it is reduced. Nothing outside of ``contract/`` asks which one a chunk has. Symbols:
``DistributedDataParallel.__init__``, ``mcore_fsdp_adapter.FullyShardedDataParallel``,
``MegatronFSDP``, ``ParamAndGradBuffer``, ``GradReducePipeline``, ``FSDPDistributedIndex``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lossagg.contract.megatron_options import megatron_release, megatron_version

_INDEX = "megatron_fsdp_dist_index"
"""What a chunk in Megatron-FSDP has."""


class Engine:
    """What wraps a chunk; this one is ``megatron.core.distributed.DistributedDataParallel``.

    What another answers differently is its subclass's. Nothing here communicates.
    """

    def __init__(self, chunk: Any) -> None:
        self.chunk = chunk

    @property
    def dp_group(self) -> ProcessGroup:
        """The dense data-parallel group without context parallelism."""
        group: ProcessGroup = self.chunk.dp_group
        return group

    @property
    def dp_cp_group(self) -> ProcessGroup:
        """The same with context parallelism."""
        group: ProcessGroup = self.chunk.dp_cp_group
        return group

    @property
    def pp_group(self) -> ProcessGroup:
        """The pipeline-parallel group."""
        group: ProcessGroup = self.chunk.pp_group
        return group

    @property
    def has_experts(self) -> bool:
        """Whether this rank holds some of its experts."""
        return bool(self.chunk.expert_parallel_buffers)

    @property
    def expert_group(self) -> ProcessGroup:
        """The ranks that hold the same experts, if it has some."""
        group: ProcessGroup = self.chunk.expt_dp_group
        return group

    @property
    def shards(self) -> bool:
        """Whether a rank's reduced gradients are only those of its optimizer."""
        return bool(self.chunk.ddp_config.use_distributed_optimizer)

    @property
    def adds_up_shards(self) -> bool:
        """Whether microbatches add up gradients that are reduced, a part of them on each rank."""
        return False

    @property
    def modules(self) -> tuple[Any, ...]:
        """Whose methods a config may name as ``no_sync_func`` or ``grad_sync_func``."""
        return (self.chunk,)

    def fault(self) -> str:
        """Say why it is not supported as it is set up; empty if it is."""
        from megatron.core.distributed import DistributedDataParallel

        kind = type(self.chunk).__name__
        # torch's fully_shard makes a subclass of what it shards.
        is_fsdp = "fsdp" in f"{type(self.chunk).__module__}.{kind}".lower() or "FullyShard" in kind
        if isinstance(self.chunk, DistributedDataParallel) and not is_fsdp:
            return ""
        return (
            f"got a {kind}, expected Megatron-Core's DistributedDataParallel or its "
            "FullyShardedDataParallel of Megatron-FSDP, version 1 (not the MegatronFSDP of the "
            "wheel megatron-fsdp, which has no groups of Megatron's): pass the wrapped chunks that "
            "the schedule gets, after wrapping; torch's FSDP2 is not supported, because its "
            "scale_gradients does nothing"
        )

    def factors(self, *, of_experts: bool) -> set[float]:
        """Return what it multiplies gradients by before it adds them over ranks."""
        experts = self.chunk.expert_parallel_buffers if of_experts else []
        buffers = [*self.chunk.buffers, *experts]
        # It scales by each bucket's own copy.
        scaled = (*buffers, *(bucket for buffer in buffers for bucket in buffer.buckets))
        return {part.gradient_scaling_factor for part in scaled}

    def gradients(self) -> Iterator[Tensor]:
        """Yield what it adds a step's gradients up in."""
        # Then parameters are gathered into the gradient buffers.
        if getattr(self.chunk.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False):
            return
        for buffer in (*self.chunk.buffers, *self.chunk.expert_parallel_buffers):
            if not _is_left(buffer):
                yield buffer.grad_data

    def parameters(self) -> Iterator[tuple[str, Any]]:
        """Yield what backward passes add gradients of, with its name in the model."""
        for name, parameter in self.chunk.module.named_parameters():
            if getattr(parameter, "main_grad", None) is not None:
                yield name, parameter

    def added_up(self, parameter: Any) -> tuple[Tensor, int]:
        """Return the flat tensor in which this rank accumulates its gradient.

        And the index of that tensor's first entry in the flattened parameter.
        """
        return parameter.main_grad.view(-1), 0

    def reduced(self, parameter: Any) -> tuple[Tensor, int]:
        """Return what this rank has of its reduced gradient, and the same index."""
        whole, first = self.added_up(parameter)
        groups = (*self.chunk.bucket_groups, *self.chunk.expert_parallel_bucket_groups)
        for group in groups if self.shards else ():
            of = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                at = (whole.data_ptr() - bucket.grad_data.data_ptr()) // whole.element_size()
                if 0 <= at < bucket.grad_data.numel():
                    size = bucket.grad_data.numel() // dist.get_world_size(of)
                    end = (dist.get_rank(of) + 1) * size - at
                    first = max(0, end - size)
                    return whole[first : max(first, end)], first
        return whole, first

    def when_zeroed(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call a function when gradients are zeroed, if a rank :attr:`adds_up_shards`.

        Returns what ends it.
        """
        return lambda: None

    @property
    def called(self) -> Any:
        """The innermost module whose hooks run in a forward pass."""
        return unwrapped(self.chunk)

    def needs_no_sync(self, num_microbatches: int) -> bool:
        """Whether it reduces over several ranks wrongly outside of a ``no_sync`` of its own."""
        return bool(self.chunk.ddp_config.overlap_grad_reduce and num_microbatches > 1)

    @property
    def reduces_twice_in_no_sync(self) -> bool:
        """Whether it reduces once more than finalize does if its ``no_sync`` is used."""
        return False

    def hold(self) -> AbstractContextManager[None]:
        """Let no microbatch inside it be the last, which starts the reduction."""
        held: AbstractContextManager[None] = self.chunk.no_sync()
        return held

    def cannot_hold(self) -> str:
        """Say why it cannot reduce once after several schedule calls; empty if it can."""
        return ""

    def reduce_held(self) -> None:
        """Start the reduction that a ``no_sync`` has held back, if finalize does not.

        Runs the wrapper's own collectives.
        """
        if self.chunk.ddp_config.overlap_grad_reduce:  # no backward pass has started it
            self.chunk.start_grad_sync()

    def wrap(self, config: Any, ddp_config: Any, module: Any, unit: type) -> Any:
        """Wrap another model as the chunk is wrapped. The wrapper's constructor communicates.

        ``unit``: class of the submodules that are gathered and freed as a whole.
        """
        wrapper = type(self.chunk)
        more: dict[str, Any] = {}
        if "pg_collection" in inspect.signature(wrapper.__init__).parameters:  # from 0.15 on
            from megatron.core.process_groups_config import ProcessGroupCollection

            groups = ProcessGroupCollection()
            for name, group in vars(self.chunk).items():
                if name.endswith("_group") and isinstance(group, ProcessGroup):
                    setattr(groups, name.removesuffix("_group"), group)
            more["pg_collection"] = groups
        return wrapper(config=config, ddp_config=ddp_config, module=module, **more)


def engine_of(chunk: Any) -> Engine:
    """Return a chunk's engine, of which :meth:`Engine.fault` says whether it is supported."""
    return _MegatronFsdp(chunk) if hasattr(chunk, _INDEX) else Engine(chunk)


def is_chunk(model: Any) -> bool:
    """Whether a model is in one of Megatron-Core's engines, which need not be installed."""
    # torch's modules have a method of the name.
    return hasattr(model, _INDEX) or isinstance(getattr(model, "buffers", None), list)


def _is_left(buffer: Any) -> bool:
    """Whether the parameters were wrapped anew, so that their gradients are in another buffer."""
    found = getattr(next(iter(getattr(buffer, "params", ())), None), "main_grad", None)
    address = buffer.grad_data.untyped_storage().data_ptr()
    return found is not None and found.untyped_storage().data_ptr() != address


class _MegatronFsdp(Engine):
    """``mcore_fsdp_adapter.FullyShardedDataParallel``, of ``--use-megatron-fsdp``.

    A gradient is added up in the group's ``main_grad_buffer`` (within an instance of hybrid
    sharding in another of the group's): in ``no_shard`` and ``optim`` a whole one, which the last
    microbatch reduces, else a shard, to which each microbatch adds what it has reduced.
    """

    def __init__(self, chunk: Any) -> None:
        super().__init__(chunk)
        self._index = chunk.megatron_fsdp_dist_index
        self._strategy: str = chunk.ddp_config.data_parallel_sharding_strategy
        self._is_hybrid = bool(self._index.use_hybrid_fsdp)

    @property
    def dp_group(self) -> Any:
        return model_group(self.chunk, "dp")

    @property
    def dp_cp_group(self) -> Any:
        return self._index.get_dp_group()

    @property
    def pp_group(self) -> Any:
        return model_group(self.chunk, "pp")

    @property
    def has_experts(self) -> bool:
        return any(group.is_expert_param for group in self._groups)

    @property
    def expert_group(self) -> Any:
        return self._index.get_dp_group(is_expert_parallel=True)

    @property
    def shards(self) -> bool:
        return self._strategy != "no_shard"

    @property
    def adds_up_shards(self) -> bool:
        return self._strategy.startswith("optim_grads")

    @property
    def modules(self) -> tuple[Any, ...]:
        return (self.chunk, self.chunk.module)

    @property
    def _groups(self) -> list[Any]:
        found: list[Any] = self.chunk.param_and_grad_buffer.parameter_groups
        return found

    @property
    def _buffers(self) -> Iterator[tuple[Any, bool]]:
        for group in self._groups:
            for buffer in (group.main_grad_buffer, _hybrid_buffer(group)):
                if buffer is not None:
                    yield buffer, group.is_expert_param

    def _group(self, parameter: Any) -> tuple[Any, int]:
        """Return a parameter's group, and its place in it."""
        number = self.chunk.param_and_grad_buffer.param_to_param_group[parameter]
        group = self._groups[number]
        return group, group.main_grad_buffer.param_idx[parameter]

    @property
    def _overlaps(self) -> bool:
        return bool(self.chunk.ddp_config.overlap_grad_reduce)

    def fault(self) -> str:
        release, ddp, strategy = megatron_release(), self.chunk.ddp_config, self._strategy
        groups = [self.dp_cp_group, *([self.expert_group] if self.has_experts else [])]
        sizes = [dist.get_world_size(group) for group in groups]
        at = f"got Megatron-FSDP of megatron-core {megatron_version()} with {strategy}"
        if release < (0, 16):
            return (
                f"{at}, which scales the gradients that it has added up and not those that arrive "
                "(Megatron-LM#3023): install megatron-core>=0.16"
            )
        if strategy == "no_shard" and not self._overlaps and max(sizes) > 1 and release < (0, 18):
            return f"{at} without overlap_grad_reduce, which reduces no gradient: set it"
        if strategy == "optim" and self._overlaps and release < (0, 17):
            return (
                f"{at} and overlap_grad_reduce, which adds a rank's own gradients to the reduced "
                "ones: leave overlap_grad_reduce False"
            )
        if self._is_hybrid and not strategy.startswith("optim_grads") and not self._overlaps:
            return (
                f"{at} in several optimizer instances without overlap_grad_reduce, which reduces "
                "gradients within each instance only: set it, or take 'optim_grads'"
            )
        if len(self.factors(of_experts=False)) > 1:
            return (
                f"{at} and outer_dp_sharding_strategy in the average loss scaling, which adds "
                "gradients over ranks and does not average them: train with "
                "calculate_per_token_loss, or leave outer_dp_sharding_strategy 'no_shard'"
            )
        if strategy.startswith("optim_grads") and any(map(self._reduces_again, self._buffers)):
            return (
                f"{at} over one rank, where each microbatch doubles or scales once more what "
                "earlier ones have added up (Megatron-LM#6660): take "
                "data_parallel_sharding_strategy 'optim', or more ranks for each expert and "
                "instance"
            )
        if ddp.average_in_collective and len(set(sizes)) > 1:
            return (
                f"{at} and average_in_collective with expert parallelism, which averages experts' "
                "gradients over the ranks of each expert only: leave average_in_collective False"
            )
        return ""

    def _reduces_again(self, found: tuple[Any, bool]) -> bool:
        """Whether each microbatch changes what a buffer of one rank has added up."""
        buffer, _ = found
        dtype = getattr(self.chunk.ddp_config, "megatron_fsdp_grad_comm_dtype", None)
        return dist.get_world_size(buffer.data_parallel_group) == 1 and (
            megatron_release() < (0, 17)
            or buffer.gradient_scaling_factor not in (None, 1)
            or dtype not in (None, buffer.dtype)
        )

    def factors(self, *, of_experts: bool) -> set[float]:
        found = [
            buffer.gradient_scaling_factor
            for buffer, is_expert in self._buffers
            if of_experts or not is_expert
        ]
        return {1.0 if factor is None else float(factor) for factor in found}

    def gradients(self) -> Iterator[Tensor]:
        for buffer, _ in self._buffers:
            yield buffer.data

    def parameters(self) -> Iterator[tuple[str, Any]]:
        # The module's own are DTensors, of which backward passes add nothing.
        names = self.chunk.param_and_grad_buffer.param_to_name
        for group in self._groups:
            if group.main_grad_buffer is not None:
                yield from ((names[parameter], parameter) for parameter in group.params)

    def added_up(self, parameter: Any) -> tuple[Tensor, int]:
        group, place = self._group(parameter)
        buffer = _hybrid_buffer(group) or group.main_grad_buffer
        return buffer.get_item(place), buffer.locate_item_in_global_item(place)[0]

    def reduced(self, parameter: Any) -> tuple[Tensor, int]:
        group, place = self._group(parameter)
        buffer = group.main_grad_buffer
        if not self.shards:
            return buffer.get_item(place), 0
        shard = buffer.get_item(place, only_shard=True)
        return shard, buffer._get_item_slice_in_shard(place)[0]

    def when_zeroed(self, call: Callable[[], None]) -> Callable[[], None]:
        buffers = self.chunk.param_and_grad_buffer
        stock = buffers.zero_grad

        def zero_grad() -> None:
            stock()
            call()

        buffers.zero_grad = zero_grad
        return partial(setattr, buffers, "zero_grad", stock)

    @property
    def called(self) -> Any:
        # It runs the forward function of the module that it wraps, and no hook of it, until 0.18.
        model, wrapper = unwrapped(self.chunk), self.chunk.module
        return wrapper if wrapper.module is model else model

    def needs_no_sync(self, num_microbatches: int) -> bool:
        # It knows the last microbatch, which alone reduces, by leaving no_sync; at M 1 too.
        return self._reduces_last and self._overlaps

    @property
    def _reduces_last(self) -> bool:
        return self._is_hybrid or not self.adds_up_shards

    @property
    def reduces_twice_in_no_sync(self) -> bool:
        # From then on every microbatch is the last one, which reduces without the overlap too;
        # from 0.20 on not in one instance.
        is_wrong = self._is_hybrid or megatron_release() < (0, 20)
        return is_wrong and self._reduces_last and not self._overlaps

    def hold(self) -> AbstractContextManager[None]:
        return nullcontext()

    def cannot_hold(self) -> str:
        is_alone = dist.get_world_size(self.dp_cp_group) == 1
        if is_alone or not (self._reduces_last and self._overlaps):
            return ""
        return (
            f"got a deferred step on Megatron-FSDP with {self._strategy}"
            f"{', in several optimizer instances' if self._is_hybrid else ''} and "
            "overlap_grad_reduce, which reduces inside the last backward pass only: train all "
            "microbatches in one schedule call, or take 'optim_grads' or 'optim_grads_params' in "
            "one instance"
        )

    def reduce_held(self) -> None:
        """Finalize does, or each microbatch has."""

    def wrap(self, config: Any, ddp_config: Any, module: Any, unit: type) -> Any:
        # Its groups are parallel_state's; it makes those of experts by the config's number of them.
        without, config.num_moe_experts = config.num_moe_experts, self.chunk.config.num_moe_experts
        wrapped = type(self.chunk)(
            config=config,
            ddp_config=ddp_config,
            module=module,
            fsdp_unit_modules=[unit],
            device=self.chunk.device,
        )
        config.num_moe_experts = without
        return wrapped


def _hybrid_buffer(group: Any) -> Any:
    """Return the buffer of full hybrid sharding within an instance; None without."""
    return getattr(group, "hsdp_gbuf", None) or getattr(group, "hfsdp_helper_gbuf", None)


def unwrapped(chunk: Any) -> Any:
    """Return the model inside its wrappers (engine, Float16Module)."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def model_group(chunk: Any, name: Literal["cp", "tp", "dp", "pp"]) -> ProcessGroup:
    """Return a group that the model was built with (the model keeps them from 0.14 on)."""
    groups = getattr(unwrapped(chunk), "pg_collection", None)
    group: ProcessGroup | None = getattr(groups, name, None)
    if group is not None:
        return group
    from megatron.core import parallel_state

    global_groups = {
        "cp": parallel_state.get_context_parallel_group,
        "tp": parallel_state.get_tensor_model_parallel_group,
        "dp": parallel_state.get_data_parallel_group,
        "pp": parallel_state.get_pipeline_model_parallel_group,
    }
    global_group: ProcessGroup = global_groups[name]()
    return global_group
