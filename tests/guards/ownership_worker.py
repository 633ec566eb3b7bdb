"""Who trained which token: CP 2, where each rank slices the mask itself or gathers all losses."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from context_parallel_steps import (
    ACTIVE,
    LENGTHS,
    MASKS,
    MODE,
    WEIGHING,
    WEIGHT_SUMS,
    WEIGHTS,
    WHOLE,
    a_plan,
    start,
    step_of,
)
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_lossagg import Aggregation, Layout, LossAggregator, Sequences, plan_step
from megatron_lossagg.errors import ContractError, ReducerError
from megatron_lossagg.loop.schedule_hook import FrameworkLoss, Integration, ScheduleHook
from megatron_lossagg.reduction.aggregation import Options


def check_a_step_whose_ranks_train_each_token_once_is_right(aggregator):
    for forward_only in (False, True):
        assert step_of(aggregator, MASKS[aggregator.cp_rank], forward_only=forward_only) == ["", ""]


def check_tokens_that_were_counted_on_the_slice_are_named(aggregator):
    mask = MASKS[aggregator.cp_rank]
    raised = step_of(aggregator, mask, active=[sum(mask[:4]), sum(mask[4:])])
    assert all("counted different tokens of sequence 0" in text for text in raised), raised
    assert all("count the whole sequences, before they are sliced" in text for text in raised)


def check_a_layout_of_another_split_than_the_models_is_refused(aggregator):
    offsets, place = [0, 8, 12], {"cp_size": 2, "cp_rank": aggregator.cp_rank}
    other = Layout.thd_contiguous(offsets, **place)
    for layout in (other, other.gathered(), aggregator.thd(offsets)):
        step = aggregator.begin(a_plan(aggregator), num_microbatches=1)
        refused = pytest.raises(ContractError, match=rf"{layout.name}, .*_partition_mode is zigzag")
        with contextlib.nullcontext() if layout.split == "zigzag" else refused:
            step.microbatch([0, 1], torch.tensor(WHOLE), layout=layout)
        step.end()


class SummingGather(torch.autograd.Function):
    """Gather the slices of all ranks; backward sums their gradients for each slice."""

    @staticmethod
    def forward(ctx, own, rank):
        ctx.rank = rank
        parts = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(parts, own)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total.chunk(2)[ctx.rank], None


def check_any_split_is_right_where_the_gather_sums_gradients(aggregator):
    """The model's slices are intervals here; the layout splits the gathered losses in zigzag."""
    offsets = [0, 8, 12]
    layout = aggregator.thd(offsets).gathered(sums_gradients=True)
    step = aggregator.step(ACTIVE, num_microbatches=1)
    mb = step.microbatch([0, 1], torch.tensor(WHOLE), layout=layout)
    own = torch.ones(6, requires_grad=True)
    mb.outputs(mb.reduce(SummingGather.apply(own, aggregator.cp_rank)))[0].backward()
    step.finish()
    weights = torch.tensor([1 / (2 * 5)] * 8 + [1 / (2 * 2)] * 4)  # 1 / (B n_b)
    expected = weights * torch.tensor(WHOLE) * 2  # K
    torch.testing.assert_close(own.grad, expected.chunk(2)[aggregator.cp_rank])


def check_losses_that_were_gathered_over_the_ranks_are_named(aggregator):
    """Each rank trains all tokens, with half of the sequences counted as its own."""
    raised = step_of(aggregator, WHOLE, lengths=[8, 4])
    for text in raised:
        assert "train 5 tokens more of sequence 0 than the 5 that were counted" in text, raised


def check_gathered_losses_are_trained_once_by_the_ranks_together(aggregator):
    assert step_of(aggregator, WHOLE, gathered=[0, 8, 12]) == ["", ""]
    aggregator.agree_on(WEIGHING)
    weights = torch.tensor(WHOLE) * torch.arange(1.0, 13)
    weights *= torch.tensor(WEIGHT_SUMS[0] / weights[:8].sum()).where(
        torch.arange(12) < 8, WEIGHT_SUMS[1] / weights[8:].sum()
    )
    weighing = {"mode": WEIGHING, "weights": weights.tolist(), "gathered": [0, 8, 12]}
    assert step_of(aggregator, WHOLE, **weighing) == ["", ""]


def check_ranks_with_different_masks_of_gathered_losses_are_named(aggregator):
    """Each mask has as many tokens as were counted, and ranks 0 and 1 weigh 2 and 4 of them."""
    mask = WHOLE.copy()
    if aggregator.cp_rank == 1:
        mask[7], mask[5] = 0, 1
    raised = step_of(aggregator, mask, gathered=[0, 8, 12])
    for text in raised:
        assert "train 1 tokens more of sequence 0 than the 5 that were counted" in text, raised
        assert "give every rank the same whole mask" in text


def check_lengths_of_other_sequences_with_the_right_sum_are_named(aggregator):
    raised = step_of(aggregator, MASKS[aggregator.cp_rank], lengths=[2, 4])
    for text in raised:
        assert "tokens more of sequence 1 than the 2 that were counted" in text, raised
        assert "fewer of sequence 0" in text


def check_ranks_under_different_modes_are_named(aggregator):
    other = Aggregation("token_mean")
    aggregator._run.agreed.add(other)  # as a rank alone would, whose flags differ
    mode = MODE if aggregator.cp_rank == 0 else other
    raised = step_of(aggregator, MASKS[aggregator.cp_rank], mode=mode)
    assert all("planned different steps" in text for text in raised), raised
    raised = step_of(aggregator, MASKS[aggregator.cp_rank], rejects_tokens=aggregator.cp_rank == 1)
    assert all("planned different steps" in text for text in raised), raised


def check_ranks_with_different_numbers_of_sequences_are_named_and_do_not_wait(aggregator):
    if aggregator.cp_rank == 0:
        raised = step_of(aggregator, MASKS[0])
    else:
        raised = step_of(aggregator, [*MASKS[1], 0, 0], active=[*ACTIVE, 0], lengths=[*LENGTHS, 2])
    assert all("planned different steps" in text for text in raised), raised


def check_fewer_tokens_than_were_counted_are_refused_unless_declared(aggregator):
    fewer = MASKS[aggregator.cp_rank].copy()
    if aggregator.cp_rank == 1:
        fewer[0] = 0
    raised = step_of(aggregator, fewer)
    for text in raised:
        assert "train 1 tokens fewer of sequence 0 than the 5 that were counted" in text, raised
    assert step_of(aggregator, fewer, rejects_tokens=True) == ["", ""]


class Slices(Integration):
    """Its framework slices the mask itself."""

    def __init__(self, mask):
        self.mask = torch.tensor(mask)

    def sequences(self, data):
        return Sequences(active_tokens=ACTIVE, lengths=[8, 4])

    def loss(self, loss_func, output):
        return FrameworkLoss(losses=output, mask=self.mask, returned=loss_func(output))


def check_a_shadow_of_slices_that_lack_a_token_is_refused_as_its_mode_is(aggregator):
    def forward_step(iterator, chunk):
        next(iterator)
        report = {"lm loss": torch.ones(2)}
        return torch.ones(6), lambda output: (output.sum(), torch.tensor(6), report)

    def shadowed(mask):
        hook = ScheduleHook(None, Slices(mask), options=Options(shadow="token_mean"))
        schedule = hook.wrap(get_forward_backward_func())
        return schedule(
            forward_step_func=forward_step,
            data_iterator=iter([None]),
            model=aggregator.chunks,
            num_microbatches=1,
            seq_length=1,
            micro_batch_size=1,
            forward_only=True,
        )

    mask = MASKS[aggregator.cp_rank].copy()
    assert "lossagg/shadow/token_mean" in shadowed(mask)[0]
    if aggregator.cp_rank == 1:
        mask[0] = 0
    with pytest.raises(ReducerError, match="train 1 tokens fewer of sequence 0 than the 5"):
        shadowed(mask)


def check_tokens_that_an_evaluation_saw_are_missed_where_training_drops_them(aggregator):
    plan = a_plan(aggregator)
    mask = torch.tensor(MASKS[aggregator.cp_rank])
    with aggregator.begin(plan, num_microbatches=1, forward_only=True) as step:
        mb = step.microbatch([0, 1], mask, lengths=LENGTHS)
        mb.outputs(mb.reduce(torch.ones(6)))
    if aggregator.cp_rank == 1:
        mask = torch.zeros_like(mask)
    step = aggregator.begin(plan, num_microbatches=1)
    mb = step.microbatch([0, 1], mask, lengths=LENGTHS)
    mb.outputs(mb.reduce(torch.ones(6, requires_grad=True)))[0].backward()
    with pytest.raises(ReducerError, match="tokens fewer of sequence 0 than the 5 that were"):
        step.finish()


def check_the_slices_token_weights_sum_to_what_was_counted(aggregator):
    aggregator.agree_on(WEIGHING)
    mask, weights = MASKS[aggregator.cp_rank], WEIGHTS[aggregator.cp_rank].copy()
    assert step_of(aggregator, mask, mode=WEIGHING, weights=weights) == ["", ""]
    if aggregator.cp_rank == 1:
        weights[5] -= 0.1
    raised = step_of(aggregator, mask, mode=WEIGHING, weights=weights)
    for text in raised:
        assert "train of sequence 1 sum to less than was counted" in text, raised
    lighter = {"mode": WEIGHING, "weights": weights, "rejects_tokens": True}
    assert step_of(aggregator, mask, **lighter) == ["", ""]
    if aggregator.cp_rank == 0:
        weights[0] += 0.1
    raised = step_of(aggregator, mask, **lighter)
    for text in raised:
        assert "train of sequence 0 sum to more than was counted" in text, raised


def check_a_sequence_that_weighs_little_beside_a_heavy_one_is_no_fault(aggregator):
    """Its sum is taken out of a cumulative one, whose rounding is the heavy sequence's."""
    aggregator.agree_on(WEIGHING)
    here = torch.cat([torch.full((4096,), 1e3), torch.full((6,), 1e-7)]).double()
    sums = [8192e3, 12e-7]
    plan = plan_step(
        WEIGHING,
        Sequences(active_tokens=[8192, 12], token_weight_sums=sums),
        group=aggregator.dp_group,
    )
    with aggregator.begin(plan, num_microbatches=1) as step:
        mask = torch.ones(4102, dtype=torch.bool)
        mb = step.microbatch([0, 1], mask, lengths=[4096, 6], token_weights=here)
        mb.outputs(mb.reduce(torch.ones(4102, requires_grad=True)))[0].backward()


def check_a_rank_whose_step_is_incomplete_stops_the_others(aggregator):
    plan = a_plan(aggregator)
    num_microbatches = 1 + (aggregator.cp_rank == 1)  # rank 1 waits for one that never comes
    step = aggregator.begin(plan, num_microbatches=num_microbatches)
    mb = step.microbatch([0, 1], torch.tensor(MASKS[aggregator.cp_rank]), lengths=LENGTHS)
    mb.outputs(mb.reduce(torch.ones(6, requires_grad=True)))[0].backward()
    words = (
        "ran for 1 microbatches" if aggregator.cp_rank else "rank 1 ended the step with an error"
    )
    with pytest.raises((ContractError, ReducerError), match=words):
        step.finish()


def check_more_sequences_than_slots_are_compared(aggregator):
    num_sequences = 2500
    lengths, active = [2] * num_sequences, [2] * num_sequences
    mask = [1, 0] * num_sequences
    assert step_of(aggregator, mask, active=active, lengths=lengths) == ["", ""]
    if aggregator.cp_rank == 1:
        mask[2 * 2100 + 1] = 1
    raised = step_of(aggregator, mask, active=active, lengths=lengths)
    for text in raised:
        assert "train 1 tokens more of one of the sequences 52, 1076, 2100 than" in text, raised


def check_a_step_of_whole_masks_after_one_of_slices_is_right(aggregator):
    """An evaluation may use another layout than training."""
    plan = a_plan(aggregator, [5])
    with aggregator.begin(plan, num_microbatches=1) as step:
        mb = step.microbatch([0], torch.tensor([1, 1, 1, 1, 1, 0, 0, 0]), cu_seqlens=[0, 8])
        mb.outputs(mb.reduce(torch.ones(4, requires_grad=True)))[0].backward()
    weighed = Sequences(active_tokens=[5], token_weight_sums=[2.5])
    plan = plan_step(WEIGHING, weighed, group=aggregator.dp_group)
    with aggregator.begin(plan, num_microbatches=1) as step:
        mask = torch.tensor([1, 1, 1, 1, 1, 0, 0, 0])
        mb = step.microbatch([0], mask, cu_seqlens=[0, 8], token_weights=mask / 2)
        mb.outputs(mb.reduce(torch.ones(4, requires_grad=True)))[0].backward()


def check_a_term_of_which_one_rank_holds_all_tokens_is_compared_on_both(aggregator):
    """Rank 1 holds no token of the term by slices, and reduces nothing for it.

    Nothing else of the step is sliced, and on this aggregator nothing was before.
    """
    aggregator = LossAggregator(aggregator.chunks, MODE, options=Options(probe=False))
    for term_mask, message in (
        ([1, 1, 0, 0], ""),
        ([1, 0, 0, 0], "train 1 tokens fewer of sequence 0 than the 2 that were counted"),
    ):
        step = aggregator.step([2], num_microbatches=1)
        mb = step.microbatch([0], torch.tensor([1, 1, 0, 0, 0, 0, 0, 0]), cu_seqlens=[0, 8])
        losses = torch.ones(4, requires_grad=True)
        loss = mb.reduce(losses)
        if aggregator.cp_rank == 0:
            term = step.microbatch([0], torch.tensor(term_mask), lengths=[4])
            loss = loss + term.reduce(losses, "token_mean")
        mb.outputs(loss)[0].backward()
        with pytest.raises(ReducerError, match=message) if message else contextlib.nullcontext():
            step.finish()


if __name__ == "__main__":
    start(globals())
