"""An unmodified slime under any mode except ``balanced``, by its arguments only.

**All of the loss.** The weights travel with the data, for the policy loss, entropy, KL and
logged metrics alike. A file for ``--custom-config-path``::

    loss_aggregation: token_mean
    rollout_data_postprocess_path: megatron_lossagg.integrations.slime.carry_weights
    custom_megatron_init_path: megatron_lossagg.integrations.slime.check

**Only the policy loss**, Dr.GRPO's constant, by one flag; the divisor is encoded in the name
(``constant_40960``, ``constant_4e4``, ``constant_0p5``)::

    --custom-pg-loss-reducer-function-path megatron_lossagg.integrations.slime.constant_40960

KL and entropy keep the framework's own average there. ``docs/integrations/slime.md`` has both, and
what is refused. Source: slime 624b824a ``MegatronTrainRayActor.train_actor``, ``loss_function``.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lossagg.errors import ContractError, PlanError
from megatron_lossagg.integrations._rollouts import (
    Denominators,
    FrameworkStep,
    Hooks,
    MakeReducer,
    carried_aggregation,
    checked_aggregation,
    constant_reducer,
    log_carried,
    log_set_up,
    rollout_mask_sums,
)
from megatron_lossagg.integrations._shared import not_a_mask
from megatron_lossagg.reduction.aggregation import Options
from megatron_lossagg.reduction.devices import moved
from megatron_lossagg.reduction.exchange import Exchange
from megatron_lossagg.reduction.faults import first_time
from megatron_lossagg.reduction.sequences import Sequences

HOOKS = Hooks(
    name="slime",
    module="megatron_lossagg.integrations.slime",
    carry_argument="rollout_data_postprocess_path",
    not_covered=(
        ("use_critic", "the critic's value loss"),
        ("enable_mtp_training", "the loss of MTP layers"),
    ),
)
_STOCK_SOURCES = ("data_source_path", "rollout_function_path")


def __getattr__(name: str) -> MakeReducer:
    """Return ``constant_<L>`` for ``--custom-pg-loss-reducer-function-path``."""
    return constant_reducer(name, __name__)


@dataclass(kw_only=True)
class _Process:
    """What this training process remembers between slime's calls."""

    own_postprocess: str | None = None
    """Path of the user's function that is to call :func:`carry_weights`; None: there is none."""
    carried: Tensor | None = None
    """The last denominators that were carried."""


_PROCESS = _Process()


def check(args: Any) -> None:
    """Refuse a wrong set-up at startup; for ``--custom-megatron-init-path``.

    If ``rollout_data_postprocess_path`` is not :func:`carry_weights`, the argument is replaced by
    :func:`checked_postprocess`, so that no batch is trained without the weights. Logs on rank 0
    what it saw: nothing is carried yet. No collective.
    """
    aggregation = checked_aggregation(args, HOOKS)
    log_set_up(args, HOOKS, aggregation)
    own = getattr(args, HOOKS.carry_argument, None)
    if aggregation is not None and own != HOOKS.carry_path:
        _PROCESS.own_postprocess = own
        setattr(args, HOOKS.carry_argument, f"{__name__}.{checked_postprocess.__name__}")


def checked_postprocess(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Call the user's own postprocess, if any, and refuse to train what it did not carry.

    Raises :class:`ContractError` if ``rollout_mask_sums`` is not what :func:`carry_weights`
    left in this rollout batch. Collectives and host syncs are those of the user's function.
    """
    own = _PROCESS.own_postprocess
    setattr(args, HOOKS.carry_argument, own)  # slime has loaded this one
    _PROCESS.carried = None
    if own:
        module, _, name = own.rpartition(".")
        getattr(importlib.import_module(module), name)(args, rollout_id, rollout_data)
    if _PROCESS.carried is None or rollout_data.get("rollout_mask_sums") is not _PROCESS.carried:
        what = "did not call" if _PROCESS.carried is None else "changed rollout_mask_sums after"
        raise ContractError(
            f"{HOOKS.carry_argument} {own} {what} carry_weights, and slime would train a different "
            f"loss than loss_aggregation asks for: set it to {HOOKS.carry_path}, or call "
            "carry_weights(args, rollout_id, rollout_data) as its last line"
        )


def carry_weights(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Overwrite ``rollout_mask_sums`` with d_s = 1 / (w_s G).

    For ``--rollout-data-postprocess-path``; a function of your own there calls this one last.
    ``rollout_data``: this data-parallel rank's sequences of the rollout batch. Reads ``loss_masks``
    (one ``[response]`` 0/1 mask per sequence), ``rollout_ids``, ``micro_batch_indices``,
    ``num_microbatches`` (M per step) and ``global_batch_sizes`` (G per step); for ``prompt_mean``
    also ``prompt``, an id per sequence, which it takes out. Without it, prompts are ``rollout_id //
    n_samples_per_prompt``, which only holds for slime's own data source; others are refused. With
    given ids, rollouts that slime drops may cut a prompt: then each has to have
    ``n_samples_per_prompt`` rollouts.

    slime calls it on every rank after advantages were computed. Per step the collectives of
    :func:`plan_step` over the data-parallel group without context parallelism, and one host sync to
    count masks. Logs once that weights were carried.
    Raises :class:`PlanError`, on all ranks of the group, and what :func:`check` raises.
    """
    aggregation = carried_aggregation(args, HOOKS)
    active_tokens, fault = _active_tokens(rollout_data["loss_masks"])
    rollout_ids = [int(rollout) for rollout in rollout_data["rollout_ids"]]
    prompt, samples_per_prompt = None, None
    if aggregation.reads("prompt"):
        try:
            prompt, samples_per_prompt = _prompts(args, rollout_ids, rollout_data)
        except PlanError as error:
            if "prompt" in aggregation.needs:
                fault = fault or str(error)
    d_S = rollout_mask_sums(
        aggregation,
        _steps(rollout_data),
        Sequences(
            active_tokens=active_tokens,
            sample=rollout_ids,
            prompt=prompt,
            samples_per_prompt=samples_per_prompt,
        ),
        group=_data_parallel_group(),
        empty_step=Options.from_args(args).empty_step,
        fault=fault,
    )
    of_slime = rollout_data["rollout_mask_sums"]
    carried = moved(torch.from_numpy(d_S), of_slime.device).to(of_slime.dtype)
    _PROCESS.carried = carried.as_subclass(Denominators) if (d_S < 1).any() else carried
    rollout_data["rollout_mask_sums"] = _PROCESS.carried
    log_carried(HOOKS, aggregation)


def _steps(rollout_data: dict[str, Any]) -> list[FrameworkStep]:
    microbatches = iter(rollout_data["micro_batch_indices"])
    steps = []
    per_step = rollout_data["num_microbatches"], rollout_data["global_batch_sizes"]
    for m, rollouts in zip(*per_step, strict=True):
        placed = [(sequence, index) for index in range(m) for sequence in next(microbatches)]
        steps.append(
            FrameworkStep(
                sequences=[sequence for sequence, _ in placed],
                rollouts=int(rollouts),
                microbatch=[index for _, index in placed],
                num_microbatches=int(m),
            )
        )
    return steps


def _active_tokens(masks: Sequence[Tensor]) -> tuple[list[int], str]:
    """Count each sequence's active tokens, and report a mask that is not 0 or 1; one host sync."""
    if not masks:
        return [], ""
    counts_S = torch.stack([mask.sum() for mask in masks])
    whole = torch.cat(list(masks))
    num_other = ((whole != 0) & (whole != 1)).sum()
    *counts, other = torch.cat([counts_S, num_other[None]]).tolist()
    change = "make loss_mask of each Sample 0 or 1"
    fault = str(not_a_mask("loss_masks", change)) if other else ""
    return [int(count) for count in counts], fault


def _prompts(
    args: Any, rollout_ids: Sequence[int], rollout_data: dict[str, Any]
) -> tuple[Sequence[int], int | None]:
    """Return the prompt id of each sequence; also the rollouts of a prompt, to be checked.

    These are not checked if ids are given and no rollout is dropped.
    """
    given = rollout_data.pop("prompt", None)
    if given is not None:
        drops = _drops_rollouts(rollout_data)
        return list(given), int(args.n_samples_per_prompt) if drops else None
    foreign = [
        f"{name} {path}"
        for name in _STOCK_SOURCES
        if not (path := str(getattr(args, name, None))).startswith("slime.")
    ]
    if getattr(args, "load_debug_rollout_data_subsample", None) is not None:
        foreign.append("load_debug_rollout_data_subsample")
    if foreign:
        raise PlanError(
            f"got prompt_mean with {', '.join(foreign)}, expected slime's own data source or "
            "prompt ids: slime carries none, and rollout_id // n_samples_per_prompt only holds for "
            "its own source. Return data['prompt'], an integer per sample, from "
            "--custom-convert-samples-to-train-data-path"
        )
    number = int(args.n_samples_per_prompt)
    if first_time("derived prompts of slime"):
        logging.getLogger(__name__).warning(
            "slime carries no prompt ids: prompt_mean takes rollout_id // %d for them, which holds "
            "for slime's own data source",
            number,
        )
    return [rollout // number for rollout in rollout_ids], number


def _drops_rollouts(rollout_data: dict[str, Any]) -> bool:
    """Whether slime left out sequences that fill no step; the prompts of those are not known here.

    By ``raw_reward``, which every rank has of all sequences; False if a conversion of the user's
    own leaves it out. One all-gather.
    """
    rewards = rollout_data.get("raw_reward")
    if rewards is None:
        return False
    own = np.array([len(rollout_data["rollout_ids"])])
    return int(Exchange(_data_parallel_group()).integers(own).sum()) < len(rewards)


def _data_parallel_group() -> ProcessGroup:
    """Return the data-parallel group without context parallelism, as torch.distributed knows it.

    slime wraps groups to destroy and rebuild them between train calls; the wrapper answers a few
    functions of torch.distributed only.
    """
    from megatron.core import mpu

    group: Any = mpu.get_data_parallel_group(with_context_parallel=False)
    reloadable = sys.modules.get("slime.utils.reloadable_process_group")
    if reloadable is not None and isinstance(group, reloadable.ReloadableProcessGroup):
        group = group.group
    process_group: ProcessGroup = group
    return process_group
