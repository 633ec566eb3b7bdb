"""What Megatron-Core does to a loss on its way to the gradient, and its inverse.

With three outputs ``(loss, num_tokens, report)``, from megatron-core 0.13 on (symbols:
``schedules.forward_step_calc_loss``, ``DistributedDataParallel.__init__``,
``finalize_model_grads``):

=========  =====================  ==================  ==========================  =========
regime     schedule               DDP                 finalize                    K
=========  =====================  ==================  ==========================  =========
average    / num_tokens, / M      mean over DP * CP   nothing                     M DP CP
per-token  nothing                sum                 / sum of all num_tokens     N
=========  =====================  ==================  ==========================  =========

K is what a share is multiplied by so that the step's gradient is the sum of the shares'
gradients. In the average regime num_tokens is 1. In the per-token regime CP rank 0 returns
the plan's count of the microbatch's rows and the other CP ranks 0, so that the sum is the
plan's N whatever the training mask; stock Megatron's side losses (MoE, MTP) keep their 1/N.

A reported value ``[share * M DP CP, 1]`` comes out as the step's loss in every stock
consumer: Megatron adds both entries over microbatches and DP * CP and divides.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lossagg.aggregation import Aggregation
from megatron_lossagg.counts import StepTotals
from megatron_lossagg.errors import ContractError
from megatron_lossagg.layout import Ints, IntsLike, Layout
from megatron_lossagg.plan import StepPlan
from megatron_lossagg.probe import ProbeReport, Trial, run_probe
from megatron_lossagg.reducer import FILLER, Reducer

Regime = Literal["average", "per-token"]

OLDEST_MEGATRON = (0, 13)
_INT32_MAX = 2**31 - 1
_NOT_SEEN = -1


class MegatronContract:
    """How the live model's Megatron-Core scales a loss; made once a run by :meth:`read`."""

    def __init__(self, *, chunks: Sequence[Any], regime: Regime) -> None:
        from megatron.core import parallel_state

        self._chunks = list(chunks)
        self._config = chunks[0].config
        self._last_step: StepContract | None = None
        self.regime: Regime = regime
        self.dp_group: ProcessGroup = chunks[0].dp_group
        """The dense data-parallel group without context parallelism."""
        self.cp_size = int(self._config.context_parallel_size)
        self.cp_rank = int(parallel_state.get_context_parallel_rank()) if self.cp_size > 1 else 0
        self.dp_size = dist.get_world_size(self.dp_group)
        self.dp_cp_size = dist.get_world_size(chunks[0].dp_cp_group)
        """DP * CP: the size of the group whose gradients the chunks reduce over."""
        self.probe: ProbeReport | None = None
        """What the startup probe measured; None where it was not asked for."""

    @staticmethod
    def read(
        model: Any, *, aggregation: Aggregation | None = None, probe: bool = True
    ) -> MegatronContract:
        """Read regime and groups off the DDP-wrapped chunks, and refuse what cannot be undone.

        ``model``: the chunks as handed to the schedule, or one chunk. ``aggregation``: checked
        to be the same on every rank of the world. ``probe``: then measure K with
        :func:`~megatron_lossagg.probe.run_probe`, once a process and kind of model, and raise
        :class:`ContractError` where Megatron undoes another factor. Collectives: one
        ``all_gather_object`` over the world, which brings a refusal on one rank to all, and
        the probe's. Call it outside the schedule, on every rank.
        """
        chunks = list(model) if isinstance(model, (list, tuple)) else [model]
        fault, told = "", ""
        try:
            regime = _checked_regime(chunks)
            told = f"megatron-core {_megatron_version()}, regime {regime}, "
            told += f"{aggregation} ({aggregation!r})"  # a formula may be silent on count_empty
        except Exception as error:  # whatever it is, no rank may leave the others waiting
            fault = str(error) if isinstance(error, ContractError) else repr(error)
        _agree(fault, told)
        contract = MegatronContract(chunks=chunks, regime=regime)
        if probe:
            contract.probe = run_probe(chunks, contract, contract._trial)
        return contract

    def thd(self, cu_seqlens_padded: IntsLike) -> Layout:
        """Return ``Layout.thd_zigzag`` for this rank; a CUDA tensor costs one host sync."""
        return Layout.thd_zigzag(cu_seqlens_padded, cp_size=self.cp_size, cp_rank=self.cp_rank)

    def step(
        self, plan: StepPlan, *, num_microbatches: int, forward_only: bool = False
    ) -> StepContract:
        """Begin a schedule call of ``num_microbatches`` over ``plan``.

        Compares what construction froze with the live config once more, and raises
        :class:`ContractError` where they differ, where the config has no
        ``finalize_model_grads_func`` (except for ``forward_only``), or where the step before was
        left incomplete. No collective.
        """
        if self._last_step is not None:
            self._last_step.close()
        _check_live(self._chunks, self.regime)
        if not forward_only and self._config.finalize_model_grads_func is None:
            raise ContractError(
                "config.finalize_model_grads_func is None: the schedule would reduce no gradient "
                "over data-parallel ranks; set it to finalize_model_grads before the first step"
            )
        if plan.num_microbatches not in (None, num_microbatches):
            raise ContractError(
                f"the plan was made for {plan.num_microbatches} microbatches, the schedule runs "
                f"{num_microbatches}: pass the same number to Sequences and to step()"
            )
        if num_microbatches < 1:
            raise ContractError(f"a schedule runs at least 1 microbatch, got {num_microbatches}")
        n = plan.totals.active_tokens
        if self.regime == "per-token":
            if n is None:
                raise ContractError(
                    "the per-token regime divides by the step's active tokens, which the plan does "
                    "not know: give StepTotals(active_tokens=...), or let plan_step count"
                )
            if n > _INT32_MAX:
                raise ContractError(
                    f"the step has {n} active tokens, Megatron-Core counts them in int32: take "
                    "fewer a step, or train without --calculate-per-token-loss"
                )
        self._last_step = StepContract(contract=self, plan=plan, num_microbatches=num_microbatches)
        return self._last_step

    def _trial(self, counted: Sequence[int], active_tokens: int) -> Trial:
        """Begin the probe's step: one row a microbatch, of as many tokens as ``counted``."""
        plan = StepPlan(  # plan_step would also raise what the step before left to be raised
            aggregation=Aggregation("token_sum"),
            totals=StepTotals(active_tokens=active_tokens),
            active_tokens=np.array(counted, dtype=np.int64),
            num_microbatches=len(counted),
            data_parallel_size=self.dp_size,
            sample_tokens=None,
            prompt_tokens=None,
            microbatch_tokens=None,
        )
        step = StepContract(contract=self, plan=plan, num_microbatches=len(counted))

        def returns(share: Tensor, m: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            layout = Layout.local([counted[m]], cp_size=1, cp_rank=0)
            mask = torch.ones(counted[m], device="cpu")
            return step.returns(share, plan.reducer([m], mask, layout))

        return Trial(factor=step.factor, returns=returns)

    def describe(self, aggregation: Aggregation) -> str:
        """One line for the start of a run: mode, formula, regime, K."""
        k = "M DP CP" if self.regime == "average" else "N"
        return (
            f"loss aggregation {aggregation}; regime {self.regime}, K = {k} "
            f"(DP {self.dp_size}, CP {self.cp_size}); probe: {self.probe or 'off'}"
        )


@dataclass(kw_only=True, eq=False)
class StepContract:
    """One schedule call: scales shares by K, makes reports, keeps account of the rows."""

    contract: MegatronContract
    plan: StepPlan
    num_microbatches: int
    """M of this schedule call."""
    _filler_calls: int = 0
    _index_of: dict[bytes, int] = field(default_factory=dict)
    _microbatch_of_row: Ints = field(init=False)

    def __post_init__(self) -> None:
        self._microbatch_of_row = np.full(len(self.plan.active_tokens), _NOT_SEEN)

    @property
    def factor(self) -> int:
        """K: M DP CP in the average regime, N in the per-token regime."""
        if self.contract.regime == "average":
            return self._report_factor
        return int(self.plan.totals.active_tokens or 0)

    @property
    def _report_factor(self) -> int:
        return self.num_microbatches * self.contract.dp_cp_size

    def returns(
        self, share: Tensor, reducer: Reducer, report: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Make what loss_func returns: ``(loss, num_tokens, report)``.

        ``share``: 0-dim, the sum of all terms' shares. ``reducer``: the microbatch's main
        reducer, whose rows are accounted for. ``report``: 0-dim shares by name. loss is
        ``share * K`` in fp32 or better with storage of its own (the schedule scales it in
        place); num_tokens an int32 0-dim tensor on its device; each report a detached
        ``[share * M DP CP, 1]``. Adds ``lossagg/weight_sum`` and ``lossagg/weight_expected``.
        No collective, no host sync.
        """
        _check_share("share", share)
        self._account(reducer)
        dtype = torch.promote_types(share.dtype, torch.float32)
        loss = share.to(dtype) * self.factor
        counted = 1 if self.contract.regime == "average" else self._counted(reducer)
        num_tokens = torch.full((), counted, dtype=torch.int32, device=loss.device)
        reports = {name: self._report(name, value) for name, value in (report or {}).items()}
        weight_sum, expected = reducer.weight_sum(), reducer.plan.expected_weight
        if weight_sum is not None:
            weight_sum = weight_sum.to(loss.device, non_blocking=True)
            reports["lossagg/weight_sum"] = self._report("lossagg/weight_sum", weight_sum)
            if expected is not None:
                one = torch.ones_like(weight_sum)
                reports["lossagg/weight_expected"] = torch.stack([one * expected, one])
        return loss, num_tokens, reports

    def close(self) -> None:
        """Check, after the schedule and before the optimizer, that every row and microbatch came.

        Does nothing where loss_func is not called: on all but the last pipeline stage. The
        next ``MegatronContract.step`` calls it too, a step late.
        """
        self.contract._last_step = None
        calls = len(self._index_of) + self._filler_calls
        if calls == 0 and not _is_last_stage():
            return
        if calls < self.num_microbatches:
            raise ContractError(
                f"loss_func ran for {calls} microbatches, {self.num_microbatches} were planned: "
                "pass the schedule's num_microbatches to contract.step(), and give each call rows "
                "of its own"
            )
        self._check_no_row_missing()

    def _counted(self, reducer: Reducer) -> int:
        return reducer.counted_tokens if self.contract.cp_rank == 0 else 0

    def _report(self, name: str, share: Tensor) -> Tensor:
        _check_share(name, share)
        value = share.detach().to(torch.promote_types(share.dtype, torch.float32))
        return torch.stack([value * self._report_factor, torch.ones_like(value)])

    def _account(self, reducer: Reducer) -> None:
        mine = self.plan.active_tokens
        if reducer.plan.active_tokens is not mine:  # under() keeps the very array
            raise ContractError(
                f"the reducer is of a step of {len(reducer.plan.active_tokens)} rows, this one has "
                f"{len(mine)}, or it is of another plan of as many: make it with this step's plan "
                "or plan.under(...)"
            )
        rows = reducer.rows[reducer.rows != FILLER]
        if len(rows):
            # The rerun machine runs a microbatch twice: the same rows are the same microbatch.
            index = self._index_of.setdefault(rows.tobytes(), len(self._index_of))
            before = self._microbatch_of_row[rows]
            taken = rows[(before != _NOT_SEEN) & (before != index)]
            if len(taken):
                raise ContractError(
                    f"row {taken[0]} is in two microbatches of the step, number "
                    f"{self._microbatch_of_row[taken[0]]} and number {index} in the order of their "
                    f"calls, the second with rows {_listed(rows.tolist())}: each row is "
                    "trained once"
                )
            self._microbatch_of_row[rows] = index
        else:
            self._filler_calls += 1
        # Microbatches of fillers alone cannot be told apart from one that was run again.
        at_least = len(self._index_of) + (self._filler_calls > 0)
        if at_least > self.num_microbatches:
            raise ContractError(
                f"loss_func ran for more than the {self.num_microbatches} planned microbatches: "
                "pass the schedule's num_microbatches to contract.step()"
            )
        if at_least == self.num_microbatches:
            self._check_no_row_missing()

    def _check_no_row_missing(self) -> None:
        missing = np.flatnonzero(self._microbatch_of_row == _NOT_SEEN).tolist()
        if missing:
            raise ContractError(
                f"{len(missing)} of {len(self.plan.active_tokens)} rows were in no microbatch of "
                f"the step ({_listed(missing)}): each row is trained once"
            )


def _megatron_version() -> str:
    import megatron.core

    return str(megatron.core.__version__)


def _checked_regime(chunks: Sequence[Any]) -> Regime:
    """Refuse what cannot be undone; return the regime that construction froze."""
    version = _megatron_version()
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if release < OLDEST_MEGATRON:
        raise ContractError(
            f"megatron-core {version}: before 0.13 num_tokens is reduced over another group and "
            "the schedule multiplies by CP: install megatron-core>=0.13"
        )
    if not chunks:
        raise ContractError("got no model chunk: pass the chunks that the schedule gets")
    for chunk in chunks:
        _check_wrapper(chunk)
    _check_config(chunks[0].config, len(chunks))
    per_token = bool(chunks[0].config.calculate_per_token_loss)
    regime: Regime = "per-token" if per_token else "average"
    _check_live(chunks, regime)
    return regime


def _check_wrapper(chunk: Any) -> None:
    from megatron.core.distributed import DistributedDataParallel

    kind = type(chunk).__name__
    if "fsdp" in f"{type(chunk).__module__}.{kind}".lower() or "FullyShard" in kind:
        raise ContractError(
            f"{kind}: Megatron-FSDP reduces gradients by rules of its own that are not undone "
            "here yet: use Megatron-Core's DistributedDataParallel"
        )
    if not isinstance(chunk, DistributedDataParallel):
        raise ContractError(
            f"got a {kind}, wanted Megatron-Core's DistributedDataParallel: pass the wrapped "
            "chunks that the schedule gets, after wrapping"
        )


def _check_config(config: Any, num_chunks: int) -> None:
    if getattr(config, "hybrid_context_parallel", False):
        raise ContractError(
            "hybrid context parallelism changes CP with every microbatch, so no row has one "
            "layout: drop --hybrid-context-parallel"
        )
    graphs = [getattr(config, name, None) for name in ("cuda_graph_impl", "cuda_graph_scope")]
    if "full_iteration" in str(graphs):
        raise ContractError(
            "a full-iteration CUDA graph freezes K at capture, and K changes with the step's "
            "tokens: use another --cuda-graph-scope"
        )
    interleaved = num_chunks > 1 and config.pipeline_model_parallel_size == 2
    overlaps = getattr(config, "overlap_p2p_comm", False)
    if interleaved and (not overlaps or getattr(config, "batch_p2p_comm", True)):
        raise ContractError(
            "interleaved pipelining over 2 stages mixes up its messages unless "
            "overlap_p2p_comm=True and batch_p2p_comm=False: set both"
        )


def _check_live(chunks: Sequence[Any], regime: Regime) -> None:
    """Compare what DDP and the routers froze at construction with the live config."""
    per_token = regime == "per-token"
    for index, chunk in enumerate(chunks):
        config = chunk.config
        if bool(config.calculate_per_token_loss) != per_token:
            raise ContractError(
                f"calculate_per_token_loss is {config.calculate_per_token_loss} in the config of "
                f"chunk {index}, the model was wrapped in the {regime} regime: " + _FLIPPED
            )
        average_in_collective = bool(chunk.ddp_config.average_in_collective)
        group = dist.get_world_size(chunk.dp_cp_group)
        dense = 1.0 if per_token or average_in_collective else 1.0 / group
        buffers = [*chunk.buffers, *(chunk.expert_parallel_buffers if per_token else [])]
        # DDP scales by each bucket's own copy.
        scaled = itertools.chain(buffers, *(buffer.buckets for buffer in buffers))
        found = {part.gradient_scaling_factor for part in scaled}
        if found - {dense}:
            raise ContractError(
                f"chunk {index} scales gradients by {sorted(found)}, the {regime} regime over "
                f"{group} ranks scales by {dense}: " + _FLIPPED
            )
        for name, module in chunk.named_modules():
            frozen = getattr(module, "calculate_per_token_loss", None)
            if isinstance(frozen, bool) and frozen != per_token:
                raise ContractError(
                    f"{name} was built with calculate_per_token_loss={frozen}, the config now says "
                    f"{per_token}: " + _FLIPPED
                )


_FLIPPED = (
    "the regime is frozen when the model is built and wrapped; set --calculate-per-token-loss "
    "before that and leave it"
)


def _agree(fault: str, told: str) -> None:
    """Raise one :class:`ContractError` on every rank of the world, or on none."""
    if not dist.is_initialized():
        raise ContractError("torch.distributed is not initialized: read the contract after it is")
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (fault, told))
    for rank, (other_fault, _) in enumerate(every):
        if other_fault:
            raise ContractError(f"rank {rank}: {other_fault}")
    for rank, (_, other) in enumerate(every):
        if other != every[0][1]:
            raise ContractError(
                f"ranks disagree: rank 0 has {every[0][1]}, rank {rank} has {other}: start all "
                "ranks with the same flags and versions"
            )


def _is_last_stage() -> bool:
    from megatron.core import parallel_state

    return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))


def _check_share(name: str, share: Tensor) -> None:
    if not isinstance(share, Tensor) or share.dim() != 0 or not share.is_floating_point():
        raise ContractError(
            f"{name} is {share!r}: a share is a 0-dim floating-point tensor, as a reducer returns"
        )


def _listed(rows: Sequence[int]) -> str:
    return ", ".join(map(str, rows[:6])) + (", ..." if len(rows) > 6 else "")
