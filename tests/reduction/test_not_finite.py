"""A loss that is not finite, and a sum that overflows, are named."""

import gc
import re
import weakref

import pytest
import torch
from custom_reducer import custom
from device_double import DEVICES, on
from steps import MASK, a_plan, a_reducer, thd

from megatron_lossagg import Layout, Sequences, plan_step
from megatron_lossagg.errors import ReducerError

LAYOUTS = {
    "thd": (lambda rank: thd(8, 4, 12, cp_size=2, cp_rank=rank), [8, 4, 12]),
    "bshd": (lambda rank: Layout.bshd_zigzag(3, 8, cp_size=2, cp_rank=rank), [8] * 3),
    "response": (
        lambda rank: Layout.response_zigzag([9, 4, 14], [8, 1, 3], cp_size=2, cp_rank=rank),
        [8, 1, 3],
    ),
}


def called(plan, mask, losses, device, sequences=(0, 1), layout=None):
    """Reduce losses; what a device found is raised when the plan is checked, without a read."""
    layout = thd(4, 2) if layout is None else layout
    with on(device) as to:
        plan.reducer(list(sequences), to(mask), layout)(to(losses))
        if device != "cpu":
            assert not to.syncs
        plan.check()
        plan.check()  # raised once


@DEVICES
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_loss_that_is_not_finite_names_its_sequence_segment_and_token(name, rank, value, device):
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
            called(plan, torch.ones(len(x)), x[held], device, sequences, layout)
        assert str(caught.value).startswith(
            f"rank 0 (context-parallel rank {rank}): the loss of sequence "
            f"{sequences[segment]} (segment "
            f"{segment} of a microbatch with sequences 5, 3, 4) is {value} at its token "
            f"{token}: check "
        )


@DEVICES
def test_one_of_several_losses_that_are_not_finite_is_named(device):
    losses = [torch.nan, torch.nan, 1, -torch.inf, torch.nan, 1]
    with pytest.raises(ReducerError, match=r"sequence 0 .*is nan at its token 0"):
        called(a_plan(), MASK, losses, device)
    with pytest.raises(ReducerError, match=r"sequence 0 .*is -inf at its token 3"):
        called(a_plan(), [0, 0, 1, 1, 0, 1], losses, device)


def test_a_loss_that_is_not_finite_names_its_microbatch_where_the_plan_knows_it():
    reducer = a_plan((3, 2), microbatch=[7, 7]).reducer([0, 1], torch.tensor(MASK), thd(4, 2))
    with pytest.raises(
        ReducerError, match=r"sequence 1 \(segment 1 of microbatch 7 with sequences 0, 1\)"
    ):
        reducer(torch.tensor([1, 1, 1, 1, 1, torch.nan]))


def test_a_microbatch_is_named_by_its_first_six_sequences():
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


@DEVICES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_an_overflowing_sum_of_finite_losses_is_reported(dtype, device):
    x = torch.full((6,), torch.finfo(dtype).max, dtype=dtype)
    message = r"every trained loss of .* 0, 1 is finite .* is inf: the sum overflows; scale the"
    with pytest.raises(ReducerError, match=message):
        called(a_plan(), MASK, x, device)
    called(a_plan(divisor=64), MASK, x / 8, device)


@DEVICES
def test_the_losses_of_a_custom_reducer_are_checked_as_well_as_its_partial_loss(device):
    def a_custom_plan(reducer):
        aggregation = custom(lambda context: reducer)
        return plan_step(aggregation, Sequences(active_tokens=[3, 2]))

    plan = a_custom_plan(lambda x: x.nan_to_num().sum())
    called(plan, MASK, [1, torch.nan, 1, 1, 1, 1], device)
    with pytest.raises(ReducerError, match=r"sequence 1 .* is nan at its token 0"):
        called(plan, MASK, [1, 1, 1, 1, torch.nan, 1], device)
    with pytest.raises(ReducerError, match="partial loss is nan: check the custom reducer"):
        called(a_custom_plan(lambda x: x.sum() * torch.nan), MASK, torch.ones(6), device)


def test_a_fault_of_one_plan_is_never_raised_by_another():
    first, second = a_plan(), a_plan()
    with on("device") as to:
        first.reducer([0, 1], to(MASK), thd(4, 2))(to([torch.nan] * 6))
        a_plan().check()
        second.check()
        with pytest.raises(ReducerError, match=r"sequence 0 .* is nan at its token 0"):
            first.under("token_mean").check()  # the same step
        first.check()


def test_what_a_step_has_to_read_keeps_neither_mask_nor_weights_until_it_ends():
    plan = a_plan(mode="sample_mean")
    with on("device") as to:
        made = plan.reducer([0, 1], to(MASK), thd(4, 2))
        made(to([torch.nan] * 6)), made.under("token_mean")(to([1.0] * 6))
        kept = weakref.ref(made)
        del made
        gc.collect()
        assert kept() is None
        with pytest.raises(ReducerError, match=r"of a microbatch with sequences 0, 1\) is nan"):
            plan.check()
