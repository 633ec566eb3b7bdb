"""ms-swift's Megatron trainer: ``install(aggregation)`` in a file of ``--external_plugins``.

A microbatch is a dict with ``labels``, -100 where nothing is trained, ``position_ids`` and
``seq_lens``; the trainer shifts the labels and slices them for context parallelism. Its loss is a
masked sum, each token times its ``loss_scale`` and, with ``enable_dft_loss``, its probability.

What all its Megatron trainers share: training and evaluation of ``BaseMegatronTrainer`` look up one
name, ``get_forward_backward_func``, in one module; it is rebound. ms-swift multiplies by nothing
after the schedule. It logs sum / count of each reported pair over microbatches. Only SFT's log
reduces a pair over ranks, ``loss``: all others that the hook reports are reduced here, when they
are logged.
"""

from __future__ import annotations

import functools
import importlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lossagg.errors import ContractError
from megatron_lossagg.integrations._shared import (
    count_segments,
    field_of,
    imported,
    rebind,
    to_numpy,
    with_weights,
)
from megatron_lossagg.loop.schedule_hook import FrameworkLoss, Integration, ScheduleHook
from megatron_lossagg.reduction.aggregation import Aggregation, Options
from megatron_lossagg.reduction.sequences import Sequences

_BASE = "swift.megatron.trainers.base"
SFT_TRAINER = ("swift.megatron.trainers.trainer", "MegatronTrainer")


class TrainerIntegration(Integration):
    """One of ms-swift's trainers, which gives the schedule a method of its own."""

    loss_name = "loss"
    trainer_at: ClassVar[tuple[str, str]]
    """Module and name of the trainer."""
    commands: ClassVar[str]
    """What starts it."""
    log_reduces_loss = False
    """Whether its log reduces ``loss`` itself."""

    def __init__(self) -> None:
        self.trainer: Any = None
        """That of the running step; None before the first."""

    @abstractmethod
    def check(self, trainer: Any, call: Mapping[str, Any]) -> None:
        """Raise :class:`ContractError` for arguments with a different loss.

        ``trainer``: what ``forward_step_func`` is a method of. ``call``: the schedule's keywords.
        """

    def applies(self, call: Mapping[str, Any]) -> bool:
        """Refuse, on every rank and before each step, what this loss is not."""
        trainer = getattr(call["forward_step_func"], "__self__", None)
        known = trainer_class(*self.trainer_at)
        if not isinstance(trainer, known) or type(trainer).loss_func is not known.loss_func:
            raise ContractError(
                f"got the loss of a {type(trainer).__name__}, expected that of ms-swift's "
                f"{self.trainer_at[1]} ({self.commands}): megatron sft and megatron pt have "
                "ms_swift.install, GRPO has ms_swift_grpo.install, GKD has ms_swift_gkd.install; "
                "train any other without megatron_lossagg"
            )
        self.check(trainer, call)
        self.trainer = trainer
        return super().applies(call)

    def iteration(self) -> int | None:
        """Number the step as ms-swift's log does: ``state.iteration`` counts finished steps."""
        return int(self.trainer.state.iteration) + 1


def trainer_class(module: str, name: str) -> Any:
    """Import a trainer; raises :class:`ContractError` if ms-swift 4.6.0 is not there."""
    expected = "ms-swift 4.6.0 or later: install it and what its Megatron trainers need"
    return getattr(imported(module, expected=expected), name)


def bound_to(loss_func: Any, name: str) -> Any:
    """Return an argument of the ``functools.partial`` that a trainer's forward_step gives."""
    found = getattr(loss_func, "keywords", {}).get(name)
    if found is None:
        raise ContractError(
            f"got {loss_func!r} from a forward_step, expected functools.partial(trainer.loss_func, "
            f"{name}=...), as of ms-swift 4.6.0: train it without megatron_lossagg"
        )
    return found


def installed(
    aggregation: Aggregation | str | None, integration: TrainerIntegration, options: Options | None
) -> ScheduleHook:
    """Rebind ms-swift's schedule, and let the trainer's log reduce what the hook reports.

    Raises :class:`ContractError` for a release before 4.6.0, in which losses have other divisors.
    """
    if "_log_callback" not in vars(trainer_class(*SFT_TRAINER)):
        raise ContractError(
            "got an ms-swift whose MegatronTrainer has no _log_callback of its own, expected "
            "4.6.0's, which reduces the logged loss: upgrade ms-swift"
        )
    trainer = trainer_class(*integration.trainer_at)
    hook = ScheduleHook(aggregation, integration, options=options)
    rebind(hook, [_BASE], "ms-swift's Megatron trainers")
    names = [n for n in hook.reported if n != "loss" or not integration.log_reduces_loss]
    trainer._log_callback = _reducing(trainer._log_callback, names)
    return hook


def _reducing(log: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Reduce what the hook reports before ms-swift divides and logs it.

    ms-swift drops a pair whose count is 0 on a rank, which then adds zeros here.
    """

    @functools.wraps(log)
    def logged(trainer: Any, logs: dict[str, Any], n_steps: int) -> Any:
        from megatron.core import parallel_state

        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            device = importlib.import_module("swift.utils").get_current_device()
            nothing = torch.zeros(2, device=device)
            pairs = torch.stack([logs.pop(name, nothing) for name in names])
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            dist.all_reduce(pairs, group=group)
            counts = pairs[:, 1].tolist()
            found = zip(names, pairs, counts, strict=True)
            logs.update({name: pair for name, pair, count in found if count > 0})
        return log(trainer, logs, n_steps)

    return logged


IGNORED = -100
"""The label of a token that is not trained."""


class SwiftIntegration(TrainerIntegration):
    """``MegatronTrainer`` (``megatron sft`` and ``megatron pt``), packed, padding-free or padded.

    A sequence is a conversation. Its active tokens are those whose label is not -100. A
    ``loss_scale`` multiplies a token's loss; under ``count="weights"`` it is the token's weight,
    otherwise it enters no count. Other trainers and other tasks than ``causal_lm`` are refused
    before the first step.
    """

    gives_token_weights = True
    trainer_at = SFT_TRAINER
    commands = "megatron sft, megatron pt"
    log_reduces_loss = True

    def check(self, trainer: Any, call: Mapping[str, Any]) -> None:
        """Raise for arguments with a different loss or a different layout."""
        args = trainer.args
        if args.task_type != "causal_lm":
            raise ContractError(
                f"task_type is {args.task_type!r}, expected 'causal_lm': the loss of another task "
                "is not a sum over tokens; train it without megatron_lossagg"
            )
        self.check_layout(trainer, call)

    def check_layout(self, trainer: Any, call: Mapping[str, Any]) -> None:
        """Raise for slices of other tokens than those that the model's config says."""
        chunks, args = call["model"], trainer.args
        config = (chunks[0] if isinstance(chunks, (list, tuple)) else chunks).config
        partition = getattr(args, "cp_partition_mode", "zigzag")
        of_model = getattr(config, "cp_partition_mode", "zigzag")
        if args.context_parallel_size > 1 and partition != of_model:
            raise ContractError(
                f"cp_partition_mode is {partition!r} in ms-swift's arguments and {of_model!r} in "
                "the model's config, expected the same: the weights are laid out as the config says"
            )

    def sequences(self, data: Any) -> Sequences:
        """Count the labels of each conversation; ``data`` is what ms-swift's collator returns."""
        mask_P = _shifted(field_of(data, "labels", "ms-swift's template")) != IGNORED
        counted = count_segments(*self._segments(data), mask_P)
        if not self.weighs_tokens:
            return counted
        scale = data.get("loss_scale")
        return with_weights(counted, mask_P * (1.0 if scale is None else _shifted(scale)))

    def _segments(self, data: Mapping[str, Any]) -> tuple[npt.ArrayLike, npt.ArrayLike]:
        """Return where each segment begins, and whether it only fills the buffer."""
        b, s = data["labels"].shape
        if not self.trainer.args.padding_free:
            return np.arange(b) * s, np.zeros(b)
        positions = data.get("text_position_ids")
        if positions is None:
            positions = data["position_ids"]
        start_G = (to_numpy(positions).ravel() == 0).nonzero()[0]
        num_given = len(data["seq_lens"])
        if positions.shape != data["labels"].shape or len(start_G) < num_given:
            raise ContractError(
                f"got {len(start_G)} positions 0 in position_ids of shape "
                f"{tuple(positions.shape)} for {num_given} conversations in labels of shape "
                f"{(b, s)}, expected one where each conversation begins"
            )
        # What follows the last conversation fills the buffer, in segments of its own.
        return start_G, np.arange(len(start_G)) >= num_given

    def loss(self, loss_func: Any, output: Tensor) -> FrameworkLoss:
        """Take labels and loss scale out of ``partial(trainer.loss_func, labels=...)``."""
        labels, scale = bound_to(loss_func, "labels"), loss_func.keywords.get("loss_scale")
        returned = loss_func(output)
        losses, mask, weights = output.float().reshape(-1), (labels != IGNORED).reshape(-1), None
        if self.trainer.args.enable_dft_loss:  # the token's probability, as a constant
            losses = losses * torch.exp(-losses.detach())
        if self.weighs_tokens:
            weights = mask.float() if scale is None else mask * scale.reshape(-1)
        elif scale is not None:
            losses = losses * scale.reshape(-1)
        return FrameworkLoss(
            losses=losses,
            mask=mask,
            token_weights=weights,
            returned=returned,
            masked_sum=returned[0],
        )


def _shifted(values: Tensor) -> npt.NDArray[Any]:
    """Move each label's value to the logit that predicts it, as ms-swift does."""
    return to_numpy(torch.roll(values, -1, dims=-1)).ravel()


def install(
    aggregation: Aggregation | str | None, *, options: Options | None = None
) -> ScheduleHook:
    """Rebind ms-swift's schedule in this process; return the hook, which counts its steps.

    Call it in a Python file that ``--external_plugins`` names: ms-swift runs it on every rank
    before it builds the trainer. The arguments are those of
    :class:`ScheduleHook`; ``prompt_mean`` is refused, for there are no
    prompt ids. Raises :class:`ContractError` if ms-swift 4.6.0 is not there. Adds one all-reduce
    to each line of the log, over data and context parallelism.
    """
    return installed(aggregation, SwiftIntegration(), options)
