"""A mask and its sequences are checked before a token is trained."""

import itertools
import warnings

import numpy as np
import pytest
import torch
from device_double import DEVICES, on
from steps import MASK, a_plan, a_reducer, thd

from megatron_lossagg import Aggregation, Layout, Sequences, plan_step
from megatron_lossagg.errors import ReducerError
from megatron_lossagg.reduction import faults
from megatron_lossagg.reduction.layout import held_sums

MASK_DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
]


def checked(plan, mask, device, sequences=(0, 1), layout=None):
    """Make a reducer of a mask; what a device found is raised when the plan is checked."""
    layout = thd(4, 2) if layout is None else layout
    with on(device) as to:
        made = plan.reducer(list(sequences), to(mask), layout)
        if device != "cpu":
            assert not to.syncs
        plan.check()
        plan.check()  # raised once
    return made


@DEVICES
@pytest.mark.parametrize("dtype", MASK_DTYPES[2:])
def test_a_mask_is_0_or_1(dtype, device):
    fractions = (0.5, torch.nan) if dtype.is_floating_point else ()
    for value in (-1, 2, 100, *fractions):
        mask = torch.tensor(MASK).to(dtype)
        mask[3] = value
        what = f"{value} at position 3" if device == "cpu" else "other numbers than 0 and 1 at 1"
        held = rf"rank 0 \(.*\): the mask of .* holds {what}.*: a mask is 0 or 1"
        with pytest.raises(ReducerError, match=f"{held}.*--loss-aggregation-count weights"):
            checked(a_plan(), mask, device)


@DEVICES
@pytest.mark.parametrize("dtype", MASK_DTYPES)
def test_a_mask_of_any_dtype_is_a_mask(dtype, device):
    n = 70_000  # more than an int16 or a half holds
    mask = torch.ones(n + 2).to(dtype)
    assert checked(a_plan((n, 2)), mask, device, layout=thd(n, 2)).counted_tokens == n + 2
    with pytest.raises(ReducerError, match=f"trains {n} tokens, the plan counted {n - 1}"):
        checked(a_plan((n - 1, 2)), mask, device, layout=thd(n, 2))


@pytest.mark.parametrize("cp_rank", [0, 1])
@pytest.mark.parametrize("rejects_tokens", [False, True])
def test_every_rank_refuses_a_value_that_one_of_them_holds(cp_rank, rejects_tokens):
    mask = torch.ones(8)
    mask[3] = 0.5  # of the second chunk, which rank 1 holds
    plan, layout = a_plan([8], rejects_tokens=rejects_tokens), thd(8, cp_size=2, cp_rank=cp_rank)
    with pytest.raises(ReducerError, match=r"holds 0\.5 at position 3"):
        checked(plan, mask, "cpu", [0], layout)


@DEVICES
@pytest.mark.parametrize("value", [-1, -100, torch.nan])
@pytest.mark.parametrize("rejects_tokens", [False, True])
def test_a_value_that_is_not_0_or_1_is_refused_past_the_end_too(device, value, rejects_tokens):
    plan = a_plan(rejects_tokens=rejects_tokens)
    what = "at position 6" if device == "cpu" else "other numbers than 0 and 1 at 1 positions"
    with pytest.raises(ReducerError, match=f"holds .*{what}: a mask is 0 or 1"):
        checked(plan, [*MASK, value], device)


def test_none_is_refused_as_a_mask():
    with pytest.raises(
        ReducerError, match=r"got the mask None, expected .* pass the microbatch's whole"
    ):
        a_plan().reducer([0, 1], None, thd(4, 2))


def test_a_mask_of_the_wrong_length_is_refused():
    with pytest.raises(ReducerError, match="mask of 5 tokens, the layout thd_zigzag has 6"):
        a_reducer([1] * 5)
    with pytest.raises(ReducerError, match="mask of 7 tokens, the layout local has 6"):
        a_plan().reducer([0, 1], torch.ones(7), Layout.local([4, 2], cp_size=1, cp_rank=0))


def test_a_mask_given_as_s_b_to_bshd_is_refused():
    layout = Layout.bshd_zigzag(2, 6, cp_size=1, cp_rank=0)
    for shape in ((6, 2), (3, 4), (2, 2, 3)):
        with pytest.raises(ReducerError, match=r"got a mask of .*expected \[b, s\] = \(2, 6\)"):
            a_plan((6, 6)).reducer([0, 1], torch.ones(shape), layout)
    for shape in ((2, 6), (12,), (2, 1, 6)):
        assert a_plan((6, 6)).reducer([0, 1], torch.ones(shape), layout).counted_tokens == 12


def test_a_mask_that_is_trained_is_refused():
    mask = torch.tensor(MASK, dtype=torch.float32, requires_grad=True)
    with pytest.raises(ReducerError, match="got a mask that requires a gradient"):
        a_plan().reducer([0, 1], mask, thd(4, 2))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.complex64])
def test_a_mask_of_another_dtype_is_refused(dtype):
    with pytest.raises(ReducerError, match=rf"got a mask of {dtype}, expected bool"):
        a_plan().reducer([0, 1], torch.tensor(MASK).to(dtype), thd(4, 2))


@DEVICES
def test_a_trained_token_past_the_end_is_refused(device):
    for past in ([1], [0, 0, 1]):
        with pytest.raises(ReducerError, match="is 1 at 1 positions past the last segment's end 6"):
            checked(a_plan(), [*MASK, *past], device)
    checked(a_plan(), [*MASK, 0, 0], device)


@DEVICES
def test_a_mask_that_selects_more_tokens_than_counted_is_refused(device):
    with pytest.raises(ReducerError, match="segment 1 trains 2 tokens, the plan counted 1"):
        checked(a_plan((3, 1)), MASK, device)
    with pytest.raises(ReducerError, match="segment 0 trains 3 tokens, the plan counted 2"):
        checked(a_plan((2, 2)), MASK, device)


@DEVICES
@pytest.mark.parametrize("rejects_tokens", [False, True])
def test_a_segment_named_as_padding_whose_mask_is_1_is_refused(device, rejects_tokens):
    """Its tokens would not be trained, and nothing else would say so."""
    plan = a_plan((3, 2), rejects_tokens=rejects_tokens)
    message = r"segment 1 is named as padding \(-1\) and its mask is 1 at 2 positions"
    with pytest.raises(ReducerError, match=message):
        checked(plan, MASK, device, [0, -1])


@DEVICES
@pytest.mark.parametrize("rejects_tokens", [False, True])
@pytest.mark.parametrize("lengths", [(0, 6), (0, 0, 6)], ids=["one", "two"])
def test_tokens_of_an_empty_first_segment_are_not_those_of_the_next(
    lengths, rejects_tokens, device
):
    """It was counted with 1 token, and the last segment trains 1 more than was counted."""
    none = [0] * (len(lengths) - 2)
    plan = a_plan((1, *none, 3), rejects_tokens=rejects_tokens)
    message = f"segment {len(lengths) - 1} trains 4 tokens, the plan counted 3"
    with pytest.raises(ReducerError, match=message):
        checked(plan, [1, 1, 1, 1, 0, 0], device, range(len(lengths)), thd(*lengths))
    right = a_plan((0, *none, 4), rejects_tokens=rejects_tokens)
    checked(right, [1, 1, 1, 1, 0, 0], device, range(len(lengths)), thd(*lengths))


@DEVICES
def test_a_mask_that_selects_fewer_tokens_is_refused_unless_declared(device):
    checked(a_plan((4, 2), rejects_tokens=True), MASK, device)
    message = "segment 0 trains 3 tokens, the plan counted 4 for its sequence 0: .*rejects-tokens"
    with pytest.raises(ReducerError, match=message):
        checked(a_plan((4, 2), rejects_tokens=False), MASK, device)


def test_a_mask_without_positions_is_checked_against_the_count():
    empty = Layout.thd_zigzag([0, 0], cp_size=1, cp_rank=0)
    checked(a_plan([3]), [], "cpu", [0], empty)
    with pytest.raises(ReducerError, match="trains 0 tokens, the plan counted 3"):
        checked(a_plan([3], rejects_tokens=False), [], "cpu", [0], empty)


@DEVICES
def test_a_local_mask_holds_a_part_of_each_sequence(device):
    plan = a_plan((8, 4), rejects_tokens=False)
    layout = Layout.local([4, 2], cp_size=2, cp_rank=1)
    with on(device) as to:
        line = plan.reducer([0, 1], to(torch.ones(6)), layout).line
        plan.check()
        assert held_sums([line.trained]).tolist() == [4, 2]


HELD = {
    "thd_zigzag": lambda cp: Layout.thd_zigzag([0, 16, 16, 24], **cp),
    "gathered": lambda cp: Layout.thd_zigzag([0, 16, 16, 24], **cp).gathered(),
    "thd_contiguous": lambda cp: Layout.thd_contiguous([0, 16, 16, 24], **cp),
    "bshd_zigzag": lambda cp: Layout.bshd_zigzag(3, 8, **cp),
    "bshd_contiguous": lambda cp: Layout.bshd_contiguous(3, 8, **cp),
    "response_zigzag": lambda cp: Layout.response_zigzag([30, 5, 9], [16, 0, 8], **cp),
}


@pytest.mark.parametrize("layout", HELD.values(), ids=HELD)
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_a_rank_counts_what_its_mask_trains_of_each_segment(layout, cp_size):
    """Tokens and weights, as a walk over the positions that it holds counts them."""
    generator = torch.Generator().manual_seed(cp_size)
    mask = torch.randint(0, 2, (24,), generator=generator)
    weights = mask * torch.rand(24, generator=generator, dtype=torch.float64)
    offsets = layout({"cp_size": cp_size, "cp_rank": 0}).offset_G1.tolist()
    of_segments = [range(a, b) for a, b in itertools.pairwise(offsets)]
    active = [int(mask[list(segment)].sum()) for segment in of_segments]
    sums = [float(weights[list(segment)].sum()) for segment in of_segments]
    plan = plan_step(
        Aggregation("token_mean", count="weights"),
        Sequences(active_tokens=active, token_weight_sums=sums),
    )
    for cp_rank in range(cp_size):
        held_here = layout({"cp_size": cp_size, "cp_rank": cp_rank})
        made = plan.reducer(range(3), mask, held_here, token_weights=weights).line
        held = set(held_here.positions.tolist())
        of_rank = [[t for t in segment if t in held] for segment in of_segments]
        assert held_sums([made.trained]).tolist() == [int(mask[tokens].sum()) for tokens in of_rank]
        expected = torch.stack([weights[tokens].sum() for tokens in of_rank])
        torch.testing.assert_close(held_sums([made.trained_weights]), expected, rtol=0, atol=1e-12)


@DEVICES
@pytest.mark.parametrize(("layout", "warns"), [("thd", True), ("bshd", True), ("response", False)])
def test_a_mask_that_looks_unshifted_warns_once(monkeypatch, device, layout, warns):
    """A segment's last logit predicts the next segment's first token."""
    monkeypatch.setattr(faults, "_warned", set())
    layout = {
        "thd": lambda: thd(4, 2),
        "bshd": lambda: Layout.bshd_zigzag(2, 3, cp_size=1, cp_rank=0),
        "response": lambda: Layout.response_zigzag([5, 3], [4, 2], cp_size=1, cp_rank=0),
    }[layout]()
    for mask, expected in (([1, 0, 0, 0, 1, 0], False), (MASK, warns), (MASK, False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checked(a_plan((6, 6)), mask, device, layout=layout)
        assert ["last position of a segment" in str(w.message) for w in caught] == [True] * expected


@DEVICES
def test_a_mask_with_no_segments_selects_nothing(device):
    checked(a_plan(), [0, 0], device, [], thd())
    with pytest.raises(ReducerError, match="is 1 at 2 positions past the last segment's end 0"):
        checked(a_plan(), [0, 1, 1], device, [], thd())


SEQUENCES = {
    "too few": ([0], "got 1 sequences for 2 segments"),
    "unknown": ([0, 2], "sequence 2 is not one of the 2 sequences"),
    "below the padding sequence": ([0, -2], "sequence -2 is not one"),
    "fractions": ([0.0, 1.0], "sequences: got .* expected integers in one dim"),
    "two dimensions": ([[0, 1]], "sequences: got .* expected integers in one dim"),
    "lists of two lengths": ([[0], [1, 0]], "sequences: got .* expected integers in one dim"),
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


def test_part_of_a_planned_microbatch_is_refused():
    """It would be weighed by the tokens of the whole one."""
    plan = a_plan((3, 2, 4), microbatch=[0, 0, 2], mode="microbatch_token_mean")
    with pytest.raises(
        ReducerError, match="microbatch 0 was planned with 2 sequences, got 1 without 1"
    ):
        plan.reducer([0, -1], torch.tensor([1, 0, 1, 1, 0, 0]), thd(4, 2))
    plan.reducer([2], torch.ones(4), thd(4))


def test_sequences_of_two_planned_microbatches_are_refused():
    plan = a_plan((3, 2), microbatch=[0, 1])
    with pytest.raises(
        ReducerError, match=r"sequence 0 was planned in microbatch 0 and sequence 1 in .* 1:"
    ):
        plan.reducer([0, 1], torch.tensor(MASK), thd(4, 2))
    mask = torch.tensor([0, 0, 0, 0, 1, 1])
    assert plan.reducer([-1, 1], mask, thd(4, 2)).counted_tokens == 2
