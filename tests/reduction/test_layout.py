"""Every token is on exactly one context-parallel rank, and on the right one."""

import itertools

import numpy as np
import pytest
import torch

from megatron_lossagg import Layout
from megatron_lossagg.errors import LayoutError
from megatron_lossagg.verify.step_data import zigzag

CP_SIZES = (1, 2, 3, 4, 8)


def positions(layout):
    """List the mask positions that a layout's rank holds, in order."""
    out = []
    for start, length in zip(layout.start_R, layout.length_R, strict=True):
        out += range(start, start + length)
    return out


def responses_held(total, response, cp, rank):
    """List a rank's response tokens, by the chunk of each token's logit."""
    if cp == 1:
        return list(range(response))
    chunk = -(-total // (2 * cp))
    held = []
    for which in (rank, 2 * cp - 1 - rank):
        for j in range(response):
            if (total - response - 1 + j) // chunk == which:
                held.append(j)
    return held


@pytest.mark.parametrize("cp", CP_SIZES)
def test_every_response_token_is_on_the_rank_of_its_logit_and_on_no_other(cp):
    for total in range(1, 25):
        for response in range(total):
            union = []
            for rank in range(cp):
                layout = Layout.response_zigzag([total], [response], cp_size=cp, cp_rank=rank)
                held = positions(layout)
                assert held == responses_held(total, response, cp, rank)
                assert layout.num_local_tokens == len(held)
                union += held
            assert sorted(union) == list(range(response)), (total, response)


def test_a_prompt_longer_than_a_chunk_does_not_wrap_around():
    held = positions(Layout.response_zigzag([12], [8], cp_size=2, cp_rank=1))
    assert held == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("cp", CP_SIZES)
def test_each_sequence_is_split_on_its_own_and_a_rank_holds_its_two_chunks_in_order(cp):
    lengths = [2 * cp * k for k in (1, 3, 0, 2)]
    offsets = [0, *itertools.accumulate(lengths)]
    union = []
    for rank in range(cp):
        expected = zigzag(offsets, cp, rank)
        layout = Layout.thd_zigzag(offsets, cp_size=cp, cp_rank=rank)
        assert positions(layout) == expected
        segment_of = [next(i for i in range(4) if p < offsets[i + 1]) for p in expected]
        assert np.repeat(layout.segment_R, layout.length_R).tolist() == segment_of
        union += positions(layout)
    assert sorted(union) == list(range(offsets[-1]))


@pytest.mark.parametrize("cp", CP_SIZES)
def test_bshd_splits_every_batch_entry_alike(cp):
    union = []
    for rank in range(cp):
        layout = Layout.bshd_zigzag(3, 48, cp_size=cp, cp_rank=rank)
        by_entry = np.array(positions(layout)).reshape(3, 48 // cp)
        assert (by_entry - by_entry[0] == np.arange(3)[:, None] * 48).all()
        assert layout.num_segments == 3
        union += positions(layout)
    assert sorted(union) == list(range(3 * 48))


@pytest.mark.parametrize("cp", CP_SIZES)
@pytest.mark.parametrize("lengths", [(3, 0, 7, 1, 13), (24,), (1,) * 24, (0, 24, 0)])
def test_a_contiguous_rank_holds_one_interval_of_the_buffer_whatever_sequences_are_in_it(
    cp, lengths
):
    offsets = [0, *itertools.accumulate(lengths)]
    segment_of = [segment for segment, length in enumerate(lengths) for _ in range(length)]
    for rank in range(cp):
        layout = Layout.thd_contiguous(offsets, cp_size=cp, cp_rank=rank)
        held = list(range(rank * 24 // cp, (rank + 1) * 24 // cp))
        assert positions(layout) == layout.positions.tolist() == held
        of_held = [segment_of[position] for position in held]
        assert np.repeat(layout.segment_R, layout.length_R).tolist() == of_held
        assert layout.local_lengths.tolist() == [of_held.count(s) for s in range(len(lengths))]
        assert [layout.place(index) for index in range(len(held))] == [
            (segment_of[position], position - offsets[segment_of[position]]) for position in held
        ]


@pytest.mark.parametrize("cp", CP_SIZES)
def test_contiguous_bshd_splits_every_batch_entry_into_one_interval_per_rank(cp):
    for rank in range(cp):
        layout = Layout.bshd_contiguous(3, 48, cp_size=cp, cp_rank=rank)
        mask_bs = torch.arange(3 * 48).view(3, 48)
        held = mask_bs[:, rank * 48 // cp : (rank + 1) * 48 // cp]
        assert positions(layout) == held.flatten().tolist()


def test_what_one_interval_holds_is_one_slice_of_the_mask():
    contiguous = Layout.thd_contiguous([0, 3, 8], cp_size=2, cp_rank=1)
    assert contiguous.interval == slice(4, 8)
    assert Layout.thd_zigzag([0, 8], cp_size=2, cp_rank=1).interval == slice(2, 6)
    assert Layout.thd_zigzag([0, 8], cp_size=2, cp_rank=0).interval is None


def test_local_keeps_every_token_it_is_given():
    layout = Layout.local([3, 0, 2], cp_size=2, cp_rank=1)
    assert positions(layout) == [0, 1, 2, 3, 4]
    assert (layout.num_segments, layout.num_tokens, layout.num_local_tokens) == (3, 5, 5)


@pytest.mark.parametrize(
    "offsets",
    [
        [0, 4, 12],
        np.array([0, 4, 12]),
        torch.tensor([0, 4, 12]),
        torch.tensor([[0, 4, 12]], dtype=torch.int32),
    ],
    ids=["list", "numpy", "int64", "int32 (1, n)"],
)
def test_offsets_of_any_form_give_the_same_tokens(offsets):
    layout = Layout.thd_zigzag(offsets, cp_size=2, cp_rank=0)
    assert positions(layout) == [0, 3, 4, 5, 10, 11]


def test_responses_are_consecutive_and_each_is_split_on_its_own():
    totals, responses = [12, 5, 9], [8, 2, 0]
    for rank in range(2):
        layout = Layout.response_zigzag(totals, responses, cp_size=2, cp_rank=rank)
        expected = []
        for total, response, begin in zip(totals, responses, (0, 8, 10), strict=True):
            expected += [begin + j for j in responses_held(total, response, 2, rank)]
        assert positions(layout) == expected
        assert layout.offset_G1.tolist() == [0, 8, 10, 10]
        segment_of = [0 if p < 8 else 1 for p in expected]
        assert np.repeat(layout.segment_R, layout.length_R).tolist() == segment_of


@pytest.mark.parametrize("cp", [1, 2])
def test_a_layout_has_its_constructors_name_its_rank_and_int64_indices(cp):
    rank = {"cp_size": cp, "cp_rank": cp - 1}
    for layout, name in (
        (Layout.thd_zigzag([0, 8], **rank), "thd_zigzag"),
        (Layout.bshd_zigzag(2, 8, **rank), "bshd_zigzag"),
        (Layout.thd_contiguous([0, 3, 8], **rank), "thd_contiguous"),
        (Layout.bshd_contiguous(2, 8, **rank), "bshd_contiguous"),
        (Layout.response_zigzag([8], [3], **rank), "response_zigzag"),
        (Layout.local([8], **rank), "local"),
    ):
        assert (layout.name, layout.cp_size, layout.cp_rank) == (name, cp, cp - 1)
        indices = (layout.offset_G1, layout.start_R, layout.length_R, layout.segment_R)
        assert {array.dtype for array in indices} == {np.dtype(np.int64)}
        assert layout.positions.dtype == torch.int64


def test_a_layout_says_which_split_of_the_model_it_needs_and_whether_sequences_are_whole():
    rank = {"cp_size": 2, "cp_rank": 0}
    for layout, split, is_whole in (
        (Layout.thd_zigzag([0, 8], **rank), "zigzag", True),
        (Layout.bshd_zigzag(2, 8, **rank), "zigzag", True),
        (Layout.thd_contiguous([0, 3, 8], **rank), "contiguous", True),
        (Layout.bshd_contiguous(2, 8, **rank), "contiguous", True),
        (Layout.response_zigzag([8], [3], **rank), "zigzag", False),
        (Layout.local([8], **rank), None, False),
    ):
        assert (layout.split, layout.is_whole) == (split, is_whole)
        if not layout.is_local:
            assert layout.gathered().split == split
            assert layout.gathered(sums_gradients=True).split is None


def test_without_context_parallelism_the_rank_holds_every_token_and_no_length_needs_padding():
    assert positions(Layout.thd_zigzag([0, 3, 8], cp_size=1, cp_rank=0)) == list(range(8))
    assert positions(Layout.bshd_zigzag(2, 5, cp_size=1, cp_rank=0)) == list(range(10))
    layout = Layout.response_zigzag([6, 4], [5, 2], cp_size=1, cp_rank=0)
    assert positions(layout) == list(range(7))
    assert (layout.cp_size, layout.cp_rank) == (1, 0)


def test_an_empty_microbatch_is_a_layout_without_segments():
    for layout in (
        Layout.thd_zigzag([0], cp_size=2, cp_rank=1),
        Layout.bshd_zigzag(0, 8, cp_size=2, cp_rank=1),
        Layout.thd_contiguous([0], cp_size=2, cp_rank=1),
        Layout.bshd_contiguous(0, 8, cp_size=2, cp_rank=1),
        Layout.response_zigzag([], [], cp_size=2, cp_rank=1),
        Layout.local([], cp_size=2, cp_rank=1),
    ):
        assert (layout.num_segments, layout.num_tokens, layout.num_local_tokens) == (0, 0, 0)


def test_a_rank_whose_chunks_are_all_prompt_holds_nothing():
    held = [
        positions(Layout.response_zigzag([16], [2], cp_size=4, cp_rank=rank)) for rank in range(4)
    ]
    assert held == [[1], [0], [], []]


THD = {
    "a segment that is not a multiple of 2 CP": ([0, 4, 10], 2, "segment 1 has 6 .* 2 CP = 4: pad"),
    "offsets that fall": ([0, 8, 4], 1, "^cu_seqlens gives segment 1 a length of -4"),
    "offsets not from 0": ([4, 8], 1, "expected offsets from 0"),
    "no offset at all": ([], 1, "expected offsets from 0"),
    "fractions": ([0.0, 4.0], 1, "^cu_seqlens: got float64 .* expected integers"),
}


def test_a_contiguous_split_refuses_what_does_not_divide_by_cp():
    with pytest.raises(LayoutError, match="cu_seqlens end at 7, not a multiple of CP = 2: pad"):
        Layout.thd_contiguous([0, 3, 7], cp_size=2, cp_rank=0)
    with pytest.raises(LayoutError, match="sequences of 7 tokens are not a multiple of CP = 2"):
        Layout.bshd_contiguous(2, 7, cp_size=2, cp_rank=0)
    with pytest.raises(LayoutError, match="expected offsets from 0"):
        Layout.thd_contiguous([4, 8], cp_size=2, cp_rank=0)


@pytest.mark.parametrize("name", THD)
def test_thd_refuses(name):
    offsets, cp, message = THD[name]
    with pytest.raises(LayoutError, match=message):
        Layout.thd_zigzag(offsets, cp_size=cp, cp_rank=0)


@pytest.mark.parametrize(
    ("offsets", "listed"),
    [([1, 2, 3, 4], "[1, 2, 3, 4]"), ([1, 2, 3, 4, 5], "[1, 2, 3, 4, ...]")],
)
def test_a_refusal_lists_the_first_four_offsets(offsets, listed):
    with pytest.raises(LayoutError) as caught:
        Layout.thd_zigzag(offsets, cp_size=1, cp_rank=0)
    assert str(caught.value).startswith(f"got cu_seqlens {listed}, expected offsets")


@pytest.mark.parametrize(("size", "rank"), [(2, 2), (2, -1), (0, 0), (-1, 0), (2.0, 0), (2, 0.5)])
def test_a_rank_outside_its_group_is_refused(size, rank):
    with pytest.raises(LayoutError, match=f"CP rank {rank} of {size}"):
        Layout.thd_zigzag([0, 8], cp_size=size, cp_rank=rank)
    with pytest.raises(LayoutError, match="expected 0 to cp_size"):
        Layout.local([3], cp_size=size, cp_rank=rank)
    with pytest.raises(LayoutError, match="expected 0 to cp_size"):
        Layout.bshd_zigzag(1, 8, cp_size=size, cp_rank=rank)
    with pytest.raises(LayoutError, match="expected 0 to cp_size"):
        Layout.response_zigzag([8], [3], cp_size=size, cp_rank=rank)


RESPONSES = {
    "lengths of another number": ([5, 6], [2], "got 2 total_lengths and 1 response"),
    "a response without prompt": ([5], [5], "follows at least one prompt token"),
    "a negative response": ([5], [-1], "^response_lengths gives segment 0 .* -1"),
    "a response longer than its sequence": ([5], [6], "has 5 tokens of which 6 are the response"),
    "a negative total": ([-5], [0], "has -5 tokens"),
    "fractions": ([5.0], [2], "total_lengths: got float64"),
    "fractions of a response": ([5], [2.0], "response_lengths: got float64"),
}


@pytest.mark.parametrize("name", RESPONSES)
def test_responses_refuse(name):
    totals, responses, message = RESPONSES[name]
    with pytest.raises(LayoutError, match=message):
        Layout.response_zigzag(totals, responses, cp_size=2, cp_rank=0)


def test_bshd_refuses_lengths_that_do_not_split():
    with pytest.raises(LayoutError, match="multiple of 2 CP = 4"):
        Layout.bshd_zigzag(2, 6, cp_size=2, cp_rank=0)
    with pytest.raises(LayoutError, match=r"got sizes \[-1, 8\], expected integers from 0"):
        Layout.bshd_zigzag(-1, 8, cp_size=2, cp_rank=0)


def test_bshd_refuses_a_length_that_is_not_an_integer():
    with pytest.raises(LayoutError, match=r"got sizes \[2, 8\.0\], expected integers"):
        Layout.bshd_zigzag(2, 16 / 2, cp_size=2, cp_rank=0)


def test_local_refuses_invalid_lengths():
    with pytest.raises(LayoutError, match="sequence_lengths_here gives segment 1 a length of -2"):
        Layout.local([3, -2], cp_size=1, cp_rank=0)
    with pytest.raises(LayoutError, match="sequence_lengths_here: got float64"):
        Layout.local([3.0], cp_size=1, cp_rank=0)
