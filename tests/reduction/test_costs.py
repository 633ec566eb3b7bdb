"""What a step may cost: operations, bytes, host syncs, tensors held, collectives.

Counted in a dispatch trace, so the numbers hold on any machine; ``benchmarks/`` counts with
the same code and prints times as well. ``meta`` tensors stand for those of any device: they have
no values, so every host sync raises.
"""

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.counting import counted
from benchmarks.workloads import AGGREGATION, CP_SIZES, TOKEN_MEAN, Workload
from megatron_lossagg import Aggregation, Layout, Sequences, plan_step
from megatron_lossagg.guards.ownership import TrainedTokens
from megatron_lossagg.reduction.step_state import StepLog

SEQUENCES = (1, 64, 4096)
MASK_TYPES = {"bool": torch.bool, "int32": torch.int32, "float32": torch.float32}

DEVICES = pytest.mark.parametrize("device", ["cpu", "meta"])
CP = pytest.mark.parametrize("cp_size", CP_SIZES)
MASKS = pytest.mark.parametrize("mask", MASK_TYPES)
MODES = pytest.mark.parametrize("mode", ["sample_mean", "token_mean"])
"""A weight per sequence, and one for all."""

SLACK_BYTES = 0.1
"""For the few bytes of 0-dim tensors, shared by the tokens of a small microbatch."""


def of_sequences(num_sequences, *, mean_tokens=64, cp_size=1):
    return Workload(
        name="counted",
        num_sequences=num_sequences,
        mean_tokens=mean_tokens,
        cp_size=cp_size,
        seed=3,
    )


def of_a_call(
    workload, device="cpu", mask_type=torch.int32, aggregation=AGGREGATION, *, in_step=False
):
    """Count one microbatch's reducer: built, called, and the backward of its partial loss.

    ``in_step``: while a step runs, which notes what each context-parallel rank trains.
    """
    plan, layout = workload.plan.under(aggregation), workload.layout()
    mask_P = workload.mask_P.to(mask_type).to(device)
    x_T = workload.x_T.detach().to(device).requires_grad_()
    if in_step:
        plan.state.log = StepLog(plan.aggregation)
    with counted() as build:
        reducer = plan.reducer(range(workload.num_sequences), mask_P, layout)
        reducer.weights(x_T.dtype, x_T.device)
    with counted() as forward:
        partial_loss = reducer(x_T)
    with counted() as backward:
        partial_loss.backward()
    plan.state.end()
    return build, forward, backward


@DEVICES
@CP
@MODES
def test_a_reducer_takes_the_same_few_operations_for_any_number_of_sequences(mode, device, cp_size):
    found = [
        of_a_call(of_sequences(n, cp_size=cp_size), device, aggregation=Aggregation(mode))
        for n in SEQUENCES
    ]
    builds, forwards, backwards = (
        [done.num_operations for done in part] for part in zip(*found, strict=True)
    )
    assert builds[0] <= builds[1] == builds[2]  # one sequence has one weight
    assert len(set(forwards)) == len(set(backwards)) == 1
    assert forwards[0] <= 5
    assert backwards[0] <= 2


@DEVICES
@CP
def test_a_call_moves_few_bytes_per_local_token(device, cp_size):
    """fp32 losses."""
    workload = of_sequences(64, mean_tokens=1024, cp_size=cp_size)
    _, forward, backward = of_a_call(workload, device)
    assert forward.bytes <= (33 + SLACK_BYTES) * workload.num_local_tokens
    assert backward.bytes <= (8 + SLACK_BYTES) * workload.num_local_tokens


@DEVICES
def test_a_step_notes_what_a_rank_trains_without_an_operation(device):
    workload = of_sequences(64, mean_tokens=64, cp_size=8)
    outside, inside = (of_a_call(workload, device, in_step=in_step)[1] for in_step in (False, True))
    assert (inside.num_operations, inside.bytes) == (outside.num_operations, outside.bytes)


@DEVICES
def test_what_a_rank_trains_is_summed_once_a_step(device):
    """In as many operations for any number of microbatches and of sequences."""
    found = set()
    for num_microbatches, num_sequences in ((1, 4), (1, 400), (8, 50)):
        workload = of_sequences(num_sequences, mean_tokens=16, cp_size=8)
        mask_P = workload.mask_P.to(device)
        trained = TrainedTokens(num_sequences)
        for _ in range(num_microbatches):
            sequences, layout = range(num_sequences), workload.layout().gathered()
            trained.add(workload.plan.reducer(sequences, mask_P, layout).line)
        with counted() as counts:
            trained.own.of_sequences()
        found.add(counts.num_operations)
    (operations,) = found
    assert operations <= 19


@DEVICES
@CP
@MASKS
@MODES
def test_building_moves_few_bytes_per_mask_position(mode, device, cp_size, mask):
    """On ``meta`` a wait would raise."""
    workload = of_sequences(64, mean_tokens=1024, cp_size=cp_size)
    build, _, _ = of_a_call(workload, device, MASK_TYPES[mask], Aggregation(mode))
    assert build.bytes <= 38 * len(workload.mask_P)


@pytest.mark.parametrize("empty", [0, 1])
def test_one_weight_for_all_makes_nothing_per_token_but_the_weights(empty):
    """Next to a fully masked sequence too: 1 byte of the mask is read, 4 are written."""
    offsets = torch.arange(65) * 1024
    layout, mask_P = Layout.thd_zigzag(offsets, cp_size=1, cp_rank=0), torch.ones(65536).bool()
    mask_P[: empty * 1024] = False
    sequences = Sequences(active_tokens=[1024 * (n >= empty) for n in range(64)])
    reducer = plan_step(TOKEN_MEAN, sequences).reducer(range(64), mask_P.to("meta"), layout)
    with counted() as made:
        reducer.weights(torch.float32, torch.device("meta"))
    assert made.bytes <= (5 + SLACK_BYTES) * layout.num_local_tokens


def test_four_bytes_per_token_are_held_for_the_backward_of_all_losses_of_one_aggregation():
    workload = of_sequences(64, mean_tokens=1024)
    losses = [workload.x_T.detach().requires_grad_() for _ in range(6)]
    reducer = workload.plan.reducer(
        range(workload.num_sequences), workload.mask_P, workload.layout()
    )
    own = reducer.plan.aggregation
    token_mean, constant = reducer.under(TOKEN_MEAN), reducer.under(workload.constant)

    def held(reducers):
        def call():
            return torch.stack([r(x) for r, x in zip(reducers, losses, strict=False)]).sum()

        return bytes_saved_for_backward(call) / workload.num_local_tokens

    assert held([reducer]) <= 4 + SLACK_BYTES
    assert held([reducer] * 6) <= 4 + SLACK_BYTES
    assert held([reducer, *(reducer.under(own) for _ in range(5))]) <= 4 + SLACK_BYTES
    of_three = [reducer, reducer, token_mean, token_mean, constant, constant]
    assert held(of_three) <= 3 * 4 + SLACK_BYTES


def bytes_saved_for_backward(call):
    """Count the bytes that the graph of ``call`` holds, each storage once."""
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = call()
    for tensor in attributes_of_graph(loss):
        keep(tensor)
    return sum(storage.nbytes() for storage in storages.values())


def attributes_of_graph(loss):
    """Find tensors that an autograd function keeps as plain attributes, which no hook sees."""
    seen, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kept = tree_leaves(list(getattr(node, "__dict__", {}).values()))
        yield from (leaf for leaf in kept if isinstance(leaf, Tensor))
        todo.extend(after for after, _ in node.next_functions)


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
