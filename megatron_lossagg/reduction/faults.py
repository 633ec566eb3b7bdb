"""What a step's checks found in its masks, losses and gradients.

Reading a value of a CUDA tensor stalls the CPU until the device has caught up. So the results of
checks on a device stay there, and one read at the end of the step brings them all. A
:class:`Faults` belongs to the plan of its step and is shared by ``StepPlan.under``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

from megatron_lossagg.errors import LossAggregationError, ReducerError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Describe", "Faults", "first_time", "looks_again", "warn_once"]

Describe = Callable[[list[float]], str]
"""From a check's values to a message; empty if they are not a fault."""

_warned: set[str] = set()


def first_time(what: str) -> bool:
    """Whether it is asked for the first time in this process."""
    is_first = what not in _warned
    _warned.add(what)
    return is_first


def warn_once(what: str, message: str) -> None:
    """Warn once per process of what may recur in every step."""
    if first_time(what):
        warnings.warn(message, RuntimeWarning, stacklevel=4)


def looks_again(number: int) -> bool:
    """Whether a costly check runs in a step: 1, 2, 4, ..., 64, and then each 64th."""
    return number & (number - 1) == 0 if number < 64 else number % 64 == 0


class Faults:
    """The results of a step's checks that are still on a device, in the order of the checks."""

    def __init__(self) -> None:
        self._recorded: list[tuple[list[Tensor], Describe, type[LossAggregationError]]] = []

    def check_or_record(
        self,
        device: torch.device,
        values: Callable[[], list[Tensor]],
        describe: Describe,
        *,
        seems_right: Callable[[], bool] = lambda: False,
    ) -> None:
        """Check now on the CPU, where reading is free; record on a different device.

        ``values`` computes the 0-dim results. On the CPU it is not called if ``seems_right``, a
        cheaper test, says so. Raises :class:`ReducerError`.
        """
        if device.type != "cpu":
            self.record(values(), describe)
        elif not seems_right() and (fault := describe([value.item() for value in values()])):
            raise ReducerError(fault)

    def record(
        self,
        values: list[Tensor],
        describe: Describe,
        *,
        error: type[LossAggregationError] = ReducerError,
    ) -> None:
        """Keep 0-dim tensors, what their values mean, and what a fault raises.

        No operation, no host sync.
        """
        self._recorded.append(([value.detach() for value in values], describe, error))

    def raise_first(self) -> None:
        """Raise the first fault, if there is one, and forget them all.

        One host sync for each device that something was recorded on.
        """
        recorded, self._recorded = self._recorded, []
        read = _read([value for values, _, _ in recorded for value in values])
        found = [(describe([next(read) for _ in vs]), error) for vs, describe, error in recorded]
        for message, error in found:
            if message:
                raise error(message)


def _read(values: list[Tensor]) -> Iterator[float]:
    """Read 0-dim tensors in their order, in one go per device."""
    import torch

    groups: dict[torch.device, dict[torch.dtype, list[int]]] = {}
    for index, value in enumerate(values):
        groups.setdefault(value.device, {}).setdefault(value.dtype, []).append(index)
    read = [0.0] * len(values)
    for by_dtype in groups.values():
        stacks = [torch.stack([values[i] for i in indices]) for indices in by_dtype.values()]
        numbers = torch.cat([stack.double() for stack in stacks]).tolist()
        for index, number in zip(chain(*by_dtype.values()), numbers, strict=True):
            read[index] = number
    return iter(read)
