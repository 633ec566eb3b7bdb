"""What is refused before a step begins: functions over what was asked, in their order.

Each raises :class:`ContractError` with what was asked, what was expected and what to change. None
communicates or waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch.distributed as dist

from megatron_lossagg.contract.engine import engine_of
from megatron_lossagg.contract.finalize import (
    hook_of,
    is_megatrons_finalize,
    is_same_function,
    without_listeners,
)
from megatron_lossagg.contract.model import LiveGroups, may_hold_back
from megatron_lossagg.contract.scaling import MOST_TOKENS_PER_TOKEN, LossScaling
from megatron_lossagg.contract.side_losses import side_losses_of
from megatron_lossagg.errors import ContractError, LossAggregationError
from megatron_lossagg.guards.frozen import Frozen
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.integers import is_integer
from megatron_lossagg.reduction.modes import CUSTOM, MODES
from megatron_lossagg.reduction.plan import StepPlan


@dataclass(kw_only=True, eq=False)
class RunFacts:
    """What a refusal may know of a run."""

    chunks: Sequence[Any]
    """The DDP-wrapped chunks of this rank."""
    groups: LiveGroups
    loss_scaling: LossScaling
    frozen: Frozen
    agreed: set[Aggregation]
    """The aggregations that all ranks have in common."""
    finalize: Any
    """The finalize function that the run began with; None until a training step has seen one."""
    is_probed: bool = False
    """Whether the startup probe measured it, or Megatron-Core's own in its place."""

    @property
    def config(self) -> Any:
        """The first chunk's ``TransformerConfig``."""
        return self.chunks[0].config


class DeferredFacts(Protocol):
    """What a refusal may know of a deferred step."""

    @property
    def aggregation(self) -> Aggregation | None:
        """Of its earlier calls; None before the first, and without counts."""

    @property
    def follows(self) -> bool:
        """Whether side losses follow the mode."""

    @property
    def own_finalize(self) -> Any:
        """The config's own finalize function."""

    def fault(self) -> str:
        """Say what is wrong with the earlier calls, empty if nothing is."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """What the caller of a step asks for."""

    plan: StepPlan | None
    """None on a pipeline stage that computes no loss."""
    num_microbatches: int
    forward_only: bool
    accumulates: bool | int
    iteration: int | None
    is_previous_open: bool
    """Whether loss_func ran for the previous step, and nothing has finished it."""
    deferred: DeferredFacts | None = None
    """The deferred step that it is a schedule call of, if it trains in one."""
    shadows: Collection[Aggregation] = ()
    """What is reported in addition to the trained loss."""

    @cached_property
    def plan_of_call(self) -> StepPlan | None:
        """The plan, whose weights are over the declared number of schedule calls.

        In a deferred step they have 1 in place of the mode's total.
        """
        if self.plan is not None and self.deferred is not None:
            return replace(self.plan, total=1.0)
        if self.plan is None or self.forward_only or isinstance(self.accumulates, bool):
            return self.plan
        return replace(self.plan, num_calls=self.accumulates)


def previous_step(run: RunFacts, asked: Asked) -> None:
    """Refuse a step while the previous one is not finished."""
    if asked.is_previous_open:
        raise ContractError(
            "the previous step was not finished: write `with aggregator.step(...) as step:` "
            "around the schedule call, or call step.finish() after it, before the optimizer's "
            "step; after an error, step.end()"
        )


def changed_config(run: RunFacts, asked: Asked) -> None:
    """Refuse a loss scaling, CP size or DDP factor that changed after construction."""
    run.frozen.check()


def finalize_function(run: RunFacts, asked: Asked) -> None:
    """Refuse a training step whose finalize function is None, or was replaced."""
    if asked.forward_only:
        return
    held = asked.deferred
    now = run.config.finalize_model_grads_func if held is None else held.own_finalize
    now = without_listeners(now)
    if now is None:
        raise ContractError(
            "config.finalize_model_grads_func is None: the schedule would reduce no gradient "
            "over data-parallel ranks; set it to finalize_model_grads before the first step"
        )
    if hook_of(now) is not None:
        if run.loss_scaling == "per_token":
            raise ContractError(
                "got a step of this model while another one runs: leave its with block first, or "
                "call its step.end(); terms of one loss belong to one step"
            )
        return
    if run.finalize is None:  # training sets it before its first step
        if run.is_probed and not is_megatrons_finalize(now):
            raise ContractError(
                f"config.finalize_model_grads_func is {now!r}, and the probe measured "
                "Megatron-Core's own, because it was None when the LossAggregator was made: "
                "set it before that"
            )
        run.finalize = now
    if not is_same_function(now, run.finalize):
        raise ContractError(
            f"config.finalize_model_grads_func is {now!r}, it was {run.finalize!r} when the "
            "LossAggregator was made: a different function may scale gradients differently; "
            "make the LossAggregator after replacing it"
        )


def numbers(run: RunFacts, asked: Asked) -> None:
    """Refuse an M, a number of the step or of schedule calls that is not an integer from 1."""
    check_microbatches(asked.num_microbatches, ContractError)
    if asked.iteration is not None and not is_integer(asked.iteration, lowest=1):
        raise ContractError(
            f"got iteration {asked.iteration!r}, expected an integer from 1: pass the number of "
            "the optimizer step that is trained"
        )
    if not isinstance(asked.accumulates, bool) and not is_integer(asked.accumulates, lowest=1):
        raise ContractError(
            f"got accumulates={asked.accumulates!r}, expected a bool or an integer from 1: pass "
            "how many schedule calls the optimizer step has"
        )


def check_microbatches(num: object, error: type[LossAggregationError]) -> None:
    """Refuse an M that is not an integer from 1."""
    if not is_integer(num, lowest=1):
        raise error(
            f"got num_microbatches {num!r}, expected an integer from 1: pass what the schedule gets"
        )


def missing_plan(run: RunFacts, asked: Asked) -> None:
    """Refuse a last pipeline stage without counts, and anything but a plan."""
    if asked.plan is None and run.groups.is_last_stage:
        raise ContractError(
            "got no counts on the last pipeline stage, which computes the loss: pass "
            "active_tokens= there"
        )
    if not isinstance(asked.plan, (StepPlan, type(None))):
        raise ContractError(f"got {asked.plan!r}, expected what plan_step returns")


def plan_of_another_step(run: RunFacts, asked: Asked) -> None:
    """Refuse a plan that has trained, or was made for other microbatches or ranks."""
    if asked.plan is None:
        return
    plan, planned = asked.plan, asked.plan.sequences.num_microbatches
    if planned not in (None, asked.num_microbatches):
        raise ContractError(
            f"the plan was made for {planned} microbatches, the schedule runs "
            f"{asked.num_microbatches}: pass the same number to Sequences and to the step"
        )
    own = tuple(dist.get_process_group_ranks(run.groups.dp_group))
    if plan.group_ranks not in (None, own):
        raise ContractError(
            f"the plan was counted over ranks {list(plan.group_ranks or ())}, the model's "
            f"data-parallel group without context parallelism is {list(own)}: pass "
            "group=aggregator.dp_group to plan_step"
        )
    if plan.state.is_stepped and not asked.forward_only:
        raise ContractError(
            "the plan has already begun to train a step: a plan is for one optimizer step; "
            "call plan_step for each, and again after a step that failed, or pass "
            "forward_only=True if nothing is trained"
        )


def aggregation_of_one_rank(run: RunFacts, asked: Asked) -> None:
    """Refuse an aggregation that the ranks have not agreed on."""
    if asked.plan is not None and asked.plan.aggregation not in run.agreed:
        raise ContractError(
            f"the plan is under {asked.plan.aggregation}, which the ranks have not agreed on: call "
            "aggregator.agree_on(...) on every rank"
        )


def unknown_divisor(run: RunFacts, asked: Asked) -> None:
    """Refuse, in the per-token loss scaling, an N that is not known or exceeds int32."""
    if asked.plan is None or run.loss_scaling == "average":
        return
    n = asked.plan.totals.active_tokens
    if n is None:
        raise ContractError(
            "the per-token loss scaling divides by the step's active tokens, which the plan "
            "does not know: give StepTotals(active_tokens=...), or let plan_step count"
        )
    if n > MOST_TOKENS_PER_TOKEN:
        raise ContractError(
            f"the step has {n} active tokens, Megatron-Core counts them in int32: take "
            "fewer per step, or train without --calculate-per-token-loss"
        )


def early_reduction(run: RunFacts, asked: Asked) -> None:
    """Refuse an overlapping reduction that nothing holds back until the last microbatch, or one
    after which finalize reduces once more.
    """
    if asked.forward_only or asked.deferred is not None:
        return
    engines = [
        engine
        for engine in map(engine_of, run.chunks)
        if run.groups.dp_cp_size > 1 or engine.has_experts
    ]
    found = run.config.no_sync_func
    functions = found if isinstance(found, (list, tuple)) else [found]
    holds = [may_hold_back(function, run.chunks) for function in functions]
    if any(holds) and any(engine.reduces_twice_in_no_sync for engine in engines):
        raise ContractError(
            "got config.no_sync_func without overlap_grad_reduce on Megatron-FSDP, which would "
            "reduce gradients twice: leave no_sync_func None"
        )
    is_needed = any(engine.needs_no_sync(asked.num_microbatches) for engine in engines)
    if is_needed and not all(holds):
        state = "None" if found is None else "not theirs"
        raise ContractError(
            f"got {asked.num_microbatches} microbatches with overlap_grad_reduce, and "
            f"config.no_sync_func is {state}: gradients would be reduced before the last "
            "microbatch has added its own, or by Megatron-FSDP never; set config.no_sync_func to "
            "the chunks' no_sync, as megatron.training does"
        )


def accumulation(run: RunFacts, asked: Asked) -> None:
    """Refuse ``accumulates`` if Megatron scales or reduces earlier gradients once more:
    per-token, with ``overlap_grad_reduce``, TP, PP, EP or the distributed optimizer over ranks;
    and ``True`` for a mode whose weights follow from one call's counts, which would add up.
    """
    if not asked.accumulates:
        return
    config, ddps = run.config, [chunk.ddp_config for chunk in run.chunks]
    shards = run.groups.dp_cp_size > 1 and any(engine_of(chunk).shards for chunk in run.chunks)
    reduced_again = {
        "--calculate-per-token-loss": run.loss_scaling == "per_token",
        "the distributed optimizer": shards,
        "overlap_grad_reduce": any(ddp.overlap_grad_reduce for ddp in ddps),
        "tensor parallelism": config.tensor_model_parallel_size > 1,  # norms, biases
        "pipeline parallelism": config.pipeline_model_parallel_size > 1,  # tied embeddings
        "expert parallelism": config.expert_model_parallel_size > 1,
    }
    for what, is_used in reduced_again.items():
        if is_used:
            raise ContractError(
                f"got accumulates={asked.accumulates} with {what}, where Megatron may scale or "
                "reduce gradients of earlier schedule calls once more: run the calls of an "
                "optimizer step inside `with aggregator.deferred()`, which reduces once, or run "
                "all microbatches in one call"
            )
    if asked.plan is not None:
        check_accumulated(asked.accumulates, asked.plan.aggregation.mode)


def check_accumulated(accumulates: bool | int, mode: str) -> None:
    """Refuse a mode, of a step or of a term, whose schedule calls do not add up to its loss."""
    if accumulates is True and mode not in ("token_sum", CUSTOM):
        raise ContractError(
            f"got accumulates=True with {mode}, whose weights are over the counts of one schedule "
            "call, so that two calls train twice the loss: pass each call of an optimizer step "
            "their number, such as accumulates=2, which trains their mean, or run them inside "
            "`with aggregator.deferred()`, which trains the mode over all of them"
        )
    if accumulates and accumulates is not True and mode == CUSTOM:
        raise ContractError(
            f"got accumulates={accumulates} with a custom reducer, which knows its weights: "
            "pass accumulates=True, and let it divide by what it should"
        )


def deferred(run: RunFacts, asked: Asked) -> None:
    """Refuse a call of a deferred step after one that failed, with ``accumulates=``, under a mode
    without one total or one that differs between calls, a shadow with another total, and side
    losses that M scales.
    """
    if asked.deferred is None:
        return
    if fault := asked.deferred.fault():
        raise ContractError(fault)
    if asked.accumulates:
        raise ContractError(
            f"got accumulates={asked.accumulates} in a deferred step, which has any number of "
            "schedule calls: leave it out"
        )
    aggregation = None if asked.plan is None else asked.plan.aggregation
    mode = None if aggregation is None else aggregation.mode
    if mode is not None and MODES[mode].total is None:
        modes = ", ".join(name for name, one in MODES.items() if one.total is not None)
        raise ContractError(
            f"got a deferred step under {mode}, whose weights have no one total to divide by at "
            f"the end: train {modes}"
        )
    earlier = asked.deferred.aggregation
    if earlier is not None and aggregation not in (None, earlier):
        raise ContractError(
            f"got a schedule call under {aggregation} in a deferred step under {earlier}, which "
            "are divided together: train one aggregation in all its calls"
        )
    if aggregation is not None:
        for shadow in asked.shadows:
            check_total(aggregation, shadow, "shadow")
    names = ", ".join(side_losses_of(run.config))
    is_exact = run.loss_scaling == "per_token" and mode in (None, "token_mean")
    if names and (not is_exact or asked.deferred.follows):
        raise ContractError(
            f"got a deferred step with side losses ({names}), which would be divided by the mode's "
            "total, and in the average loss scaling by M of each call: train token_mean with "
            "--calculate-per-token-loss and stock side losses, or set their coefficients to 0"
        )


def check_total(own: Aggregation, other: Aggregation, what: str) -> None:
    """Refuse, in a deferred step, what its one division would not give the mean that it names."""
    if own.total != other.total:
        raise ContractError(
            f"got a {what} under {other} in a deferred step under {own}: one number divides all; "
            "name a mode with the same total and counts, or train in one schedule call"
        )


BEFORE_A_STEP: tuple[Callable[[RunFacts, Asked], None], ...] = (
    previous_step,
    changed_config,
    finalize_function,
    numbers,
    missing_plan,
    plan_of_another_step,
    aggregation_of_one_rank,
    unknown_divisor,
    early_reduction,
    accumulation,
    deferred,
)
"""In the order in which they look."""
