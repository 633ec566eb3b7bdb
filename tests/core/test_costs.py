"""What a step may cost: operations, bytes, host syncs, tensors held, collectives.

Counted in a dispatch trace, so the numbers hold on any machine; ``benchmarks/`` counts with
the same code and prints times as well. ``meta`` tensors stand for those of any device: they have
no values, so every host sync raises.
"""

import call_counts as counts
import pytest
import torch
from call_counts import (
    BUILD_BYTES,
    CALL_BYTES,
    CALL_OPERATIONS,
    HELD_BYTES,
    NOTED_OPERATIONS,
    SLACK_BYTES,
    bytes_saved_for_backward,
)

from benchmarks.counting import counted
from benchmarks.workloads import CP_SIZES, Workload
from megatron_lossagg import Aggregation

SEQUENCES = (1, 64, 4096)

DEVICES = pytest.mark.parametrize("device", counts.DEVICES)
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


@DEVICES
@CP
def test_a_call_takes_the_same_few_operations_for_any_number_of_sequences(device, cp_size):
    found = {
        n: counts.of_a_call(of_sequences(n, cp_size=cp_size), device).operations for n in SEQUENCES
    }
    assert len(set(found.values())) == 1, found
    forward, backward = found[SEQUENCES[0]]
    assert forward <= CALL_OPERATIONS[0]
    assert backward <= CALL_OPERATIONS[1]


@DEVICES
@CP
def test_a_call_moves_few_bytes_per_local_token(device, cp_size):
    """fp32 losses."""
    workload = of_sequences(64, mean_tokens=1024, cp_size=cp_size)
    forward, backward = counts.of_a_call(workload, device).bytes_per_token
    assert forward <= CALL_BYTES[0] + SLACK_BYTES
    assert backward <= CALL_BYTES[1] + SLACK_BYTES


@DEVICES
def test_a_step_notes_what_a_rank_trains_without_a_pass_over_its_tokens(device):
    """In as many operations for any number of sequences, and bytes for any number of tokens."""
    found = {}
    for num_sequences, mean_tokens in ((64, 64), (64, 1024), (4096, 64)):
        workload = of_sequences(num_sequences, mean_tokens=mean_tokens, cp_size=8)
        alone, noted = (
            counts.of_a_call(workload, device, in_step=in_step).forward for in_step in (False, True)
        )
        more = noted.num_operations - alone.num_operations, noted.bytes - alone.bytes
        found[num_sequences, mean_tokens] = more
    assert found[64, 64] == found[64, 1024]
    assert 0 < found[64, 64][0] == found[4096, 64][0] <= NOTED_OPERATIONS


@DEVICES
@CP
@MASKS
@pytest.mark.parametrize("mode", ["sample_mean", "token_mean"])
def test_building_moves_few_bytes_per_mask_position(mode, device, cp_size, mask):
    """A weight per sequence, and one for all. On ``meta`` a wait would raise."""
    workload = of_sequences(64, mean_tokens=1024, cp_size=cp_size)
    found = counts.of_a_call(workload, device, counts.MASK_TYPES[mask], Aggregation(mode))
    assert found.build_bytes_per_position <= BUILD_BYTES


def test_four_bytes_per_token_are_held_for_the_backward_of_all_losses_of_one_aggregation():
    held = counts.held_for_backward(of_sequences(64, mean_tokens=1024))
    for what, aggregations in counts.HELD_OF.items():
        assert held[what] <= aggregations * HELD_BYTES + SLACK_BYTES, what


# The counter itself, on what can be counted by hand.


def test_operations_and_bytes_are_counted_as_by_hand():
    x, w = torch.ones(1000, requires_grad=True), torch.ones(1000)
    with counted() as forward:
        total = (x * w)[:].view(10, 100).sum()
    with counted() as backward:
        total.backward()
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
        lambda x: (2 * x).tolist(),
        lambda x: x.detach().numpy(),
        lambda x: torch.repeat_interleave(x, x.long()),
        lambda x: torch.equal(x, x),
        lambda x: x + torch.ones(5),
    ],
    ids=["item", "bool", "nonzero", "mask", "cpu", "tolist", "numpy", "repeat", "equal", "mixed"],
)
def test_a_read_of_a_device_raises_in_a_count(read):
    with counted(), pytest.raises((RuntimeError, NotImplementedError, TypeError)):
        read(torch.ones(5, device="meta"))


def test_a_copy_to_a_device_is_counted():
    with counted() as copied:
        torch.ones(100).to("meta", non_blocking=True)
    assert copied.operations == {"ones": 1, "_to_copy": 1}
