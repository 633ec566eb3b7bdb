"""Per-token losses to a share: what is seen, what is not, and at what cost."""

import gc
import re
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lossagg import Aggregation, Layout, Sequences, faults, microbatch, plan_step, reducer
from megatron_lossagg.errors import ReducerError
from megatron_lossagg.options import Options


def a_plan(active=(3, 2), mode="token_sum", microbatch=None, rejects_tokens=True, **options):
    sequences = Sequences(active_tokens=list(active), microbatch=microbatch)
    return plan_step(
        Aggregation(mode, **options), sequences, options=Options(rejects_tokens=rejects_tokens)
    )


def thd(*lengths, cp_size=1, cp_rank=0):
    return Layout.thd_zigzag(np.cumsum([0, *lengths]), cp_size=cp_size, cp_rank=cp_rank)


def a_reducer(mask, active=(3, 2), sequences=(0, 1), lengths=(4, 2), **options):
    return a_plan(active, **options).reducer(list(sequences), torch.tensor(mask), thd(*lengths))


MASK = [1, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("poison", [torch.inf, -torch.inf, torch.nan])
def test_masked_positions_affect_neither_share_nor_gradient(poison):  # failures d4
    x = torch.tensor([1.0, poison, 2, 3, 4, 5], requires_grad=True)
    share = a_reducer(MASK)(x)
    share.backward()
    assert share.item() == 15
    assert x.grad.tolist() == [1, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_losses_are_accumulated_in_float32(dtype):  # failures e4, e7
    n = 4097  # in bf16 a running sum of ones stops at 256, in fp16 at 2048
    reducer = a_reducer([1] * n, active=[n], sequences=[0], lengths=[n])
    share = reducer(torch.ones(n, dtype=dtype))
    assert share.dtype == torch.float32
    assert share.item() == n


def test_float64_stays_float64():
    share = a_reducer(MASK, mode="sample_mean")(torch.ones(6, dtype=torch.float64))
    assert share.dtype == torch.float64
    assert share.item() == pytest.approx(1, abs=1e-15)


def test_an_empty_rank_is_connected_to_the_graph():  # failures d6, f1
    x = torch.zeros(0, requires_grad=True)
    plan = a_plan([2])
    layout = Layout.response_zigzag([12], [2], cp_size=2, cp_rank=1)
    assert layout.num_local_tokens == 0
    share = plan.reducer([0], torch.ones(2), layout)(x)
    share.backward()
    assert share.item() == 0
    assert x.grad.shape == (0,)


def test_a_microbatch_with_no_active_tokens_reaches_backward():
    x = torch.full((6,), torch.nan, requires_grad=True)
    share = a_reducer([0] * 6)(x)
    share.backward()
    assert share.item() == 0
    assert x.grad.tolist() == [0] * 6


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in (torch.ops.aten.detach.default, torch.ops.aten.lift_fresh.default):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def on_cuda(monkeypatch):
    """Make reducers treat CPU tensors as CUDA tensors, whose values they may not read."""
    for module in (microbatch, reducer):
        monkeypatch.setattr(module, "on_host", lambda tensor: False)


def on_cuda_if(device, monkeypatch):
    if device == "device":
        for module in (microbatch, reducer):
            monkeypatch.setattr(module, "on_host", lambda tensor: False)


def reducer_checked(plan, sequences):
    """Make a reducer; on a device its mask's faults are raised when the step is checked."""
    plan.reducer(sequences, torch.tensor(MASK), thd(4, 2))
    plan.check()


def read_by_the_framework(operations):
    return [n for n in operations.names if "_local_scalar_dense" in n or "aten.nonzero" in n]


def test_a_call_costs_the_same_operations_for_1_and_1000_sequences():
    assert_same_operations_for_1_and_1000_sequences()


def test_on_cuda_a_call_costs_the_same_operations_for_1_and_1000_sequences_and_no_framework_sync(
    on_cuda,
):
    operations = assert_same_operations_for_1_and_1000_sequences()
    assert not read_by_the_framework(operations)


def test_on_a_device_a_call_reads_nothing():  # reading a meta tensor raises
    share = a_reducer(MASK, mode="sample_mean")(torch.ones(6, device="meta"))
    assert share.device.type == "meta"


def assert_same_operations_for_1_and_1000_sequences():
    seen = []
    for sequences in (1, 1000):
        plan = a_plan([2] * sequences, mode="sample_mean")
        reducer = plan.reducer(range(sequences), torch.ones(2 * sequences), thd(*[2] * sequences))
        with Operations() as operations:
            reducer(torch.ones(2 * sequences))
        seen.append(operations.names)
    assert seen[0] == seen[1]
    return operations


def test_the_operation_counter_sees_reads_and_nonzero():
    with Operations() as operations:
        torch.nonzero(torch.ones(2))
        torch.ones(()).item()
    assert [name for name in operations.names if "_local_scalar_dense" in name]
    assert [name for name in operations.names if "nonzero" in name]


@pytest.mark.parametrize("shape", [(6,), (1, 6), (6, 1), (1, 6, 1)])
def test_losses_and_mask_of_any_shape_are_read_in_order(shape):
    reducer = a_plan().reducer([0, 1], torch.tensor(MASK).reshape(shape), thd(4, 2))
    assert reducer(torch.arange(6.0).reshape(shape)).item() == 14


def test_bshd_losses_are_read_sequence_by_sequence():
    plan = a_plan((8, 8), mode="sample_mean")
    x = torch.arange(16.0).reshape(2, 8)
    shares = []
    for rank, positions in ((0, [0, 1, 6, 7]), (1, [2, 3, 4, 5])):
        layout = Layout.bshd_zigzag(2, 8, cp_size=2, cp_rank=rank)
        shares.append(plan.reducer([1, 0], torch.ones(2, 8), layout)(x[:, positions]).item())
    assert sum(shares) == pytest.approx(x.mean().item())
    assert shares[0] == pytest.approx(x[:, [0, 1, 6, 7]].sum().item() / 16)


def test_the_inputs_are_not_changed():  # failures c12
    mask, x = torch.tensor(MASK, dtype=torch.float32), torch.full((6,), 2.0)
    reducer = a_plan().reducer([0, 1], mask, thd(4, 2))
    assert reducer(x).item() == reducer(x).item() == 10
    assert mask.tolist() == MASK
    assert x.tolist() == [2.0] * 6


def test_later_changes_of_a_mask_have_no_effect():
    mask = torch.tensor(MASK)
    reducer = a_plan().reducer([0, 1], mask, thd(4, 2))
    mask.zero_()
    assert reducer(torch.ones(6)).item() == 5


def test_a_share_has_its_own_storage_for_megatron_to_scale():  # failures h3, i7
    share = a_reducer(MASK)(torch.ones(6, requires_grad=True))
    assert share._base is None
    assert not share.is_leaf


def test_the_gradient_is_the_weight():
    x = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    a_reducer(MASK, mode="sample_mean")(x).backward()
    assert x.grad.tolist() == pytest.approx([1 / 6, 0, 1 / 6, 1 / 6, 1 / 4, 1 / 4], rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_half_precision_losses_comes_back_in_their_type(dtype):
    x = torch.ones(6, dtype=dtype, requires_grad=True)
    a_reducer(MASK)(x).backward()
    assert x.grad.dtype == dtype
    assert x.grad.tolist() == [1, 0, 1, 1, 1, 1]


def test_building_costs_the_same_operations_for_1_and_1000_sequences():
    seen = []
    for sequences in (1, 1000):
        plan = a_plan([8] * sequences)
        layout = thd(*[8] * sequences, cp_size=2)
        mask = torch.ones(8 * sequences)
        with Operations() as operations:
            plan.reducer(range(sequences), mask, layout)
        seen.append(operations.names)
    assert seen[0] == seen[1]


def test_tokens_past_the_last_offset_have_weight_0():
    reducer = a_reducer([1, 1, 1, 1, 1, 0, 0], active=(3, 2), lengths=(3, 2))
    x = torch.tensor([1.0, 1, 1, 1, 1, torch.nan, 7], requires_grad=True)
    share = reducer(x)
    share.backward()
    assert share.item() == 5
    assert x.grad.tolist() == [1] * 5 + [0, 0]


def test_a_padding_has_weight_0_and_any_losses():
    reducer = a_reducer([1, 1, 1, 0, 0], active=(3,), sequences=(0, -1), lengths=(3, 2))
    assert reducer(torch.tensor([1, 1, 1, torch.nan, torch.inf])).item() == 3
    assert reducer.counted_tokens == 3
    assert reducer.weight_sum().item() == 3


@pytest.mark.parametrize("rejects_tokens", [False, True])
@pytest.mark.parametrize("device", ["framework", "device"])
def test_a_segment_named_as_padding_whose_mask_is_1_is_refused(device, rejects_tokens, monkeypatch):
    """Its tokens would not be trained, and nothing else would say so."""
    on_cuda_if(device, monkeypatch)
    plan = a_plan((3, 2), rejects_tokens=rejects_tokens)
    message = (
        r"segment 1 is named as padding \(-1\) and its mask is 1 at 2 positions: give its sequence"
    )
    with pytest.raises(ReducerError, match=message):
        reducer_checked(plan, [0, -1])


def test_a_training_mask_that_selects_fewer_tokens_keeps_the_denominator():  # failures I2
    reducer = a_reducer([1, 0, 0, 0, 1, 0], mode="token_mean")
    assert reducer(torch.ones(6)).item() == pytest.approx(2 / 5)
    assert reducer.weight_sum().item() == pytest.approx(2 / 5)
    assert reducer.counted_tokens == 5


def test_the_weight_sum_is_a_float32_scalar_for_losses_of_any_dtype():
    reducer = a_reducer(MASK, mode="token_mean")
    reducer(torch.ones(6, dtype=torch.float64))
    assert reducer.weight_sum().dtype == torch.float32
    assert reducer.weight_sum().shape == ()


def test_under_reduces_the_same_tokens_under_another_aggregation():
    reducer = a_reducer(MASK, mode="constant", divisor=10.0)
    x = torch.arange(6.0)
    assert reducer(x).item() == pytest.approx((0 + 2 + 3 + 4 + 5) / 20)
    assert reducer.under("token_mean")(x).item() == pytest.approx(14 / 5)
    assert reducer.under("sample_mean")(x).item() == pytest.approx((5 / 3 + 9 / 2) / 2)
    assert reducer(x).item() == pytest.approx(14 / 20)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0.5, r"holds 0\.5 at position 1: a mask is 0 or 1"),
        (-1.0, "holds -1"),
        (2.0, "holds 2"),
        (float("nan"), "holds nan"),
    ],
)
def test_a_mask_is_0_or_1(value, message):  # failures d14, d15
    with pytest.raises(ReducerError, match=message):
        a_reducer([1, value, 1, 1, 1, 1])


MASK_DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
]


@pytest.mark.parametrize("dtype", MASK_DTYPES)
def test_a_mask_of_any_dtype_is_a_mask(dtype):
    n = 70_000  # more than an int16 or a half holds
    reducer = a_plan((n, 2)).reducer([0, 1], torch.ones(n + 2).to(dtype), thd(n, 2))
    assert reducer(torch.ones(n + 2)).item() == n + 2
    with pytest.raises(ReducerError, match=f"trains {n} tokens, the plan counted {n - 1}"):
        a_plan((n - 1, 2)).reducer([0, 1], torch.ones(n + 2).to(dtype), thd(n, 2))


@pytest.mark.parametrize("dtype", MASK_DTYPES[2:])
def test_a_value_other_than_0_and_1_is_refused_in_any_dtype(dtype):
    for value in (-1, 2, 100):
        mask = torch.tensor(MASK)
        mask[3] = value
        with pytest.raises(ReducerError, match=rf"the mask holds {value}\S* at position 3"):
            a_plan().reducer([0, 1], mask.to(dtype), thd(4, 2))


def test_sequences_of_one_weight_among_masked_sequences_and_paddings_keep_that_weight():
    plan = a_plan((3, 0, 2), mode="constant", divisor=5)
    x = torch.arange(1.0, 9)
    made = plan.reducer([0, 1, 2], torch.tensor([1, 1, 1, 0, 0, 0, 1, 1]), thd(3, 3, 2))
    assert made(x).item() == pytest.approx((1 + 2 + 3 + 7 + 8) / 15)
    made = plan.reducer([0, -1, 2], torch.tensor([1, 1, 1, 0, 0, 0, 1, 1]), thd(3, 3, 2))
    assert made(x).item() == pytest.approx((1 + 2 + 3 + 7 + 8) / 15)


def test_none_is_refused_as_a_mask():  # failures c13
    with pytest.raises(
        ReducerError, match=r"got the mask None, expected .* pass the microbatch's whole"
    ):
        a_plan().reducer([0, 1], None, thd(4, 2))


def test_a_mask_of_the_wrong_length_is_refused():
    with pytest.raises(ReducerError, match="mask of 5 tokens, the layout thd_zigzag has 6"):
        a_reducer([1] * 5)
    with pytest.raises(ReducerError, match="mask of 7 tokens, the layout local has 6"):
        a_plan().reducer([0, 1], torch.ones(7), Layout.local([4, 2], cp_size=1, cp_rank=0))


def test_a_trained_token_past_the_end_is_refused():
    with pytest.raises(ReducerError, match="1 at position 6, past the last segment's end 6"):
        a_reducer([*MASK, 1])
    with pytest.raises(ReducerError, match="1 at position 8, past the last segment's end 6"):
        a_reducer([*MASK, 0, 0, 1])


def test_a_mask_that_selects_more_tokens_than_counted_is_refused():
    with pytest.raises(ReducerError, match="segment 1 trains 2 tokens, the plan counted 1"):
        a_reducer(MASK, active=(3, 1))
    with pytest.raises(ReducerError, match="segment 0 trains 3 tokens, the plan counted 2"):
        a_reducer(MASK, active=(2, 2))


SEQUENCES = {
    "too few": ([0], "got 1 sequences for 2 segments"),
    "unknown": ([0, 2], "sequence 2 is not one of the 2 sequences"),
    "below the padding sequence": ([0, -2], "sequence -2 is not one"),
    "doubled": ([1, 1], "sequence 1 appears in 2 segments"),
    "fractions": ([0.0, 1.0], "sequences: got .* expected integers in one dim"),
    "truths": ([False, True], "sequences: got .* expected integers in one dim"),
    "two dimensions": ([[0, 1]], "sequences: got .* expected integers in one dim"),
    "a ragged list": ([[0], [1, 2]], "sequences: got .* expected integers in one dim"),
    "nothing": (None, "sequences: got .* expected integers in one dim"),
}


@pytest.mark.parametrize("what", SEQUENCES)
def test_sequences_have_one_entry_per_segment_and_no_sequence_twice(what):
    sequences, message = SEQUENCES[what]
    with pytest.raises(ReducerError, match=message):
        a_plan().reducer(sequences, torch.tensor(MASK), thd(4, 2))


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor])
def test_sequences_of_any_form_pick_their_weights(form):
    plan = a_plan((2, 3), mode="sample_mean")
    reducer = plan.reducer(form([1, 0]), torch.tensor(MASK), thd(4, 2))
    x = torch.tensor([3.0, 9, 3, 3, 0, 0])
    assert reducer(x).item() == pytest.approx(9 / 6)
    assert reducer.counted_tokens == 5


def test_the_doubled_sequence_is_the_one_that_is_named():
    with pytest.raises(ReducerError, match="sequence 1 appears in 2 segments"):
        a_reducer([1] * 6, active=(2, 2), sequences=(0, 1, 1), lengths=(2, 2, 2))


def test_several_paddings_are_not_a_doubled_sequence():
    reducer = a_reducer([0, 0, 1, 1, 0, 0], active=(2,), sequences=(-1, 0, -1), lengths=(2, 2, 2))
    assert reducer(torch.arange(6.0)).item() == 5


def test_a_microbatch_without_segments_is_an_empty_share():
    x = torch.zeros(0, requires_grad=True)
    reducer = a_plan().reducer([], torch.zeros(0), thd())
    share = reducer(x)
    share.backward()
    assert (share.item(), reducer.counted_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(5), r"got 5 per-token losses .* holds 6 on CP rank 0 of 1"),
        (torch.ones(7), "got 7 per-token losses"),
        (
            torch.ones(6, dtype=torch.int64),
            r"got a torch\.int64 tensor of .*, expected per-token losses",
        ),
        (None, "got None, expected per-token losses in floating point"),
    ],
)
def test_losses_other_than_those_of_this_ranks_slice_are_refused(x, message):
    with pytest.raises(ReducerError, match=message):
        a_reducer(MASK)(x)


MASKS = {
    "values other than 0 and 1": (
        [1.0, 0, 0.5, 1, 3, 1],
        "has 2 values other than 0 and 1: a mask",
    ),
    "a token past the end": ([*MASK, 1.0, 0], "is 1 at 1 positions past the last segment's end 6"),
    "more trained than counted": (
        [1.0, 0, 1, 0, 1, 1],
        "segment 1 trains 2 tokens, the plan counted 1 ",
    ),
}


@pytest.mark.parametrize("what", MASKS)
def test_a_cuda_masks_fault_is_recorded_without_reading_it_and_raised_with_its_step(on_cuda, what):
    mask, message = MASKS[what]
    plan = a_plan((3, 1) if "more" in what else (3, 2), microbatch=[4, 4])
    with Operations() as operations:
        plan.reducer([-1, -1], torch.zeros(6), thd(4, 2))
        plan.reducer([0, 1], torch.tensor(mask), thd(4, 2))
        plan.reducer([-1], torch.zeros(0), thd(0))
    assert not read_by_the_framework(operations)
    with pytest.raises(ReducerError, match=r"rank 0 \(context-parallel rank 0\).*" + message):
        plan.check()
    plan.check()  # raised once


@pytest.mark.parametrize("cp_rank", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float32])
def test_on_cuda_a_mask_is_sliced_and_weighed_as_on_the_cpu(monkeypatch, dtype, cp_rank):
    generator = torch.Generator().manual_seed(3)
    lengths = [0, 8, 4, 0, 12]
    mask = (torch.rand(28, generator=generator) < 0.6).to(dtype)
    mask[24:] = 0
    parts = mask[:24].long().split(lengths)
    plan = a_plan([int(part.sum()) for part in parts], mode="sample_mean")
    seen = []
    for is_framework in (True, False):
        for module in (microbatch, reducer):
            monkeypatch.setattr(
                module, "on_host", lambda tensor, is_framework=is_framework: is_framework
            )
        layout = thd(*lengths, cp_size=2, cp_rank=cp_rank)
        made = plan.reducer(range(5), mask, layout)
        x = torch.arange(12.0, requires_grad=True)
        share = made(x)
        share.backward()
        seen.append((made.microbatch.keep.tolist(), share.item(), x.grad.tolist()))
        plan.check()
    assert seen[0] == seen[1]


def test_a_fault_of_one_plan_is_never_raised_by_another(on_cuda):
    first, second = a_plan(), a_plan()
    first.reducer([0, 1], torch.tensor(MASK), thd(4, 2))(torch.full((6,), torch.nan))
    a_plan().check()
    second.check()
    with pytest.raises(ReducerError, match=r"sequence 0 .* is nan at its token 0"):
        first.under("token_mean").check()  # the same step
    first.check()


WRONG_LENGTHS = {
    "thd": lambda cp, rank: thd(8 * cp, 4 * cp, cp_size=cp, cp_rank=rank),
    "bshd": lambda cp, rank: Layout.bshd_zigzag(2, 4 * cp, cp_size=cp, cp_rank=rank),
    "response": lambda cp, rank: Layout.response_zigzag([12, 9], [8, 3], cp_size=cp, cp_rank=rank),
    "response, padded": lambda cp, rank: Layout.response_zigzag(
        [12, 9], [8, 3], cp_size=cp, cp_rank=rank, max_seq_len=16
    ),
    "local": lambda cp, rank: Layout.local([2, 3], cp_size=cp, cp_rank=rank),
}


@pytest.mark.parametrize(("cp", "rank"), [(cp, rank) for cp in (1, 2, 3, 4) for rank in range(cp)])
@pytest.mark.parametrize("name", WRONG_LENGTHS)
def test_losses_of_any_wrong_length_are_refused(name, cp, rank):
    layout = WRONG_LENGTHS[name](cp, rank)
    right = layout.num_local_tokens
    made = a_plan((40, 40)).reducer([0, 1], torch.ones(layout.num_tokens), layout)
    assert made(torch.ones(right)).item() == right
    for wrong in {*range(2 * right + 1), right + 1, layout.num_tokens} - {right}:
        with pytest.raises(ReducerError, match=f"got {wrong} per-token losses .* holds {right} on"):
            made(torch.ones(wrong))


@pytest.mark.parametrize("cp", [1, 2])
def test_losses_given_as_s_b_to_bshd_are_refused(cp):
    layout = Layout.bshd_zigzag(2, 12, cp_size=cp, cp_rank=0)
    made = a_plan((12, 12)).reducer([0, 1], torch.ones(2, 12), layout)
    x = torch.arange(24.0 // cp).reshape(2, 12 // cp)
    assert made(x).item() == x.sum().item()
    assert made(x.reshape(-1)).item() == x.sum().item()
    for wrong in (x.t(), x.t().contiguous(), x.reshape(2, 2, 6 // cp), x.reshape(4, 6 // cp)):
        with pytest.raises(
            ReducerError, match=r"not each of their sequences begins .* not \[s, b\]"
        ):
            made(wrong)


def test_packed_losses_in_sequences_are_read_where_each_sequence_begins_with_a_segment():
    made = a_plan((3, 3)).reducer([0, 1], torch.ones(6), thd(3, 3))
    assert made(torch.arange(6.0).reshape(2, 3)).item() == 15
    assert made(torch.ones(2, 1, 3, 1)).item() == 6
    with pytest.raises(ReducerError, match="each of their sequences begins with a segment"):
        made(torch.ones(3, 2))
    long = a_plan((8, 4)).reducer([0, 1], torch.ones(12), thd(8, 4))
    for shape in ((2, 6), (3, 2, 2)):
        with pytest.raises(ReducerError, match="each of their sequences begins with a segment"):
            long(torch.ones(shape))


def test_losses_in_sequences_of_another_length_are_refused_by_bshd():
    layout = Layout.bshd_zigzag(4, 8, cp_size=2, cp_rank=0)
    made = a_plan((8,) * 4).reducer(range(4), torch.ones(4, 8), layout)
    assert made(torch.ones(4, 4)).item() == made(torch.ones(4, 1, 4)).item() == 16
    for shape in ((2, 8), (8, 2), (2, 2, 4)):
        with pytest.raises(ReducerError, match=r"not \[s, b\], or flat"):
            made(torch.ones(shape))


def test_a_mask_given_as_s_b_to_bshd_is_refused():
    layout = Layout.bshd_zigzag(2, 6, cp_size=1, cp_rank=0)
    for shape in ((6, 2), (3, 4), (2, 2, 3)):
        with pytest.raises(ReducerError, match=r"got a mask of .*expected \[b, s\] = \(2, 6\)"):
            a_plan((6, 6)).reducer([0, 1], torch.ones(shape), layout)
    for shape in ((2, 6), (12,), (2, 1, 6)):
        assert a_plan((6, 6)).reducer([0, 1], torch.ones(shape), layout).counted_tokens == 12


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.complex64])
def test_a_mask_of_another_dtype_is_refused(dtype):
    with pytest.raises(ReducerError, match=rf"got a mask of {dtype}, expected bool"):
        a_plan().reducer([0, 1], torch.tensor(MASK).to(dtype), thd(4, 2))


def test_losses_of_eight_bits_are_refused():
    with pytest.raises(
        ReducerError, match=r"float8_e4m3fn tensor of .*, expected per-token losses"
    ):
        a_reducer(MASK)(torch.ones(6).to(torch.float8_e4m3fn))


def test_part_of_a_planned_microbatch_is_refused():
    """It would be weighed by the tokens of the whole one."""
    plan = a_plan((3, 2, 4), microbatch=[0, 0, 2], mode="microbatch_token_mean")
    with pytest.raises(
        ReducerError, match="microbatch 0 was planned with 2 sequences, got 1 without 1"
    ):
        plan.reducer([0, -1], torch.tensor([1, 0, 1, 1, 0, 0]), thd(4, 2))
    plan.reducer([2], torch.ones(4), thd(4))


def test_weights_are_a_copy_and_counts_are_read_only():
    plan = a_plan((3, 1), mode="sample_mean", microbatch=[0, 0])
    plan.weights.mul_(7)
    assert plan.weights.tolist() == [1 / 6, 1 / 2]
    layout = thd(4, 2)
    arrays = [plan.active_tokens, plan.sample_tokens, plan.microbatch, plan.microbatch_tokens]
    arrays += [layout.offset_S1, layout.start_R, layout.length_R, layout.segment_R]
    for array in arrays:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5


def test_weights_are_computed_once_per_step_and_aggregation():
    plan = a_plan((3, 2), mode="sample_mean")
    made = [plan.reducer([0, 1], torch.tensor(MASK), thd(4, 2)) for _ in range(2)]
    first, second = (one.under("token_mean") for one in made)
    assert first.plan is second.plan
    assert first.plan.weight_S is second.plan.weight_S


def test_sequences_of_two_planned_microbatches_are_refused():
    plan = a_plan((3, 2), microbatch=[0, 1])
    with pytest.raises(
        ReducerError, match=r"sequence 0 was planned in microbatch 0 and sequence 1 in .* 1:"
    ):
        plan.reducer([0, 1], torch.tensor(MASK), thd(4, 2))
    mask = torch.tensor([0, 0, 0, 0, 1, 1])
    assert plan.reducer([-1, 1], mask, thd(4, 2)).counted_tokens == 2


def test_sequences_and_counts_that_change_later_change_nothing_here():
    counts, sequences = torch.tensor([3, 2]), np.array([0, 1])
    plan = plan_step(Aggregation("token_mean"), Sequences(active_tokens=counts))
    made = plan.reducer(sequences, torch.tensor(MASK), thd(4, 2))
    counts.mul_(2), sequences.__setitem__(slice(None), [1, 0])
    assert made.counted_tokens == 5
    assert made.under("sample_mean")(torch.ones(6)).item() == pytest.approx(1)
    assert made.sequences.tolist() == [0, 1]


def test_on_cuda_a_mask_with_no_segments_selects_nothing(on_cuda):
    plan = a_plan()
    plan.reducer([], torch.tensor([0, 0]), thd())
    plan.check()
    plan.reducer([], torch.tensor([0, 1, 1]), thd())
    with pytest.raises(ReducerError, match="is 1 at 2 positions past the last segment's end 0"):
        plan.check()


@pytest.mark.parametrize("device", ["framework", "device"])
def test_a_mask_that_selects_fewer_tokens_is_refused_unless_declared(monkeypatch, device):
    on_cuda_if(device, monkeypatch)
    declared = a_plan((4, 2), rejects_tokens=True)
    declared.reducer([0, 1], torch.tensor(MASK), thd(4, 2))
    declared.check()
    plan = a_plan((4, 2), rejects_tokens=False)
    message = "segment 0 trains 3 tokens, the plan counted 4 for its sequence 0: .*rejects-tokens"
    with pytest.raises(ReducerError, match=message):
        reducer_checked(plan, [0, 1])


@pytest.mark.parametrize("device", ["framework", "device"])
def test_a_local_mask_holds_a_part_of_each_sequence(monkeypatch, device):
    on_cuda_if(device, monkeypatch)
    plan = a_plan((8, 4), rejects_tokens=False)
    made = plan.reducer([0, 1], torch.ones(6), Layout.local([4, 2], cp_size=2, cp_rank=1))
    plan.check()
    assert plan.state.trained.of_sequences() is None
    made(torch.ones(6))
    assert plan.state.trained.of_sequences().tolist() == [4, 2]


@pytest.mark.parametrize("device", ["framework", "device"])
@pytest.mark.parametrize(("layout", "warns"), [("thd", True), ("bshd", True), ("response", False)])
def test_a_mask_that_looks_unshifted_warns_once(monkeypatch, device, layout, warns):
    """A segment's last logit predicts the next segment's first token."""
    on_cuda_if(device, monkeypatch)
    monkeypatch.setattr(faults, "_warned", set())
    layout = {
        "thd": lambda: thd(4, 2),
        "bshd": lambda: Layout.bshd_zigzag(2, 3, cp_size=1, cp_rank=0),
        "response": lambda: Layout.response_zigzag([5, 3], [4, 2], cp_size=1, cp_rank=0),
    }[layout]()
    for mask, expected in (([1, 0, 0, 0, 1, 0], False), (MASK, warns), (MASK, False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plan = a_plan((6, 6))
            plan.reducer([0, 1], torch.tensor(mask), layout)
            plan.check()
        assert ["last position of a segment" in str(w.message) for w in caught] == [True] * expected


# Losses that are not finite


LAYOUTS = {
    "thd": (lambda rank: thd(8, 4, 12, cp_size=2, cp_rank=rank), [8, 4, 12]),
    "bshd": (lambda rank: Layout.bshd_zigzag(3, 8, cp_size=2, cp_rank=rank), [8] * 3),
    "response": (
        lambda rank: Layout.response_zigzag([9, 4, 14], [8, 1, 3], cp_size=2, cp_rank=rank),
        [8, 1, 3],
    ),
    "response, padded": (
        lambda rank: Layout.response_zigzag(
            [9, 4, 14], [8, 1, 3], cp_size=2, cp_rank=rank, max_seq_len=16
        ),
        [8, 1, 3],
    ),
}


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_loss_that_is_not_finite_names_its_sequence_segment_and_token(name, rank, value):
    layout_of, lengths = LAYOUTS[name]
    layout, sequences = layout_of(rank), [5, 3, 4]
    plan = a_plan(
        [0, 0, 0, *(lengths[sequences.index(sequence)] for sequence in (3, 4, 5))],
        mode="sample_mean",
    )
    whole = torch.ones(sum(lengths))
    places = [(g, t) for g, length in enumerate(lengths) for t in range(length)]
    held = layout.positions.tolist()
    for position in held:
        x = whole.clone()
        x[position] = value
        segment, token = places[position]
        with pytest.raises(ReducerError) as caught:
            plan.reducer(sequences, torch.ones(len(x)), layout)(x[held])
        assert str(caught.value).startswith(
            f"rank 0 (context-parallel rank {rank}): the loss of sequence "
            f"{sequences[segment]} (segment "
            f"{segment} of a microbatch with sequences 5, 3, 4) is {value} at its token "
            f"{token}: check "
        )


def test_the_first_of_several_losses_that_are_not_finite_is_named():
    x = torch.tensor([torch.nan, torch.nan, 1, -torch.inf, torch.nan, 1])
    with pytest.raises(
        ReducerError, match=r"sequence 0 .*is nan at its token 0: .* clear the mask"
    ):
        a_reducer(MASK)(x)
    with pytest.raises(ReducerError, match=r"sequence 0 .*is -inf at its token 3"):
        a_reducer([0, 0, 1, 1, 1, 1])(x)


def test_a_loss_that_is_not_finite_names_its_microbatch_where_the_plan_knows_it():
    reducer = a_plan((3, 2), microbatch=[7, 7]).reducer([0, 1], torch.tensor(MASK), thd(4, 2))
    with pytest.raises(
        ReducerError, match=r"sequence 1 \(segment 1 of microbatch 7 with sequences 0, 1\)"
    ):
        reducer(torch.tensor([1, 1, 1, 1, 1, torch.nan]))


def test_a_long_microbatch_is_named_by_its_first_sequences():
    reducer = a_reducer([1] * 9, active=[1] * 9, sequences=range(9), lengths=[1] * 9)
    with pytest.raises(ReducerError, match=r"with sequences 0, 1, 2, 3, 4, 5, \.\.\.\) is nan"):
        reducer(torch.full((9,), torch.nan))


def test_a_microbatch_of_six_sequences_is_named_by_all_of_them():
    for n, listed in ((6, "0, 1, 2, 3, 4, 5)"), (7, "0, 1, 2, 3, 4, 5, ...)")):
        reducer = a_reducer([1] * n, active=[1] * n, sequences=range(n), lengths=[1] * n)
        with pytest.raises(ReducerError, match=re.escape(f"with sequences {listed} is nan")):
            reducer(torch.full((n,), torch.nan))


def test_a_token_of_a_local_sequence_is_counted_in_this_ranks_part():
    layout = Layout.local([4, 2], cp_size=2, cp_rank=1)
    reducer = a_plan((8, 4)).reducer([0, 1], torch.ones(6), layout)
    with pytest.raises(ReducerError, match=r"sequence 1 .* at its token 1 of this rank's part: "):
        reducer(torch.tensor([1, 1, 1, 1, 1, torch.nan]))
    whole = a_plan((4, 2)).reducer(
        [0, 1], torch.ones(6), Layout.local([4, 2], cp_size=1, cp_rank=0)
    )
    with pytest.raises(ReducerError, match=r"sequence 1 .* at its token 1: "):
        whole(torch.tensor([1, 1, 1, 1, 1, torch.nan]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_an_overflowing_sum_of_finite_losses_is_reported(dtype):
    x = torch.full((6,), torch.finfo(dtype).max, dtype=dtype)
    with pytest.raises(
        ReducerError, match="every trained loss of a microbatch with sequences 0, 1 is f"
    ):
        a_reducer(MASK)(x)
    with pytest.raises(ReducerError, match="is inf: the sum overflows; scale the losses down"):
        a_reducer(MASK)(x)
    assert a_reducer(MASK, mode="token_sum", divisor=64)(x / 8).isfinite()


def test_the_losses_of_a_custom_reducer_are_checked_as_well_as_its_share():
    def factory(context):
        return lambda x: x.nan_to_num().sum()

    custom = a_plan().reducer([0, 1], torch.tensor(MASK), thd(4, 2), factory=factory)
    assert custom(torch.tensor([1, torch.nan, 1, 1, 1, 1])).item() == 5
    with pytest.raises(ReducerError, match=r"sequence 1 .* is nan at its token 0"):
        custom(torch.tensor([1.0, 1, 1, 1, torch.nan, 1]))
    wrong = a_plan().reducer(
        [0, 1], torch.tensor(MASK), thd(4, 2), factory=lambda c: lambda x: x.sum() * torch.nan
    )
    with pytest.raises(
        ReducerError, match="is finite and their share is nan: check the custom red"
    ):
        wrong(torch.ones(6))


@pytest.mark.parametrize("mode", ["token_mean", "sample_mean", "token_sum"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("poison", [None, torch.inf, torch.nan])
def test_the_masked_sum_is_bit_for_bit_the_plain_one(mode, dtype, poison, monkeypatch):
    """The CPU's plain sum, its fallback where a masked loss is not finite, and the device's."""
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(6, generator=generator).to(dtype)
    weights = a_plan(mode=mode).weights.to(torch.promote_types(dtype, torch.float32))
    weight_T = torch.repeat_interleave(weights, torch.tensor([4, 2])) * torch.tensor(MASK)
    expected = (values * weight_T).sum()
    if poison is not None:
        values[1] = poison  # not trained
    for is_framework in (True, False):
        for module in (microbatch, reducer):
            monkeypatch.setattr(
                module, "on_host", lambda tensor, is_framework=is_framework: is_framework
            )
        x = values.clone().requires_grad_()
        share = a_reducer(MASK, mode=mode)(x)
        share.backward()
        assert torch.equal(share, expected)
        assert torch.equal(x.grad, weight_T.to(dtype))
        assert torch.equal(x.detach(), values) or poison is torch.nan


def test_a_cuda_loss_that_is_not_finite_is_located_without_reading_it(on_cuda):
    plan = a_plan(microbatch=[4, 4])
    bad = torch.tensor([1, torch.inf, 1, 1, 1, torch.nan], requires_grad=True)
    with Operations() as operations:
        made = plan.reducer([0, 1], torch.tensor(MASK), thd(4, 2))
        made(torch.ones(6)), made(bad), made(torch.full((6,), torch.nan))
    assert not read_by_the_framework(operations)
    with pytest.raises(ReducerError) as caught:
        plan.check()
    assert (
        "rank 0 (context-parallel rank 0): the loss of sequence 1 (segment 1 of microbatch "
        "4 with sequences "
        "0, 1) is nan at its token 1: check what the loss is computed from"
    ) in str(caught.value)
    plan.check()  # raised once


def test_a_cuda_sum_that_overflows_is_raised_with_its_step(on_cuda):
    plan = a_plan()
    plan.reducer([0, 1], torch.tensor(MASK), thd(4, 2))(torch.full((6,), 3e38))
    with pytest.raises(ReducerError, match=r"every trained loss .* share is inf: the sum over"):
        plan.check()


def test_on_cuda_a_custom_reducer_that_swallows_a_nan_is_raised_with_its_step(on_cuda):
    plan = a_plan()
    custom = plan.reducer(
        [0, 1], torch.tensor(MASK), thd(4, 2), factory=lambda c: lambda x: x.nan_to_num().sum()
    )
    custom(torch.tensor([1, torch.nan, 1, 1, 1, 1]))
    plan.check()
    custom(torch.tensor([torch.nan, 1, 1, 1, 1, 1]))
    with pytest.raises(ReducerError, match=r"sequence 0 .* is nan at its token 0"):
        plan.check()


def test_on_cuda_a_custom_share_that_is_not_finite_is_the_custom_reducers(on_cuda):
    plan = a_plan()
    wrong = plan.reducer(
        [0, 1], torch.tensor(MASK), thd(4, 2), factory=lambda c: lambda x: x.sum() * torch.nan
    )
    wrong(torch.ones(6))
    with pytest.raises(ReducerError, match="is finite and their share is nan: check the custom"):
        plan.check()


def test_what_a_step_has_to_read_keeps_neither_mask_nor_weights_until_it_closes(on_cuda):
    plan = a_plan(mode="sample_mean")
    made = plan.reducer([0, 1], torch.tensor(MASK), thd(4, 2))
    made(torch.full((6,), torch.nan)), made.under("token_mean")(torch.ones(6))
    kept = weakref.ref(made.microbatch)
    del made
    gc.collect()
    assert kept() is None
    with pytest.raises(ReducerError, match=r"of a microbatch with sequences 0, 1\) is nan"):
        plan.check()


def test_a_device_holds_4_bytes_per_token_for_the_backward_pass_of_all_metrics(on_cuda):
    made = a_reducer(MASK, mode="sample_mean")
    held = {}

    def pack(tensor):
        held[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for _ in range(5):
            made(torch.ones(6, requires_grad=True))
    assert sum(held.values()) == 4 * 6


# Custom reducers


def doubled_sum(context):
    assert context.sequences.tolist() == [0, 1]
    assert context.mask.tolist() == [bool(m) for m in MASK]
    assert context.layout.num_tokens == 6
    assert context.aggregation.mode == "token_sum"
    assert context.arguments == "the framework's"
    weights = context.plan.under("token_mean").weights
    return lambda x: 2 * x.sum() + 0 * weights.sum()


def test_a_custom_reducer_gets_float32_for_half_precision_losses():
    seen = []
    reducer = a_plan().reducer(
        [0, 1],
        torch.tensor(MASK),
        thd(4, 2),
        factory=lambda c: lambda x: (seen.append(x.dtype), x.sum())[1],
    )
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        reducer(torch.ones(6, dtype=dtype))
    assert seen == [torch.float32, torch.float32, torch.float64]


def test_a_custom_reducer_gets_masked_losses_and_the_whole_context():
    plan = a_plan()
    reducer = plan.reducer(
        [0, 1], torch.tensor(MASK), thd(4, 2), factory=doubled_sum, arguments="the framework's"
    )
    assert reducer(torch.tensor([1.0, torch.nan, 1, 1, 1, 1])).item() == 10
    assert reducer.weight_sum() is None
    assert reducer.under("token_mean")(torch.ones(6)).item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (lambda x: x, r"float32 tensor of shape \(6,\): return a 0-dim"),
        (lambda x: 1.0, r"returned 1\.0: return a 0-dim"),
        (lambda x: x.sum().long(), "int64"),
    ],
)
def test_a_custom_share_is_a_floating_point_scalar(share, message):
    reducer = a_plan().reducer([0, 1], torch.tensor(MASK), thd(4, 2), factory=lambda c: share)
    with pytest.raises(ReducerError, match=message):
        reducer(torch.ones(6))


def test_a_custom_share_may_be_of_any_float_type_and_keeps_its_graph():
    x = torch.ones(6, requires_grad=True)
    reducer = a_plan().reducer(
        [0, 1], torch.tensor(MASK), thd(4, 2), factory=lambda c: lambda x: x.double().sum()
    )
    share = reducer(x)
    share.backward()
    assert share.dtype == torch.float64
    assert x.grad.tolist() == MASK


def test_a_custom_reducer_sees_only_this_ranks_slice():
    seen = {}

    def factory(context):
        seen["mask"], seen["rank"] = context.mask.tolist(), context.layout.cp_rank
        return lambda x: seen.setdefault("x", x).sum()

    plan = a_plan((6,))
    layout = thd(8, cp_size=2, cp_rank=1)  # holds 2, 3, 4, 5
    reducer = plan.reducer([0], torch.tensor([1, 1, 0, 1, 1, 1, 0, 1]), layout, factory=factory)
    assert reducer(torch.tensor([[2.0, 3, 4, 5]])).item() == 12
    assert (seen["mask"], seen["rank"]) == ([False, True, True, True], 1)
    assert seen["x"].tolist() == [0, 3, 4, 5]


def test_a_factory_returns_a_callable():
    with pytest.raises(ReducerError, match="factory returned 3: return a callable"):
        a_plan().reducer([0, 1], torch.tensor(MASK), thd(4, 2), factory=lambda c: 3)


def test_losses_may_include_or_omit_the_tail():
    mask = torch.cat([torch.ones(8), torch.zeros(4)])
    reducer = a_plan([8]).reducer([0], mask, thd(8, cp_size=2, cp_rank=1))
    assert reducer(torch.ones(4)).item() == 4
    assert reducer(torch.ones(6)).item() == 4  # 12 tokens over CP 2: this rank's, tail included
    with pytest.raises(ReducerError, match="got 5 per-token losses"):
        reducer(torch.ones(5))
    with pytest.raises(ReducerError, match="got 12 per-token losses"):
        reducer(torch.ones(12))


@pytest.mark.parametrize(
    ("lengths", "total"),
    [((4, 8), 16), ((12,), 16), ((4, 4, 4, 4), 32), ((8, 24), 48)],
)
def test_losses_of_padded_sequences_under_offsets_without_padding_are_refused(lengths, total):
    """Lengths that are multiples of 2 CP all the same: other tokens would be trained."""
    mask = torch.zeros(total)
    mask[0] = 1
    plan = a_plan([1] + [0] * (len(lengths) - 1))
    layout = thd(*lengths, cp_size=2, cp_rank=0)
    made = plan.reducer(range(len(lengths)), mask, layout)
    assert made(torch.ones(layout.num_local_tokens)).item() == 1  # sliced by the same offsets
    with pytest.raises(ReducerError, match=r"pass the padded offsets .* give that segment -1"):
        made(torch.ones(total // 2))
    tail = thd(*lengths, total - sum(lengths), cp_size=2, cp_rank=0)
    assert plan.reducer([*range(len(lengths)), -1], mask, tail)(torch.ones(total // 2)).item() == 1
