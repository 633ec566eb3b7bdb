"""What ms-swift's Megatron trainers share: their schedule, the number of a step, and the log.

Training and evaluation of ``BaseMegatronTrainer`` look up one name, ``get_forward_backward_func``,
in one module; it is rebound. ms-swift multiplies by nothing after the schedule. It logs sum / count
of each reported pair over microbatches. Only SFT's log reduces a pair over ranks, ``loss``: all
others that the hook reports are reduced here, when they are logged.
"""

from __future__ import annotations

import functools
import importlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from megatron_lossagg.errors import ContractError
from megatron_lossagg.integrations._rebind import rebind
from megatron_lossagg.integrations._refusals import imported
from megatron_lossagg.loop.framework import Integration
from megatron_lossagg.loop.schedule_hook import ScheduleHook
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.reduction.options import Options

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
