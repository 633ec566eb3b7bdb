"""Host and device: what may be read at once, and copies that do not wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["from_host", "moved", "on_host"]


def on_host(tensor: Tensor) -> bool:
    """Whether reading a value of the tensor costs no host sync."""
    return tensor.device.type == "cpu"


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device, itself if it is there already.

    To a device without a host sync, through pinned memory; to the CPU the host waits, as it
    reads the copy at once.
    """
    if device.type == "cuda" and on_host(tensor):
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type != "cpu")


def from_host(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a device without a host sync; the array itself where that is the CPU."""
    return moved(torch.from_numpy(np.ascontiguousarray(array)), device)
