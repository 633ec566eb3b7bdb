"""AReaL: its Megatron engines' update of a policy and of SFT, from trajectories to gradients.

``ppo_update`` and ``train_lm`` run as they are: the split into microbatches, packing, padding, the
forward step, log-probabilities, losses and loss weights, in a process group of one. Instead of
Megatron's schedule, which takes CUDA, each microbatch's loss is divided by their number and added,
as it does in the average loss scaling. The model is a table: the logits of a position are its row,
and no two positions share one.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from drawn_step import Step, aliases
from function_checks import Check, Comparison, compare
from one_rank import one_rank
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_lossagg.integrations._shared import replaced
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.drivers.driver import Drawn, aggregations, ppo_losses

_ENGINE = "areal.engine.megatron_engine"
_CLIP, _DUAL_CLIP = 0.2, 3.0
_MICROBATCHES = 3
_ONE_MICROBATCH = ((tuple(range(12)),),)
"""Of the drawn step's data: AReaL splits it."""


def checks() -> list[Check]:
    """List the checks; imports AReaL's engine."""
    import areal.engine.megatron_engine  # noqa: F401  what is missing, before the first check

    listed = []
    for name, one in aliases("areal", divisor=1.0).items():
        run = partial(trained, one, is_ours=False)
        listed.append(Check(f"areal:{name}", f"{_ENGINE}.MegatronPPOActor.train_batch", run))
    for name, one in aggregations().items():
        run = partial(trained, one)
        listed.append(Check(f"ppo_update, {name}", f"{_ENGINE}.MegatronPPOActor.ppo_update", run))
        if one.mode != "prompt_mean":
            run = partial(trained, one, is_sft=True)
            listed.append(Check(f"train_lm, {name}", f"{_ENGINE}.MegatronLMEngine.train_lm", run))
    return listed


def trained(aggregation: Aggregation, *, is_sft: bool = False, is_ours: bool = True) -> Comparison:
    """Train the drawn step with AReaL's engine, in our subclass or as it is."""
    from areal.engine import megatron_engine
    from areal.utils import stats_tracker

    from megatron_lossagg.integrations import areal

    step = Step(_ONE_MICROBATCH)
    ids = _positions(step.drawn)
    model = _Table(sum(map(len, ids)))
    schedule, variables = _Schedule(), {**os.environ, **areal._variables(aggregation)}
    with (
        one_rank(),
        replaced(os, environ=variables),
        replaced(megatron_engine, get_forward_backward_func=lambda: schedule),
    ):
        engine = _engine(model, is_sft=is_sft, is_ours=is_ours)
        data = _trajectories(step, ids, is_sft=is_sft)
        (engine.train_lm if is_sft else engine.ppo_update)(data)
        stats_tracker.export_all()  # which are the process's
    wanted = step.wanted(aggregation, [_losses(step, ids, model.table, is_sft=is_sft)])
    return compare(schedule.loss, wanted, [model.table])


class _Schedule:
    """Adds up the microbatches' losses as Megatron does, and keeps their graph."""

    def __init__(self) -> None:
        self.loss = torch.zeros(())

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Iterator[Any],
        model: Any,
        num_microbatches: int,
        **_: object,
    ) -> None:
        """Run a step forward; the loss that AReaL returns is not of tokens to be divided by."""
        for _number in range(num_microbatches):
            output, loss_func = forward_step_func(data_iterator, model)
            loss, _report = loss_func(output)
            self.loss = self.loss + loss / num_microbatches


class _Table(torch.nn.Module):
    """A model whose logits of a position are the row of its token."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(calculate_per_token_loss=False)
        draw = torch.Generator().manual_seed(17)
        self.table = torch.nn.Parameter(torch.randn(size, size, generator=draw))

    def zero_grad_buffer(self) -> None:
        """Do nothing: there is no buffer."""

    def forward(self, input_ids: Tensor, **_: object) -> Tensor:
        """Return ``[1, tokens, tokens of the step]``."""
        return self.table[input_ids]


def _positions(drawn: Sequence[Drawn]) -> list[Tensor]:
    """Number the tokens of the step: as token ids, none of which occurs twice."""
    ends = itertools.accumulate(len(one.tokens) for one in drawn)
    return [torch.arange(end - len(one.tokens), end) for one, end in zip(drawn, ends, strict=True)]


def _losses(step: Step, ids: Sequence[Tensor], table: Tensor, *, is_sft: bool) -> Tensor:
    """Compute each response token's loss in float64, ``[sequences, s]``."""
    losses = []
    for one, tokens in zip(step.drawn, ids, strict=True):
        logits = table.double()[tokens[:-1]].log_softmax(-1)
        log_probs = logits.gather(-1, tokens[1:, None])[-len(one.mask) :, 0]
        old, advantages = one.old_log_probs, one.advantages
        of_policy = partial(ppo_losses, log_probs, old, advantages)
        losses.append(-log_probs if is_sft else of_policy(clip=_CLIP, dual_clip=_DUAL_CLIP))
    return pad_sequence(losses, batch_first=True)


def _trajectories(step: Step, ids: Sequence[Tensor], *, is_sft: bool) -> list[dict[str, Tensor]]:
    """Return AReaL's list: of each prompt its sequences, padded to the longest."""
    members: dict[int, list[int]] = {}
    for number, prompt in enumerate(step.prompts):
        members.setdefault(prompt, []).append(number)
    return [
        _trajectory([step.drawn[n] for n in numbers], [ids[n] for n in numbers], is_sft=is_sft)
        for numbers in members.values()
    ]


def _trajectory(
    sequences: Sequence[Drawn], ids: Sequence[Tensor], *, is_sft: bool
) -> dict[str, Tensor]:
    lengths = torch.tensor([len(one) for one in ids])

    def at_logits(values: Sequence[Tensor]) -> Tensor:
        """Put each response token's value where the logit is that predicts it."""
        made = torch.zeros(len(ids), int(lengths.max()))
        for row, end, given in zip(made, lengths - 1, values, strict=True):
            row[end - len(given) : end] = given
        return made

    mask = at_logits([torch.tensor(one.mask) for one in sequences])
    data = {
        "input_ids": pad_sequence(list(ids), batch_first=True),
        "attention_mask": (torch.arange(int(lengths.max())) < lengths[:, None]).long(),
        "loss_mask": mask.roll(1, dims=-1).long() if is_sft else mask,  # train_lm rolls it
    }
    if not is_sft:
        old = at_logits([one.old_log_probs for one in sequences])
        data |= dict.fromkeys(("logprobs", "prox_logp"), old)
        data["advantages"] = at_logits([one.advantages for one in sequences])
        data |= dict.fromkeys(("tot_rewards", "kl_rewards"), torch.zeros_like(old))
        data["rewards"] = torch.zeros(len(ids))
    return data


def _engine(model: _Table, *, is_sft: bool, is_ours: bool) -> Any:
    """Make an engine around a model, without what loads one and without an optimizer."""
    from areal.api.cli_args import MicroBatchSpec, PPOActorConfig, TrainEngineConfig
    from areal.engine import megatron_engine

    from megatron_lossagg.integrations import areal

    spec = MicroBatchSpec(n_mbs=_MICROBATCHES)
    base: Any
    config: Any
    if is_sft:
        base = areal.LossAggregationLM if is_ours else megatron_engine.MegatronLMEngine
        config = TrainEngineConfig(mb_spec=spec)
    else:
        base = areal.LossAggregationActor if is_ours else megatron_engine.MegatronPPOActor
        config = PPOActorConfig(mb_spec=spec, ppo_n_minibatches=1)
        config.eps_clip, config.c_clip = _CLIP, _DUAL_CLIP

    engine = base(config)
    engine.model, engine.device = megatron_engine._MegatronModelList([model]), "cpu"
    engine.parallel_strategy = SimpleNamespace(
        tensor_parallel_size=1, pipeline_parallel_size=1, context_parallel_size=1
    )
    engine.process_group_initialized = True
    engine.logger = logging.getLogger(__name__)
    engine.optimizer = SimpleNamespace(
        zero_grad=lambda: None,
        step=lambda: (True, 1.0, None),
        param_groups=[{"lr": 0.0}],
        get_loss_scale=lambda: torch.ones(()),
    )
    return engine
