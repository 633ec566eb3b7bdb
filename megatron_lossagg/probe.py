"""The startup probe: measure K on the live Megatron-Core instead of believing the table.

A tiny chunk a virtual stage, with one weight vector w and ``out = in + sum_j w_j``, goes
through the live DDP class, schedule and finalize function. Each data- and context-parallel
rank d and microbatch m has a share of its own, ``v(d, m) * out``, and returns what
:class:`~megatron_lossagg.contract.MegatronContract` would return for it. K is right where

    main_grad_j = sum_{d,m} v(d, m)        for every j, on every stage and rank

and elsewhere Megatron undoes another factor, ``K * sum v / main_grad_j``, which is reported.
The probe measures factors and no rounding, so it computes in float32 whatever the model's
dtype. It works on copies: the live config, model, buffers, random states and Megatron's
globals stay as they are.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.errors import ContractError
from megatron_lossagg.exchange import Exchange
from megatron_lossagg.layout import Ints

DDP, SCHEDULE, FINALIZE = "DDP", "schedule", "finalize"
_PATIENCE = timedelta(seconds=60)
_PIECE = 128  # elements of w for each rank; Megatron pads a bucket to a multiple of it

_PLAIN_CONFIG: Mapping[str, Any] = {
    # host callbacks
    "timers": None,
    "no_sync_func": None,
    "grad_sync_func": None,
    "param_sync_func": None,
    "grad_scale_func": None,
    "config_logger_dir": "",
    # the shape and dtype of what stages send one another
    "hidden_size": 1,
    "params_dtype": torch.float32,
    "pipeline_dtype": torch.float32,
    "enable_autocast": False,
    "variable_seq_lengths": False,
    "sequence_parallel": False,
    # what asks for modules that the probe's chunk has not
    "num_moe_experts": None,
    "moe_router_enable_expert_bias": False,
    "mtp_num_layers": None,
    "mtp_standalone": False,
    "qk_layernorm": False,
    "has_cond_embedder": False,
    "defer_embedding_wgrad_compute": False,
    "delay_wgrad_compute": False,
    "overlap_moe_expert_parallel_comm": False,
    # memory and speed
    "cuda_graph_impl": "none",
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "recompute_granularity": None,
    "num_microbatches_with_partial_activation_checkpoints": None,
    "cpu_offloading": False,
    "fine_grained_activation_offloading": False,
}
_PLAIN_DDP_CONFIG: Mapping[str, Any] = {
    "overlap_param_gather": False,
    "align_param_gather": False,
    "check_for_nan_in_grad": False,
    "check_for_large_grads": False,
    "fp8_param_gather": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
    "nccl_ub": False,
    "pad_buckets_for_high_nccl_busbw": False,  # a padded bucket leaves some ranks no weight
}
_GROUPS = {
    "dp": "dp_group",
    "dp_cp": "dp_cp_group",
    "expt_dp": "expt_dp_group",
    "intra_dp_cp": "intra_dp_cp_group",
    "intra_expt_dp": "intra_expt_dp_group",
    "inter_dist_opt": "inter_dist_opt_group",
    "tp": "tp_group",
    "pp": "pp_group",
    "ep": "ep_group",
}


class Contract(Protocol):
    """What the probe asks of a :class:`~megatron_lossagg.contract.MegatronContract`."""

    regime: Any
    dp_size: int
    cp_size: int
    dp_cp_size: int


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A :class:`~megatron_lossagg.contract.StepContract` for the probe's step."""

    factor: int
    """Its K."""
    returns: Callable[[Tensor, int], tuple[Tensor, Tensor, dict[str, Tensor]]]
    """What loss_func returns for a share and the number of its microbatch."""


BeginTrial = Callable[[Sequence[int], int], Trial]
"""From this rank's counted tokens of each microbatch, and the step's, to its :class:`Trial`."""


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """What the startup probe found; equal on all ranks but for ``seconds``."""

    seconds: float
    expected: int | None = None
    """K of the probe's step, as the contract says it."""
    factors: tuple[float, float] | None = None
    """Lowest and highest K measured over ranks and stages; None where nothing was measured."""
    measured: tuple[str, ...] = ()
    """The parts that were run: of "DDP", "schedule", "finalize"."""
    read: tuple[str, ...] = ()
    """The parts that were read and believed, each with the reason."""
    repeated: bool = False
    """Whether this was found earlier in the process, for a model of the same kind."""

    def __str__(self) -> str:
        said = []
        if self.factors is not None:
            through = ", ".join(self.measured)
            said.append(f"K = {_range(self.factors)} measured through {through}")
        if self.read:
            said.append("read, not measured: " + "; ".join(self.read))
        return f"{', '.join(said)} ({'known' if self.repeated else f'{self.seconds:.2f} s'})"


def run_probe(chunks: Sequence[Any], contract: Contract, begin: BeginTrial) -> ProbeReport:
    """Measure K on the live Megatron-Core; raise :class:`ContractError` where it differs.

    ``chunks``: the DDP-wrapped chunks; nothing of them changes. ``begin``: makes the step that
    is measured. A part that cannot run the probe (a finalize function that holds the live
    model, a DDP class that wants more arguments) is replaced by Megatron-Core's own and
    reported as read. What was measured once in the process is not measured again: same
    regime, classes, DDP configs, groups and functions.

    Symbols: ``type(chunk)``, ``pipeline_parallel.get_forward_backward_func``,
    ``config.finalize_model_grads_func``. Collectives: six all-gathers of an integer or two
    over the world, and those of one small step. Host syncs: one each. Call it on every rank,
    outside the schedule. A rank that fails alone while others wait for it raises
    :class:`ContractError` after a minute at most, and its end ends the run.
    """
    started = time.perf_counter()
    own_groups = _has_own_groups(chunks)
    parts = {} if own_groups else _live_parts(chunks)
    key = None if own_groups else _kind(chunks, contract, parts)
    every_own_groups, every_known = _world_flags(own_groups, key in _known)
    if every_own_groups.any():
        return ProbeReport(read=(_OWN_GROUPS,), seconds=time.perf_counter() - started)
    if every_known.all():
        return replace(_known[key], repeated=True)
    step = _Step.of(chunks[0], contract, begin)
    ratios, read = _measure(chunks, step, parts)
    measured = tuple(part for part in parts if part not in read)
    report = ProbeReport(
        expected=step.trial.factor,
        factors=ratios and _verdict(ratios, step, contract, measured),
        seconds=time.perf_counter() - started,
        measured=measured,
        read=tuple(f"{part} ({reason})" for part, reason in read.items()),
    )
    _known[key] = report
    return report


_OWN_GROUPS = (
    "DDP, schedule and finalize (the chunks' groups are not parallel_state's: only who calls the "
    "schedule knows which it gets)"
)


def _has_own_groups(chunks: Sequence[Any]) -> bool:
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return True
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    ranks = dist.get_process_group_ranks(group)
    return any(dist.get_process_group_ranks(chunk.dp_cp_group) != ranks for chunk in chunks)


def _live_parts(chunks: Sequence[Any]) -> dict[str, Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    return {
        DDP: type(chunks[0]),
        SCHEDULE: get_forward_backward_func(),
        FINALIZE: chunks[0].config.finalize_model_grads_func,
    }


@dataclass(frozen=True, kw_only=True)
class _Step:
    """The probe's step: d counts the ranks of DP * CP, r those of DP, m microbatches."""

    num_stages: int
    num_microbatches: int
    dp_cp_size: int
    dp_size: int
    dp_cp_rank: int
    trial: Trial

    @staticmethod
    def of(chunk: Any, contract: Contract, begin: BeginTrial) -> _Step:
        from megatron.core import parallel_state

        interleaved = parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        microbatches = range(2 * stages + (not interleaved))

        def counted(r: int) -> list[int]:
            return [1 + (r + contract.dp_size * m) % 13 for m in microbatches]

        active_tokens = sum(sum(counted(r)) for r in range(contract.dp_size))
        return _Step(
            num_stages=stages,
            num_microbatches=len(microbatches),
            dp_cp_size=contract.dp_cp_size,
            dp_size=contract.dp_size,
            dp_cp_rank=dist.get_rank(chunk.dp_cp_group),
            trial=begin(counted(dist.get_rank(chunk.dp_group)), active_tokens),
        )

    def value(self, d: int, m: int) -> int:
        return 1 + (d + self.dp_cp_size * m) % 251

    @property
    def true_gradient(self) -> int:
        return sum(map(self.own_gradient, range(self.dp_cp_size)))

    def own_gradient(self, d: int) -> int:
        return sum(self.value(d, m) for m in range(self.num_microbatches))

    def factors(self, low: float, high: float) -> tuple[float, float]:
        """The K that Megatron undoes where gradients are low to high times the true ones."""
        smallest, largest = (self.trial.factor / r if r else float("inf") for r in (high, low))
        return smallest, largest

    @property
    def tolerance(self) -> float:
        """A float32 rounding an addition and a few more; finalize's 1/N has the default dtype."""
        additions = self.dp_cp_size + self.num_microbatches + 8
        default = torch.finfo(torch.get_default_dtype())
        return torch.finfo(torch.float32).eps * additions + default.eps


class _NotMeasuredError(Exception):
    """A part of Megatron cannot run the probe: the part, why. Equal on all ranks."""


class _Chunk(torch.nn.Module):
    """One stage of the probe's model: out = in + the sum of its weights."""

    pre_process = post_process = False
    share_embeddings_and_output_weights = False

    def __init__(self, live: Any, config: Any, vp_stage: int | None) -> None:
        from megatron.core.enums import ModelType

        super().__init__()
        self.config = config
        self.vp_stage = vp_stage
        self.model_type = ModelType.encoder_or_decoder
        self.input: Tensor | None = None
        device = next(live.module.parameters()).device
        self.dense = _weight(live.dp_cp_group, device)
        if live.expert_parallel_buffers:
            self.expert = _weight(live.expt_dp_group, device)
            self.expert.allreduce = False  # how DistributedDataParallel knows an expert's

    def set_input_tensor(self, tensor: Any) -> None:
        self.input = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self) -> Tensor:
        # A sum owns its storage: Megatron refuses to free an output that is a view.
        sums = torch.stack([weight.sum() for weight in self.parameters()])
        total = sums.view(1, 1, -1).sum(dim=-1, keepdim=True)
        return total if self.input is None else self.input + total


def _weight(group: Any, device: torch.device) -> Any:
    size = _PIECE * dist.get_world_size(group)
    return torch.nn.Parameter(torch.zeros(size, dtype=torch.float32, device=device))


def _measure(
    chunks: Sequence[Any], step: _Step, live: Mapping[str, Any]
) -> tuple[tuple[float, float] | None, dict[str, str]]:
    """Return :func:`_run`'s ratios, None if there are none, and why which parts were only read."""
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads

    stock = {DDP: DistributedDataParallel, FINALIZE: finalize_model_grads}
    parts, read = dict(live), {}
    if parts[FINALIZE] is None:
        parts[FINALIZE] = stock[FINALIZE]
        read[FINALIZE] = "config.finalize_model_grads_func is None until training sets it"
    while True:
        try:
            with _untouched(chunks), torch.enable_grad():
                return _run(chunks, step, parts), read
        except _NotMeasuredError as found:  # on all ranks alike
            part, reason = found.args
        if part == SCHEDULE and step.num_stages > 1:
            raise ContractError(
                f"the startup probe cannot run this schedule, {reason}: messages between pipeline "
                "stages may be left over, so training cannot go on: use "
                "--no-loss-aggregation-probe"
            )
        read[part] = reason
        if parts[part] is stock.get(part, parts[part]):
            return None, {other: read.get(other, "not reached") for other in parts}
        parts[part] = stock[part]


def _run(chunks: Sequence[Any], step: _Step, parts: Mapping[str, Any]) -> tuple[float, float]:
    """Return the lowest and highest ``main_grad / true`` of this rank's weights."""
    finalize_calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    with _part(DDP):
        built = _build(chunks, step, parts[DDP], lambda *a, **k: finalize_calls.append((a, k)))
    with _part(SCHEDULE):
        _run_schedule(built, step, parts[SCHEDULE])
    with _part(FINALIZE):
        for arguments, named in finalize_calls:
            parts[FINALIZE](*arguments, **named)
    with _part(DDP):  # its buffers may be cut otherwise
        gradient = torch.cat([ratio for chunk in built for ratio in _ratios(chunk, step)])
        low, high = torch.stack([gradient.min(), gradient.max()]).tolist()
    for chunk in built:  # its hooks keep it alive until the garbage collector comes by
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            for data in (buffer.grad_data, buffer.param_data):
                if data is not None:
                    data.untyped_storage().resize_(0)
    return low, high


def _build(
    chunks: Sequence[Any], step: _Step, wrapper: Any, finalize: Callable[..., None]
) -> list[Any]:
    config = _changed(chunks[0].config, _PLAIN_CONFIG)
    config.microbatch_group_size_per_vp_stage = step.num_stages
    config.finalize_model_grads_func = finalize
    built = []
    for index, chunk in enumerate(chunks):
        module = _Chunk(chunk, config, index if len(chunks) > 1 else None)
        ddp_config = _changed(chunk.ddp_config, _PLAIN_DDP_CONFIG)
        built.append(
            wrapper(config=config, ddp_config=ddp_config, module=module, **_groups(chunk, wrapper))
        )
        built[-1].zero_grad_buffer()
    hooks = [chunk.no_sync for chunk in built]  # Megatron before 0.14 reduces once a step only so
    config.no_sync_func = hooks if len(hooks) > 1 else hooks[0]
    return built


def _groups(chunk: Any, wrapper: Any) -> dict[str, Any]:
    """Give the live chunk's groups where the class takes them (from 0.15 on)."""
    if "pg_collection" not in inspect.signature(wrapper.__init__).parameters:
        return {}
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection()
    for name, attribute in _GROUPS.items():
        if hasattr(chunk, attribute):
            setattr(groups, name, getattr(chunk, attribute))
    return {"pg_collection": groups}


def _run_schedule(built: list[Any], step: _Step, schedule: Any) -> None:
    def forward_step(microbatches: Iterator[int], chunk: Any) -> tuple[Tensor, Any]:
        m = next(microbatches)

        def loss_func(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            return step.trial.returns(output.sum() * step.value(step.dp_cp_rank, m), m)

        return chunk(), loss_func

    schedule(
        forward_step_func=forward_step,
        data_iterator=[iter(range(step.num_microbatches)) for _ in built],
        model=built,
        num_microbatches=step.num_microbatches,
        seq_length=step.dp_cp_size // step.dp_size,  # one position a context-parallel rank
        micro_batch_size=1,
        forward_only=False,
    )


def _ratios(chunk: Any, step: _Step) -> Iterator[Tensor]:
    """Gradients over the true ones: of dense weights, and of experts' where there are some.

    An expert's gradient is summed over the ranks that hold it, ``expt_dp_group``.
    """
    yield _shard(chunk, chunk.module.dense, chunk.intra_dp_cp_group) / step.true_gradient
    if chunk.expert_parallel_buffers:
        gradient = _shard(chunk, chunk.module.expert, chunk.intra_expt_dp_group)
        true = torch.tensor(step.own_gradient(step.dp_cp_rank), device=gradient.device)
        dist.all_reduce(true, group=chunk.expt_dp_group)
        yield gradient / true


def _shard(chunk: Any, weight: Any, group: Any) -> Tensor:
    """The reduced part of a gradient: all of it, or this rank's with a distributed optimizer."""
    gradient: Tensor = weight.main_grad
    if not chunk.ddp_config.use_distributed_optimizer:
        return gradient
    return gradient.view(dist.get_world_size(group), -1)[dist.get_rank(group)]


def _verdict(
    ratios: tuple[float, float], step: _Step, contract: Contract, measured: Sequence[str]
) -> tuple[float, float]:
    """Return the lowest and highest K of the world, or raise where one is not the contract's."""
    every = _world().integers(np.array(ratios).view(np.int64)).view(np.float64)
    for rank, (low, high) in enumerate(every.tolist()):
        if abs(low - 1) <= step.tolerance and abs(high - 1) <= step.tolerance:
            continue
        formula = "M DP CP" if contract.regime == "average" else "N"
        raise ContractError(
            f"rank {rank}: the startup probe measured K = {_range(step.factors(low, high))}, "
            f"expected K = {formula} = {step.trial.factor} in the {contract.regime} regime "
            f"(M {step.num_microbatches}, DP {contract.dp_size}, CP {contract.cp_size}, "
            f"PP {step.num_stages}; through {', '.join(measured)}): a step's gradient would be "
            f"{_range((low, high))} times its loss's. This Megatron-Core scales losses by rules "
            "that are not undone: remove what patches it, or train without the probe "
            "(--no-loss-aggregation-probe) if you know better"
        )
    return step.factors(float(every.min()), float(every.max()))


def _range(bounds: tuple[float, float]) -> str:
    low, high = (f"{bound:.6g}" for bound in bounds)
    return low if low == high else f"{low} to {high}"


@contextlib.contextmanager
def _untouched(chunks: Sequence[Any]) -> Iterator[None]:
    """Refuse every use of the live chunks' gradients, and put Megatron's globals back."""
    from megatron.core import parallel_state

    def refuse(*_: Any, **__: Any) -> None:
        raise ContractError("it works on the live model, not on the one that it is given")

    names = ("zero_grad_buffer", "start_grad_sync", "finish_grad_sync", "scale_gradients")
    own = [{name: vars(c)[name] for name in names if name in vars(c)} for c in chunks]
    state = vars(parallel_state)
    state_before = {name: value for name, value in state.items() if name.isupper()}
    try:
        for chunk in chunks:
            vars(chunk).update(dict.fromkeys(names, refuse))
        yield
    finally:
        for chunk, before in zip(chunks, own, strict=True):
            for name in names:
                vars(chunk).pop(name, None)
            vars(chunk).update(before)
        state.update(state_before)


@contextlib.contextmanager
def _part(name: str) -> Iterator[None]:
    """End the block on all ranks alike: an error on one is a :class:`_NotMeasuredError` on all.

    Collectives: one all-gather over the world, a second one after an error. A rank that fails
    first waits until no other can be left in a collective of the block; if one may be, it
    raises :class:`ContractError`, and its end is the end of the others.
    """
    fault = ""
    try:
        yield
    except Exception as error:  # whatever it is, no rank may leave the others waiting
        fault = f"{type(error).__name__}: {error}"
    store = dist.distributed_c10d._get_default_store()
    mark = f"megatron_lossagg/probe/{next(_parts_run)}"
    store.set(f"{mark}/{dist.get_rank()}", "back")
    if fault:
        try:
            store.wait([f"{mark}/{rank}" for rank in range(dist.get_world_size())], _PATIENCE)
        except Exception:
            raise ContractError(
                f"the startup probe failed on rank {dist.get_rank()} in the {name}, and other "
                f"ranks still wait for it: {fault}. Train with --no-loss-aggregation-probe"
            ) from None
    (every_failed,) = _world_flags(bool(fault))
    if every_failed.any():
        faults = enumerate(_world().messages(fault))
        raise _NotMeasuredError(name, next(f"rank {rank}: {told}" for rank, told in faults if told))


_parts_run = itertools.count()
_known: dict[Any, ProbeReport] = {}


def _kind(chunks: Sequence[Any], contract: Contract, parts: Mapping[str, Any]) -> Any:
    """Tell apart what may scale losses differently."""
    functions = tuple(parts.values())  # kept alive: the id of one that is gone may come again
    groups = ("dp_group", "dp_cp_group", "intra_dp_cp_group", "intra_expt_dp_group")
    kinds = tuple(
        (
            type(chunk),
            repr(chunk.ddp_config),
            *(tuple(dist.get_process_group_ranks(getattr(chunk, name))) for name in groups),
        )
        for chunk in chunks
    )
    config = chunks[0].config
    pipeline = tuple(
        getattr(config, name, None)
        for name in ("pipeline_model_parallel_size", "overlap_p2p_comm", "batch_p2p_comm")
    )
    return contract.regime, contract.cp_size, pipeline, functions, kinds


def _world() -> Exchange:
    return Exchange(dist.group.WORLD)


def _world_flags(*flags: bool) -> Ints:
    """Every rank's flags, ``[number of flags, world size]``."""
    every: Ints = _world().integers(np.array(flags, dtype=np.int64)).T
    return every


def _changed(config: Any, changes: Mapping[str, Any]) -> Any:
    """Return a shallow copy with the changes to those fields that this version has."""
    changed = copy.copy(config)
    for name, value in changes.items():
        if hasattr(config, name):
            setattr(changed, name, value)
    return changed
