"""What devices found in the masks, losses and gradients of one step; read once, when it closes.

Reading a value of a CUDA tensor stalls the host until the device has caught up. So a check
on a device leaves its result there, and all results of a step are read in one go. A
:class:`Faults` belongs to the plan of its step and is shared by ``StepPlan.under``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import Tensor

__all__ = ["Describe", "Faults", "warn_once"]

Describe = Callable[[list[float]], str]
"""From the recorded values to a message; empty if they are not a fault."""

_warned: set[str] = set()


def warn_once(what: str, message: str) -> None:
    """Warn once per process of what may recur in every step."""
    if what not in _warned:
        _warned.add(what)
        warnings.warn(message, RuntimeWarning, stacklevel=4)


class Faults:
    """The results of a step's checks that are still on a device, in the order of the checks."""

    def __init__(self) -> None:
        self._recorded: list[tuple[list[Tensor], Describe]] = []

    def record(self, values: list[Tensor], describe: Describe) -> None:
        """Keep 0-dim tensors and what their values mean. No operation, no host sync."""
        self._recorded.append(([value.detach() for value in values], describe))

    def take(self) -> str:
        """Return the message of the first fault, empty if there is none, and forget them all.

        One host sync for each device that something was recorded on.
        """
        recorded, self._recorded = self._recorded, []
        read = _read([value for values, _ in recorded for value in values])
        messages = [describe([next(read) for _ in values]) for values, describe in recorded]
        return next(filter(None, messages), "")


def _read(values: list[Tensor]) -> Iterator[float]:
    """Read 0-dim tensors in their order, in one go per device."""
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
