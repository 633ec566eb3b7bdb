"""Copies between devices that do not wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; return the tensor itself if it is there already.

    A copy to a device goes through pinned memory and does not wait. A copy to the CPU waits,
    because its values are read next.
    """
    if tensor.device == device:
        return tensor
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type != "cpu")


def from_numpy(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a device without a host sync; on the CPU the tensor shares its memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else moved(tensor, device)
