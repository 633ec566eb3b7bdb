"""Per-token losses to a partial loss: what is seen, and what is not."""

import importlib

import numpy as np
import pytest
import torch
from device_double import DEVICES, on
from steps import MASK, a_plan, a_reducer, thd

from megatron_lossagg import Aggregation, Layout, Sequences, plan_step
from megatron_lossagg.errors import LayoutError, ReducerError
from megatron_lossagg.reduction.microbatch import Microbatch


@pytest.mark.parametrize("poison", [torch.inf, -torch.inf, torch.nan])
def test_masked_positions_affect_neither_partial_loss_nor_gradient(poison):
    x = torch.tensor([1.0, poison, 2, 3, 4, 5], requires_grad=True)
    partial_loss = a_reducer(MASK)(x)
    partial_loss.backward()
    assert partial_loss.item() == 15
    assert x.grad.tolist() == [1, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_losses_are_accumulated_in_float32(dtype):
    n = 4097  # in bf16 a running sum of ones stops at 256, in fp16 at 2048
    reducer = a_reducer([1] * n, active=[n], sequences=[0], lengths=[n])
    partial_loss = reducer(torch.ones(n, dtype=dtype))
    assert partial_loss.dtype == torch.float32
    assert partial_loss.item() == n


@pytest.mark.filterwarnings("ignore")  # torch's own, while it traces
def test_a_compiled_reducer_follows_other_weights_masks_and_sizes():
    compiled = torch.compile(lambda reducer, x: reducer(x), backend="aot_eager")
    for mode in ("sample_mean", "token_mean"):
        for last in (2, 3):
            mask = [*MASK[:4], *[1] * last]
            plan = a_plan((sum(MASK[:4]), last), mode=mode)
            reducer = plan.reducer([0, 1], torch.tensor(mask), thd(4, last))
            found, expected = (torch.ones(4 + last, requires_grad=True) for _ in range(2))
            compiled(reducer, found).backward()
            reducer(expected).backward()
            assert found.grad.tolist() == expected.grad.tolist()


def test_an_empty_rank_is_connected_to_the_graph():
    x = torch.zeros(0, requires_grad=True)
    plan = a_plan([2])
    layout = Layout.response_zigzag([12], [2], cp_size=2, cp_rank=1)
    assert layout.num_local_tokens == 0
    partial_loss = plan.reducer([0], torch.ones(2), layout)(x)
    partial_loss.backward()
    assert partial_loss.item() == 0
    assert x.grad.shape == (0,)


def test_a_microbatch_with_no_active_tokens_reaches_backward():
    x = torch.full((6,), torch.nan, requires_grad=True)
    partial_loss = a_reducer([0] * 6)(x)
    partial_loss.backward()
    assert partial_loss.item() == 0
    assert x.grad.tolist() == [0] * 6


@pytest.mark.parametrize("shape", [(6,), (1, 6), (6, 1), (1, 6, 1)])
def test_losses_and_mask_of_any_shape_are_read_in_order(shape):
    reducer = a_plan().reducer([0, 1], torch.tensor(MASK).reshape(shape), thd(4, 2))
    assert reducer(torch.arange(6.0).reshape(shape)).item() == 14


def test_bshd_losses_are_read_sequence_by_sequence():
    plan = a_plan((8, 8), mode="sample_mean")
    x = torch.arange(16.0).reshape(2, 8)
    partial_losses = []
    for rank, positions in ((0, [0, 1, 6, 7]), (1, [2, 3, 4, 5])):
        layout = Layout.bshd_zigzag(2, 8, cp_size=2, cp_rank=rank)
        partial_losses.append(
            plan.reducer([1, 0], torch.ones(2, 8), layout)(x[:, positions]).item()
        )
    assert sum(partial_losses) == pytest.approx(x.mean().item())
    assert partial_losses[0] == pytest.approx(x[:, [0, 1, 6, 7]].sum().item() / 16)


def test_the_inputs_are_not_changed():
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


def test_a_partial_loss_has_its_own_storage_for_megatron_to_scale():
    partial_loss = a_reducer(MASK)(torch.ones(6, requires_grad=True))
    assert partial_loss._base is None
    assert not partial_loss.is_leaf


def test_tokens_past_the_last_offset_have_weight_0():
    reducer = a_reducer([1, 1, 1, 1, 1, 0, 0], active=(3, 2), lengths=(3, 2))
    x = torch.tensor([1.0, 1, 1, 1, 1, torch.nan, 7], requires_grad=True)
    partial_loss = reducer(x)
    partial_loss.backward()
    assert partial_loss.item() == 5
    assert x.grad.tolist() == [1] * 5 + [0, 0]


def test_a_padding_has_weight_0_and_any_losses():
    mask = [1, 1, 0, 0, 1, 0, 1, 1, 1]
    reducer = a_reducer(mask, (2, 4), (0, -1, 1), lengths=(2, 2, 5), mode="sample_mean")
    x = torch.tensor([1, 1, torch.nan, torch.inf, 1, 1, 1, 1, 1])
    assert reducer(x).item() == reducer.weight_sum().item() == 1
    assert reducer.counted_tokens == 6


def test_a_training_mask_that_selects_fewer_tokens_keeps_the_denominator():
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


def test_sequences_of_one_weight_among_masked_sequences_and_paddings_keep_that_weight():
    plan = a_plan((3, 0, 2), mode="constant", divisor=5)
    x = torch.arange(1.0, 9)
    made = plan.reducer([0, 1, 2], torch.tensor([1, 1, 1, 0, 0, 0, 1, 1]), thd(3, 3, 2))
    assert made(x).item() == pytest.approx((1 + 2 + 3 + 7 + 8) / 15)
    made = plan.reducer([0, -1, 2], torch.tensor([1, 1, 1, 0, 0, 0, 1, 1]), thd(3, 3, 2))
    assert made(x).item() == pytest.approx((1 + 2 + 3 + 7 + 8) / 15)


def test_a_microbatch_without_segments_is_an_empty_partial_loss():
    x = torch.zeros(0, requires_grad=True)
    reducer = a_plan().reducer([], torch.zeros(0), thd())
    partial_loss = reducer(x)
    partial_loss.backward()
    assert (partial_loss.item(), reducer.counted_tokens) == (0, 0)


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


WRONG_LENGTHS = {
    "thd": lambda cp, rank: thd(8 * cp, 4 * cp, cp_size=cp, cp_rank=rank),
    "bshd": lambda cp, rank: Layout.bshd_zigzag(2, 4 * cp, cp_size=cp, cp_rank=rank),
    "response": lambda cp, rank: Layout.response_zigzag([12, 9], [8, 3], cp_size=cp, cp_rank=rank),
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


@pytest.mark.parametrize("reduced", [torch.sum, torch.mean])
def test_one_loss_of_a_whole_microbatch_is_refused_as_what_it_is(reduced):
    made = a_plan().reducer([0, 1], torch.tensor(MASK), thd(4, 2))
    with pytest.raises(ReducerError, match="one loss without a dimension, expected 6 per-token"):
        made(reduced(torch.arange(6.0)))


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


def test_losses_of_eight_bits_are_refused():
    with pytest.raises(
        ReducerError, match=r"float8_e4m3fn tensor of .*, expected per-token losses"
    ):
        a_reducer(MASK)(torch.ones(6).to(torch.float8_e4m3fn))


def test_weights_are_a_copy_and_counts_are_read_only():
    plan = a_plan((3, 1), mode="sample_mean", microbatch=[0, 0])
    plan.weights.mul_(7)
    assert plan.weights.tolist() == [1 / 6, 1 / 2]
    layout = thd(4, 2)
    arrays = [plan.active_tokens, plan.sequences.microbatch]
    arrays += [plan.weight_S, plan.weight_A]
    arrays += [layout.offset_G1, layout.start_R, layout.length_R, layout.segment_R]
    for array in arrays:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5


def test_sequences_and_counts_that_change_later_change_nothing_here():
    counts, sequences = torch.tensor([3, 2]), np.array([0, 1])
    plan = plan_step(Aggregation("token_mean"), Sequences(active_tokens=counts))
    made = plan.reducer(sequences, torch.tensor(MASK), thd(4, 2))
    counts.mul_(2), sequences.__setitem__(slice(None), [1, 0])
    assert made.counted_tokens == 5
    assert made.under("sample_mean")(torch.ones(6)).item() == pytest.approx(1)
    assert made.sequences.tolist() == [0, 1]


@DEVICES
@pytest.mark.parametrize("mode", ["token_mean", "sample_mean", "token_sum"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("poison", [None, torch.inf, torch.nan])
def test_the_masked_sum_is_bit_for_bit_the_plain_one(mode, dtype, poison, device):
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(6, generator=generator).to(dtype)
    weights = a_plan(mode=mode).weights.to(torch.promote_types(dtype, torch.float32))
    weight_T = torch.repeat_interleave(weights, torch.tensor([4, 2])) * torch.tensor(MASK)
    expected = (values * weight_T).sum()
    if poison is not None:
        values[1] = poison  # not trained
    with on(device) as to:
        x = to(values.clone()).requires_grad_()
        partial_loss = a_plan(mode=mode).reducer([0, 1], to(MASK), thd(4, 2))(x)
        partial_loss.backward()
        assert partial_loss.dtype == expected.dtype
        assert torch.equal(partial_loss.cpu(), expected)
        assert torch.equal(x.grad.cpu(), weight_T.to(dtype))
        assert torch.equal(x.detach().cpu(), values) or poison is torch.nan


@DEVICES
@pytest.mark.parametrize("cp_rank", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float32])
def test_a_mask_with_empty_sequences_is_sliced_and_weighed(dtype, cp_rank, device):
    generator = torch.Generator().manual_seed(3)
    lengths = [0, 8, 4, 0, 12]
    mask = (torch.rand(28, generator=generator) < 0.6).to(dtype)
    mask[24:] = 0
    parts = mask[:24].long().split(lengths)
    plan = a_plan([int(part.sum()) for part in parts], mode="sample_mean")
    layout = thd(*lengths, cp_size=2, cp_rank=cp_rank)
    weight_P = torch.repeat_interleave(plan.weights, torch.tensor(lengths)) * mask[:24]
    with on(device) as to:
        x = to(torch.arange(12.0)).requires_grad_()
        made = plan.reducer(range(5), to(mask), layout)
        partial_loss = made(x)
        partial_loss.backward()
        plan.check()
        expected = weight_P[layout.positions].float()
        assert x.grad.tolist() == expected.tolist()
        assert made.keep.tolist() == (expected > 0).tolist()
        assert partial_loss.item() == pytest.approx((torch.arange(12.0) * expected).sum().item())


def test_losses_may_include_or_omit_the_tail():
    mask = torch.cat([torch.ones(8), torch.zeros(4)])
    reducer = a_plan([8]).reducer([0], mask, thd(8, cp_size=2, cp_rank=1))
    assert reducer(torch.ones(4)).item() == 4
    with pytest.raises(ReducerError, match="which says not how the last 4 are sliced: "):
        reducer(torch.ones(6))  # 12 tokens over CP 2
    alone = a_plan([8]).reducer([0], mask, thd(8))
    assert alone(torch.ones(8)).item() == alone(torch.ones(12)).item() == 8
    with pytest.raises(ReducerError, match="got 5 per-token losses"):
        reducer(torch.ones(5))
    with pytest.raises(ReducerError, match="got 12 per-token losses"):
        reducer(torch.ones(12))


@pytest.mark.parametrize(
    ("lengths", "total"),
    [((4, 8), 16), ((12,), 16), ((4, 4, 4, 4), 32), ((8, 24), 48), ((8, 8), 24)],
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


@DEVICES
@pytest.mark.parametrize("tail", [0, 8])
def test_of_gathered_losses_each_rank_trains_those_of_its_own_logits(device, tail):
    mask = [1, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 1] + [0] * tail
    plan, found, gradients = a_plan((5, 2), mode="sample_mean", rejects_tokens=False), 0.0, []
    with on(device) as to:
        for cp_rank in (0, 1):
            layout = thd(8, 4, tail, cp_size=2, cp_rank=cp_rank).gathered()
            x = to(torch.arange(1.0, 13 + tail)).requires_grad_()
            partial_loss = plan.reducer([0, 1, -1], to(mask), layout)(x)
            partial_loss.backward()
            found += partial_loss.item()
            gradients.append(x.grad.tolist())
    assert found == pytest.approx((1 + 3 + 4 + 5 + 8) / 10 + (9 + 12) / 4)
    of_0, of_1 = gradients
    assert of_0 == pytest.approx([0.1, 0, 0, 0, 0, 0, 0, 0.1, 0.25, 0, 0, 0.25] + [0] * tail)
    assert of_1 == pytest.approx([0, 0, 0.1, 0.1, 0.1, 0, 0, 0, 0, 0, 0, 0] + [0] * tail)


def test_a_tail_of_gathered_losses_needs_a_segment_unless_the_gather_sums():
    mask, losses = torch.tensor([1.0] * 8 + [0.0] * 4), torch.ones(12)
    split = thd(8, cp_size=2, cp_rank=0)
    assert a_plan([8]).reducer([0], mask, split.gathered(sums_gradients=True))(losses).item() == 4
    with pytest.raises(ReducerError, match="give that segment -1"):
        a_plan([8]).reducer([0], mask, split.gathered())(losses)


def test_gathered_losses_are_those_of_the_whole_mask_in_its_order():
    layout = Layout.bshd_zigzag(2, 8, cp_size=2, cp_rank=1).gathered()
    reducer = a_plan((8, 8)).reducer([0, 1], torch.ones(2, 8), layout)
    assert reducer(torch.ones(2, 8)).item() == pytest.approx(8)
    with pytest.raises(ReducerError, match=r"got 8 .* holds 16 on CP rank 1 of 2: .* whole mask"):
        reducer(torch.ones(2, 4))
    with pytest.raises(ReducerError, match=r"got losses of shape \(8, 2\)"):
        reducer(torch.ones(8, 2))
    with pytest.raises(LayoutError, match=r"local, whose mask is this rank's part"):
        Layout.local([4], cp_size=2, cp_rank=0).gathered()


@pytest.mark.parametrize(
    ("module", "name"), [("reduction.reducer", "Reducer"), ("loop.step", "MicrobatchLoss")]
)
def test_a_former_name_leads_to_the_microbatch_with_a_warning(module, name):
    module = importlib.import_module(f"megatron_lossagg.{module}")
    with pytest.warns(DeprecationWarning, match=f"{name} is now reduction.microbatch.Microbatch"):
        assert getattr(module, name) is Microbatch
    with pytest.raises(AttributeError):
        module.Reducers  # noqa: B018


def test_a_microbatch_of_the_plan_has_no_outputs():
    made = a_plan().reducer([0, 1], torch.tensor(MASK), thd(4, 2))
    loss = made(torch.ones(6))
    for call in (lambda: made.outputs(loss), lambda: made.shadow(torch.ones(6))):
        with pytest.raises(ReducerError, match=r"belongs to no step: .* step\.microbatch"):
            call()
