"""Megatron-Bridge: ``install(aggregation)`` before ``pretrain`` or ``finetune``.

Its training and its evaluation look up one name, ``get_forward_backward_func``, each in a module of
its own; both are rebound. Data and loss are as Megatron-LM's: a dict with ``loss_mask`` and the
offsets of packed sequences, a masked sum whose mask is the first argument of a
``functools.partial``. Bridge multiplies by nothing after the schedule. Its ``vlm_step`` takes what
a vision-language model returns apart itself, and gives the mask that the model has sliced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lossagg.contract.megatron_options import check_options
from megatron_lossagg.integrations._shared import rebind
from megatron_lossagg.integrations.megatron_lm import MaskedSumIntegration
from megatron_lossagg.loop.schedule_hook import ScheduleHook
from megatron_lossagg.reduction.aggregation import Aggregation, Options


class BridgeIntegration(MaskedSumIntegration):
    """Megatron-Bridge's text data; each packed sequence is split over context-parallel ranks.

    Bridge at 067f987d pads no pack after it was read.
    """

    def __init__(self) -> None:
        self._state: Any = None
        """Bridge's ``GlobalState``, if its forward_step asks for it."""

    def applies(self, call: Mapping[str, Any]) -> bool:
        """Refuse, on every rank and before the first step, a different CP for evaluation.

        Bridge binds its ``GlobalState`` to a ``forward_step`` that asks for it; another one says
        nothing of it, and ``Frozen.check`` then stops the first evaluation.
        """
        bound = getattr(call["forward_step_func"], "args", ())
        state: Any = next(iter(bound), None)
        config = getattr(state, "cfg", None)
        if config is not None:
            self._state = state
            cp_size = config.model.context_parallel_size
            check_options("Bridge's dist config", config.dist, cp_size=cp_size)
        return super().applies(call)

    def iteration(self) -> int | None:
        """Number the step as Bridge's log does: ``train_state.step`` counts finished steps."""
        train_state = getattr(self._state, "train_state", None)
        return None if train_state is None else train_state.step + 1


def install(
    aggregation: Aggregation | str | None, *, options: Options | None = None
) -> ScheduleHook:
    """Rebind Megatron-Bridge's schedules in this process; return the hook, which counts its steps.

    The arguments are those of :class:`ScheduleHook`; ``prompt_mean`` is refused, for there are no
    prompt ids. A loss with more terms (distillation) is refused in the step that has them, a
    forward_step whose output is a tuple in the first one. Raises :class:`ContractError` if Bridge
    is not there.
    """
    hook = ScheduleHook(aggregation, BridgeIntegration(), options=options)
    modules = ["megatron.bridge.training.train", "megatron.bridge.training.eval"]
    return rebind(hook, modules, "Megatron-Bridge")
