"""Stand-ins for what Megatron-Core takes from CUDA, so that it trains on a CPU with gloo.

Megatron-Core asks CUDA for a device, a random state, streams and synchronization. Each of those
names is replaced by one for the CPU; the table ``STAND_INS`` is all that is replaced. Nothing in it
computes: schedules, distributed data parallelism, ``finalize_model_grads`` and the optimizers run
as Megatron-Core ships them, a GPT's fused functions uncompiled.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed

from megatron_lossagg.errors import LossAggregationError

Replacement = Callable[[Any], Any]
"""Makes what stands in for a name from the original, None if there is none."""

_CPU = torch.device("cpu")


class StandInError(LossAggregationError, RuntimeError):
    """Stand-ins were asked for on a machine with CUDA, or after Megatron-Core had bound CUDA's."""


class _CpuStream:
    """A stream of a device that has finished everything it was ever given."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        del args, kwargs

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _CpuStream)

    __hash__ = object.__hash__

    def record_event(self, *args: object) -> _CpuStream:
        """Answer with itself: what has been submitted is done."""
        del args
        return self

    def wait(self) -> None:
        """Return immediately, as the event that :meth:`record_event` answers with."""

    def wait_stream(self, stream: object) -> None:
        """Return immediately: the other stream has finished too."""
        del stream

    def synchronize(self) -> None:
        """Return immediately."""


def around(call: Callable[..., Any]) -> Replacement:
    """Make replacements that answer ``call(original, *args, **kwargs)``; a decorator."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return call(original, *args, **kwargs)

        return replacement

    return make


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device | str):
        return torch.device(device).type == "cuda"
    return isinstance(device, int)


@around
def _on_cpu(
    factory: Callable[..., torch.Tensor],
    *args: Any,
    device: Any = None,
    pin_memory: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    del pin_memory  # Pinning asks for an accelerator; the result is the same without.
    return factory(*args, device=_CPU if _is_cuda(device) else device, **kwargs)


class _TorchOnCpu:
    """torch as a module of Megatron-Core sees it, whose CUDA devices are the CPU."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    @staticmethod
    def device(*name: Any) -> torch.device:
        """Make a device; of CUDA's, the CPU."""
        is_cuda = isinstance(name[0], str) and name[0].startswith("cuda")
        return _CPU if is_cuda else torch.device(*name)


def _mesh_on_cpu(original: Any) -> Any:
    def from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:
        device_type = _CPU.type if _is_cuda(device_type) else device_type
        return original.from_group(group, device_type, *args, **kwargs)

    return SimpleNamespace(from_group=from_group)


def _class_of_nothing(original: Any) -> type:
    return original if isinstance(original, type) else type("TELinear", (), {})


def _scaled_before(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let Megatron-FSDP scale before a collective, as it does in bfloat16: gloo's cannot."""

    def reduce_op(gradient: Any, factor: Any, ddp_config: Any) -> Any:
        ddp_config = copy.copy(ddp_config)
        ddp_config.gradient_reduce_div_fusion = False
        return original(gradient, factor, ddp_config)

    return reduce_op


def _ended_at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a gather of Megatron-FSDP end before the next begins.

    With two of one group under way, gloo's threads corrupt the heap: a step with experts on four
    ranks ended by SIGABRT in one of ten runs (torch 2.13.0).
    """

    def coalescing_manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Any:
        del async_ops
        return original(group, device)

    return coalescing_manager


@around
def _cuda_type_name(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    answer = original(*args, **kwargs)
    if isinstance(answer, str) and not answer.startswith("torch.cuda."):
        return answer.replace("torch.", "torch.cuda.", 1)
    return answer


@around
def _splits_as_lists(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    splits = {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in kwargs.items()
        if name.endswith("_split_sizes")
    }
    return original(*args, **{**kwargs, **splits})


def always(answer: Any) -> Callable[[Any], Callable[..., Any]]:
    """Make replacements that answer ``answer`` to every call."""
    return lambda original: lambda *args, **kwargs: answer


def instead(replacement: Any) -> Callable[[Any], Any]:
    """Make what stands in for a name whatever it was."""
    return lambda original: replacement


def _cpu_random_state(*args: object, **kwargs: object) -> torch.Tensor:
    return torch.default_generator.get_state()


_FSDP = "megatron.core.distributed.fsdp"

# Above each name what does not run on a CPU without it.
STAND_INS: dict[str, Replacement] = {
    # megatron.core.distributed.param_and_grad_buffer._ParamAndGradBuffer
    "torch.cuda.current_device": always(_CPU),
    # megatron.core.optimizer.clip_grads.get_grad_norm_fp32
    "torch.tensor": _on_cpu,
    # megatron.core.pipeline_parallel.schedules.forward_backward_no_pipelining
    "torch.zeros": _on_cpu,
    # megatron.core.transformer.utils.get_default_causal_mask
    "torch.ones": _on_cpu,
    # megatron.core.tensor_parallel.data.broadcast_data
    "torch.Tensor.cuda": instead(lambda self, *args, **kwargs: self),
    # megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params
    "torch.Tensor.type": _cuda_type_name,
    # megatron.core.tensor_parallel.random.CudaRNGStatesTracker.add
    "torch.cuda.manual_seed": instead(torch.default_generator.manual_seed),
    "torch.cuda.get_rng_state": instead(_cpu_random_state),
    # megatron.core.tensor_parallel.random.CudaRNGStatesTracker.fork
    "torch.cuda.random.get_rng_state": instead(_cpu_random_state),
    # megatron.core.tensor_parallel.random._set_cuda_rng_state
    "torch.cuda.default_generators": instead(defaultdict(lambda: torch.default_generator)),
    "torch.cuda._lazy_call": instead(lambda callback, **_: callback()),
    # megatron.core.pipeline_parallel.p2p_communication.P2PCommunicator
    "torch.cuda.synchronize": always(None),
    # megatron.core.transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher
    "torch.cuda.Stream": instead(_CpuStream),
    "torch.cuda.current_stream": always(_CpuStream()),
    "torch.cuda.stream": always(contextlib.nullcontext()),
    # megatron.core.tensor_parallel.mappings.all_to_all
    "torch.distributed.all_to_all_single": _splits_as_lists,
    # megatron.core.transformer.moe.moe_utils.RouterGatingLinearFunction: an import without
    # Transformer Engine leaves the name undefined, here it is None
    "megatron.core.transformer.moe.moe_utils.te_general_gemm": lambda original: original,
    # Megatron-FSDP, whose device is f"cuda:{torch.cuda.current_device()}"
    f"{_FSDP}.mcore_fsdp_adapter.torch": _TorchOnCpu,
    f"{_FSDP}.src.megatron_fsdp.megatron_fsdp.torch": _TorchOnCpu,
    f"{_FSDP}.mcore_fsdp_adapter.DeviceMesh": _mesh_on_cpu,
    f"{_FSDP}.mcore_fsdp_adapter.TELinear": _class_of_nothing,  # a mock without it
    f"{_FSDP}.src.megatron_fsdp.param_and_grad_buffer.gradient_reduce_preprocessing": (
        _scaled_before
    ),
    f"{_FSDP}.src.megatron_fsdp.param_and_grad_buffer._coalescing_manager": _ended_at_once,
}

_originals: dict[str, Any] = {}


def install(*, allow_cuda: bool = False) -> None:
    """Replace every name in ``STAND_INS`` in this process, once; later calls do nothing.

    Call it before anything imports Megatron-Core, which binds some of the names at import; it
    imports Megatron-Core itself, and what a GPT has of it, whose fused functions are not compiled,
    as under Megatron-LM's ``--disable-jit-fuser``; what is imported later is. Only a new process
    reverts it. ``allow_cuda=True`` keeps a machine with CUDA on its CPU.
    """
    if _originals:
        return
    if torch.cuda.is_available() and not allow_cuda:
        raise StandInError(
            f"torch.cuda is available ({torch.cuda.device_count()} devices), and the stand-ins are "
            "for machines without it: leave install() out to train on the GPU, or call "
            "install(allow_cuda=True) to stay on the CPU"
        )
    if "megatron.core" in sys.modules:
        raise StandInError(
            "megatron.core is imported already and has bound CUDA's own functions: call "
            "megatron_lossagg.cpu.install() before the first import of megatron"
        )
    with _uncompiled():  # each process would import inductor, and a machine may have no compiler
        replace(STAND_INS)
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Let ``torch.compile`` return functions as they are: those that are decorated meanwhile."""
    name = "TORCHDYNAMO_DISABLE"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def replace(stand_ins: Mapping[str, Replacement]) -> None:
    """Replace the names of a table in this process; of Megatron-FSDP's, those of this release."""
    for name, make in stand_ins.items():
        owner_name, _, attribute = name.rpartition(".")
        if owner_name.startswith(_FSDP) and not _is_module(owner_name):
            continue
        owner = _owner(owner_name)
        _originals[name] = original = getattr(owner, attribute, None)
        setattr(owner, attribute, make(original))


def replaced() -> frozenset[str]:
    """Return the names that were replaced in this process."""
    return frozenset(_originals)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _owner(name: str) -> Any:
    if name.startswith("megatron."):
        return importlib.import_module(name)  # pkgutil would hide why an import fails
    return pkgutil.resolve_name(name)
