"""What the schedule hook trains and reports on live Megatron-Core, compared with loops; DP 2."""

import collections
import functools
import itertools
from unittest.mock import patch

import pytest
import tiny_gpt
import torch
import torch.distributed as dist
from hooked_loop import (
    LENGTH,
    SAMPLE_MEAN,
    M,
    OfDicts,
    a_batch,
    a_hook,
    assert_trains_by_hand,
    batches,
    framework_loss,
    gradient,
    of_both_ranks,
    run,
    run_worker,
    with_loss,
    with_weights,
)
from megatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunMode,
    destroy_rerun_state_machine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)

from megatron_lossagg import Aggregation, LossAggregator
from megatron_lossagg.integrations.megatron_lm import PretrainIntegration
from megatron_lossagg.loop.schedule_hook import ScheduleHook
from megatron_lossagg.reduction.aggregation import Options


def check_an_entry_of_the_batch_is_a_sequence(chunk, stock):
    assert_trains_by_hand(a_hook().wrap(stock), chunk, of_both_ranks())


def check_packed_conversations_are_sequences_and_empty_tail_segments_are_none(chunk, stock):
    assert_trains_by_hand(a_hook().wrap(stock), chunk, of_both_ranks(cuts=[0, 3, 7, 8, 8, 8]))


def check_positions_past_the_last_conversation_are_no_sequence(chunk, stock):
    assert_trains_by_hand(a_hook().wrap(stock), chunk, of_both_ranks(cuts=[0, 3, 6]))


def check_each_packed_entry_of_a_microbatch_has_its_own_offsets(chunk, stock):
    cuts = torch.tensor([[0, 3, 8, 8], [0, 2, 5, 8]], dtype=torch.int32)
    integration = OfDicts()
    for batch in itertools.chain(*of_both_ranks()):
        sequences = integration.sequences({**batch, "cu_seqlens": cuts})
        assert sequences.lengths.tolist() == [3, 5, 2, 3, 3]
        mask = batch["loss_mask"]
        wanted = [mask[0, :3], mask[0, 3:], mask[1, :2], mask[1, 2:5], mask[1, 5:]]
        assert sequences.active_tokens.tolist() == [int(part.sum()) for part in wanted]


def check_what_is_only_padding_is_no_sequence(chunk, stock):
    """Offsets with and without padding, or a padding mask."""
    mask = torch.ones(1, 8)
    mask[:, 6:] = 0
    padded = torch.tensor([[0, 3, 6, 8, -1]], dtype=torch.int32)
    unpadded = torch.tensor([[0, 2, 5, 5, -1]], dtype=torch.int32)
    is_padding = torch.tensor([[False] * 6 + [True] * 2])
    for data in (
        {"cu_seqlens_q_padded": padded, "cu_seqlens_q": unpadded},
        {"cu_seqlens": padded, "cu_seqlens_unpadded": unpadded},
        {"cu_seqlens_q": padded, "padding_mask": is_padding},
    ):
        sequences = OfDicts().sequences({"loss_mask": mask, **data})
        assert sequences.lengths.tolist() == [3, 3, 2]
        assert sequences.is_padding.tolist() == [0, 0, 1]
    for wrong in ([[0, 5, 3]], [[2, 5, 8]]):
        with pytest.raises(ValueError, match=r"cu_seqlens .* offsets from 0 that never fall"):
            OfDicts().sequences({"loss_mask": mask, "cu_seqlens": torch.tensor(wrong)})
    cuts = torch.tensor([[0, 3, 6, 6], [0, 2, 5, 5]])  # each entry's tail is its own
    sequences = OfDicts().sequences({"loss_mask": torch.ones(2, 8), "cu_seqlens": cuts})
    assert sequences.lengths.tolist() == [3, 3, 2, 2, 3, 3]
    assert sequences.is_padding.tolist() == [0, 0, 1, 0, 0, 1]


def check_bridges_offsets_are_sequences_and_its_sentinels_are_none(chunk, stock):
    for name, cuts in {"cu_seqlens_q": [0, 3, 8], "cu_seqlens": [0, 3, 8, -1, -1]}.items():
        of_ranks = of_both_ranks(cuts=[0, 3, 8])
        data = [dict(batch) for batch in of_ranks[dist.get_rank()]]
        for batch in data:
            del batch["cu_seqlens"]
            batch[name] = torch.tensor([cuts], dtype=torch.int32)
        assert_trains_by_hand(a_hook().wrap(stock), chunk, of_ranks, data)


def check_evaluation_reports_the_same_loss_and_one_aggregator_serves_both(chunk, stock):
    hook = a_hook()
    data = batches(dist.get_rank())
    trained = run(hook.wrap(stock), chunk, data)
    aggregator = hook.aggregator
    assert aggregator.probe is not None
    with torch.no_grad():
        evaluated = run(hook.wrap(stock), chunk, data, forward_only=True)
    for name in ("lm loss", "stock/lm_loss"):
        assert tiny_gpt.reported(trained, name) == tiny_gpt.reported(evaluated, name)
    assert hook.aggregator is aggregator
    assert hook.num_steps == 2
    assert hook.k == M * dist.get_world_size()


def check_an_evaluation_first_leaves_the_probe_to_the_first_training_step(chunk, stock):
    hook = a_hook()
    with torch.no_grad():
        run(hook.wrap(stock), chunk, batches(dist.get_rank()), forward_only=True)
    assert hook.aggregator.probe is None
    run(hook.wrap(stock), chunk, batches(dist.get_rank()))
    assert hook.aggregator.probe is not None


def check_the_frameworks_report_stays_next_to_ours(chunk, stock):
    data = batches(dist.get_rank())
    theirs = run(stock, chunk, data)
    ours = run(a_hook().wrap(stock), chunk, data)
    names = {"lm loss", "lossagg/weight_sum", "lossagg/weight_expected"}
    assert set(ours[0]) == {"stock/lm_loss", "accuracy"} | names
    for before, after in zip(theirs, ours, strict=True):
        assert torch.equal(before["lm loss"], after["stock/lm_loss"])
        assert torch.equal(before["accuracy"], after["accuracy"])


def check_what_a_framework_does_to_its_microbatch_does_not_reach_the_one_that_was_read(
    chunk, stock
):
    data = batches(dist.get_rank())
    held = [batch["tokens"] for batch in data]
    run(a_hook().wrap(stock), chunk, iter(data))
    assert all(batch["tokens"] is tokens for batch, tokens in zip(data, held, strict=True))


def check_an_evaluation_needs_no_finalize_model_grads_func(chunk, stock):
    with patch.object(chunk.config, "finalize_model_grads_func", None), torch.no_grad():
        run(a_hook().wrap(stock), chunk, batches(0), forward_only=True)


def check_a_loss_mask_of_token_weights_enters_losses_and_denominators(chunk, stock):
    aggregation = Aggregation("sample_mean", count="weights")
    for cuts in (None, [0, 3, 7, 8, 8]):
        hook = ScheduleHook(aggregation, OfDicts(), options=Options())
        of_ranks = [with_weights(rank, cuts=cuts) for rank in (0, 1)]
        reports = assert_trains_by_hand(hook.wrap(stock), chunk, of_ranks)
        assert tiny_gpt.reported(reports, "lossagg/weight_sum") == pytest.approx(
            tiny_gpt.reported(reports, "lossagg/weight_expected"), rel=1e-6
        )


def check_a_call_that_collects_other_data_is_left_alone(chunk, stock):
    def other_step(iterator, model):
        data = next(iterator)
        output = model(data["tokens"], data["position_ids"], None, labels=data["labels"])
        return output, lambda output, non_loss_data: output.sum(1)

    hook, data = a_hook(), batches(dist.get_rank())
    call = {
        "forward_step_func": other_step,
        "forward_only": True,
        "collect_non_loss_data": True,
    }
    with torch.no_grad():
        theirs, ours = (run(s, chunk, data, **call) for s in (stock, hook.wrap(stock)))
    assert len(ours) == M
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
    assert hook.num_steps == 0


def check_the_rerun_machine_repeats_a_step_with_the_same_gradient(chunk, stock):
    run(a_hook().wrap(stock), chunk, batches(dist.get_rank()))
    wanted = gradient(chunk)
    destroy_rerun_state_machine()
    initialize_rerun_state_machine(
        mode=RerunMode.VALIDATE_RESULTS, result_rejected_tracker_filename=None
    )
    machine = get_rerun_state_machine()

    def validated_loss(mask, output):
        loss, *rest = framework_loss(mask, output)
        machine.validate_result(
            result=loss,
            rejection_func=lambda loss: True,  # so that it runs the step again, to compare
            message="a result that is suspected",
            tolerance=0.0,
            fatal=False,
        )
        return loss, *rest

    validated_step = with_loss(lambda mask: functools.partial(validated_loss, mask))
    hook = a_hook()
    schedule = hook.wrap(stock)
    iterator = RerunDataIterator(map(dict, 2 * batches(dist.get_rank())))
    try:
        for calls in (1, 3):  # it validates nothing in the first step of a run
            while machine.should_run_forward_backward(iterator):
                run(schedule, chunk, iterator, forward_step_func=validated_step)
                assert torch.equal(gradient(chunk), wanted)
            assert hook.num_steps == calls
            machine.should_checkpoint_and_exit()
    finally:
        destroy_rerun_state_machine()


def check_an_integration_of_whole_sequences_gives_its_own_layout(chunk, stock):
    class Whole(PretrainIntegration):
        def layout(self, aggregator, lengths):
            return aggregator.thd(torch.tensor([0, *lengths]).cumsum(0))

    aggregator = LossAggregator(chunk, SAMPLE_MEAN, options=Options(probe=False))
    assert_trains_by_hand(aggregator.wrap(stock, Whole()), chunk, of_both_ranks())


def refills_one_buffer(data):
    """Yield one dict of static tensors, into which each microbatch is copied."""
    static = {name: value.clone() for name, value in data[0].items()}
    held = dict(static)
    for batch in data:
        for name, value in batch.items():
            static[name].copy_(value)
        held.update(static)  # what a framework did to the dict is undone
        yield held


def check_a_loader_that_uses_its_memory_again_trains_as_one_that_does_not(chunk, stock):
    """The other ways to use memory again are in ``test_buffer_memory.py``."""
    steps = 2
    data = [a_batch(100 * dist.get_rank() + number) for number in range(3 * steps)]

    def trained(schedule, loader):
        iterator, gradients = loader(data), []
        for _ in range(steps):
            run(schedule, chunk, iterator, num_microbatches=3)
            gradients.append(gradient(chunk))
        return torch.stack(gradients)

    def fresh(data):
        return (dict(batch) for batch in data)

    of_stock, ours = trained(stock, fresh), trained(a_hook().wrap(stock), fresh)
    assert not torch.equal(ours[0], ours[1])
    assert torch.equal(trained(stock, refills_one_buffer), of_stock)
    assert torch.equal(trained(a_hook().wrap(stock), refills_one_buffer), ours)


def assert_trains_the_last_of_two_chunks(chunk, stock, iterators):
    """One is enough to see what the schedule gets; returns the tokens of the first."""
    seen = []

    def schedule(**call):
        first, last = call["data_iterator"]
        seen.extend(batch["tokens"] for batch in first)
        return stock(**{**call, "data_iterator": last})

    assert_trains_by_hand(a_hook().wrap(schedule), chunk, of_both_ranks(), data_iterator=iterators)
    return seen


def check_chunks_over_one_buffer_train_their_own_microbatches(chunk, stock):
    data = batches(dist.get_rank())
    iterators = [refills_one_buffer(data), refills_one_buffer(data)]
    seen = assert_trains_the_last_of_two_chunks(chunk, stock, iterators)
    assert all(torch.equal(a, b["tokens"]) for a, b in zip(seen, data, strict=True))


def check_packed_data_may_follow_unpacked_data(chunk, stock):
    schedule = a_hook().wrap(stock)
    for cuts in ([0, 3, 8], None, [0, 5, 8]):
        assert_trains_by_hand(schedule, chunk, of_both_ranks(cuts=cuts))


def check_packed_entries_may_be_trained_as_one(chunk, stock):
    integration, mask = OfDicts(), torch.ones(2, LENGTH)
    offsets = torch.tensor([[0, 3, LENGTH], [0, 5, LENGTH]])
    integration.sequences({"loss_mask": mask, "cu_seqlens": offsets})
    output = torch.ones(1, 2 * LENGTH, requires_grad=True)
    taken = integration.loss(functools.partial(framework_loss, mask), output)
    assert taken.losses.shape == taken.mask.shape == (2 * LENGTH,)


def check_a_mask_in_bfloat16_is_a_mask(chunk, stock):
    of_ranks = of_both_ranks()
    data = [
        {**batch, "loss_mask": batch["loss_mask"].bfloat16()} for batch in of_ranks[dist.get_rank()]
    ]
    assert_trains_by_hand(a_hook().wrap(stock), chunk, of_ranks, data)


def check_a_hook_takes_the_name_of_a_mode(chunk, stock):
    hook = ScheduleHook("sample_mean", OfDicts())
    assert_trains_by_hand(hook.wrap(stock), chunk, of_both_ranks())


def check_a_framework_cannot_report_under_our_names(chunk, stock):
    def reporting(mask, output):
        loss, num_tokens, report = framework_loss(mask, output)
        return loss, num_tokens, {**report, "lossagg/weight_sum": torch.tensor([7.0, 1.0])}

    step = with_loss(lambda mask: functools.partial(reporting, mask))
    reports = run(a_hook().wrap(stock), chunk, batches(0), forward_step_func=step)
    assert tiny_gpt.reported(reports, "lossagg/weight_sum") == pytest.approx(1)


def check_a_chunk_that_a_schedule_unwraps_is_still_the_losss(chunk, stock):
    def unwrapping(**call):
        step = call["forward_step_func"]
        return stock(**{**call, "forward_step_func": lambda it, model: step(it, model.module)})

    assert_trains_by_hand(a_hook().wrap(unwrapping), chunk, of_both_ranks())


def check_chunks_that_share_a_source_are_read_in_order(chunk, stock):
    kept = collections.deque()

    def reads_and_keeps():
        for batch in batches(dist.get_rank()):
            kept.append(dict(batch))
            yield dict(batch)

    def gets_what_was_kept():
        while True:
            yield kept.popleft()

    iterators = [reads_and_keeps(), gets_what_was_kept()]
    assert len(assert_trains_the_last_of_two_chunks(chunk, stock, iterators)) == M


def main():
    run_worker(globals())


if __name__ == "__main__":
    main()
