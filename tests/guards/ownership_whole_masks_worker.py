"""Who trained which token: CP 2, with whole masks that each rank slices, and of both kinds."""

import contextlib
import itertools
import warnings

import numpy as np
import pytest
import torch
from context_parallel_steps import (
    ACTIVE,
    LENGTHS,
    MODE,
    WEIGHING,
    WHOLE,
    a_plan,
    start,
    step_of,
)
from ranks import of_ranks

from megatron_lossagg import Aggregation, Layout, Sequences, plan_step
from megatron_lossagg.errors import ContractError, ReducerError


def whole_step(aggregator, *, mask=WHOLE, prompt=None, sequence_weight=None):
    """Train one step of whole masks; return what was raised on each rank."""
    raised = ""
    mode = Aggregation("prompt_mean") if prompt else MODE
    sequences = Sequences(active_tokens=ACTIVE, prompt=prompt, sequence_weight=sequence_weight)
    plan = plan_step(mode, sequences, group=aggregator.dp_group)
    step = aggregator.begin(plan, num_microbatches=1)
    mb = step.microbatch([0, 1], torch.tensor(mask), cu_seqlens=[0, 8, 12])
    mb.outputs(mb.reduce(torch.ones(6, requires_grad=True)))[0].backward()
    try:
        step.finish()
    except (ReducerError, ContractError) as error:
        raised = str(error)
    return of_ranks(raised)


def check_ranks_that_weigh_the_same_sequences_differently_are_named(aggregator):
    aggregator.agree_on(Aggregation("prompt_mean"))
    assert whole_step(aggregator, prompt=[7, 7]) == ["", ""]
    raised = whole_step(aggregator, prompt=[7, 7 + aggregator.cp_rank])
    for text in raised:
        assert "give the same sequences different weights: pass the same ids, totals and" in text


def check_ranks_with_different_weights_of_sequences_are_named(aggregator):
    assert whole_step(aggregator, sequence_weight=[2.0, 0.5]) == ["", ""]
    for text in whole_step(aggregator, sequence_weight=[2.0, 0.5 + aggregator.cp_rank]):
        assert "give the same sequences different weights" in text


def check_columns_and_what_is_left_out_are_told_apart(aggregator):
    rank = aggregator.cp_rank
    of_ranks = {"columns": {"turns": [1, 2 + rank]}, "left_out": [0, rank]}
    for given, names in (
        ({"columns": of_ranks["columns"], "left_out": [0, 1]}, "columns"),
        ({"columns": {"turns": [1, 2]}, "left_out": of_ranks["left_out"]}, "left_out"),
        (of_ranks, "columns and left_out"),
    ):
        with pytest.raises(ContractError, match=f"ranks 0 and 1 pass different {names} of the"):
            aggregator.step(ACTIVE, num_microbatches=1, **given)


def check_ranks_with_different_whole_masks_are_named(aggregator):
    """Each mask has as many tokens as were counted; the ranks hold 4 and 2 of sequence 0's."""
    assert whole_step(aggregator) == ["", ""]
    mask = WHOLE.copy()
    if aggregator.cp_rank == 1:
        mask[7], mask[5] = 0, 1
    for text in whole_step(aggregator, mask=mask):
        assert "train 1 tokens more of sequence 0 than the 5 that were counted" in text
        assert "give every rank the same whole mask" in text


def check_masks_of_several_layouts_and_terms_are_compared_apart(aggregator):
    """Terms of one plan: of slices by another split, and of gathered losses."""
    offsets, place = [0, 8, 12], {"cp_size": 2, "cp_rank": aggregator.cp_rank}
    with aggregator.step(ACTIVE, num_microbatches=1) as step:
        mb = step.microbatch([0, 1], torch.tensor(WHOLE), cu_seqlens=offsets)
        interval = Layout.thd_contiguous(offsets, **place)
        lengths = interval.local_lengths
        part = torch.tensor(WHOLE)[interval.positions]
        losses = torch.ones(6, requires_grad=True)
        local = step.microbatch([0, 1], part, lengths=lengths).reduce(losses, "token_mean")
        mb.outputs(mb.reduce(losses) + local)[0].backward()


def check_microbatches_of_a_step_may_have_masks_of_different_kinds(aggregator):
    """And of each kind a missing token is named."""
    masks = [torch.tensor(WHOLE[:8]), torch.tensor(WHOLE[8:])]
    here = [aggregator.thd([0, len(mask)]).positions for mask in masks]

    def whole(step, sequence, mask):
        return step.microbatch([sequence], mask, cu_seqlens=[0, len(mask)])

    def local(step, sequence, mask):
        positions = here[sequence]
        return step.microbatch([sequence], mask[positions], lengths=[len(positions)])

    def gathered(step, sequence, mask):
        layout = aggregator.thd([0, len(mask)]).gathered()
        return step.microbatch([sequence], mask, layout=layout)

    for kinds in itertools.permutations((whole, local, gathered), 2):
        for lost in (None, 0, 1):
            step = aggregator.step(ACTIVE, num_microbatches=2)
            for sequence, kind in enumerate(kinds):
                mask = masks[sequence].clone()
                if sequence == lost and aggregator.cp_rank == 0 and kind is local:
                    mask[0] = 0
                mb = kind(step, sequence, mask)
                losses = torch.ones(len(mask if kind is gathered else here[sequence]))
                (mb.outputs(mb.reduce(losses.requires_grad_()))[0] / 2).backward()
            is_lost = lost is not None and kinds[lost] is local
            message = f"train 1 tokens fewer of sequence {lost} than"
            with (
                pytest.raises(ReducerError, match=message) if is_lost else contextlib.nullcontext()
            ):
                step.finish()


def check_a_token_that_a_slice_lacks_is_named_next_to_a_whole_mask(aggregator):
    """Two terms over the same sequences, of which only the one by slices lacks a token."""
    whole = torch.tensor(WHOLE)
    part = whole[aggregator.thd([0, 8, 12]).positions]
    if aggregator.cp_rank == 0:
        part[0] = 0
    step = aggregator.step(ACTIVE, num_microbatches=1)
    mb = step.microbatch([0, 1], whole, cu_seqlens=[0, 8, 12])
    term = step.microbatch([0, 1], part, lengths=LENGTHS)
    losses = torch.ones(6, requires_grad=True)
    mb.outputs(mb.reduce(losses) + term.reduce(losses, "token_mean"))[0].backward()
    with pytest.raises(ReducerError, match="train 1 tokens fewer of sequence 0 than"):
        step.finish()


def check_sequences_of_one_slot_may_have_masks_of_different_kinds(aggregator):
    """Of 1,025 sequences the first and the last share a slot."""
    step = aggregator.step([4] * 1025, num_microbatches=2)
    whole = step.microbatch(range(1024), torch.ones(4096), cu_seqlens=range(0, 4097, 4))
    (whole.outputs(whole.reduce(torch.ones(2048, requires_grad=True)))[0] / 2).backward()
    part = step.microbatch([1024], torch.ones(2), lengths=[2])
    (part.outputs(part.reduce(torch.ones(2, requires_grad=True)))[0] / 2).backward()
    step.finish()


def check_whole_masks_with_other_token_weights_of_the_same_sum_are_named(aggregator):
    aggregator.agree_on(WEIGHING)
    mask = torch.ones(8)
    weights = torch.tensor([0.8, 0.2] * 4)  # rank 0 holds 0, 1, 6 and 7
    if aggregator.cp_rank == 1:
        weights = torch.tensor([0.1, 0.1, 0.9, 0.9, 0.9, 0.9, 0.1, 0.1])
    sequences = Sequences(active_tokens=[8], token_weight_sums=[4.0])
    plan = plan_step(WEIGHING, sequences, group=aggregator.dp_group)
    step = aggregator.begin(plan, num_microbatches=1)
    mb = step.microbatch([0], mask, cu_seqlens=[0, 8], token_weights=weights)
    mb.outputs(mb.reduce(torch.ones(4, requires_grad=True)))[0].backward()
    with pytest.raises(ReducerError, match="of sequence 0 sum to more than was counted"):
        step.finish()


def check_a_reducer_of_the_steps_plan_takes_the_models_layouts_only(aggregator):
    """Also one of another aggregation over the same counts, made without step.microbatch."""
    plan = a_plan(aggregator)
    step = aggregator.begin(plan, num_microbatches=1)
    offsets, mask = [0, 8, 12], torch.tensor(WHOLE)
    for layout, words in (
        (Layout.thd_contiguous(offsets, cp_size=2, cp_rank=aggregator.cp_rank), "is zigzag"),
        (Layout.thd_zigzag(offsets, cp_size=1, cp_rank=0), "a layout of CP rank 0 of 1"),
    ):
        losses = torch.ones(layout.num_local_tokens)
        for one in (plan, plan.under("token_mean")):
            reducer = one.reducer([0, 1], mask, layout)
            reducer(losses)  # a metric
            with pytest.raises(ContractError, match=words):
                reducer(losses.clone().requires_grad_())
    step.end()


def check_a_term_of_some_of_a_microbatchs_sequences_may_come_first(aggregator):
    whole = torch.tensor(WHOLE)
    for term_first in (True, False):
        with aggregator.step(ACTIVE, num_microbatches=1) as step:
            mb = step.microbatch([0, 1], whole, cu_seqlens=[0, 8, 12])
            term = step.microbatch([0], whole[:8], cu_seqlens=[0, 8])
            losses = torch.ones(6, requires_grad=True)
            parts = [(term, losses[:4]), (mb, losses)]
            ordered = parts if term_first else parts[::-1]
            mb.outputs(sum(one.reduce(own) for one, own in ordered))[0].backward()


def check_a_term_may_train_as_many_tokens_in_other_places(aggregator):
    """The ranks hold 2 and 3 tokens of sequence 0 in the first mask, 4 and 1 in the other."""
    other = torch.tensor([1, 1, 1, 0, 0, 0, 1, 1, *WHOLE[8:]])
    with aggregator.step(ACTIVE, num_microbatches=1) as step:
        mb, term = (
            step.microbatch([0, 1], mask, cu_seqlens=[0, 8, 12])
            for mask in (torch.tensor(WHOLE), other)
        )
        losses = torch.ones(6, requires_grad=True)
        mb.outputs(mb.reduce(losses) + term.reduce(losses, "token_mean"))[0].backward()


def check_sums_of_token_weights_may_differ_by_rounding_and_ids_may_not(aggregator):
    own = np.nextafter(4.75, 5) if aggregator.cp_rank else 4.75
    weights = torch.tensor(WHOLE) * torch.tensor([0.95] * 8 + [0.4] * 4)
    aggregator.agree_on(WEIGHING)
    for shift in (0, 1):
        counts = {"active_tokens": ACTIVE, "token_weight_sums": [own, 0.8]}
        sequences = Sequences(**counts, sample=[7, 7 + shift * aggregator.cp_rank])
        plan = plan_step(WEIGHING, sequences, group=aggregator.dp_group)
        step = aggregator.begin(plan, num_microbatches=1)
        more = {"cu_seqlens": [0, 8, 12], "token_weights": weights}
        mb = step.microbatch([0, 1], torch.tensor(WHOLE), **more)
        mb.outputs(mb.reduce(torch.ones(6, requires_grad=True)))[0].backward()
        different = pytest.raises(ReducerError, match="the same sequences different weights")
        with different if shift else contextlib.nullcontext():
            step.finish()


def check_a_microbatch_without_sequences_and_a_step_without_tokens_end(aggregator):
    with warnings.catch_warnings(), contextlib.suppress(RuntimeWarning):
        warnings.simplefilter("ignore")
        assert step_of(aggregator, [0] * 6, active=[0, 0]) == ["", ""]


if __name__ == "__main__":
    start(globals())
