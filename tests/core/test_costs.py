"""What a step may cost: operations, bytes, host syncs, tensors held, collectives.

Counted in a dispatch trace, so the numbers hold on any machine; ``benchmarks/`` counts with
the same code and prints times as well. The device path is traced on ``meta`` tensors.
"""

import json

import numpy as np
import pytest
import torch
from conftest import launched_module

from benchmarks import counts
from benchmarks.counting import bytes_saved_for_backward, counted
from benchmarks.report import (
    CALL_BYTES,
    CALL_OPERATIONS,
    COLLECTIVES,
    HELD_BYTES,
    SLACK_BYTES,
)
from benchmarks.workloads import CP_SIZES, Workload
from megatron_lossagg import Aggregation, layout

SEQUENCES = (1, 64, 4096)
READS_OF_A_STEP = 1  # when it closes

PATHS = pytest.mark.parametrize("path", counts.PATHS)
CP = pytest.mark.parametrize("cp_size", CP_SIZES)
MASKS = pytest.mark.parametrize("mask", counts.MASK_TYPES)


def of_sequences(num_sequences, *, mean_tokens=64, cp_size=1):
    return Workload(
        name="counted",
        num_sequences=num_sequences,
        mean_tokens=mean_tokens,
        cp_size=cp_size,
        seed=3,
    )


@PATHS
@CP
def test_a_call_takes_the_same_few_operations_for_any_number_of_sequences(path, cp_size):
    found = {
        n: counts.of_a_call(of_sequences(n, cp_size=cp_size), path).operations for n in SEQUENCES
    }
    assert len(set(found.values())) == 1, found
    forward, backward = found[SEQUENCES[0]]
    assert forward <= CALL_OPERATIONS[0]
    assert backward <= CALL_OPERATIONS[1]


@PATHS
@CP
def test_a_call_moves_few_bytes_per_local_token(path, cp_size):
    """fp32 losses."""
    workload = of_sequences(64, mean_tokens=1024, cp_size=cp_size)
    forward, backward = counts.of_a_call(workload, path).bytes_per_token
    assert forward <= CALL_BYTES[0] + SLACK_BYTES
    assert backward <= CALL_BYTES[1] + SLACK_BYTES


MOST_BUILD_BYTES = 43.0


@PATHS
@CP
@MASKS
@pytest.mark.parametrize("mode", ["sample_mean", "token_mean"])
def test_building_moves_few_bytes_per_mask_position(mode, path, cp_size, mask):
    """A weight per sequence, and one for all."""
    workload = of_sequences(64, mean_tokens=1024, cp_size=cp_size)
    found = counts.of_a_call(workload, path, counts.MASK_TYPES[mask], Aggregation(mode))
    assert found.build_bytes_per_position <= MOST_BUILD_BYTES


@CP
@MASKS
def test_nothing_waits_for_a_device_before_the_step_closes(cp_size, mask):
    workload = of_sequences(64, cp_size=cp_size)
    found = counts.of_a_call(workload, "device", counts.MASK_TYPES[mask])
    assert not found.build.reads
    assert not found.forward.reads
    assert not found.backward.reads


def test_four_bytes_per_token_are_held_for_the_backward_of_all_losses_of_one_aggregation():
    held = counts.held_for_backward(of_sequences(64, mean_tokens=1024))
    assert held.one_call <= HELD_BYTES + SLACK_BYTES
    assert held.six_calls <= HELD_BYTES + SLACK_BYTES
    assert held.six_calls_under <= HELD_BYTES + SLACK_BYTES
    assert held.three_aggregations <= 3 * HELD_BYTES + SLACK_BYTES


@pytest.fixture(scope="module")
def live_step(tmp_path_factory):
    file = tmp_path_factory.mktemp("costs") / "found.json"
    launched_module("benchmarks.live_step", file, processes=1)
    return json.loads(file.read_text())["counts"]


def test_returns_waits_for_no_device_and_no_rank(live_step):
    """A step of the example on stock Megatron-Core, two microbatches."""
    assert live_step["returns"]["calls"] == 2
    assert live_step["returns"]["reads"] == 0
    assert live_step["returns"]["collectives"] == 0


def test_a_step_reads_the_device_once_when_it_closes(live_step):
    assert live_step["close"]["calls"] == 1
    assert live_step["close"]["reads"] <= READS_OF_A_STEP
    assert live_step["close"]["collectives"] == 0


def test_planning_makes_at_most_two_collectives(tmp_path):
    launched_module("benchmarks.collectives", tmp_path / "found.json", processes=2)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["none"]["collectives"] == 1
    for ids in ("prompt", "sample and prompt"):
        assert 1 <= found[ids]["collectives"] <= COLLECTIVES


# The counter itself, on what can be counted by hand.


def test_operations_and_bytes_are_counted_as_by_hand():
    x, w = torch.ones(1000, requires_grad=True), torch.ones(1000)
    with counted() as forward:
        partial_loss = (x * w)[:].view(10, 100).sum()
    with counted() as backward:
        partial_loss.backward()
    assert forward.operations == {"mul": 1, "sum": 1}
    assert forward.bytes == 3 * 4000 + 4004
    assert backward.operations["mul"] == 1
    assert bytes_saved_for_backward(lambda: (x * w).sum()) == 4000


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 2).any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: (2 * x).tolist(),
        lambda x: x.detach().numpy(),
        lambda x: torch.repeat_interleave(x, x.long()),
    ],
    ids=["item", "bool", "nonzero", "mask", "cpu", "to", "tolist", "numpy", "repeat"],
)
def test_a_read_of_the_device_is_counted(read):
    x = torch.ones(5)
    with counted(x) as counts_of_read:
        read(x)
    assert counts_of_read.num_reads >= 1


def test_a_read_of_the_framework_is_not_counted():
    x, lengths = torch.ones(5), torch.ones(5)
    with counted(x) as counts_of_read:
        lengths.sum().item()
        torch.repeat_interleave(x, lengths.long(), output_size=5)
    assert counts_of_read.num_reads == 0


def test_numpy_is_counted_by_the_arrays_of_its_functions_and_left_as_it_was():
    array = layout.np.arange(100)
    with counted() as counts_of_numpy:
        doubled = layout.np.multiply(array, 2)
        layout.np.cumsum(doubled, out=array)
        layout.np.add.reduceat(array, [0, 50])
        layout.np.ascontiguousarray(array)
    assert counts_of_numpy.numpy_bytes == 8 * (200 + 200 + 102)
    assert layout.np is np
