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
advantage. KL, entropy and distillation have the policy's weights. The engine
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

What a batch counts: a prompt is a ``uid``. A sample is a trajectory, ``(uid, session_id)``: verl's
agent loops may return several sequences of one, and write both columns to each. A batch without
``session_id`` has one sequence per sample. A trainer on verl that writes trajectories to a column
of its own names it in ``LOSSAGG_SAMPLE_COLUMN`` of every worker's environment. A column
``loss_weight`` has one number per sequence, which multiplies w_s. Sources: verl 1dda039b
``AgentLoopWorkerTQ._agent_loop_postprocess``, ``upsample_batch_to_divisible_size``;
verl-project/verl#7580 ``normalize_loss_weight_global``, ``apply_loss_weight_to_loss_mat``.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.errors import AggregationError, ContractError, PlanError
from megatron_lossagg.integrations._shared import advantage_groups, replaced
from megatron_lossagg.integrations.weigh_rl import Reduction, Where, weigh_if_asked
from megatron_lossagg.loop.step import say_counted
from megatron_lossagg.reduction.aggregation import Aggregation, Options
from megatron_lossagg.reduction.exchange import together
from megatron_lossagg.reduction.faults import warn_once
from megatron_lossagg.reduction.integers import Ints, checked_integers
from megatron_lossagg.reduction.layout import Layout
from megatron_lossagg.reduction.modes import MODES
from megatron_lossagg.reduction.plan import StepPlan, plan_step
from megatron_lossagg.reduction.sequences import Sequences
from megatron_lossagg.weigh.listen import tell

COUNT_SAMPLES = ("sample_mean", "constant", "sample_sum", "prompt_mean", "row_mean", "balanced")
"""Modes that can leave empty samples out."""
LOSS_WEIGHT = "loss_weight"
"""The column with a weight of each sequence."""
SAMPLE_COLUMN = "LOSSAGG_SAMPLE_COLUMN"
"""The environment variable with the name of the column of samples."""
_SESSION = "session_id"
IS_PADDING = "is_padding"
"""The column that says which sequences are padding, for a loop that pads by itself."""
_PADDING_UID = re.compile(r"pad[0-9a-f]{32}")
"""The uid of the sequences that verl adds to make a batch divisible, all of them fully masked."""


def _column(data: Any, name: str) -> list[str] | None:
    """Return a column as one text per sequence, empty for a None; None if the batch lacks it."""
    if name not in data.keys():  # noqa: SIM118
        return None
    values = data[name]
    values = values.tolist() if isinstance(values, Tensor) else values
    return ["" if value is None else str(value) for value in values]


def _uids(data: Any) -> list[str]:
    uids = _column(data, "uid")
    return [""] * len(data["loss_mask"]) if uids is None else uids


def _sample_column() -> str:
    return os.environ.get(SAMPLE_COLUMN) or _SESSION


def _samples(data: Any) -> list[str] | None:
    """Return each sequence's trajectory; None if the batch has no sessions."""
    sessions = _column(data, _sample_column())
    return sessions and [repr(pair) for pair in zip(_uids(data), sessions, strict=True)]


def names_of(data: Any) -> list[str] | None:
    """Return each sequence's ``uid``, and its session if there are any; None without uids."""
    uids = _column(data, "uid")
    sessions = uids and _column(data, _sample_column())
    return [*map(" ".join, zip(uids, sessions, strict=True))] if uids and sessions else uids


def _paddings(data: Any) -> list[bool]:
    """Tell which sequences are padding: by verl's uid for it, or a column ``is_padding``.

    verl's own ``is_padding`` is a tag of its data store, which the engine does not see.
    """
    named = [_PADDING_UID.fullmatch(uid) is not None for uid in _uids(data)]
    if IS_PADDING not in data.keys():  # noqa: SIM118
        return named
    column = [bool(one) for one in data[IS_PADDING]]
    return [by_name or by_column for by_name, by_column in zip(named, column, strict=True)]


def plan_batch(
    aggregation: Aggregation, data: Any, group: Any, *, counts_zero: bool = True
) -> tuple[StepPlan, Tensor]:
    """Count this rank's sequences; returns the plan, and where each one is in it, int64 ``[b]``.

    ``counts_zero``: whether a sequence with a ``loss_weight`` of 0 is counted all the same. No host
    sync but those of :func:`plan_step` if ``loss_mask`` is on the CPU, as verl has it.
    """
    mask = data["loss_mask"]
    sums = [sequence.bool().sum() for sequence in mask.unbind()]
    # waits before the step: counts
    n_b = torch.stack(sums).cpu() if sums else torch.zeros(0, dtype=torch.int64)
    paddings = _paddings(data)
    is_sequence_b = ~torch.tensor(paddings, dtype=torch.bool)

    def sequences() -> Sequences:
        columns = _columns(aggregation, data)
        weights = columns.get("sequence_weight")
        if not counts_zero and weights is None:
            raise PlanError(
                f"got a loss mode of _no_count_zero and a batch without {LOSS_WEIGHT}, whose zeros "
                "it leaves out of the counts: give each sequence one, or drop _no_count_zero"
            )
        if not counts_zero and weights is not None:
            columns["left_out"] = [weight == 0 for weight in weights]
        return Sequences(active_tokens=n_b, is_padding=paddings, **columns)

    plan = plan_step(
        aggregation,
        sequences,
        group=group,
        # verl's rollout correction leaves loss_mask as it was.
        options=Options(rejects_tokens=True),
    )
    sample = "" if plan.sequences.sample is None else f"(uid, {_sample_column()})"
    leave_out = f"loss_mode={_PREFIX}{aggregation.mode}{_NO_EMPTY}"
    leave_out += f", or a column {IS_PADDING} if they are padding,"
    say_counted(plan, sample=sample, leave_out=leave_out)
    return plan, torch.where(is_sequence_b, is_sequence_b.cumsum(0) - 1, -1)


def _columns(aggregation: Aggregation, data: Any) -> dict[str, Any]:
    """Return what the plan needs of each sequence, padding included, by its name in Sequences.

    Raises :class:`PlanError`: inside of what tells the other ranks.
    """
    _check_columns(aggregation, data, _uids(data))
    columns: dict[str, list[Any] | None] = {}
    if aggregation.mode == "prompt_mean":
        columns["prompt"] = _uids(data)
    elif aggregation.mode in COUNT_SAMPLES:
        columns["sample"] = _samples(data)
    if aggregation.mode == "balanced":
        columns["group"] = _groups(data)
    columns["sequence_weight"] = _loss_weights(data)
    return {name: column for name, column in columns.items() if column is not None}


def _groups(data: Any) -> list[str]:
    """Name each sequence's group, its uid and the sign of its advantage; raises PlanError."""
    mask = data["response_mask"] if "response_mask" in data.keys() else data["loss_mask"]  # noqa: SIM118
    return advantage_groups(_uids(data), data["advantages"], mask)


def _loss_weights(data: Any) -> list[Any] | None:
    """Return the column ``loss_weight``, which Sequences checks; None if there is none."""
    if LOSS_WEIGHT not in data.keys():  # noqa: SIM118
        return None
    column = data[LOSS_WEIGHT]
    if isinstance(column, Tensor):
        column = [one.reshape(-1).tolist() for one in column.unbind()]
        column = [one[0] if len(one) == 1 else one for one in column]
    return [*column]


_OF_PROMPTS = {
    "prompt_mean": "the prompt of each sequence",
    "balanced": "the group of each sequence, (uid, sign of its advantage)",
}
"""What modes that need a uid in any case tell by it."""


def _check_columns(aggregation: Aggregation, data: Any, uids: list[str]) -> None:
    """Refuse a batch that lacks columns, or some of their values, by which a mode counts."""
    mode, name = aggregation.mode, _sample_column()
    if mode not in COUNT_SAMPLES:
        return
    if mode == "balanced" and "advantages" not in data.keys():  # noqa: SIM118
        raise PlanError(
            "got a batch without advantages, by whose sign balanced tells groups: choose another "
            "mode for a loss without them"
        )
    sessions = None if mode == "prompt_mean" else _column(data, name)
    if sessions is None and mode != "prompt_mean" and name != _SESSION:
        raise PlanError(
            f"got {SAMPLE_COLUMN}={name} and a batch without this column, by which {mode} tells "
            f"the sample of each sequence: keep it in the batch, or unset {SAMPLE_COLUMN}"
        )
    if sessions is not None and not all(sessions):
        raise PlanError(
            f"got sequences without a {name} in a batch that has the column, by which {mode} "
            "tells the sample of each: give every sequence one, or leave the column out"
        )
    or_else = ""
    if mode in _OF_PROMPTS:
        tells = _OF_PROMPTS[mode]
    elif sessions is not None:
        tells = f"the sample of each sequence, (uid, {name})"
    elif aggregation.count_empty:
        tells = "padding sequences apart from empty ones"
        or_else = f", or choose loss_mode={_PREFIX}{mode}{_NO_EMPTY}"
    else:
        return
    if not all(uids):
        raise PlanError(
            f"got sequences without a uid, by which {mode} tells {tells}: keep uid in the batch "
            f"that update_actor is given{or_else}"
        )


def check_same_batch(aggregation: Aggregation, data: Any) -> None:
    """Raise :class:`PlanError` on all data- and context-parallel ranks if their batches differ.

    Compares uids, loss masks and what else the mode counts, by a hash. One all-gather with its host
    sync.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    named = "data- and context-parallel rank {}"
    with together(group, "compare its batch", named=named, raises=PlanError) as ranks:
        # waits before the step: counts
        masks = [mask.bool().cpu().numpy() for mask in data["loss_mask"].unbind()]
        ids = [_uids(data), _paddings(data), _columns(aggregation, data), [*map(len, masks)]]
        hashed = hashlib.sha256(repr(ids).encode())
        for mask in masks:
            hashed.update(mask.tobytes())
        ranks.own = hashed.digest()
    hashes = ranks.of_ranks
    other = next((rank for rank, one in enumerate(hashes) if one != hashes[0]), None)
    if other is not None:
        raise PlanError(
            f"got one batch on rank 0 of the {len(hashes)} data- and context-parallel ranks and "
            f"a different one on rank {other}, expected the same on all: with "
            "dynamic_context_parallel each rank counts the whole batch by itself. Give every rank "
            "the batch of verl's data-parallel rank 0, or set "
            "actor_rollout_ref.actor.megatron.dynamic_context_parallel=False"
        )


def warn_of_split(data: Any, plan: StepPlan, tokens_of: dict[str, int]) -> None:
    """Warn once if an earlier optimizer step over the batch had other sequences of a prompt.

    Of a sample or a group, likewise, for the modes that count them. ``tokens_of``: tokens of each
    of these in the earlier steps over the batch; updated. Sequences on other ranks are in them, so
    that one rank with sequences of it in both steps sees it.
    """
    mode, counts = plan.aggregation.mode, plan.table.counts
    if mode not in COUNT_SAMPLES:
        return
    kind, ids, tokens_A = "sample", _samples(data), counts.n_b
    if mode == "prompt_mean":
        kind, ids, tokens_A = "prompt", _uids(data), counts.n_p
    elif mode == "balanced":
        kind, ids, tokens_A = "group", _groups(data), counts.n_c
    if ids is None:
        return
    of_batch = zip(ids, _paddings(data), strict=True)
    trained = [one for one, is_padding in of_batch if not is_padding]
    for one, tokens in zip(trained, tokens_A[plan.table.own].tolist(), strict=True):
        if tokens_of.setdefault(one, tokens) != tokens:
            warn_once(
                f"{kind}s over several steps",
                f"{mode} counts a {kind} within one optimizer step, and a {kind} "
                f"has sequences in several steps of this batch, in each of which they weigh as a "
                f"whole {kind}: set actor_rollout_ref.actor.ppo_mini_batch_size to "
                "data.train_batch_size. If trajectories have several sequences, verl still cuts a "
                "batch of more than ppo_mini_batch_size * rollout.n sequences",
            )
    if "update_lr_scheduler" not in data.keys() or data["update_lr_scheduler"]:  # noqa: SIM118
        tokens_of.clear()  # verl's mark of a batch's last step


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


_LOSSES = ("trainer.ppo.core_algos", "workers.utils.losses", "trainer.distillation.losses")

HEARD = Where(
    "verl.workers.engine.megatron.transformer_impl",
    [
        *(Reduction(f"verl.{name}", "agg_loss", "loss_mat", "loss_mask") for name in _LOSSES),
        Reduction(__name__, "_Microbatch.agg_loss", "loss_mat", "loss_mask"),
    ],
    sums_gradients=False,
    names=names_of,
)
"""The functions by which its terms are weighed."""
