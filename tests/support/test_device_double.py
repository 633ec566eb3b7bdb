"""The double of a device does what CUDA does with tensors that are not on the CPU."""

from contextlib import suppress

import numpy as np
import pytest
import torch
from device_double import DeviceDouble, OnDevice


@pytest.fixture
def double():
    with DeviceDouble() as device:
        yield device


@pytest.fixture
def x(double):
    return torch.arange(6.0).view(2, 3).to(double.device, non_blocking=True)


def test_a_tensor_on_the_device_is_not_on_the_cpu_and_keeps_its_values(double, x):
    assert x.device.type == "meta"
    assert isinstance(x, OnDevice)
    assert (2 * x).sum().item() == 30
    assert torch.full((2,), 3.0, device=x.device).sum().item() == 6
    assert x.new_ones(2).device == torch.zeros_like(x).device == x.device


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: float(x.sum()),
        lambda x: bool((x > 2).any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: x.to("cpu", torch.int64),
        lambda x: x.tolist(),
        lambda x: torch.zeros(2, 3).copy_(x),
    ],
    ids=["item", "float", "bool", "nonzero", "mask", "cpu", "to", "tolist", "copy_"],
)
def test_what_brings_values_to_the_cpu_is_a_host_sync(double, x, read):
    read(x)
    assert sum(double.syncs.values()) == 1


def written(x, index, value):
    x[index] = value


@pytest.mark.parametrize(
    "copy",
    [
        lambda x: written(x, (0, 0), 1),
        lambda x: written(x, (0, slice(0, 2)), [1.0, 2.0]),
        lambda x: torch.ones(2).to(x.device),
        lambda x: torch.zeros_like(x).copy_(torch.ones(2, 3)),
        lambda x: x[[0, 1]],
    ],
    ids=["a number written", "a list written", "to", "copy_", "a list as an index"],
)
def test_what_copies_from_memory_that_is_not_pinned_is_a_host_sync(double, x, copy):
    with suppress(RuntimeError, NotImplementedError, TypeError):  # on meta, some have no values
        copy(x)
    (place,) = double.syncs
    assert place.startswith("test_device_double.py:")


def test_what_stays_on_the_device_is_none(double, x):
    torch.cumsum(torch.where(x > 1, x, 0.0), 0).clone().mul_(2).sum(-1)
    torch.from_numpy(np.ones((2, 3))).to(x.device, non_blocking=True).add_(x)
    assert not double.syncs


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x: x.numpy(),
        lambda x: np.asarray(x),
        lambda x: x + torch.ones(2, 3),
        lambda x: torch.ones(2, 3).mul_(x),
        lambda x: torch.stack([x, torch.ones(2, 3)]),
        lambda x: torch.tensor([1.0], device=x.device) + 1,
    ],
    ids=["numpy", "asarray", "add", "mul_", "stack", "torch.tensor"],
)
def test_what_takes_only_tensors_of_the_cpu_fails(x, mixed):
    with pytest.raises(RuntimeError):
        mixed(x)


def test_outside_of_the_block_nothing_reads_the_device():
    with DeviceDouble() as double:
        x = torch.ones(2).to(double.device, non_blocking=True)
    with pytest.raises(RuntimeError, match="outside of its DeviceDouble"):
        x + 1
