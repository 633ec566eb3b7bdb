"""What a step's checks found in its masks, losses and gradients.

Reading a value of a CUDA tensor stalls the CPU until the device has caught up. So the results of
checks on a device stay there, and one read at the end of the step brings them all. A
:class:`Faults` belongs to the plan of its step and is shared by ``StepPlan.under``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_lossagg.errors import LossAggregationError, ReducerError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Describe = Callable[[list[float]], str]
"""From a check's values to a message; empty if they are not a fault."""
DescribeArrays = Callable[[list[npt.NDArray[Any]]], str]
"""The same, from the values of tensors; each array is flat."""
OnGuard = Callable[[str, str], None]
"""Gets the name of a guard, and what it found."""
_Recorded = tuple["list[Tensor]", DescribeArrays, type[LossAggregationError], str]

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
        self._recorded: list[_Recorded] = []
        self.on_guard: OnGuard | None = None
        """Gets what a guard found, in place of an error; None raises."""

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

    def compare(self, found: list[Tensor], describe: DescribeArrays) -> None:
        """Describe tensors of one device: on the CPU now, else when the step's faults are read.

        On the CPU ``describe`` gets their memory. Raises :class:`ReducerError`.
        """
        if found[0].device.type != "cpu":
            self._keep(found, describe, ReducerError)
        elif fault := describe([one.numpy() for one in found]):
            raise ReducerError(fault)

    def record(
        self,
        values: list[Tensor],
        describe: Describe,
        *,
        error: type[LossAggregationError] = ReducerError,
        guard: str = "",
    ) -> None:
        """Keep 0-dim tensors, what their values mean, and what a fault raises.

        ``guard``: the guard that looks, if one does. No operation, no host sync.
        """
        self._keep(values, partial(_of_numbers, describe), error, guard)

    def _keep(
        self,
        found: list[Tensor],
        describe: DescribeArrays,
        error: type[LossAggregationError],
        guard: str = "",
    ) -> None:
        self._recorded.append(([one.detach() for one in found], describe, error, guard))

    def raise_first(self) -> None:
        """Raise the first fault, if there is one, and forget them all.

        One host sync for each device that something was recorded on.
        """
        recorded, self._recorded = self._recorded, []
        read = _read([one for found, *_ in recorded for one in found])
        messages = [describe([next(read) for _ in found]) for found, describe, *_ in recorded]
        for message, (_, _, error, guard) in zip(messages, recorded, strict=True):
            if message and guard and self.on_guard is not None:
                self.on_guard(guard, message)
            elif message:
                raise error(message)


def _of_numbers(describe: Describe, found: list[npt.NDArray[Any]]) -> str:
    return describe([float(one) for value in found for one in value])


def _read(found: list[Tensor]) -> Iterator[npt.NDArray[np.float64]]:
    """Read tensors in their order, flat and in float64, in one go per device."""
    import torch

    groups: dict[torch.device, dict[torch.dtype, list[int]]] = {}
    for index, one in enumerate(found):
        groups.setdefault(one.device, {}).setdefault(one.dtype, []).append(index)
    read: dict[int, npt.NDArray[np.float64]] = {}
    for by_dtype in groups.values():
        parts = [torch.cat([found[i].reshape(-1) for i in part]) for part in by_dtype.values()]
        order = [index for part in by_dtype.values() for index in part]
        ends = np.cumsum([found[index].numel() for index in order])
        numbers = torch.cat([part.double() for part in parts]).cpu().numpy()
        read.update(zip(order, np.split(numbers, ends[:-1]), strict=True))
    return iter([read[index] for index in range(len(found))])
