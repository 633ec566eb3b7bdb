"""What single calls of ``losses`` weigh, and what is refused: DP 2, and CP 2 with four ranks.

The loss of token t is weight t, as in ``weigh_worker.py``, without a schedule.
"""

import os
import time
from contextlib import suppress
from functools import partial
from itertools import product
from unittest import mock

import numpy as np
import pytest
import tiny_gpt
import token_model
import torch
import torch.distributed as dist
from check_runner import run_checks
from megatron.core import parallel_state
from torch.utils.checkpoint import checkpoint

from megatron_lossagg import LossAggregator
from megatron_lossagg.errors import ContractError
from megatron_lossagg.reduction import exchange as module
from megatron_lossagg.weigh.weighing import Weighing

CP = int(os.environ["WORLD_SIZE"]) // 2
CUTS = [0, 8, 12, 16]
LOSS_SCALE = 1024.0
N_OF = (torch.tensor([3, 1]), torch.tensor([1, 4]))
"""Active tokens of the sequences of two microbatches."""


class DeferredStepError(Exception):
    """Ends a deferred step before it is finished."""


SIZES = (2, 1, 4)
"""Of the groups of three microbatches, with dynamic context parallelism."""


def check_a_model_whose_ranks_nobody_adds_up_is_refused():
    with pytest.raises(ContractError, match="expected a model in Megatron's or torch's"):
        Weighing(torch.nn.Linear(2, 2))


def check_an_option_that_moves_tokens_is_refused_by_name():
    chunk = token_model.wrapped(tiny_gpt.config_of(), 16)
    chunk.config.hybrid_context_parallel = True
    with pytest.raises(ContractError, match="hybrid_context_parallel is True, which is not supp"):
        Weighing([chunk], num_microbatches=1)
    chunk = token_model.wrapped(tiny_gpt.config_of(), 16)
    chunk.config.flextron = True  # the loss has a further term, and its tokens stay
    Weighing([chunk], num_microbatches=1)


def check_a_sequence_is_whole_over_the_group_of_its_microbatch():
    world, rank = dist.get_world_size(), dist.get_rank()
    for split in ("zigzag", "contiguous"):
        chunk = token_model.wrapped(tiny_gpt.config_of(per_token=True), 16)
        chunk.config.dynamic_context_parallel = True
        chunk.config.cp_partition_mode = split
        weighing, loss = Weighing([chunk], num_microbatches=len(SIZES)), 0.0
        num_samples = sum(2 * world // min(size, world) for size in SIZES)
        with weighing:
            for size in (min(size, world) for size in SIZES):
                group, _ = dist.new_subgroups(size)
                cuts = [0, 4 * size, 6 * size]
                x = weighing.losses(chunk(torch.arange(6)), cu_seqlens=cuts, cp_group=group)
                here = torch.arange(6) < 4  # of the first sequence
                if split == "contiguous":
                    here = torch.arange(6) + 6 * (rank % size) < cuts[1]
                n = torch.where(here, 4 * size, 2 * size)
                loss = loss + (x / n).sum() / num_samples
            loss.backward()
            chunk.config.finalize_model_grads_func([chunk], torch.tensor(int(rank == 0)))
        step = weighing.weighed()
        assert (step.trains, step.weight_sum) == ("sample_mean", pytest.approx(1.0))
        found = {(s.dp_rank, s.microbatch, s.sequence, s.tokens) for s in step.sequences}
        assert found == {
            (first, index, number, tokens * size)
            for index, size in enumerate(min(size, world) for size in SIZES)
            for first in range(0, world, size)
            for number, tokens in enumerate((4, 2))
        }


def check_losses_without_their_group_are_refused_with_dynamic_context_parallelism():
    chunk = token_model.wrapped(tiny_gpt.config_of(), 16)
    chunk.config.dynamic_context_parallel = True
    weighing = Weighing([chunk], num_microbatches=1)
    weighing.losses(chunk(torch.arange(4)), lengths=[4])
    with pytest.raises(ContractError, match="got losses without a cp_group"):
        weighing.weighed()


def recomputed(loss_of, kinds):
    """Put a function into checkpoints, one in another; ``kinds``: whether each is reentrant."""
    for is_reentrant in kinds:
        loss_of = partial(checkpoint, loss_of, use_reentrant=is_reentrant)
    return loss_of


def check_a_loss_that_is_recomputed_is_weighed_once():
    """A right sample mean of two microbatches, with backward passes in every order."""
    lengths, masks = ([3, 1], [2, 4]), (torch.ones(4), torch.tensor([1, 0, 1, 1, 1, 1]))
    kinds = [(one,) for one in (True, False)] + [*product((True, False), repeat=2)]
    for is_heard_without_graph, is_numbered in ((True, True), (True, False), (False, True)):
        for of, order, has_mask in product(kinds, ("turn", "first", "sum"), (True, False)):
            chunk = token_model.wrapped(tiny_gpt.config_of(), 16)
            weighing, losses = Weighing([chunk], num_microbatches=2), []

            def loss_of(tokens, m, weighing=weighing, chunk=chunk, has_mask=has_mask):
                x = chunk(tokens.long()) * tokens.clamp(1, 1)
                if is_heard_without_graph or x.requires_grad:  # noqa: B023  called in this turn
                    more = {"microbatch": m} if is_numbered else {}  # noqa: B023
                    mask = masks[m] if has_mask else None
                    x = weighing.losses(x, mask, lengths=lengths[m], **more)
                n = torch.repeat_interleave(N_OF[m], torch.tensor(lengths[m]))
                return (x * masks[m] / n).sum() / 4

            with weighing:
                for m in range(2):
                    tokens = torch.arange(len(masks[m])).double().requires_grad_()
                    losses.append(recomputed(loss_of, of)(tokens, m))
                    if order == "turn":
                        losses[m].backward()
                if order == "sum":
                    sum(losses).backward()
                for loss in losses if order == "first" else ():
                    loss.backward()
                chunk.config.finalize_model_grads_func([chunk], None)
            weighing.of_this_rank()  # and again, as of each of two terms
            parts = weighing.of_this_rank().parts
            found = parts[["microbatch", "sequence", "tokens"]].tolist()
            assert found == [(0, 0, 3), (0, 1, 1), (1, 0, 1), (1, 1, 4)]
            assert {*(parts["weight_sum"] * 4).round(9)} == {1}


def check_a_microbatch_without_a_graph_takes_no_others_recomputation():
    chunk = token_model.wrapped(tiny_gpt.config_of(), 16)
    weighing = Weighing([chunk], num_microbatches=2)

    def loss_of(tokens):
        return weighing.losses(chunk(tokens.long()) * tokens.clamp(1, 1), lengths=[3, 1]).mean()

    with weighing:
        weighing.losses(chunk(torch.arange(2)).detach(), lengths=[2])
        recomputed(loss_of, [True])(torch.arange(4).double().requires_grad_()).backward()
        chunk.config.finalize_model_grads_func([chunk], None)
    found = weighing.of_this_rank().parts[["microbatch", "sequence", "tokens"]].tolist()
    assert found == [(0, 0, 0), (1, 0, 3), (1, 1, 1)]


def check_a_microbatch_of_no_token_is_one_where_only_the_recomputation_is_heard():
    chunk = token_model.wrapped(tiny_gpt.config_of(), 16)
    weighing = Weighing([chunk], num_microbatches=2)

    def loss_of(tokens):
        x = chunk(tokens.long()) * tokens.clamp(1, 1)
        if torch.is_grad_enabled():
            weighing.losses(x.detach(), lengths=[len(x)], term="clipped")  # trains nothing
            heard = weighing.losses(x if len(x) else x.detach(), lengths=[len(x)])
            x = heard if len(x) else x + heard
        return x.sum()

    with weighing:
        for n in (0, 4):
            recomputed(loss_of, [True])(torch.arange(n).double().requires_grad_()).backward()
        chunk.config.finalize_model_grads_func([chunk], None)
    found = weighing.of_this_rank().parts[["microbatch", "tokens"]].tolist()
    assert found == [(0, 0), (1, 4)]
    assert not len(weighing.of_this_rank("clipped").parts)


def check_tokens_are_counted_on_one_of_the_tensor_parallel_ranks():
    """TP 2 instead of DP 2 (and CP 2): both ranks have the losses of all tokens."""
    parallel_state.destroy_model_parallel()
    try:
        parallel_state.initialize_model_parallel(2, context_parallel_size=CP)
        chunk = token_model.wrapped(tiny_gpt.config_of(), 16)
        weighing = Weighing([chunk], num_microbatches=1)
        with weighing:
            weighing.losses(chunk(torch.arange(4)), lengths=[3, 1]).mean().backward()
            chunk.config.finalize_model_grads_func([chunk], None)
        step = weighing.weighed()
        assert [one.tokens for one in step.sequences] == [3 * CP, CP]
        assert chunk.module.weight.main_grad[:4].tolist() == [1 / 4] * 4
        assert step.weight_sum == pytest.approx(1.0)
        assert (step.sizes["TP"], step.trains) == (2, "token_mean")
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(context_parallel_size=CP)


def check_a_call_that_is_missing_for_a_microbatch_is_refused():
    chunk = token_model.wrapped(tiny_gpt.config_of(), 16)
    weighing = Weighing([chunk], num_microbatches=2)
    weighing.losses(chunk(torch.arange(4)), lengths=[4])
    with pytest.raises(ContractError, match="in a step of 2 microbatches, expected as many"):
        weighing.weighed()


def check_terms_are_weighed_by_themselves():
    chunk = token_model.wrapped(tiny_gpt.config_of(), 16)
    weighing = Weighing([chunk])
    with weighing:
        policy, kl = chunk(torch.arange(4)), chunk(torch.arange(4))
        policy = weighing.losses(policy, lengths=[3, 1], term="policy")
        kl = weighing.losses(kl, lengths=[3, 1], term="kl")
        (policy.mean() + 0.3 * kl.mean()).backward()
        chunk.config.finalize_model_grads_func([chunk], None)
    with pytest.raises(ContractError, match="got the terms"):
        weighing.weighed()
    step = weighing.terms()
    assert step["policy"].trains == "token_mean"
    assert step["kl"].weight_sum / step["policy"].weight_sum == pytest.approx(0.3)


def check_a_term_that_one_rank_lacks_has_the_num_tokens_of_all():
    chunk = token_model.wrapped(tiny_gpt.config_of(per_token=True), 16)
    weighing, n = Weighing([chunk]), dist.get_world_size()
    with weighing:
        x, y = chunk(torch.arange(4)), chunk(torch.arange(4))
        loss = weighing.losses(x, lengths=[4], term="policy").sum()
        if dist.get_rank() == 0:
            loss = loss + weighing.losses(y, lengths=[4], term="kl").sum()
        loss.backward()
        num_tokens = torch.tensor(4, dtype=torch.int32)
        chunk.config.finalize_model_grads_func([chunk], num_tokens)
    terms = weighing.terms()
    assert terms["kl"].weight_sum == pytest.approx(1 / n)
    assert terms["policy"].weight_sum == pytest.approx(1.0)


def check_a_rank_without_a_token_has_no_term_of_its_own():
    chunk = token_model.wrapped(tiny_gpt.config_of(), 16)
    weighing = Weighing([chunk])
    with weighing:
        losses = chunk(torch.arange(4))
        if dist.get_rank() == 0:
            losses = weighing.losses(losses, lengths=[4], term="policy")
        losses.sum().backward()
        chunk.config.finalize_model_grads_func([chunk], None)
    assert [*weighing.terms()] == ["policy"]


def check_a_loss_scale_that_changes_after_the_step_is_the_steps():
    scale = {"now": LOSS_SCALE}
    made = tiny_gpt.config_of(grad_scale_func=lambda loss: loss * scale["now"])
    chunk = token_model.wrapped(made, 16)
    weighing = Weighing([chunk])
    with weighing:
        losses = weighing.losses(chunk(torch.arange(4)), lengths=[4])
        made.grad_scale_func(losses.mean()).backward()
        chunk.config.finalize_model_grads_func([chunk], None)
    scale["now"] *= 2
    assert weighing.weighed().weight_sum == pytest.approx(1.0)


def check_a_weighing_weighs_one_step():
    chunk = token_model.wrapped(tiny_gpt.config_of(), 16)
    weighing = Weighing([chunk])
    with weighing:
        for _ in range(2):
            chunk.config.finalize_model_grads_func([chunk], None)
    with pytest.raises(ContractError, match="2 steps inside of one Weighing"):
        weighing.weighed()
    with pytest.raises(ContractError, match="got a second step"), weighing:
        pass


def check_what_one_rank_refuses_is_raised_on_every_rank():
    chunk = token_model.wrapped(tiny_gpt.config_of(), 16)
    weighing = Weighing([chunk])
    with weighing:
        lengths = [3] if dist.get_rank() == 0 else [4]
        weighing.losses(chunk(torch.arange(4)), torch.ones(4), lengths=lengths).sum().backward()
        chunk.config.finalize_model_grads_func([chunk], None)
    with pytest.raises(ContractError, match="got losses of 4 tokens, expected 3"):
        weighing.weighed()


def check_a_rank_that_waits_for_the_others_says_so():
    chunk = token_model.wrapped(tiny_gpt.config_of(), 16)
    weighing, is_first, said = Weighing([chunk]), dist.get_rank() == 0, []
    with weighing:
        weighing.losses(chunk(torch.arange(4)), lengths=[4]).mean().backward()
        chunk.config.finalize_model_grads_func([chunk], None)
    with mock.patch.multiple(module, PATIENCE=1.0, say=said.append):
        if not is_first:
            time.sleep(3)
        weighing.weighed()
    others = "rank 1" if dist.get_world_size() == 2 else "ranks 1, 2, 3"
    assert said == [f"rank 0 has waited 1 s for {others} to call weighed() or terms()"] * is_first


def check_a_mask_of_any_dtype_is_taken_and_of_another_size_refused():
    chunk = token_model.wrapped(tiny_gpt.config_of(), 16)
    weighing = Weighing([chunk])
    weighing.losses(chunk(torch.arange(4)), torch.ones(3), lengths=[4])
    with pytest.raises(ContractError, match=r"got a mask of \(3,\) for losses of \(4,\)"):
        weighing.weighed()
    weighing = Weighing([chunk])
    with weighing:
        mask = torch.ones(4, dtype=torch.bfloat16)
        weighing.losses(chunk(torch.arange(4)), mask, lengths=[4]).sum().backward()
    assert [*weighing.of_this_rank().parts["tokens"]] == [4]


def check_trained_tokens_past_the_last_sequence_are_refused():
    chunk = token_model.wrapped(tiny_gpt.config_of(), 16)
    weighing = Weighing([chunk])
    with weighing:
        cuts = [0, 2 * CP]
        weighing.losses(chunk(torch.arange(4)), cu_seqlens=cuts).sum().backward()
    with pytest.raises(ContractError, match="trained tokens past the last sequence"):
        weighing.of_this_rank()


def check_offsets_that_are_not_of_the_losses_are_refused():
    chunk = token_model.wrapped(tiny_gpt.config_of(), 16)
    weighing = Weighing([chunk])
    weighing.losses(chunk(torch.arange(4)), cu_seqlens=CUTS)
    with pytest.raises(ContractError, match="got losses of 4 tokens, expected"):
        weighing.of_this_rank()
    weighing = Weighing([chunk])
    logits = torch.zeros(2, 3, 4)
    assert weighing.losses(logits) is logits  # the step goes on, and every rank raises
    with pytest.raises(ContractError, match="expected the losses of tokens"):
        weighing.weighed()


def check_a_loss_in_pieces_is_one_microbatch_and_one_without_a_call_has_no_token():
    chunk = token_model.wrapped(tiny_gpt.config_of(), 16)
    weighing = Weighing([chunk], num_microbatches=3)
    with weighing:
        one, two, three = (chunk(torch.arange(n)) for n in (4, 2, 6))
        one = weighing.losses(one, lengths=[3, 1], microbatch=0, names=["a", "b"])
        two = weighing.losses(two, lengths=[2], microbatch=0, names=["c"])
        three = weighing.losses(three, lengths=[6], microbatch=2)
        (one.sum() + two.sum() + three.sum()).backward()
    parts = weighing.of_this_rank().parts
    found = parts[["microbatch", "sequence", "name", "tokens"]].tolist()
    assert found == [(0, 0, "a", 3), (0, 1, "b", 1), (0, 2, "c", 2), (2, 0, "", 6)]
    assert weighing.of_this_rank().sizes["M"] == 3


def check_a_microbatch_that_is_none_of_the_step_is_refused():
    chunk = token_model.wrapped(tiny_gpt.config_of(), 16)
    weighing = Weighing([chunk], num_microbatches=2)
    weighing.losses(chunk(torch.arange(4)), microbatch=2, lengths=[4])
    with pytest.raises(ContractError, match="got microbatch=2 in a step of 2, expected 0 to 1"):
        weighing.weighed()


def check_sequences_of_length_0_are_empty_and_padding_needs_no_name():
    chunk = token_model.wrapped(tiny_gpt.config_of(), 16)
    weighing = Weighing([chunk])
    with weighing:
        losses = chunk(torch.arange(4))
        one = weighing.losses(losses, lengths=np.array([3, 0, 1]), names=["a", "b"])
        (one / torch.tensor([3, 3, 3, 1]) / 3).sum().backward()
        chunk.config.finalize_model_grads_func([chunk], None)
    step = weighing.weighed()
    assert (step.num_empty, step.sizes["CP"]) == (dist.get_world_size() // CP, CP)
    assert [one.name for one in step.sequences if one.dp_rank == 0] == ["a", ""]


def check_a_coarser_dtype_of_a_term_that_is_not_trained_loosens_nothing():
    chunk = token_model.wrapped(tiny_gpt.config_of(), 16)
    weighing = Weighing([chunk])
    with weighing:
        losses = chunk(torch.arange(4)).float()
        loss = weighing.losses(losses, lengths=[4], term="policy").mean()
        weighing.losses(losses.detach().bfloat16(), lengths=[4], term="clipped")
        (loss * 1.005).backward()
        chunk.config.finalize_model_grads_func([chunk], None)
    assert weighing.terms()["policy"].trains is None


def check_a_term_that_a_rank_lacks_has_the_tolerance_of_those_that_have_it():
    chunk = token_model.wrapped(tiny_gpt.config_of(), 16)
    weighing, is_first = Weighing([chunk]), dist.get_rank() == 0
    with weighing:
        losses = chunk(torch.arange(4)).to(torch.float32 if is_first else torch.bfloat16)
        loss = weighing.losses(losses, lengths=[4], term="kl" if is_first else "loss")
        (loss.float().mean() * 1.005).backward()
        chunk.config.finalize_model_grads_func([chunk], None)
    assert weighing.terms()["kl"].trains is None


def check_a_call_of_a_deferred_step_trains_no_mode_that_is_known():
    aggregator = LossAggregator([token_model.wrapped(tiny_gpt.config_of(), 16)], "token_mean")
    (chunk,) = aggregator.chunks
    chunk.zero_grad_buffer()
    finalize = chunk.config.finalize_model_grads_func
    with suppress(DeferredStepError), aggregator.deferred():
        with Weighing([chunk]) as weighing:
            losses = weighing.losses(chunk(torch.arange(4)), lengths=[4])
            losses.mean().backward()
            chunk.config.finalize_model_grads_func([chunk], None)
        assert "not finalized" in weighing.weighed().causes[0]
        raise DeferredStepError
    assert chunk.config.finalize_model_grads_func == finalize


if __name__ == "__main__":
    tiny_gpt.start(cp=CP)
    run_checks(globals())
