"""AMD's Primus: ``install(aggregation)`` before its runtime starts a trainer.

``MegatronPretrainTrainer.train`` binds a ``get_forward_backward_func`` of its own in Megatron-LM's
loop and then calls ``pretrain``, so a hook that was put there before is lost. This one is put there
as ``pretrain`` begins, around Primus's function. Data and loss are Megatron-LM's.
"""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Callable
from typing import Any

from megatron_lossagg.errors import ContractError
from megatron_lossagg.integrations._shared import imported, rebind, replaced, report_if_unused
from megatron_lossagg.integrations.megatron_lm import PretrainIntegration
from megatron_lossagg.loop.schedule_hook import ScheduleHook
from megatron_lossagg.reduction.aggregation import Aggregation, Options

_BACKEND = "primus.backends.megatron"
_LOOP = "megatron.training.training"
_EVALUATOR = f"{_BACKEND}.training.evaluator"
"""Has the function by name since it was imported."""
_SCHEDULES = ("patch_zero_bubble", "patch_primus_pipeline")
"""Arguments that replace Megatron's schedules by Primus's own."""


def install(
    aggregation: Aggregation | str | None, *, options: Options | None = None
) -> ScheduleHook:
    """Hook the trainers of Primus in this process; return the hook, which counts its steps.

    The arguments are those of :class:`ScheduleHook`; ``prompt_mean`` is refused, for there are no
    prompt ids. Raises :class:`ContractError` if Primus is not there; and as a trainer begins, for
    Primus's own schedules and its ``MegatronSFTTrainer``.
    """
    hook = ScheduleHook(aggregation, PretrainIntegration(), options=options)
    expected = "Primus: put its checkout on PYTHONPATH"
    pretrain = imported(f"{_BACKEND}.megatron_pretrain_trainer", expected=expected)
    sft = imported(f"{_BACKEND}.megatron_sft_trainer", expected=expected)
    trainer = pretrain.MegatronPretrainTrainer
    trainer.train = _hooked(hook, trainer.train)
    sft.MegatronSFTTrainer.train = _refused(hook)
    atexit.register(report_if_unused, hook, "Primus")
    return hook


def _hooked(hook: ScheduleHook, train: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train)
    def run(trainer: Any) -> Any:
        for name in _SCHEDULES:
            if getattr(trainer.backend_args, name, False):
                raise ContractError(
                    f"got {name} with {hook.flag}, expected Megatron's own schedules: Primus's "
                    f"were not tested here; set {name}: false, or drop the hook"
                )
        megatron = imported("megatron.training", expected="the Megatron-LM that Primus trains with")
        with replaced(megatron, pretrain=_bound_before(hook, megatron.pretrain)):
            return train(trainer)

    return run


def _bound_before(hook: ScheduleHook, pretrain: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``pretrain``, which puts the hook around what Primus bound, once."""
    is_bound = False

    @functools.wraps(pretrain)  # Primus reads its signature
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_bound
        if not is_bound:  # a restart in the process calls again
            is_bound = True
            atexit.unregister(report_if_unused)  # rebind registers it again
            rebind(hook, [_LOOP, _EVALUATOR] if _EVALUATOR in sys.modules else [_LOOP], "Primus")
        return pretrain(*args, **kwargs)

    return run


def _refused(hook: ScheduleHook) -> Callable[..., Any]:
    def run(trainer: Any) -> Any:
        raise ContractError(
            f"got {hook.flag} with Primus's {type(trainer).__name__}, expected "
            "MegatronPretrainTrainer: its packed data was not tested here; train SFT with "
            "Megatron-LM's --sft data, or drop the hook"
        )

    return run
