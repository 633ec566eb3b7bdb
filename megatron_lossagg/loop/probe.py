"""The startup probe: measure K on the live Megatron-Core instead of relying on the table.

A tiny chunk per virtual stage, with one weight vector w and ``out = in + sum_j w_j``, goes
through the live DDP class, schedule and finalize function. Each data- and context-parallel
rank d and microbatch m has a partial loss of its own, ``v(d, m) * out``, and returns what
:class:`~megatron_lossagg.reduction.microbatch.Microbatch` returns for it. K is right if

    main_grad_j = sum_{d,m} v(d, m)        for every j, on every stage and rank

and elsewhere Megatron compensates for a different K, ``K * sum v / main_grad_j``, which is
reported. The probe measures K, not rounding, so it computes in float32 for any dtype of the model.
It works on copies: the live config, model, buffers, random states and Megatron's globals stay as
they are. An error on one rank must become the same error on all, or the others wait in a collective
forever: each part ends alike on all ranks.

Symbols: d counts the data- and context-parallel ranks, r the data-parallel ones, m the
microbatches; v(d, m) is what a partial loss multiplies ``out`` by.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.contract.engine import engine_of
from megatron_lossagg.contract.model import LiveGroups
from megatron_lossagg.contract.outputs import Outputs
from megatron_lossagg.contract.scaling import K_FORMULA, Scaling
from megatron_lossagg.errors import ContractError
from megatron_lossagg.loop.step import Step
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.exchange import together
from megatron_lossagg.reduction.plan import plan_step
from megatron_lossagg.reduction.sequences import Sequences
from megatron_lossagg.reduction.table import StepTotals
from megatron_lossagg.weigh.causes import is_near

if TYPE_CHECKING:
    from megatron_lossagg.loop.aggregator import LossAggregator


PATIENCE = timedelta(seconds=60)
"""How long a rank that failed waits for the others to leave their collectives."""

_REMEDY = "fix the error, or turn the probe off with --no-loss-aggregation-probe"

_parts_run = itertools.count()


class NotMeasuredError(Exception):
    """The probe cannot run; its message is equal on all ranks."""


@contextlib.contextmanager
def part(name: str, *, is_fatal: bool = False) -> Iterator[None]:
    """End the block alike on all ranks if it fails on one.

    All raise ``NotMeasuredError`` after an error of Megatron's parts, and :class:`ContractError`
    after one of those, or after any error if ``is_fatal``. One all-gather over the world, a second
    one after a long error. A rank that fails waits until every rank has left the block. If one may
    still be in a collective of it after ``PATIENCE``, the failed rank raises
    :class:`ContractError`, and the launcher ends the others.
    """
    severity, fault = 0, ""
    try:
        yield
    except NotMeasuredError as error:
        severity, fault = 1, str(error)
    except ContractError as error:
        severity, fault = 2, str(error)
    except Exception as error:  # of any kind: no rank may leave the others waiting
        severity, fault = 1, f"{type(error).__name__}: {error}"
        if is_fatal:
            severity, fault = 2, f"the startup probe failed in the {name}, {fault}: {_REMEDY}"
    _wait_for_others(name, fault)
    with together(dist.group.WORLD, f"leave the startup probe's {name}") as ranks:
        ranks.own = severity, fault
    severity = max(severity for severity, _ in ranks.of_ranks)
    if not severity:
        return
    rank, fault = next((r, said) for r, (one, said) in enumerate(ranks.of_ranks) if one == severity)
    fault = f"rank {rank}: {fault}"
    if severity == 2:
        raise ContractError(fault)
    raise NotMeasuredError(f"{name}: {fault}")


def _wait_for_others(name: str, fault: str) -> None:
    store = dist.distributed_c10d._get_default_store()
    mark = f"megatron_lossagg/probe/{next(_parts_run)}"
    store.set(f"{mark}/{dist.get_rank()}", "left")
    if not fault:
        return
    try:
        store.wait([f"{mark}/{rank}" for rank in range(dist.get_world_size())], PATIENCE)
    except Exception:
        raise ContractError(
            f"the startup probe failed on rank {dist.get_rank()} in the {name}: {fault}. Other "
            f"ranks still wait for this one, so the run ends: {_REMEDY}"
        ) from None


@contextlib.contextmanager
def untouched(chunks: Sequence[Any]) -> Iterator[None]:
    """Refuse every use of the live chunks' gradients, and restore Megatron's globals."""
    from megatron.core import parallel_state

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("it works on the live model, not on the one that it is given")

    names = ("zero_grad_buffer", "start_grad_sync", "finish_grad_sync", "scale_gradients")
    changed = [*map(vars, chunks), vars(parallel_state)]
    before = [dict(attributes) for attributes in changed]
    try:
        for chunk in chunks:
            vars(chunk).update(dict.fromkeys(names, refuse))
        yield
    finally:
        for attributes, own in zip(changed, before, strict=True):
            for name in attributes.keys() - own.keys():
                del attributes[name]
            attributes.update(own)


_PIECE = 128  # elements of w per rank; Megatron pads a bucket to a multiple of it

_PLAIN_CONFIG: Mapping[str, Any] = {
    # callbacks
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
    # what needs modules that the probe's chunk does not have
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


class _ProbeChunk(torch.nn.Module):
    """One stage of the probe's model: the sum of its weights; its input gets the same gradient."""

    pre_process = post_process = False
    share_embeddings_and_output_weights = False

    def __init__(self, live: Any, config: Any, vp_stage: int | None) -> None:
        from megatron.core.enums import ModelType

        super().__init__()
        self.config = config
        self.vp_stage = vp_stage
        self.model_type = ModelType.encoder_or_decoder
        self.input: Tensor | None = None
        self.weights = _Weights(live)

    def set_input_tensor(self, tensor: Any) -> None:
        """Take what the stage before sent; the schedule calls it."""
        self.input = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self) -> Tensor:
        """Return ``[1, 1, 1]`` with storage of its own.

        With ``deallocate_pipeline_outputs`` the schedule frees the output once it is sent, and
        refuses to free a view.
        """
        total: Tensor = self.weights()
        return total if self.input is None else _Through.apply(self.input) + total  # type: ignore[no-untyped-call]


class _Weights(torch.nn.Module):
    """The weights, which Megatron-FSDP gathers and frees by submodules."""

    def __init__(self, live: Any) -> None:
        super().__init__()
        device, engine = next(live.module.parameters()).device, engine_of(live)
        self.dense = _weight(engine.dp_cp_group, device)
        if engine.has_experts:
            weight = _weight(engine.expert_group, device)
            weight.allreduce = False  # how DistributedDataParallel recognizes an expert's
            self.experts = torch.nn.ParameterDict({"weight": weight})  # Megatron-FSDP: by the name

    def forward(self) -> Tensor:
        """Return their sum, ``[1, 1, 1]``."""
        sums = torch.stack([weight.sum() for weight in self.parameters()])
        return sums.view(1, 1, -1).sum(dim=-1, keepdim=True)


class _Through(torch.autograd.Function):
    """Zeros that pass the gradient on.

    gloo may still read an output that the schedule has freed (``deallocate_pipeline_outputs``): the
    next stage then receives any value. It must not reach the probe's loss, which would be NaN.
    """

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        return torch.zeros_like(received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _weight(group: Any, device: torch.device) -> Any:
    size = _PIECE * dist.get_world_size(group)
    return torch.nn.Parameter(torch.zeros(size, dtype=torch.float32, device=device))


def build(chunks: Sequence[Any], finalize: Callable[..., None], num_stages: int) -> list[Any]:
    """Wrap a :class:`_ProbeChunk` for each live chunk in the live chunk's class.

    ``finalize``: what the schedule calls to finalize. The live configs are copied.
    """
    config = _changed(chunks[0].config, _PLAIN_CONFIG)
    config.microbatch_group_size_per_vp_stage = num_stages
    config.finalize_model_grads_func = finalize
    built = []
    for index, chunk in enumerate(chunks):
        module = _ProbeChunk(chunk, config, index if len(chunks) > 1 else None)
        ddp_config = _changed(chunk.ddp_config, _PLAIN_DDP_CONFIG)
        built.append(engine_of(chunk).wrap(config, ddp_config, module, _Weights))
    if built[0].ddp_config.overlap_grad_reduce:  # as megatron.training does
        config.no_sync_func = _per_chunk([chunk.no_sync for chunk in built])
    if _starts_sync(chunks):
        config.grad_sync_func = _per_chunk([chunk.start_grad_sync for chunk in built])
    return built


def _starts_sync(chunks: Sequence[Any]) -> bool:
    """Whether the schedule starts the chunks' reductions, as with ``--align-grad-reduce``.

    Any other ``grad_sync_func`` is the framework's own and is left out of the probe.
    """
    hooks = chunks[0].config.grad_sync_func
    hooks = hooks if isinstance(hooks, list) else [hooks]
    return len(hooks) == len(chunks) and all(
        getattr(hook, "__name__", None) == "start_grad_sync"
        and getattr(hook, "__self__", None) in engine_of(chunk).modules
        for hook, chunk in zip(hooks, chunks, strict=True)
    )


def _per_chunk(hooks: list[Any]) -> Any:
    """Return hooks as Megatron takes them: a list, or the only one."""
    return hooks if len(hooks) > 1 else hooks[0]


def _changed(config: Any, changes: Mapping[str, Any]) -> Any:
    """Return a shallow copy with the changes to those fields that this version has."""
    changed = copy.copy(config)
    for name, value in changes.items():
        if hasattr(config, name):
            setattr(changed, name, value)
    return changed


class ProbeStep:
    """The probe's step: its sizes, its values v(d, m), and its true gradient."""

    def __init__(self, aggregator: LossAggregator) -> None:
        from megatron.core import parallel_state

        interleaved = parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None
        self.aggregator = aggregator
        self.num_stages = dist.get_world_size(aggregator.groups.pp_group)
        self.num_microbatches = 2 * self.num_stages + (not interleaved)

        def counted(r: int) -> list[int]:
            return [
                1 + (r + aggregator.groups.dp_size * m) % 13 for m in range(self.num_microbatches)
            ]

        self.counts = counted(dist.get_rank(aggregator.dp_group))
        """This rank's active tokens of each microbatch, of one sequence each."""
        self.scaling = Scaling(
            loss_scaling=aggregator.loss_scaling,
            num_microbatches=self.num_microbatches,
            dp_cp_size=aggregator.groups.dp_cp_size,
            active_tokens=sum(sum(counted(r)) for r in range(aggregator.groups.dp_size)),
        )
        self._rank = dist.get_rank(aggregator.groups.dp_cp_group)

    def value(self, d: int, m: int) -> int:
        """Return v(d, m)."""
        return 1 + (d + self.scaling.dp_cp_size * m) % 251

    def own_gradient(self, d: int) -> int:
        """Return rank d's part of the true gradient."""
        return sum(self.value(d, m) for m in range(self.num_microbatches))

    def run(self, chunks: list[Any], schedule: Any) -> None:
        """Run the schedule once: the loss of microbatch m is ``v(d, m) * output``."""
        plan = plan_step(
            Aggregation("token_sum"),
            Sequences(active_tokens=self.counts),
            totals=StepTotals(active_tokens=self.scaling.active_tokens),
        )
        step = Step(
            chunks=self.aggregator.chunks,
            groups=self.aggregator.groups,
            loss_scaling=self.aggregator.loss_scaling,
            plan=plan,
            num_microbatches=self.num_microbatches,
            guards=None,  # the live model's gradients are not the probe's
        )

        def loss_func(m: int, output: Tensor) -> Outputs:
            mask = torch.ones(self.counts[m], device="cpu")
            mb = step.microbatch([m], mask, lengths=[self.counts[m]])
            losses = torch.zeros_like(mask, dtype=output.dtype, device=output.device)
            losses[0] = output.sum() * self.value(self._rank, m)
            return mb.outputs(mb.reduce(losses))

        schedule(
            forward_step_func=lambda data, chunk: (chunk(), partial(loss_func, next(data))),
            data_iterator=[iter(range(self.num_microbatches)) for _ in chunks],
            model=chunks,
            num_microbatches=self.num_microbatches,
            seq_length=int(chunks[0].config.context_parallel_size),  # one position per CP rank
            micro_batch_size=1,
            forward_only=False,
        )
        step.end()

    def ratios(self, chunk: Any) -> Iterator[Tensor]:
        """Divide a chunk's gradients by the true ones: of dense weights, then of experts'.

        A true gradient is the sum of v(d, m) over all m, and over all d or, of an expert, over the
        ranks that hold it: one all-reduce over that group.
        """
        true = sum(map(self.own_gradient, range(self.scaling.dp_cp_size)))
        engine = engine_of(chunk)
        weights = dict(engine.parameters())
        yield engine.reduced(weights["weights.dense"])[0] / true
        if engine.has_experts:
            gradient, _ = engine.reduced(weights["weights.experts.weight"])
            of_experts = torch.full((), self.own_gradient(self._rank), device=gradient.device)
            dist.all_reduce(of_experts, group=engine.expert_group)
            yield gradient / of_experts

    def measured_k(self, ratio: float) -> float:
        """Return the K that is right if gradients are ``ratio`` times the true ones.

        Raises :class:`ContractError` if it is not the step's. The tolerance is one float32 rounding
        per addition and a few more, and one in torch's default dtype, of finalize's 1/N.
        """
        its, aggregator = self.scaling, self.aggregator
        measured = its.k / ratio if ratio else float("inf")
        additions = its.dp_cp_size + its.num_microbatches + 8
        default = torch.finfo(torch.get_default_dtype())
        if is_near(ratio, 1, torch.finfo(torch.float32).eps * additions + default.eps):
            return measured
        raise ContractError(
            f"the startup probe measured K = {measured:.6g}, expected K = "
            f"{K_FORMULA[its.loss_scaling]} = {its.k} in the {its.loss_scaling} loss scaling (at "
            f"the probe's own M {its.num_microbatches}, DP {aggregator.groups.dp_size}, CP "
            f"{aggregator.cp_size}, PP {self.num_stages}). A step's gradient would be {ratio:.6g} "
            "times that of its loss, because this Megatron-Core scales losses differently. Remove "
            "what patches it, or turn the probe off with --no-loss-aggregation-probe if this is "
            "intended"
        )


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """What the startup probe found."""

    seconds: float
    measured_k: float | None = None
    """The measured K furthest from the step's, over this rank's parameters; None if none was."""
    scaling: Scaling | None = None
    """Loss scaling and sizes of the probe's step: its M and N are not those of the run's steps."""
    note: str = ""
    """What was not measured and why, in one sentence; empty if everything was."""

    def __str__(self) -> str:
        finding = "K was read, not measured"
        if self.scaling is not None:
            own_size = {
                "average": f"M = {self.scaling.num_microbatches}",
                "per_token": f"N = {self.scaling.active_tokens}",
            }[self.scaling.loss_scaling]
            finding = (
                f"K = {K_FORMULA[self.scaling.loss_scaling]} confirmed through DDP, schedule, "
                f"finalize: measured {self.measured_k:.6g} at the probe's own {own_size}"
            )
        return f"{'; '.join(filter(None, (finding, self.note)))} ({self.seconds:.2f} s)"


_OWN_GROUPS = (
    "the chunks' groups are not parallel_state's, so only the caller of the schedule knows which "
    "groups it gets"
)
_NOT_SET = (
    "finalize is Megatron-Core's own, because config.finalize_model_grads_func is None until "
    "training sets it"
)


def run_probe(aggregator: LossAggregator) -> ProbeReport:
    """Measure K on the live Megatron-Core; raise :class:`ContractError` if it differs.

    The live chunks stay unchanged. If a part cannot run the probe (a finalize function bound to
    the live model, a DDP class that needs more arguments), nothing is measured, and the report says
    why. A live model that cannot be read is an error.

    Symbols: ``type(chunk)``, ``pipeline_parallel.get_forward_backward_func``,
    ``config.finalize_model_grads_func``. Collectives: eight all-gathers of an integer over the
    world, and those of two small steps. Host syncs: one each. Call it on every rank,
    outside the schedule. A rank that fails by itself while others wait for it raises
    :class:`ContractError` after a minute at most, and the launcher ends the others.
    """
    started = time.perf_counter()
    finalize = None
    try:
        with part("live model", is_fatal=True):
            if _has_own_groups(aggregator.groups):
                raise NotMeasuredError(_OWN_GROUPS)
            from megatron.core.pipeline_parallel import get_forward_backward_func

            schedule = get_forward_backward_func()
            finalize = aggregator.chunks[0].config.finalize_model_grads_func
            step = ProbeStep(aggregator)
        with untouched(aggregator.chunks), torch.enable_grad():
            k = _measured(step, schedule, finalize)
    except NotMeasuredError as error:  # on all ranks alike
        return ProbeReport(note=str(error), seconds=time.perf_counter() - started)
    return ProbeReport(
        measured_k=k,
        scaling=step.scaling,
        note=_NOT_SET if finalize is None else "",
        seconds=time.perf_counter() - started,
    )


def _has_own_groups(groups: LiveGroups) -> bool:
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return True
    its_and_global = (
        (groups.dp_group, parallel_state.get_data_parallel_group()),
        (groups.dp_cp_group, parallel_state.get_data_parallel_group(with_context_parallel=True)),
        (groups.pp_group, parallel_state.get_pipeline_model_parallel_group()),
    )
    ranks = dist.get_process_group_ranks
    return any(ranks(its) != ranks(other) for its, other in its_and_global)


def _measured(step: ProbeStep, schedule: Any, finalize: Any) -> float:
    """Run the step; return the K that is right for this rank's weights.

    It runs twice: from megatron-core 0.16 on, the reduction of gradients overlaps with the backward
    pass from the second step on, through other code than in the first. Raises on all ranks alike:
    ``NotMeasuredError`` if a part cannot run it, and :class:`ContractError` if K is not right on
    one, if the schedule does not finalize, and if it failed between pipeline stages, where its
    messages may be left over.
    """
    from megatron.core.distributed import finalize_model_grads

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    """Of the finalize function, which the schedule calls."""
    with part("DDP"):
        chunks = build(
            step.aggregator.chunks,
            lambda *arguments, **named: calls.append((arguments, named)),
            step.num_stages,
        )
    for _ in range(2):
        with part("schedule", is_fatal=step.num_stages > 1):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            step.run(chunks, schedule)
        with part("finalize"):
            if len(calls) != 1:
                raise ContractError(
                    f"the schedule called config.finalize_model_grads_func {len(calls)} times, "
                    "expected once: gradients are not reduced as K assumes; remove what patches "
                    "the schedule, or turn the probe off with --no-loss-aggregation-probe"
                )
            arguments, named = calls.pop()
            (finalize or finalize_model_grads)(*arguments, **named)
        with part("DDP"):  # its buffers may be laid out differently
            ratios = torch.cat([ratio for chunk in chunks for ratio in step.ratios(chunk)])
            k = step.measured_k(ratios[(ratios - 1).abs().argmax()].item())
    return k
