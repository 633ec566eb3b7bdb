"""AReaL's Megatron engine: the weights of a mode for its policy loss and SFT.

::

    trainer = aggregated(PPOTrainer, Aggregation("sample_mean"))(config, train_dataset=...)

AReaL trains ``sum_t l_t / N``: a microbatch's mean over its tokens, times its tokens, over N of all
ranks. Here advantages leave as ``A_t w_s N``, and SFT's losses as ``l_t w_s N``. The trainer makes
engines of the classes below, which its workers import by name; the aggregation reaches them in
environment variables. A call of ``train_batch`` is one optimizer step.
Sources: AReaL 4aef98d8 ``MegatronEngine.train_batch``, ``_compute_logprobs_and_loss``,
``compute_total_loss_weight``, ``PPOActor.ppo_update``, ``grpo_loss_fn``, ``LMEngine.train_lm``,
``PPOTrainer._create_train_engine``, ``SFTTrainer._create_actor``, ``ppo_actor_loss_fn``,
``reassemble_cp_packed_logprobs``.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.errors import AggregationError, ContractError, PlanError
from megatron_lossagg.integrations._shared import (
    WEIGH,
    announce,
    imported,
    is_asked,
    not_a_mask,
    replaced,
    variables,
)
from megatron_lossagg.integrations.weigh_rl import Reduction, Where, weigh_if_asked
from megatron_lossagg.loop.flags import aggregation_from_args, args_of
from megatron_lossagg.loop.step import say_counted
from megatron_lossagg.reduction.aggregation import Aggregation, require_mask_count
from megatron_lossagg.reduction.devices import moved
from megatron_lossagg.reduction.modes import CUSTOM
from megatron_lossagg.reduction.plan import plan_step
from megatron_lossagg.reduction.sequences import Sequences
from megatron_lossagg.weigh.listen import own

_NOT_HERE = (CUSTOM, "microbatch_token_mean", "balanced")
_VERSION = "use AReaL 4aef98d8"
PROMPT, SCALE = "loss_aggregation_prompt", "loss_aggregation_scale"
"""Columns ``[sequences, s]`` of a batch: AReaL splits and packs no others, and pads with 0."""
_COUNT_EMPTY = "loss_aggregation_count_empty"
_SFT_LOSS = "compute_packed_sft_loss"


def aggregated(trainer: Any, aggregation: Aggregation | None) -> Any:
    """Make a subclass of AReaL's ``PPOTrainer`` or ``SFTTrainer`` that trains with our weights.

    ``None`` keeps AReaL's own, which ``LOSSAGG_WEIGH=1`` shows of a policy. Raises
    :class:`AggregationError` for a mode that needs what AReaL's batches lack, and as the trainer is
    built, for what :func:`check_config` refuses. Other engines than Megatron's, trainers of pairs,
    and to weigh SFT are a :class:`ContractError` then.
    """
    if aggregation is not None:
        _check_mode(aggregation)

    class LossAggregationTrainer(trainer):  # type: ignore[misc]
        """An AReaL trainer; its actor is an engine of this module, its critic AReaL's."""

        def _create_train_engine(self, actor_config: Any, alloc: Any) -> Any:
            if actor_config is not self.config.actor:  # the reference and the teacher
                return super()._create_train_engine(actor_config, alloc)
            if aggregation is not None:
                check_config(self.config, aggregation)
            with _in_place_of_engines(actor_config, aggregation):
                return _checked(super()._create_train_engine(actor_config, alloc))

        def _create_actor(self, actor_config: Any) -> Any:
            if is_asked():
                raise ContractError(
                    f"got {WEIGH} with {trainer.__name__}, expected a PPOTrainer: AReaL's SFT is "
                    f"not weighed; unset {WEIGH}"
                )
            if aggregation is None:
                return super()._create_actor(actor_config)
            if aggregation.mode == "prompt_mean":
                raise AggregationError(
                    f"got {aggregation} with {trainer.__name__}, expected a mode without prompts: "
                    "AReaL's SFT has no prompt ids; choose another mode"
                )
            check_config(self.config, aggregation)
            with _in_place_of_engines(actor_config, aggregation):
                return _checked(super()._create_actor(actor_config))

    return LossAggregationTrainer


def _check_mode(aggregation: Aggregation) -> None:
    require_mask_count(aggregation, "AReaL")
    if aggregation.mode in _NOT_HERE:
        raise AggregationError(
            f"got {aggregation}, expected a mode of whole steps without ids of categories: AReaL's "
            "train_batch knows neither; choose another mode"
        )


def check_config(config: Any, aggregation: Aggregation) -> None:
    """Refuse, of a trainer's configuration, what would not train the mode's weights."""
    actor = config.actor
    refused = {
        "teacher": (getattr(config, "teacher", None), "its loss is a mean of each microbatch"),
        "actor.m2_threshold": (
            getattr(actor, "m2_threshold", None),
            "M2PO divides by the tokens that it keeps of each microbatch",
        ),
        "actor.enable_tree_training": (
            actor.enable_tree_training or None,
            "a token of a tree belongs to several sequences",
        ),
        "actor._version": (
            actor._version if actor._version != "v1" else None,
            "its workers were not tested here",
        ),
    }
    for name, (value, reason) in refused.items():
        if value is not None:
            raise ContractError(f"got {name} with {aggregation}, expected none: {reason}; unset it")
    steps = getattr(actor, "ppo_n_minibatches", 1)
    if aggregation.mode == "prompt_mean" and steps != 1:
        raise ContractError(
            f"got actor.ppo_n_minibatches={steps} with {aggregation}, expected 1: AReaL splits a "
            "prompt's sequences over several optimizer steps; set it to 1"
        )


@contextmanager
def _in_place_of_engines(config: Any, aggregation: Aggregation | None) -> Iterator[None]:
    """Let AReaL take this module's engines, and tell its workers the aggregation."""
    environment = variables() | ({} if aggregation is None else _variables(aggregation))
    engines = imported("areal.engine", expected=f"AReaL: {_VERSION}")
    os.environ.update(environment)  # AReaL's SPMD mode has its engines here
    for spec in config.scheduling_spec:
        spec.env_vars.update(environment)
    ours = [name for name in _ENGINES if (name == "WeighedActor") == (aggregation is None)]
    with replaced(engines, **{_ENGINES[name][0]: _engine(name) for name in ours}):
        yield


def _checked(engine: Any) -> Any:
    """Return the engine, or AReaL's controller of engines, if it is of this module."""
    made = getattr(engine, "train_engine", type(engine))
    if made.__module__ != __name__:
        raise ContractError(
            f"got the engine {made.__module__}.{made.__name__}, expected Megatron's for a policy "
            "or SFT: set actor.backend=megatron:..., and train with PPOTrainer or SFTTrainer; "
            f"{_VERSION}"
        )
    return engine


def __getattr__(name: str) -> Any:
    if name in _ENGINES:
        return _engine(name)  # imported by AReaL's workers
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _engine(name: str) -> Any:
    """Make an engine class; AReaL's is imported here, and its Megatron-Core."""
    engines = imported("areal.engine.megatron_engine", expected=f"AReaL: {_VERSION}")
    own, subclass_of = _ENGINES[name]
    made = subclass_of(getattr(engines, own))
    made.__name__ = made.__qualname__ = name
    return made


def _weighed_actor(base: Any) -> Any:
    class Actor(base):  # type: ignore[misc]
        """AReaL's actor, which weighs its first step if its process was asked to."""

        def ppo_update(self, data: list[dict[str, Any]]) -> Any:
            """Name the prompts, and train."""
            return super().ppo_update(_named(self, data))

        def train_batch(self, *args: Any, **kwargs: Any) -> Any:
            """Train the step."""
            weigh_if_asked("areal")
            return super().train_batch(*args, **kwargs)

    return Actor


def _actor(base: Any) -> Any:
    class Actor(_weighed_actor(base)):  # type: ignore[misc]
        """AReaL's actor; each step's advantages are multiplied by w_s N."""

        def train_batch(self, input_: Any, loss_fn: Any, loss_weight_fn: Any) -> Any:
            """Count the step and train it: one or two all-gathers over the data-parallel group."""
            data = dict(self._normalize_batch_input(input_)[0])
            scale_S = _scales(self, data, data.get(PROMPT), loss_weight_fn)
            own[:] = [_of_environment()]
            advantages = data["advantages"]
            scale = scale_S.to(advantages)[:, None].expand_as(advantages)
            data["advantages"], data[SCALE] = advantages * scale, scale.contiguous()
            return super().train_batch(data, loss_fn, loss_weight_fn)

    return Actor


def _named(engine: Any, data: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the number of its prompt, from 1, to each entry of ``data``, which is one."""
    first = (engine.data_parallel_rank << 32) + 1
    return [
        {**one, PROMPT: torch.full_like(one["attention_mask"], first + n, dtype=torch.long)}
        for n, one in enumerate(data)
    ]


def ids_of(batch: Any, first: Sequence[int]) -> dict[str, Any]:
    """Return the prompts of a packed microbatch's sequences, None of padding, for weighing."""
    if PROMPT not in batch:
        return {}
    prompts = batch[PROMPT].reshape(-1)[torch.as_tensor(first)].tolist()
    return {"prompt": [prompt or None for prompt in prompts]}


def _lm(base: Any) -> Any:
    class LM(base):  # type: ignore[misc]
        """AReaL's engine for SFT; evaluation keeps its token mean."""

        def train_batch(self, input_: Any, loss_fn: Any, loss_weight_fn: Any) -> Any:
            """Count the step and train it: one all-gather over the data-parallel group."""
            if getattr(loss_fn, "__name__", "") != _SFT_LOSS:
                raise ContractError(f"got the loss {loss_fn}, expected {_SFT_LOSS}: {_VERSION}")
            data = dict(self._normalize_batch_input(input_)[0])
            scale_S = _scales(self, data, None, loss_weight_fn)
            mask = data["loss_mask"]
            data[SCALE] = moved(scale_S, mask.device)[:, None].expand_as(mask).contiguous()
            return super().train_batch(data, _weighed(loss_fn), loss_weight_fn)

    return LM


def _scales(
    engine: Any, data: dict[str, Any], prompt: Tensor | None, loss_weight_fn: Callable[..., Any]
) -> Tensor:
    """Return w_s N of this rank's sequences, float64 ``[S]``; collectives over DP."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_model_config

    aggregation = _of_environment()
    if get_model_config(engine.model[0]).calculate_per_token_loss:
        raise ContractError(
            "got calculate_per_token_loss=True, expected False: AReaL passes Megatron no token "
            "count, so gradients would be DP CP times too large; unset it"
        )
    mask = data["loss_mask"] * data["attention_mask"].bool()  # as AReaL packs it

    def counted() -> Sequences:
        if bool(((mask != 0) & (mask != 1)).any()):
            raise not_a_mask("loss_mask", "make it 0 or 1, and scale advantages to weigh a token")
        active_tokens = mask.sum(-1).to("cpu", torch.int64)
        if int(loss_weight_fn({**data, "loss_mask": mask})) != int(active_tokens.sum()):
            raise PlanError(
                "AReaL weighs a microbatch by a number other than its active tokens, expected "
                f"loss_mask.count_nonzero(): {_VERSION}"
            )
        ids = None
        if prompt is not None and aggregation.reads("prompt"):
            ids = prompt[:, 0].cpu()  # waits before the step
        return Sequences(active_tokens=active_tokens, prompt=ids)

    plan = plan_step(aggregation, counted, group=parallel_state.get_data_parallel_group())
    announce("AReaL", aggregation)
    say_counted(plan)
    return plan.weights * float(plan.totals.active_tokens or 0)


def _weighed(loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return AReaL's loss of SFT with our weights, next to AReaL's own statistics."""

    def weighed(logprobs: Tensor, entropy: Tensor, input_: dict[str, Any], **logits: Any) -> Tensor:
        loss_fn(logprobs.detach(), entropy, input_, **logits)
        mask = input_["loss_mask"].bool()
        losses = torch.where(mask, -logprobs * input_[SCALE].to(logprobs), 0)
        tracker = imported("areal.utils.stats_tracker", expected=f"AReaL: {_VERSION}")
        tracker.stat(loss_aggregation=losses.detach().float(), denominator="n_valid_tokens")
        loss: Tensor = losses.sum() / mask.count_nonzero()
        return loss

    return weighed


_ENGINES = {
    "LossAggregationActor": ("MegatronPPOActor", _actor),
    "LossAggregationLM": ("MegatronLMEngine", _lm),
    "WeighedActor": ("MegatronPPOActor", _weighed_actor),
}
"""Our engines, each with AReaL's and what makes a subclass of it; the last is AReaL's weights."""


def _variables(aggregation: Aggregation) -> dict[str, str]:
    """Write the aggregation as environment variables, all of them: AReaL joins them by commas."""
    args = args_of(aggregation)
    return {name.upper(): "" if value is None else str(value) for name, value in args.items()}


def _of_environment() -> Aggregation:
    """Read what :func:`_variables` wrote; raises :class:`ContractError` if it did not arrive."""
    names = map(str.lower, _variables(Aggregation("token_mean")))
    given: dict[str, Any] = {name: os.environ.get(name.upper()) or None for name in names}
    if given[_COUNT_EMPTY] is not None:
        given[_COUNT_EMPTY] = given[_COUNT_EMPTY] == "True"
    aggregation = aggregation_from_args(Namespace(**given))
    if aggregation is None:
        raise ContractError(
            "got no LOSS_AGGREGATION in a worker's environment, expected what the trainer puts in "
            "actor.scheduling_spec: make the trainer with aggregated(PPOTrainer, Aggregation(...))"
        )
    return aggregation


HEARD = Where(
    "areal.engine.megatron_engine",
    [
        Reduction(
            *("areal.trainer.ppo.actor", "ppo_actor_loss_fn", "pg_loss", "loss_mask"),
            how="inside",
            cu_seqlens="cu_seqlens",
            scale=SCALE,
        )
    ],
    sums_gradients=True,
    batch="input_data",
    ids=ids_of,
    column=PROMPT,
)
"""The function by which the policy loss is weighed."""
