"""Every mode in an unmodified slime, by arguments alone.

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
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lossagg.errors import ContractError, PlanError
from megatron_lossagg.integrations._pg_loss_reducer import MakeReducer, constant_reducer
from megatron_lossagg.integrations._rollout_mask_sums import (
    REDUCER,
    FrameworkStep,
    Hooks,
    check_set_up,
    is_ours,
    log_carried,
    log_set_up,
    rollout_mask_sums,
)
from megatron_lossagg.reduction.options import Options

__all__ = ["carry_weights", "check"]

HOOKS = Hooks(
    name="slime",
    module="megatron_lossagg.integrations.slime",
    carry_argument="rollout_data_postprocess_path",
    about_flags="slime ignores command-line flags that it does not know, ours among them",
)
_STOCK_SOURCES = ("data_source_path", "rollout_function_path")


def __getattr__(name: str) -> MakeReducer:
    """Return ``constant_<L>`` for ``--custom-pg-loss-reducer-function-path``."""
    return constant_reducer(name, __name__)


@dataclass(kw_only=True)
class _Process:
    """What this training process remembers between slime's calls."""

    own_postprocess: str = ""
    """Path of the user's function that is to call :func:`carry_weights`."""
    carried: Tensor | None = None
    """The last denominators that were carried."""


_PROCESS = _Process()


def check(args: Any) -> None:
    """Refuse a wrong set-up at startup; for ``--custom-megatron-init-path``.

    Finds misspelled arguments, which slime takes without a word, hooks that contradict each
    other, and hooks that are missing. Logs on rank 0 what it saw: nothing is carried yet. Where
    ``rollout_data_postprocess_path`` is a function of your own, the argument is replaced by
    :func:`checked_postprocess`. No collective.
    """
    aggregation = check_set_up(args, HOOKS)
    log_set_up(args, HOOKS, aggregation)
    own = getattr(args, HOOKS.carry_argument, None)
    is_own = own and not is_ours(own) and not is_ours(getattr(args, REDUCER, None))
    if aggregation is not None and is_own:
        _PROCESS.own_postprocess = str(own)
        setattr(args, HOOKS.carry_argument, f"{__name__}.{checked_postprocess.__name__}")


def checked_postprocess(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Call the user's own postprocess, and refuse to train what it did not carry.

    Raises :class:`ContractError` if ``rollout_mask_sums`` is not what :func:`carry_weights`
    left in this rollout batch. Collectives and host syncs are those of the user's function.
    """
    setattr(args, HOOKS.carry_argument, _PROCESS.own_postprocess)  # slime has loaded this one
    module, _, name = _PROCESS.own_postprocess.rpartition(".")
    _PROCESS.carried = None
    getattr(importlib.import_module(module), name)(args, rollout_id, rollout_data)
    if _PROCESS.carried is None or rollout_data.get("rollout_mask_sums") is not _PROCESS.carried:
        what = "returned without" if _PROCESS.carried is None else "changed rollout_mask_sums after"
        raise ContractError(
            f"{HOOKS.carry_argument} {_PROCESS.own_postprocess} {what} carry_weights, and "
            "slime would train a different loss than loss_aggregation asks for: call "
            f"{HOOKS.carry_path}(args, rollout_id, rollout_data) as its last line"
        )


def carry_weights(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Overwrite ``rollout_mask_sums`` with d_s = 1 / (w_s G).

    For ``--rollout-data-postprocess-path``; a function of your own there calls this one last.
    ``rollout_data``: this data-parallel rank's sequences of the rollout batch. Reads ``loss_masks``
    (one ``[response]`` 0/1 mask per sequence), ``rollout_ids``, ``micro_batch_indices``,
    ``num_microbatches`` (M per step) and ``global_batch_sizes`` (G per step); for ``prompt_mean``
    also ``prompt``, an id per sequence, which it takes out. Without it, prompts are ``rollout_id //
    n_samples_per_prompt``, which only holds for slime's own data source; others are refused.

    slime calls it on every rank after advantages were computed. Per step the collectives of
    :func:`plan_step` over the data-parallel group without context parallelism, one all-gather
    for the whole batch, and one host sync to count masks. Logs once that weights were carried.
    Raises :class:`PlanError`, on all ranks of the group, and what :func:`check` raises.
    """
    aggregation = check_set_up(args, HOOKS, is_carried=True)
    assert aggregation is not None
    active_tokens, fault = _active_tokens(rollout_data["loss_masks"])
    rollout_ids = [int(rollout) for rollout in rollout_data["rollout_ids"]]
    prompt, samples_per_prompt = None, None
    if aggregation.mode == "prompt_mean":
        try:
            prompt, samples_per_prompt = _prompts(args, rollout_ids, rollout_data)
        except PlanError as error:
            fault = fault or str(error)
    d_S = rollout_mask_sums(
        aggregation,
        _steps(rollout_data),
        active_tokens=active_tokens,
        sample=rollout_ids,
        prompt=prompt,
        samples_per_prompt=samples_per_prompt,
        group=_data_parallel_group(),
        empty_step=Options.from_args(args).empty_step,
        fault=fault,
    )
    _PROCESS.carried = torch.from_numpy(d_S).to(rollout_data["rollout_mask_sums"])
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
    fault = ""
    if other:
        fault = f"got loss_masks with {int(other)} values other than 0 and 1, expected a 0/1 mask: "
        fault += "make loss_mask of each Sample 0 or 1"
    return [max(int(count), 0) for count in counts], fault


def _prompts(
    args: Any, rollout_ids: Sequence[int], rollout_data: dict[str, Any]
) -> tuple[Sequence[int], int | None]:
    """Return the prompt id of each sequence; also the rollouts of a prompt if ids are derived."""
    given = rollout_data.pop("prompt", None)
    if given is not None:
        return list(given), None
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
    _log_derived_prompts(number)
    return [rollout // number for rollout in rollout_ids], number


@cache
def _log_derived_prompts(number: int) -> None:
    logging.getLogger(__name__).warning(
        "slime carries no prompt ids: prompt_mean takes rollout_id // %d for them, which holds "
        "for slime's own data source",
        number,
    )


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
