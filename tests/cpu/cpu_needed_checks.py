"""Take away one stand-in at a time and check that Megatron-Core fails without it."""

from __future__ import annotations

import contextlib
import pkgutil
import sys
import traceback
from importlib.util import find_spec
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import broadcast_data, get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.utils import get_default_causal_mask
from stock_step import run_of, stock_model, stock_step

from megatron_lossagg.contract.megatron_options import megatron_release
from megatron_lossagg.cpu import stand_ins
from megatron_lossagg.verify.parallelism import Parallelism
from megatron_lossagg.verify.world import split_world


def one_rank():
    return split_world(Parallelism())


def step(**sizes):
    """Run a step in float32; return the model."""
    layout = Parallelism(float32=True, **sizes)
    with split_world(layout):
        chunks = stock_model(layout)
        stock_step(chunks, run_of(layout).batches, layout)
        return chunks


def train_dense():
    step()


def optimize():
    layout = Parallelism(float32=True)
    with split_world(layout):
        chunks = stock_model(layout)
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, clip_grad=1.0), chunks)
        stock_step(chunks, run_of(layout).batches, layout)
        optimizer.step()


def mask_causally():
    # Some versions cache it.
    mask = getattr(get_default_causal_mask, "__wrapped__", get_default_causal_mask)
    assert mask(3).tolist()[0] == [False, True, True]


def broadcast():
    with one_rank():
        assert broadcast_data(["x"], {"x": torch.arange(3)}, torch.int64)["x"].tolist() == [0, 1, 2]


def fork_random_state():
    with one_rank():
        before = torch.get_rng_state()
        model_parallel_cuda_manual_seed(1)
        tracker = get_cuda_rng_tracker()
        with tracker.fork("model-parallel-rng"):
            first = torch.rand(4)
        outside = torch.get_rng_state()
        with tracker.fork("data-parallel-rng"):
            other = torch.rand(4)
        assert not torch.equal(first, other)
        assert torch.equal(outside, torch.get_rng_state())
        model_parallel_cuda_manual_seed(1)
        with tracker.fork("model-parallel-rng"):
            assert torch.equal(first, torch.rand(4))
        with tracker.fork("model-parallel-rng"):
            assert not torch.equal(first, torch.rand(4))
    torch.set_rng_state(before)


def route_to_experts():
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = None  # made once per process
    step(moe=True)


def route_to_experts_beside_a_gpu():
    """As after ``install(allow_cuda=True)``: the machine has CUDA, and the model is on the CPU."""
    on_cpu = mock.patch(
        "megatron_lossagg.verify.small_gpt.device", return_value=torch.device("cpu")
    )
    with mock.patch("torch.cuda.is_available", return_value=True), on_cpu:
        route_to_experts()


def exchange_tokens():
    step(dp=2, moe=True, ep=2)


def pass_between_stages():
    step(pp=2)


def shard():
    step(dp=2, megatron_fsdp="optim_grads_params")


def shard_split_layers():
    step(tp=2, megatron_fsdp="no_shard")


def gather_one_at_a_time():
    with mock.patch("torch.distributed.distributed_c10d._CoalescingManager.append") as under_way:
        shard()
    assert not under_way.called


FSDP = "megatron.core.distributed.fsdp"
OF_FSDP = {
    f"{FSDP}.mcore_fsdp_adapter.torch": shard,
    f"{FSDP}.mcore_fsdp_adapter.DeviceMesh": shard,
    f"{FSDP}.mcore_fsdp_adapter.TELinear": shard_split_layers,
    f"{FSDP}.src.megatron_fsdp.megatron_fsdp.torch": shard,
    f"{FSDP}.src.megatron_fsdp.param_and_grad_buffer.gradient_reduce_preprocessing": shard,
    f"{FSDP}.src.megatron_fsdp.param_and_grad_buffer._coalescing_manager": gather_one_at_a_time,
}
if megatron_release() < (0, 16) or find_spec("einops") is None:
    OF_FSDP = {}
NEEDED_ON = {
    1: {
        "torch.cuda.current_device": train_dense,
        "torch.zeros": train_dense,
        "torch.tensor": optimize,
        "torch.Tensor.type": optimize,
        "torch.ones": mask_causally,
        "torch.Tensor.cuda": broadcast,
        "torch.cuda.manual_seed": fork_random_state,
        "torch.cuda.get_rng_state": fork_random_state,
        "torch.cuda.random.get_rng_state": fork_random_state,
        "torch.cuda.default_generators": fork_random_state,
        "torch.cuda._lazy_call": fork_random_state,
        "torch.cuda.Stream": route_to_experts,
        "torch.cuda.current_stream": route_to_experts,
        "torch.cuda.stream": route_to_experts_beside_a_gpu,  # as under allow_cuda=True
        "megatron.core.transformer.moe.moe_utils.te_general_gemm": route_to_experts,
    },
    2: {
        "torch.distributed.all_to_all_single": exchange_tokens,
        **OF_FSDP,
        # Last: a stage that fails leaves its peer's message unreceived.
        "torch.cuda.synchronize": pass_between_stages,
    },
}


@contextlib.contextmanager
def removed(name):
    """Put the original of a stand-in back wherever it is bound."""
    owner_name, _, attribute = name.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    original, ours = stand_ins._originals[name], vars(owner)[attribute]
    modules = [module for key, module in sys.modules.items() if key.startswith("megatron.core")]
    bound = [(owner, attribute)] + [
        (module, key)
        for module in modules
        for key, value in list(vars(module).items())
        if value is ours and value is not None
    ]
    for place, key in bound:
        setattr(place, key, original) if original is not None else delattr(place, key)
    try:
        yield
    finally:
        for place, key in bound:
            setattr(place, key, ours)


def failure(name, scenario):
    """Return what went wrong without a stand-in, and in which function; None if nothing did."""
    scenario()
    with removed(name):
        try:
            scenario()
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            return f"{type(error).__name__} in {frames[-1].name}: {error}"[:200]
    return None


def run(directory):
    """Return, for each stand-in this world size exercises, how Megatron fails without it."""
    del directory
    scenarios = NEEDED_ON[dist.get_world_size()]
    return {name: failure(name, scenario) for name, scenario in scenarios.items()}
