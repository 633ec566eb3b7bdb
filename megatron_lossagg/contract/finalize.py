"""Whether Megatron divides a step's gradients by the num_tokens that the step returned.

Only in the per-token loss scaling, in which the schedule adds up what loss_func returned and passes
the sum to ``config.finalize_model_grads_func``, which divides by it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_lossagg.reduction.faults import Faults

__all__ = ["DivisorCheck", "own_finalize"]


class DivisorCheck:
    """Stands in for a config's finalize function while one step runs, and calls it.

    ``faults``: of the step, which are read when it ends. No collective, no host sync.
    """

    def __init__(self, config: Any, num_microbatches: int, faults: Faults) -> None:
        self._config = config
        self._num_microbatches = num_microbatches
        self._faults = faults
        self._returned: list[Tensor] = []
        self._stock = own_finalize(config)
        config.finalize_model_grads_func = self.finalize

    def add(self, num_tokens: Tensor) -> None:
        """Note what loss_func is to return for a microbatch; a copy, which nobody changes."""
        self._returned.append(num_tokens.clone())

    def finalize(
        self, model: Any, num_tokens: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Compare ``num_tokens``, which is of this rank still, and finalize as before."""
        returned, self._returned = self._returned, []
        describe = partial(_describe, len(returned), self._num_microbatches)
        # A copy: Megatron reduces num_tokens over ranks in place.
        found = torch.zeros(()) if num_tokens is None else num_tokens.clone()
        self._faults.record([found, *returned], describe)
        return self._stock(model, num_tokens, *args, **kwargs)

    def end(self) -> None:
        """Put the config's own function back."""
        if self._config.finalize_model_grads_func == self.finalize:
            self._config.finalize_model_grads_func = self._stock


def own_finalize(config: Any) -> Any:
    """Return a config's finalize function, also while a step runs."""
    function = config.finalize_model_grads_func
    owner = getattr(function, "__self__", None)
    return owner._stock if isinstance(owner, DivisorCheck) else function


def _describe(num_returned: int, num_microbatches: int, values: list[float]) -> str:
    found, *returned = map(int, values)
    if num_returned != num_microbatches:
        return (
            f"the schedule divided gradients after {num_returned} of the {num_microbatches} "
            "microbatches of the step: run all of them in one schedule call"
        )
    if found != sum(returned):
        return (
            f"the schedule got {found} tokens of this rank to divide by, mb.outputs returned "
            f"{sum(returned)}: return all three of mb.outputs from loss_func as they are, (loss, "
            "num_tokens, report), and train one step at a time"
        )
    return ""
