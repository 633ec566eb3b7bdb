"""What a batch of verl's counts: its prompts, its samples, and the sequences that are padding.

A prompt is a ``uid``. A sample is a trajectory, ``(uid, session_id)``: verl's agent loops may
return several sequences of one, and write both columns to each. A batch without ``session_id`` has
one sequence per sample. A trainer on verl that writes trajectories to a column of its own names it
in ``LOSSAGG_SAMPLE_COLUMN`` of every worker's environment. A column ``loss_weight`` has one number
per sequence, which multiplies w_s.

Sources: verl 1dda039b ``AgentLoopWorkerTQ._agent_loop_postprocess``,
``upsample_batch_to_divisible_size``; verl-project/verl#7580 ``normalize_loss_weight_global``,
``apply_loss_weight_to_loss_mat``.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.errors import PlanError
from megatron_lossagg.integrations._advantage_groups import advantage_groups
from megatron_lossagg.loop.first_step import say_counted
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.exchange import together
from megatron_lossagg.reduction.faults import first_time, warn_once
from megatron_lossagg.reduction.options import Options
from megatron_lossagg.reduction.plan import StepPlan, plan_step
from megatron_lossagg.reduction.sequences import Sequences

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
        given: dict[str, Any] = {
            name: [one for one, is_padding in zip(column, paddings, strict=True) if not is_padding]
            for name, column in columns.items()
        }
        return Sequences(active_tokens=n_b[is_sequence_b], num_padding=sum(paddings), **given)

    _say_empty(aggregation, int((n_b[is_sequence_b] == 0).sum()), len(paddings))
    plan = plan_step(
        aggregation,
        sequences,
        group=group,
        # verl's rollout correction leaves loss_mask as it was.
        options=Options(rejects_tokens=True),
    )
    sample = "" if plan.sequences.sample is None else f"(uid, {_sample_column()})"
    say_counted(plan, sample=sample)
    return plan, torch.where(is_sequence_b, is_sequence_b.cumsum(0) - 1, -1)


def _say_empty(aggregation: Aggregation, num_empty: int, num_sequences: int) -> None:
    """Log once that sequences without a trained token are counted, and how many."""
    counts = aggregation.mode in COUNT_SAMPLES and aggregation.count_empty
    if counts and num_empty and first_time("empty sequences of verl"):
        logging.getLogger(__name__).warning(
            "%d of the %d sequences of this rank's batch are fully masked, and %s counts them: if "
            "they are padding, give the batch a column is_padding; to leave them out, choose "
            "loss_mode=lossagg_%s_no_count_empty",
            num_empty,
            num_sequences,
            aggregation.mode,
            aggregation.mode,
        )


def _columns(aggregation: Aggregation, data: Any) -> dict[str, list[Any]]:
    """Return what the plan needs of each sequence, padding included, by its name in Sequences.

    Raises :class:`PlanError`: inside of what tells the other ranks.
    """
    if fault := _lacking(aggregation, data, _uids(data)):
        raise PlanError(fault)
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


def _loss_weights(data: Any) -> list[float] | None:
    """Return the column ``loss_weight``; raises PlanError for what is no number per sequence."""
    if LOSS_WEIGHT not in data.keys():  # noqa: SIM118
        return None
    column = data[LOSS_WEIGHT]
    if isinstance(column, Tensor):
        column = [one.reshape(-1).tolist() for one in column.unbind()]
        column = [one[0] if len(one) == 1 else one for one in column]
    weights = [*column]
    for weight in weights:
        if not isinstance(weight, Real) or not math.isfinite(weight) or weight < 0:
            raise PlanError(
                f"got a {LOSS_WEIGHT} of {weight!r} in the batch, expected a finite number from 0 "
                "for each sequence, which multiplies its losses: give every sequence one, or leave "
                "the column out"
            )
    return [float(weight) for weight in weights]


_OF_PROMPTS = {
    "prompt_mean": "the prompt of each sequence",
    "balanced": "the group of each sequence, (uid, sign of its advantage)",
}
"""What modes that need a uid in any case tell by it."""


def _lacking(aggregation: Aggregation, data: Any, uids: list[str]) -> str:
    """Say which columns a mode needs and the batch lacks; empty if none."""
    mode = aggregation.mode
    if mode not in COUNT_SAMPLES:
        return ""
    if mode == "balanced" and "advantages" not in data.keys():  # noqa: SIM118
        return (
            "got a batch without advantages, by whose sign balanced tells groups: choose another "
            "mode for a loss without them"
        )
    name = _sample_column()
    sessions = None if mode == "prompt_mean" else _column(data, name)
    if sessions is None and mode != "prompt_mean" and name != _SESSION:
        return (
            f"got {SAMPLE_COLUMN}={name} and a batch without this column, by which {mode} tells "
            f"the sample of each sequence: keep it in the batch, or unset {SAMPLE_COLUMN}"
        )
    if sessions is not None and not all(sessions):
        return (
            f"got sequences without a {name} in a batch that has the column, by which {mode} "
            "tells the sample of each: give every sequence one, or leave the column out"
        )
    if all(uids):
        return ""
    tells = _OF_PROMPTS.get(mode, "padding sequences apart from empty ones")
    if mode not in _OF_PROMPTS and sessions is not None:
        tells = f"the sample of each sequence, (uid, {name})"
    elif mode not in _OF_PROMPTS and not aggregation.count_empty:
        return ""
    fault = (
        f"got sequences without a uid, by which {mode} tells {tells}: keep uid in the batch that "
        "update_actor is given"
    )
    if mode not in _OF_PROMPTS and sessions is None:
        fault += f", or choose loss_mode=lossagg_{mode}_no_count_empty"
    return fault


def check_same_batch(aggregation: Aggregation, data: Any) -> None:
    """Raise :class:`PlanError` on all data- and context-parallel ranks if their batches differ.

    Compares uids, loss masks and what else the mode counts, by a hash. One all-gather with its host
    sync.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    named = "data- and context-parallel rank {}"
    with together(group, "compare its batch", named=named, raises=PlanError) as ranks:
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
