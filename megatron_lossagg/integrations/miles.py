"""An unmodified miles on Megatron under most modes, by its arguments only.

**All of the loss.** The weights travel with the data, for the policy loss, entropy, KL, a
critic's value loss and logged metrics alike. A file for ``--custom-config-path``::

    loss_aggregation: token_mean
    custom_convert_samples_to_train_data_path: megatron_lossagg.integrations.miles.carry_weights
    custom_megatron_init_path: megatron_lossagg.integrations.miles.check

**Only the policy loss**, Dr.GRPO's constant, by one flag, on FSDP too::

    --custom-pg-loss-reducer-function-path megatron_lossagg.integrations.miles.constant_40960

``docs/integrations/miles.md`` has both, and what is refused. Source: miles 31f1ca96
``convert_samples_to_train_data``, ``build_dp_schedule``, ``loss_function``.
"""

from __future__ import annotations

import importlib
import itertools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_lossagg.errors import ContractError, PlanError
from megatron_lossagg.integrations._rollouts import (
    REDUCER,
    FrameworkStep,
    Hooks,
    MakeReducer,
    carried_aggregation,
    checked_aggregation,
    constant_reducer,
    is_ours,
    keep_below_one,
    log_carried,
    log_set_up,
    refuse_bshd,
    rollout_mask_sums,
)
from megatron_lossagg.integrations._shared import not_a_mask
from megatron_lossagg.reduction.aggregation import Aggregation, Options
from megatron_lossagg.reduction.faults import warn_once
from megatron_lossagg.reduction.sequences import Sequences

HOOKS = Hooks(
    name="miles",
    module="megatron_lossagg.integrations.miles",
    carry_argument="custom_convert_samples_to_train_data_path",
    not_covered=(("enable_mtp_training", "the loss of MTP layers"),),
)
_DIVIDING = (
    "miles.backends.training_utils.cp_utils",
    "miles.backends.training_utils.log_utils",
    "miles.backends.training_utils.loss",
    "miles.backends.training_utils.loss_hub.losses",
)
"""miles' modules that divide by ``rollout_mask_sums``."""


def __getattr__(name: str) -> MakeReducer:
    """Return ``constant_<L>`` for ``--custom-pg-loss-reducer-function-path``."""
    return constant_reducer(name, __name__)


def check(args: Any) -> None:
    """Refuse a wrong set-up at startup; for ``--custom-megatron-init-path``.

    Logs on rank 0 what it saw: nothing is carried yet. The weights are carried in miles' rollout
    manager, so this process can only look at the argument that has :func:`carry_weights` called
    there, and warns if it is a function of your own. With weights that are carried, miles' loss
    does not raise a denominator below 1 from here on (``_rollouts.py``). No collective.
    """
    aggregation = checked_aggregation(args, HOOKS)
    if is_ours(getattr(args, REDUCER, None)) and getattr(args, "context_parallel_size", 1) > 1:
        refuse_bshd(args)
    log_set_up(args, HOOKS, aggregation)
    if aggregation is None:
        return
    _check_miles(args, aggregation)
    conversion = getattr(args, HOOKS.carry_argument, None)
    if not conversion:
        raise ContractError(
            f"got loss_aggregation ({aggregation}) and no {HOOKS.carry_argument}, which carries "
            f"the weights: set it to {HOOKS.carry_path}, or drop loss_aggregation"
        )
    keep_below_one(_DIVIDING)
    if conversion != HOOKS.carry_path:
        logging.getLogger(__name__).warning(
            "%s %s runs in miles' rollout manager, where nothing can check that it ends with "
            "with_weights: without it miles trains its own mean. Look for 'megatron_lossagg "
            "trains' in the rollout manager's log",
            HOOKS.carry_argument,
            conversion,
        )


def carry_weights(args: Any, samples: Sequence[Any]) -> dict[str, Any]:
    """Convert samples as miles does, with ``rollout_mask_sums`` = d_s = 1 / (w_s G).

    For ``--custom-convert-samples-to-train-data-path``. miles calls it in its rollout manager
    with the whole rollout batch. A function of your own there ends with :func:`with_weights`.
    No collective. Raises :class:`PlanError` and what :func:`check` raises.
    """
    _checked(args)  # before the framework's own conversion, whose errors would hide ours
    conversion = importlib.import_module("miles.ray.rollout.train_data_conversion")
    load_function = importlib.import_module("miles.utils.misc").load_function
    data: dict[str, Any] = conversion.convert_samples_to_train_data(
        args,
        samples,
        metadata={},  # of multi-LoRA and dynamic global batch size, which are refused
        custom_convert_samples_to_train_data_func=None,
        custom_reward_post_process_func=load_function(args.custom_reward_post_process_path),
    )
    return with_weights(args, samples, data)


def with_weights(args: Any, samples: Sequence[Any], data: dict[str, Any]) -> dict[str, Any]:
    """Overwrite ``rollout_mask_sums`` of converted data, one number per sample; returns it.

    Reads ``loss_masks`` and ``rollout_ids`` of ``data``, and for ``prompt_mean`` the samples'
    ``group_index``. Steps are as miles makes them: rollout ids in first-seen order, cut by
    ``global_batch_size`` (G). Samples that miles drops keep what they have.
    """
    aggregation = _checked(args)
    masks = data["loss_masks"]
    prompt = None
    if aggregation.reads("prompt"):
        try:
            prompt = _prompts(samples, len(masks))
        except PlanError:
            if "prompt" in aggregation.needs:
                raise
    steps = _steps(args, data)
    in_a_step = {sequence for step in steps for sequence in step.sequences}
    remedy = _remedy(args)
    d_S = rollout_mask_sums(
        aggregation,
        steps,
        Sequences(
            active_tokens=[_active_tokens(sequence, mask) for sequence, mask in enumerate(masks)],
            sample=[int(rollout) for rollout in data["rollout_ids"]],
            prompt=prompt,
        ),
        dropped=[sequence for sequence in range(len(masks)) if sequence not in in_a_step],
        empty_step=Options.from_args(args).empty_step,
        remedy=remedy,
    )
    if remedy is not None:  # whether later data needs it, no argument says
        warn_once(
            "denominators below 1",
            f"got custom_megatron_init_path {getattr(args, 'custom_megatron_init_path', None)}: a "
            "later batch that gives a sequence a weight above 1/G (G: rollouts of a step) would be "
            f"refused, for miles raises its denominator to 1. {remedy}",
        )
    of_miles_S = data.get("rollout_mask_sums") or [1.0] * len(masks)  # for those that miles drops
    data["rollout_mask_sums"] = np.where(np.isnan(d_S), of_miles_S, d_S).tolist()
    log_carried(HOOKS, aggregation)
    return data


def _remedy(args: Any) -> str | None:
    """Return how to have denominators below 1 trained; None if the trainer's :func:`check` does."""
    if getattr(args, "custom_megatron_init_path", None) in (HOOKS.check_path, HOOKS.weigh_path):
        return None
    return f"Set custom_megatron_init_path to {HOOKS.check_path}, which has miles keep it"


def _checked(args: Any) -> Aggregation:
    aggregation = carried_aggregation(args, HOOKS)
    _check_miles(args, aggregation)
    return aggregation


def _check_miles(args: Any, aggregation: Aggregation) -> None:
    """Refuse by name what the denominators do not reach, or reach wrongly."""
    if aggregation.mode == "microbatch_token_mean":
        raise ContractError(
            f"got {aggregation}, expected a mode of the whole step: miles makes its microbatches "
            "after this hook. Choose token_mean"
        )
    store = getattr(args, "object_store_backend", "ray")
    reasons = {
        "--train-backend fsdp": (
            getattr(args, "train_backend", "megatron") != "megatron",
            "its FSDP actor does not hand rollout_mask_sums to the loss: use --train-backend "
            "megatron, or constant_<L> for only the policy loss",
        ),
        f"--object-store-backend {store}": (
            store != "ray",
            "it stores rollout_mask_sums as int64 and would cut off the fractions: use "
            "--object-store-backend ray",
        ),
        "--use-dynamic-global-batch-size": (
            getattr(args, "use_dynamic_global_batch_size", False),
            "the step's size does not reach this hook: set --global-batch-size and drop that flag",
        ),
        "--multi-lora": (
            getattr(args, "multi_lora", False),
            "it divides by the rollouts of each LoRA adapter, later: drop one of them",
        ),
        "independent data parallelism (indep_dp)": (
            getattr(args, "indep_dp", False),
            "it was not run with carried weights: drop train from --ft-components",
        ),
    }
    for what, (is_set, reason) in reasons.items():
        if is_set:
            raise ContractError(f"got {what} with carried weights, expected none: {reason}")


def _steps(args: Any, data: dict[str, Any]) -> list[FrameworkStep]:
    """Cut rollouts into steps as ``build_dp_schedule`` does, or samples as the legacy split."""
    sequences_of_rollout: dict[int, list[int]] = {}
    for sequence, rollout in enumerate(data["rollout_ids"]):
        sequences_of_rollout.setdefault(int(rollout), []).append(sequence)
    rollouts, size = list(sequences_of_rollout.values()), int(args.global_batch_size)
    if len(rollouts) < size:
        raise PlanError(
            f"got {len(rollouts)} rollouts, expected at least the {size} of a step: lower "
            "--global-batch-size or generate more rollouts"
        )
    num_full = len(rollouts) // size
    sizes = [size] * num_full
    is_late = getattr(args, "delay_split_train_data_by_dp", False)
    if is_late or "multimodal_train_inputs" in data:  # the trainer splits, and counts samples
        _check_legacy_split(args, rollouts, size)
    elif getattr(args, "allow_partial_train_step", False) and args.use_dynamic_batch_size:
        sizes += [len(rollouts) % size] * (len(rollouts) % size > 0)
    bounds = np.cumsum([0, *sizes]).tolist()
    return [
        FrameworkStep(
            sequences=[sequence for rollout in rollouts[first:last] for sequence in rollout],
            rollouts=last - first,
        )
        for first, last in itertools.pairwise(bounds)
    ]


def _check_legacy_split(args: Any, rollouts: Sequence[Sequence[int]], size: int) -> None:
    num_steps = len(rollouts) // size
    num_samples = sum(len(sequences) for sequences in rollouts)
    is_mixed = num_steps > 1 and getattr(args, "balance_data", False)
    if num_samples > len(rollouts) or len(rollouts) % size or is_mixed:
        raise ContractError(
            f"got multimodal inputs or --delay-split-train-data-by-dp with {num_samples} samples "
            f"of {len(rollouts)} rollouts in {num_steps} steps of {size}, expected one sample per "
            "rollout and full steps in order, since miles then splits samples, not rollouts: train "
            "one step per rollout batch, or drop --balance-data"
        )


def _active_tokens(sequence: int, mask: Sequence[int]) -> int:
    if not {*mask} <= {0, 1}:
        raise not_a_mask(f"loss_mask of sample {sequence}", "make loss_mask of each Sample 0 or 1")
    return int(sum(mask))


def _prompts(samples: Sequence[Any], num_sequences: int) -> list[int]:
    if len(samples) != num_sequences:
        raise PlanError(
            f"got {len(samples)} samples converted to {num_sequences} sequences, expected one "
            "sequence each: pass with_weights the samples that were converted, in their order"
        )
    ids = [sample.group_index for sample in samples]
    if None in ids:
        raise PlanError(
            f"got no group_index for sample {ids.index(None)}, expected the prompt of every sample "
            "for prompt_mean: set Sample.group_index in your data source"
        )
    return [int(group) for group in ids]
