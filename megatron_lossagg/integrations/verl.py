"""Aggregations in an unmodified verl on Megatron: two lines of configuration.

verl imports the entry points of ``verl.plugins`` with every ``import verl``, in each worker. Ours
registers an engine, which ``VERL_ENGINE_VENDOR=lossagg`` in every worker's environment selects, and
policy losses under these names::

    actor_rollout_ref.actor.policy_loss.loss_mode=lossagg_constant
    actor_rollout_ref.actor.loss_scale_factor=40960                  # L of constant, C of token_sum

``lossagg_<mode>`` is verl's ``vanilla`` policy loss under our weights, ``lossagg_<mode>+gspo``
another one of its policy losses, ``lossagg_<mode>_no_count_empty`` leaves empty samples out, and
``lossagg_<mode>_no_count_zero`` sequences whose ``loss_weight`` is 0. A
prompt is a ``uid``, a sample a session of it, and a group its samples with one sign of the
advantage (``_verl_batch.py``). KL, entropy and distillation have the policy's weights. The engine
is verl's Megatron engine, which plans each step itself; another engine refuses these names.

verl's losses compute per-token losses ``[b, s]`` and call ``agg_loss`` on them. While one runs,
:func:`_aggregated` puts our partial loss in that function's place::

    loss = DP * sum_s w_s sum_t m_t x_t

A column ``loss_weight`` is in w_s, and a loss function of verl's does not see it: with
verl-project/verl#7580 verl's own would multiply by it once more.

Every context-parallel rank has whole sequences: verl gathers log-probabilities with a gradient for
its own slice only. Afterwards verl multiplies by M (two outputs), or by tokens / DP if
``calculate_per_token_loss`` is set, and either gives the step's gradient. Sources: verl 1dda039b
``agg_loss``, ``ppo_loss``, ``MegatronEngine.forward_backward_batch``,
``MegatronEngineWithLMHead.postprocess_micro_batch_func``, ``postprocess_thd_engine``.

With ``dynamic_context_parallel`` every rank has the whole batch, and a scheduler gives each
sequence to a group of ranks of its own size. verl's data-parallel group is then this rank alone:
DP is 1, and each rank counts the batch once by itself. Source: ``DynamicCPScheduler.schedule``.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from torch import Tensor

from megatron_lossagg.errors import AggregationError, ContractError, PlanError
from megatron_lossagg.integrations._refusals import replaced
from megatron_lossagg.integrations._verl_batch import (
    COUNT_SAMPLES,
    LOSS_WEIGHT,
    check_same_batch,
    plan_batch,
    warn_of_split,
)
from megatron_lossagg.integrations._weigh_switch import weigh_if_asked
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.integers import Ints, checked_integers
from megatron_lossagg.reduction.layout import Layout
from megatron_lossagg.reduction.modes import MODES
from megatron_lossagg.reduction.plan import StepPlan
from megatron_lossagg.weigh.listen import tell

VENDOR = "lossagg"
"""The value of ``VERL_ENGINE_VENDOR`` that selects the engine of this module."""

SEQUENCE = "lossagg_sequence"
"""Field of the batch: each sequence's position in the plan, -1 for padding."""

_PREFIX, _NO_EMPTY, _NO_ZERO = "lossagg_", "_no_count_empty", "_no_count_zero"
_MODES = ("token_mean", "token_sum", *COUNT_SAMPLES)
_NOT_BY_AGG_LOSS = ("geo_mean",)
"""verl's policy losses that average over a microbatch themselves."""
_AGGREGATES = (
    "verl.trainer.ppo.core_algos",
    "verl.workers.utils.losses",
    "verl.trainer.distillation.losses",
)
"""verl's modules that have the name ``agg_loss``."""

_OF_AGG_LOSS = {
    "loss_agg_mode",
    "dp_size",
    "batch_num_tokens",
    "global_batch_size",
    "loss_scale_factor",
}
"""What verl's ``agg_loss`` takes next to losses and mask; a plan's weights replace all of it."""


@dataclass(frozen=True)
class LossMode:
    """What a registered ``policy_loss.loss_mode`` means."""

    mode: str
    count_empty: bool
    loss: str
    """verl's own policy loss, whose per-token losses are aggregated."""
    count_zero: bool = True
    """Whether a sequence with a ``loss_weight`` of 0 is counted."""

    @property
    def name(self) -> str:
        """The registered name."""
        no_empty = "" if self.count_empty else _NO_EMPTY
        no_zero = "" if self.count_zero else _NO_ZERO
        loss = "" if self.loss == "vanilla" else f"+{self.loss}"
        return f"{_PREFIX}{self.mode}{no_empty}{no_zero}{loss}"

    @staticmethod
    def named(name: str) -> LossMode | None:
        """Read a registered name; None for a name of verl's own."""
        match = re.fullmatch(f"{_PREFIX}(\\w+?)({_NO_EMPTY})?({_NO_ZERO})?(?:\\+(\\w+))?", name)
        if match is None:
            return None
        return LossMode(match[1], match[2] is None, match[4] or "vanilla", match[3] is None)

    def aggregation(self, loss_scale_factor: float | None) -> Aggregation:
        """Add the divisor of ``actor.loss_scale_factor``, if the mode has one."""
        if self.mode not in _MODES:
            raise AggregationError(
                f"got loss_mode={self.name}, expected {_PREFIX} and one of {', '.join(_MODES)}: "
                "verl's configuration has no exponent, path or microbatch for another; choose one"
            )
        takes_one = MODES[self.mode].divisor != "none"
        if MODES[self.mode].divisor == "required" and loss_scale_factor is None:
            raise AggregationError(
                f"loss_mode={self.name} divides by a constant length and got none: set "
                "actor_rollout_ref.actor.loss_scale_factor to the longest response that "
                "generation allows"
            )
        return Aggregation(
            self.mode,
            divisor=loss_scale_factor if takes_one else None,
            count_empty=self.count_empty,
        )


def __getattr__(name: str) -> object:
    """Register with verl when its plugin loader takes the attribute ``plugin``."""
    if name != "plugin":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return _register()
    except Exception as error:  # verl hides what a plugin raises
        warnings.warn(f"megatron_lossagg: not registered with verl: {error!r}", stacklevel=2)
        raise


@cache
def _register() -> tuple[str, ...]:
    """Register the policy losses, and the engine if it is selected; returns the names."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, register_policy_loss

    losses = [name for name in POLICY_LOSS_REGISTRY if name not in _NOT_BY_AGG_LOSS]
    modes = [
        LossMode(mode, count_empty, loss, count_zero)
        for loss in losses
        for mode in _MODES
        for count_empty in ((True, False) if mode in COUNT_SAMPLES else (True,))
        for count_zero in (True, False)
    ]
    for mode in modes:
        loss = POLICY_LOSS_REGISTRY[mode.loss]
        register_policy_loss(mode.name)(partial(_policy_loss, mode, loss))
    if os.environ.get("VERL_ENGINE_VENDOR") == VENDOR:
        from verl.workers.engine import EngineRegistry
        from verl.workers.engine.megatron import MegatronEngineWithLMHead

        register = EngineRegistry.register(
            model_type="language_model", backend="megatron", device="cuda", vendor=VENDOR
        )
        register(_engine(MegatronEngineWithLMHead))
    weigh_if_asked("verl")
    return tuple(mode.name for mode in modes)


def _policy_loss(
    mode: LossMode, loss: Callable[..., tuple[Tensor, dict[str, Any]]], *args: Any, **kwargs: Any
) -> tuple[Tensor, dict[str, Any]]:
    """Run one of verl's policy losses; the engine of this module has replaced ``agg_loss``."""
    if not _planned:
        raise ContractError(
            f"got loss_mode={mode.name} on an engine of verl's own, which knows no weights, "
            f"expected this package's: set VERL_ENGINE_VENDOR={VENDOR} in the environment of every "
            "worker, and train with the megatron backend on CUDA. If both are set, this process's "
            "log says why the plugin failed"
        )
    calls = _planned[-1].num_calls
    result = loss(*args, **kwargs)
    num_calls = _planned[-1].num_calls - calls
    if num_calls != 1:
        raise ContractError(
            f"verl's policy loss {mode.loss!r} called agg_loss {num_calls} times, expected once: "
            "its loss cannot be aggregated here; choose another policy loss"
        )
    return result


@dataclass(eq=False)
class _Microbatch:
    """A microbatch's sequences, and the plan that has their weights."""

    plan: StepPlan
    sequences: Ints
    """int64 ``[b]``: position in the plan, -1 for a sequence that verl added as padding."""
    dp_size: int
    num_calls: int = 0

    def agg_loss(self, loss_mat: Tensor, loss_mask: Tensor, *_: object, **given: object) -> Tensor:
        """Return DP * partial loss; ``loss_mat``, ``loss_mask``: ``[b, s]``, whole sequences."""
        if unknown := given.keys() - _OF_AGG_LOSS:
            raise ContractError(
                f"verl passes {', '.join(sorted(unknown))} to agg_loss, which this package would "
                "drop: use a tested release of verl, or a policy loss that does not pass it"
            )
        self.num_calls += 1
        layout = Layout.bshd_zigzag(*loss_mask.shape, cp_size=1, cp_rank=0)
        return self.plan.reducer(self.sequences, loss_mask, layout)(loss_mat) * self.dp_size


_planned: list[_Microbatch] = []
"""The microbatch whose loss the engine of this module is computing."""


@contextmanager
def _aggregated(microbatch: _Microbatch) -> Iterator[None]:
    """Put our partial loss in the place of ``agg_loss``, in each module of verl with the name."""
    modules = [sys.modules[name] for name in _AGGREGATES if name in sys.modules]
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(replaced(module, agg_loss=microbatch.agg_loss))
        _planned.append(microbatch)
        stack.callback(_planned.pop)
        yield


def _engine(base: Any) -> Any:
    """Make verl's Megatron engine with a plan for every step."""

    class LossAggregationEngine(base):  # type: ignore[misc]
        """verl's Megatron engine; a ``lossagg_`` loss mode gives every loss the plan's weights."""

        has_plan = False  # whether a step of ours is under way

        def __init__(self, *args: Any, **kwargs: Any):
            self.tokens_of: dict[str, int] = {}
            super().__init__(*args, **kwargs)

        def forward_backward_batch(
            self, data: Any, loss_function: Any, forward_only: bool = False
        ) -> Any:
            """Plan the step over the data-parallel group, then run verl's own step.

            ``data``: this data-parallel rank's sequences. Two all-gathers if prompts, sessions or
            groups are counted, or sequences have weights, else one. With
            ``dynamic_context_parallel`` one over data- and context-parallel ranks instead. A host
            sync for each, for each microbatch, and for the faults.
            """
            config = getattr(loss_function, "keywords", {}).get("config")
            policy_loss = getattr(config, "policy_loss", None)  # not of a critic
            mode = policy_loss and LossMode.named(policy_loss.get("loss_mode", "vanilla"))
            if config is None or not mode:
                return super().forward_backward_batch(data, loss_function, forward_only)
            aggregation = mode.aggregation(config.loss_scale_factor)
            group, dp_size = self.get_data_parallel_group(), self.get_data_parallel_size()
            if self.engine_config.dynamic_context_parallel:
                check_same_batch(aggregation, data)
            plan, sequences = plan_batch(aggregation, data, group, counts_zero=mode.count_zero)
            data[SEQUENCE] = sequences
            if not forward_only:
                warn_of_split(data, plan, self.tokens_of)
            planned = partial(with_plan, loss_function, plan, dp_size)
            with replaced(self, has_plan=True):
                output = super().forward_backward_batch(data, planned, forward_only)
            plan.check()
            return output

        def postprocess_micro_batch_func(
            self, output: Any, data: Any, *args: Any, **kwargs: Any
        ) -> Any:
            """Return what verl's own does; in a step of ours with exact shares of the tokens.

            In the per-token loss scaling verl reports floor(tokens / CP) on every CP rank, too few
            to divide by. Here rank r reports floor((tokens + r) / CP): all of them. No host sync.
            """
            result = super().postprocess_micro_batch_func(output, data, *args, **kwargs)
            config = self.engine_config
            if not self.has_plan or len(result) != 3 or config.dynamic_context_parallel:
                return result
            from megatron.core import parallel_state

            loss, num_tokens, report = result
            whole = self._routed_num_tokens(data) + parallel_state.get_context_parallel_rank()
            return loss, (whole // config.context_parallel_size).to(num_tokens), report

    return LossAggregationEngine


def with_plan(
    loss_function: Callable[..., Any], plan: StepPlan, dp_size: int, **arguments: Any
) -> Any:
    """Call verl's loss function on a microbatch, every aggregation in it by the plan."""
    data = arguments["data"]
    sequences = checked_integers("sequences", data[SEQUENCE], PlanError)
    if LOSS_WEIGHT in data.keys():  # noqa: SIM118  the plan has it
        arguments["data"] = data.exclude(LOSS_WEIGHT)
    tell(plan, None, sequences)
    with _aggregated(_Microbatch(plan, sequences, dp_size)):
        return loss_function(**arguments)
