"""A small plan, its layout, its reducer and a step, on the CPU or on a device."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from device_double import DeviceDouble
from step_facts import a_chunk, groups_of

from megatron_lossagg import Aggregation, Layout, Sequences, plan_step
from megatron_lossagg.loop.step import Step
from megatron_lossagg.reduction.aggregation import Options

MASK = [1, 0, 1, 1, 1, 1]
DEVICES = pytest.mark.parametrize("device", ["cpu", "device"])


def a_plan(active=(3, 2), mode="token_sum", microbatch=None, rejects_tokens=True, **options):
    sequences = Sequences(active_tokens=list(active), microbatch=microbatch)
    return plan_step(
        Aggregation(mode, **options), sequences, options=Options(rejects_tokens=rejects_tokens)
    )


def thd(*lengths, cp_size=1, cp_rank=0):
    return Layout.thd_zigzag(np.cumsum([0, *lengths]), cp_size=cp_size, cp_rank=cp_rank)


def a_reducer(mask, active=(3, 2), sequences=(0, 1), lengths=(4, 2), **options):
    return a_plan(active, **options).reducer(list(sequences), torch.tensor(mask), thd(*lengths))


def a_step(plan, m, *, dp=1, cp=1, cp_rank=0, loss_scaling="average", chunks=None, **options):
    """Begin a step of a rank without Megatron-Core; without chunks it has no gradients."""
    return Step(
        chunks=chunks or [a_chunk()],
        groups=groups_of(dp=dp, cp=cp, cp_rank=cp_rank),
        loss_scaling=loss_scaling,
        plan=plan,
        num_microbatches=m,
        **options,
    )


@contextmanager
def on(device):
    """Give a function that brings a tensor to the device; the device double counts its syncs."""
    if device == "cpu":
        yield lambda values: torch.as_tensor(values)
        return
    with DeviceDouble() as double:

        def to(values):
            return torch.as_tensor(values).to(double.device, non_blocking=True)

        to.syncs = double.syncs
        yield to


def labelled(label):
    """Read a mode with its number, and V if empty samples and prompts do not count."""
    mode, *number = label.removesuffix(", V").split()
    name = "exponent" if mode == "length_power" else "divisor"
    numbers = {name: float(number[0])} if number else {}
    return Aggregation(mode, **numbers, count_empty=not label.endswith(", V"))


def weights_of(label, **sequences):
    return plan_step(labelled(label), Sequences(**sequences)).weights.tolist()
