"""Position ids that a loop passes are those of the layout, or the step is refused."""

import pytest
import torch
from device_double import DEVICES, on
from steps import a_plan, a_step, thd

from megatron_lossagg import Layout
from megatron_lossagg.errors import ReducerError
from megatron_lossagg.reduction.checks import check_positions

MASK = torch.tensor([1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0])
"""Two sequences of 6 and 5 tokens, each padded to 8."""
IN_SEQUENCE = torch.arange(8).repeat(2)
IN_BUFFER = torch.arange(16)
LAYOUTS = {
    "zigzag": lambda r: thd(8, 8, cp_size=2, cp_rank=r),
    "contiguous": lambda r: Layout.thd_contiguous([0, 8, 16], cp_size=2, cp_rank=r),
    "unpacked": lambda r: Layout.bshd_zigzag(2, 8, cp_size=2, cp_rank=r),
    "CP 1": lambda r: thd(8, 8),
}
BY_HAND = {
    "zigzag": ([0, 1, 6, 7, 8, 9, 14, 15], [2, 3, 4, 5, 10, 11, 12, 13]),
    "contiguous": ([*range(8)], [*range(8, 16)]),
    "unpacked": ([0, 1, 6, 7, 8, 9, 14, 15], [2, 3, 4, 5, 10, 11, 12, 13]),
    "CP 1": ([*range(16)], [*range(16)]),
}
"""Which tokens of the buffer a rank holds."""


def a_microbatch(name, positions, *, cp_rank=0, mask=MASK):
    plan = a_plan([6, 5])
    made = plan.reducer([0, 1], mask, LAYOUTS[name](cp_rank))
    check_positions(positions, made.keep, made.line, made.num_past_end, plan.state.faults)
    plan.check()


@DEVICES
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("cp_rank", [0, 1])
def test_positions_in_the_sequence_or_in_the_buffer_are_right(device, name, cp_rank):
    here = BY_HAND[name][cp_rank]
    with on(device) as to:
        for positions in (IN_SEQUENCE[here], IN_BUFFER[here], IN_SEQUENCE[here][None].int()):
            padded = torch.where(MASK[here].bool().view(positions.shape), positions, 77)
            for given in (positions, padded):
                a_microbatch(name, to(given), cp_rank=cp_rank, mask=to(MASK))


@DEVICES
def test_a_rank_without_tokens_has_no_positions(device):
    with on(device) as to:
        plan = a_plan([6, 5])
        made = plan.reducer([], to(torch.zeros(0)), thd())
        faults = plan.state.faults
        check_positions(to(torch.zeros(0).long()), made.keep, made.line, 0, faults)
        plan.check()


@DEVICES
@pytest.mark.parametrize(
    ("name", "sliced"),
    [("zigzag", "contiguous"), ("contiguous", "zigzag"), ("unpacked", "contiguous")],
)
def test_positions_of_another_split_are_refused(device, name, sliced):
    with on(device) as to:
        positions = to(IN_SEQUENCE[BY_HAND[sliced][0]])
        with pytest.raises(ReducerError, match=r"has the position .* by the layout .* it is token"):
            a_microbatch(name, positions, mask=to(MASK))


def test_what_is_no_position_of_each_token_is_refused():
    for positions in (torch.arange(7), torch.arange(9)):
        with pytest.raises(ReducerError, match=r"positions, .* holds 8 tokens on CP rank 0 of 2"):
            a_microbatch("zigzag", positions)
    for positions in ([0, 1], torch.zeros(8)):
        with pytest.raises(ReducerError, match="expected an integer tensor"):
            a_microbatch("zigzag", positions)
    step = a_step(a_plan([2]), 1, cp=2)
    with pytest.raises(ReducerError, match="a layout of whole sequences"):
        step.microbatch([0], torch.ones(2), lengths=[2], positions=torch.arange(2))
