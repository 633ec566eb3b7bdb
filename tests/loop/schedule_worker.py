"""The schedule hook on live Megatron-Core, around a framework's loop as Megatron-LM's; DP 2."""

import collections
import functools
import itertools
import re
from unittest.mock import patch

import pytest
import tiny_gpt
import torch
import torch.distributed as dist
from check_runner import run_checks
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunMode,
    destroy_rerun_state_machine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)
from torch.autograd.graph import get_gradient_edge

from megatron_lossagg import Aggregation, LossAggregator
from megatron_lossagg.errors import AggregationError, ContractError, PlanError, ReducerError
from megatron_lossagg.guards.framework_loss import compare_with_framework
from megatron_lossagg.integrations import bridge, megatron_lm
from megatron_lossagg.integrations.megatron_lm import PretrainIntegration
from megatron_lossagg.loop.buffer import MicrobatchSequences
from megatron_lossagg.loop.schedule_hook import ScheduleHook
from megatron_lossagg.reduction.faults import Faults
from megatron_lossagg.reduction.options import Options
from megatron_lossagg.verify.step_data import VOCABULARY

SAMPLE_MEAN = Aggregation("sample_mean")
M, LENGTH = 2, 8


def refused(kind, *words):
    return pytest.raises(kind, match=".*".join(re.escape(word) for word in words))


def a_batch(seed, *, cuts=None, entries=2):
    """Make what Megatron-LM's data loader gives; ``cuts``: offsets of one packed entry."""
    draw = torch.Generator().manual_seed(seed)
    shape = (1 if cuts else entries, LENGTH)
    tokens = torch.randint(VOCABULARY, (shape[0], LENGTH + 1), generator=draw)
    mask = (torch.rand(shape, generator=draw) < 0.6).float()
    mask[:, 0] = 1
    batch = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": mask,
        "position_ids": torch.arange(LENGTH).expand(shape),
    }
    if cuts:
        mask[0, cuts[-1] :] = 0
        batch["cu_seqlens"] = torch.tensor([cuts], dtype=torch.int32)
    return batch


def batches(rank, **options):
    return [a_batch(10 * rank + number, **options) for number in range(M)]


def of_both_ranks(**options):
    return [batches(rank, **options) for rank in (0, 1)]


def framework_loss(mask, output):
    losses, mask = output.view(-1).float(), mask.view(-1)
    loss, num_tokens = (losses * mask).sum(), mask.sum().int()
    report = torch.stack([loss.detach(), num_tokens.float()])
    return loss, num_tokens, {"lm loss": report, "accuracy": report.clone()}


def forward_step(iterator, model):
    data = next(iterator)
    for name in list(data):
        data[name] = data[name].clone()  # as a framework that moves its dict to a device in place
    offsets = data.get("cu_seqlens", data.get("cu_seqlens_q"))
    packed = None if offsets is None else tiny_gpt.packed_at(packed_offsets(offsets))
    output = model(
        data["tokens"],
        data["position_ids"],
        None,
        labels=data["labels"],
        packed_seq_params=packed,
    )
    data["tokens"] = None
    return output, functools.partial(framework_loss, data["loss_mask"])


def with_loss(loss_func_of):
    """Return a forward_step whose loss_func is ``loss_func_of(mask)``."""

    def step(iterator, model):
        output, loss_func = forward_step(iterator, model)
        return output, loss_func_of(*loss_func.args)

    return step


def packed_offsets(offsets):
    """Return where sequences lie, and the tail of the entry as a sequence of its own, as a list."""
    return sorted({*offsets.flatten().tolist(), LENGTH} - {-1})


def run(schedule, chunk, data, **more):
    chunk.zero_grad_buffer()
    return schedule(
        **{
            "forward_step_func": forward_step,
            "data_iterator": data if hasattr(data, "__next__") else map(dict, data),
            "model": [chunk],
            "num_microbatches": M,
            "seq_length": LENGTH,
            "micro_batch_size": 2,
            **more,
        }
    )


def gradient(chunk):
    return chunk.buffers[0].grad_data.clone()


def by_hand(chunk, of_ranks):
    """Return the mean over sequences of their weighted mean loss, and its gradient, by loops.

    ``of_ranks``: all ranks' data.
    """
    model, means, num_sequences = chunk.module, [], 0
    for data in (data for rank in of_ranks for data in rank):
        offsets = data.get("cu_seqlens")
        cuts = [0, LENGTH] if offsets is None else sorted(set(offsets.flatten().tolist()))
        for entry in range(len(data["tokens"])):
            for start, end in itertools.pairwise(cuts):
                names = ("tokens", "labels", "loss_mask", "position_ids")
                at = {name: data[name][entry, start:end] for name in names}
                positions = at["position_ids"][None]
                losses = model(at["tokens"][None], positions, None, labels=at["labels"][None])[0]
                weights = at["loss_mask"].tolist()
                weighed = [v * losses[t] for t, v in enumerate(weights) if v]
                num_sequences += 1
                if weighed:
                    means.append(sum(weighed) / sum(weights))
    loss = sum(means) / num_sequences
    return loss.item(), torch.autograd.grad(loss, list(model.parameters()))


def assert_trains_by_hand(schedule, chunk, of_ranks, data=None, **more):
    """Run a step and compare loss and gradient with those of all ranks' data; returns the reports.

    ``data``: what this rank reads, its part of ``of_ranks`` by default.
    """
    own = of_ranks[dist.get_rank()] if data is None else data
    reports = run(schedule, chunk, own, **more)
    loss, gradients = by_hand(chunk, of_ranks)
    assert abs(tiny_gpt.reported(reports, "lm loss") - loss) < 1e-6 * abs(loss)
    for parameter, wanted in zip(chunk.module.parameters(), gradients, strict=True):
        scale = 1e-5 * wanted.norm() + 1e-7
        assert (parameter.main_grad - wanted).norm() < scale
    return reports


def a_hook(**options):
    # Bridge's data is Megatron-LM's, and asks nothing of megatron.training, which is not here.
    return ScheduleHook(SAMPLE_MEAN, bridge.BridgeIntegration(), options=Options(**options))


def check_an_entry_of_the_batch_is_a_sequence(chunk, stock):
    assert_trains_by_hand(a_hook().wrap(stock), chunk, of_both_ranks())


def check_packed_conversations_are_sequences_and_empty_tail_segments_are_none(chunk, stock):
    assert_trains_by_hand(a_hook().wrap(stock), chunk, of_both_ranks(cuts=[0, 3, 7, 8, 8, 8]))


def check_positions_past_the_last_conversation_are_no_sequence(chunk, stock):
    assert_trains_by_hand(a_hook().wrap(stock), chunk, of_both_ranks(cuts=[0, 3, 6]))


def check_each_packed_entry_of_a_microbatch_has_its_own_offsets(chunk, stock):
    cuts = torch.tensor([[0, 3, 8, 8], [0, 2, 5, 8]], dtype=torch.int32)
    integration = bridge.BridgeIntegration()
    for batch in itertools.chain(*of_both_ranks()):
        sequences = integration.sequences({**batch, "cu_seqlens": cuts})
        assert sequences.lengths.tolist() == [3, 5, 2, 3, 3]
        mask = batch["loss_mask"]
        wanted = [mask[0, :3], mask[0, 3:], mask[1, :2], mask[1, 2:5], mask[1, 5:]]
        assert sequences.active_tokens.tolist() == [int(part.sum()) for part in wanted]


def check_what_is_only_padding_is_no_sequence(chunk, stock):
    """As Bridge's packed data has it: offsets with and without padding, or a padding mask."""
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
        sequences = bridge.BridgeIntegration().sequences({"loss_mask": mask, **data})
        assert sequences.lengths.tolist() == [3, 3, 2]
        assert sequences.is_padding.tolist() == [0, 0, 1]
    for wrong in ([[0, 5, 3]], [[2, 5, 8]]):
        with pytest.raises(ValueError, match=r"cu_seqlens .* offsets from 0 that never fall"):
            bridge.BridgeIntegration().sequences(
                {"loss_mask": mask, "cu_seqlens": torch.tensor(wrong)}
            )
    cuts = torch.tensor([[0, 3, 6, 6], [0, 2, 5, 5]])  # each entry's tail is its own
    sequences = bridge.BridgeIntegration().sequences(
        {"loss_mask": torch.ones(2, 8), "cu_seqlens": cuts}
    )
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


def check_an_empty_step_is_an_error_in_training_and_none_in_evaluation(chunk, stock):
    data = batches(0)
    for batch in data:
        batch["loss_mask"].zero_()
    schedule = a_hook(empty_step="error").wrap(stock)
    with pytest.warns(RuntimeWarning, match="no active tokens"), torch.no_grad():
        reports = run(schedule, chunk, data, forward_only=True)
    assert tiny_gpt.reported(reports, "lm loss") == 0
    with refused(PlanError, "no active tokens", "--loss-aggregation-empty-step error"):
        run(schedule, chunk, data)


def check_an_evaluation_needs_no_finalize_model_grads_func(chunk, stock):
    with patch.object(chunk.config, "finalize_model_grads_func", None), torch.no_grad():
        run(a_hook().wrap(stock), chunk, batches(0), forward_only=True)


def check_rejected_tokens_are_an_error_unless_they_were_declared(chunk, stock):
    def rejecting(mask):
        mask[:, 0] = 0
        return functools.partial(framework_loss, mask)

    rejects = {"forward_step_func": with_loss(rejecting)}
    run(a_hook(rejects_tokens=True).wrap(stock), chunk, batches(0), **rejects)
    with pytest.raises(ReducerError, match="segment 0 trains 4 tokens, the plan counted 5"):
        run(a_hook().wrap(stock), chunk, batches(0), **rejects)


def with_weights(rank, **options):
    """Make batches whose loss_mask holds token weights, one of them 0 for a whole sequence."""
    found = batches(rank, **options)
    for number, batch in enumerate(found):
        draw = torch.Generator().manual_seed(100 * rank + number)
        batch["loss_mask"] = batch["loss_mask"] * torch.rand(
            batch["loss_mask"].shape, generator=draw
        )
    found[0]["loss_mask"][0, :3] = 0
    return found


def check_a_loss_mask_of_token_weights_enters_losses_and_denominators(chunk, stock):
    aggregation = Aggregation("sample_mean", count="weights")
    for cuts in (None, [0, 3, 7, 8, 8]):
        hook = ScheduleHook(aggregation, bridge.BridgeIntegration(), options=Options())
        of_ranks = [with_weights(rank, cuts=cuts) for rank in (0, 1)]
        reports = assert_trains_by_hand(hook.wrap(stock), chunk, of_ranks)
        assert tiny_gpt.reported(reports, "lossagg/weight_sum") == pytest.approx(
            tiny_gpt.reported(reports, "lossagg/weight_expected"), rel=1e-6
        )


def check_a_fraction_in_a_mask_is_refused_unless_weights_are_counted(chunk, stock):
    with refused(ReducerError, "a mask is 0 or 1", "--loss-aggregation-count weights"):
        run(a_hook().wrap(stock), chunk, with_weights(dist.get_rank()))


def check_an_integration_without_token_weights_cannot_count_them(chunk, stock):
    class NoWeights(PretrainIntegration):
        gives_token_weights = False

    with refused(AggregationError, "NoWeights knows no token weights", "--loss-aggregation-count"):
        ScheduleHook(Aggregation("token_mean", count="weights"), NoWeights())


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


def check_a_framework_that_is_not_there_is_refused_by_name(chunk, stock):
    for install, name in ((megatron_lm.install, "Megatron-LM"), (bridge.install, "Bridge")):
        with refused(ContractError, "cannot be imported", name, "put its checkout on PYTHONPATH"):
            install(SAMPLE_MEAN)


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
    """The other ways to use memory again are in ``test_buffer.py``."""
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


def check_positional_arguments_are_refused(chunk, stock):
    with refused(ContractError, "got 2 positional arguments", "expected keywords"):
        a_hook().wrap(stock)(forward_step, iter([]))


def check_a_forward_step_that_reads_two_microbatches_is_refused(chunk, stock):
    def greedy(iterator, model):
        next(iterator)
        return forward_step(iterator, model)

    with refused(ContractError, "read more than one microbatch in a call"):
        run(a_hook().wrap(stock), chunk, batches(0), forward_step_func=greedy)


def check_a_forward_step_that_reads_elsewhere_is_refused(chunk, stock):
    elsewhere = iter(batches(0))
    with refused(ContractError, "did not read its microbatch from the data iterator"):
        run(
            a_hook().wrap(stock),
            chunk,
            batches(0),
            forward_step_func=lambda iterator, model: forward_step(elsewhere, model),
        )


def check_a_schedule_that_runs_more_microbatches_is_refused(chunk, stock):
    def longer(**call):
        return stock(**{**call, "num_microbatches": M + 1})

    with refused(ContractError, f"ran more than its {M} microbatches"):
        run(a_hook().wrap(longer), chunk, batches(0))


def check_an_iterator_that_ends_early_is_refused_on_every_rank(chunk, stock):
    short = batches(0)[: M - dist.get_rank()]
    with refused(PlanError, "rank 1", "the data iterator ended after 1 of 2 microbatches"):
        run(a_hook().wrap(stock), chunk, short)


def check_dynamic_context_parallelism_is_refused_where_no_parts_are_counted(chunk, stock):
    class Own(PretrainIntegration):
        def sequences(self, data):
            return super().sequences(data)

    class OwnParts(Own):
        counts_parts = True

    assert PretrainIntegration().counts_parts
    assert OwnParts().counts_parts  # it says so
    chunk.config.dynamic_context_parallel = True
    try:
        for integration in (Own(), bridge.BridgeIntegration()):
            hook = ScheduleHook(SAMPLE_MEAN, integration)
            with refused(ContractError, "dynamic_context_parallel is True, which is not supported"):
                run(hook.wrap(stock), chunk, batches(0))
    finally:
        del chunk.config.dynamic_context_parallel


def check_an_integration_without_lengths_is_refused(chunk, stock):
    class NoLengths(PretrainIntegration):
        def sequences(self, data):
            return MicrobatchSequences(active_tokens=data["loss_mask"].sum(1))

    with refused(ContractError, "NoLengths.sequences gave no lengths"):
        run(ScheduleHook(SAMPLE_MEAN, NoLengths()).wrap(stock), chunk, batches(0))


def changed(change):
    """Return a forward_step whose loss_func gives ``change(loss, mask)`` instead of its loss."""

    def changed_loss(mask, output):
        loss, *rest = framework_loss(mask, output)
        return change(loss, mask), *rest

    return with_loss(lambda mask: functools.partial(changed_loss, mask))


def check_a_loss_with_another_term_is_refused_in_whichever_microbatch_it_comes(chunk, stock):
    masked = batches(0)
    masked[0]["loss_mask"].zero_()
    for data, of in ((batches(0), 0), (masked, 1)):
        calls = itertools.count()
        step = changed(lambda loss, mask, n=calls, of=of: loss + 0.5 * (next(n) == of))
        with refused(ReducerError, f"for microbatch {of} of rank {dist.get_rank()}", "not known"):
            run(a_hook().wrap(stock), chunk, data, forward_step_func=step)


def check_a_penalty_that_warms_up_and_a_factor_from_a_later_step_on_are_refused(chunk, stock):
    for change in (lambda loss, beta: loss + beta, lambda loss, beta: loss * (1 - 0.9 * beta)):
        beta = torch.zeros(())
        step = changed(lambda loss, mask, change=change, beta=beta: change(loss, beta))
        schedule = a_hook().wrap(stock)
        for _ in range(2):
            run(schedule, chunk, batches(0), forward_step_func=step)
        beta += 1
        with refused(ReducerError, "terms or factors that are not known here"):
            run(schedule, chunk, batches(0), forward_step_func=step)


def check_the_comparison_waits_for_no_device(chunk, stock):
    losses = torch.ones(4, device="meta", requires_grad=True)
    mask = torch.ones(4, device="meta")
    loss_func = functools.partial(framework_loss_of_a_device, mask)
    framework, faults = PretrainIntegration().loss(loss_func, losses), Faults()
    compare_with_framework(
        framework.masked_sum,
        framework.losses,
        framework.mask,
        None,
        output=get_gradient_edge(losses),
        faults=faults,
        microbatch=0,
    )  # a meta tensor raises when it is read
    with pytest.raises(NotImplementedError, match="meta"):
        faults.raise_first()


def framework_loss_of_a_device(mask, output):
    loss = (output * mask).sum()
    return loss, mask.sum().int(), {"lm loss": torch.stack([loss.detach(), mask.sum()])}


def check_an_inf_at_a_masked_position_is_no_term(chunk, stock):
    def poisoned(iterator, model):
        output, loss_func = forward_step(iterator, model)
        (mask,) = loss_func.args
        output = torch.where(mask == 0, torch.inf, output)
        return output, loss_func

    run(a_hook().wrap(stock), chunk, batches(0), forward_step_func=poisoned)


def check_a_term_without_a_value_is_compared_by_its_gradient(chunk, stock):
    """As an unbiased estimate of a divergence has one."""
    step = changed(lambda loss, mask: loss + loss**2 - (loss**2).detach())
    with refused(ReducerError, "and their gradients differ by", "not known here"):
        run(a_hook().wrap(stock), chunk, batches(0), forward_step_func=step)


def check_a_loss_func_may_mask_in_place(chunk, stock):
    def in_place(mask, output):
        output.view(-1).mul_(mask.view(-1))
        return framework_loss(mask, output)

    step = with_loss(lambda mask: functools.partial(in_place, mask))
    assert_trains_by_hand(a_hook().wrap(stock), chunk, of_both_ranks(), forward_step_func=step)


class OnlyOnce(torch.autograd.Function):
    """A sum whose backward pass changes what it has saved, as Megatron's cross entropy does."""

    @staticmethod
    def forward(ctx, x):
        saved = torch.ones_like(x)
        ctx.save_for_backward(saved)
        return x.sum()

    @staticmethod
    def backward(ctx, gradient):
        (saved,) = ctx.saved_tensors
        return saved.mul_(gradient)


def check_a_shadow_runs_no_backward_pass_of_the_loss_that_is_trained(chunk, stock):
    def once(mask, output):
        _, *rest = framework_loss(mask, output)
        return OnlyOnce.apply(output.view(-1) * mask.view(-1)), *rest

    step = with_loss(lambda mask: functools.partial(once, mask))
    integration = bridge.BridgeIntegration()
    hook = ScheduleHook(None, integration, options=Options(shadow="token_mean"))
    run(hook.wrap(stock), chunk, batches(0), forward_step_func=step)


def check_packed_data_may_follow_unpacked_data(chunk, stock):
    schedule = a_hook().wrap(stock)
    for cuts in ([0, 3, 8], None, [0, 5, 8]):
        assert_trains_by_hand(schedule, chunk, of_both_ranks(cuts=cuts))


def check_packed_entries_may_be_trained_as_one(chunk, stock):
    integration, mask = bridge.BridgeIntegration(), torch.ones(2, LENGTH)
    offsets = torch.tensor([[0, 3, LENGTH], [0, 5, LENGTH]])
    integration.sequences({"loss_mask": mask, "cu_seqlens": offsets})
    output = torch.ones(1, 2 * LENGTH, requires_grad=True)
    taken = integration.loss(functools.partial(framework_loss, mask), output)
    assert taken.losses.shape == taken.mask.shape == (2 * LENGTH,)


def check_a_mask_of_other_dimensions_than_the_losses_is_refused(chunk, stock):
    def step(of, iterator, model):
        data = {name: of(value) for name, value in next(iterator).items()}
        output = model(data["tokens"], data["position_ids"], None, labels=data["labels"])
        return output, functools.partial(framework_loss, data["loss_mask"])

    for change, back, kind, words in (
        (lambda x: x[None], lambda x: x[0], PlanError, "a loss_mask of shape [1, 2, 8]"),
        (
            lambda x: x.T,
            lambda x: x.T.contiguous(),
            ContractError,
            "expected [b, s] with 8 entries",
        ),
        (
            lambda x: x.reshape(-1, 1),
            lambda x: x.reshape(2, LENGTH),
            ContractError,
            "got losses of shape [2, 8] from the model, expected [b, s] with 16 entries",
        ),
    ):
        data = [{name: change(x) for name, x in batch.items()} for batch in batches(0)]
        with refused(kind, words):
            call = {"forward_step_func": functools.partial(step, back)}
            run(a_hook().wrap(stock), chunk, data, **call)
    packed = [{**batch, "seq_len_q": torch.tensor([5, 11])} for batch in batches(0)]
    with refused(PlanError, "got seq_len_q from the data iterator, expected the offsets cu_seq"):
        run(a_hook().wrap(stock), chunk, packed)


def check_a_mask_in_bfloat16_is_a_mask(chunk, stock):
    of_ranks = of_both_ranks()
    data = [
        {**batch, "loss_mask": batch["loss_mask"].bfloat16()} for batch in of_ranks[dist.get_rank()]
    ]
    assert_trains_by_hand(a_hook().wrap(stock), chunk, of_ranks, data)


def check_a_schedule_is_wrapped_once_in_a_process(chunk, stock):
    once = a_hook().wrap(stock)
    with refused(ContractError, "wrapped already (--loss-aggregation sample_mean"):
        a_hook().wrap(once)


def check_a_hook_takes_the_name_of_a_mode(chunk, stock):
    hook = ScheduleHook("sample_mean", bridge.BridgeIntegration())
    assert_trains_by_hand(hook.wrap(stock), chunk, of_both_ranks())


def check_a_framework_cannot_report_under_our_names(chunk, stock):
    def reporting(mask, output):
        loss, num_tokens, report = framework_loss(mask, output)
        return loss, num_tokens, {**report, "lossagg/weight_sum": torch.tensor([7.0, 1.0])}

    step = with_loss(lambda mask: functools.partial(reporting, mask))
    reports = run(a_hook().wrap(stock), chunk, batches(0), forward_step_func=step)
    assert tiny_gpt.reported(reports, "lossagg/weight_sum") == pytest.approx(1)


def check_an_evaluation_is_not_compared(chunk, stock):
    step = changed(lambda loss, mask: loss + 0.5)
    with torch.no_grad():
        run(a_hook().wrap(stock), chunk, batches(0), forward_step_func=step, forward_only=True)


def check_tuples_of_a_model_or_a_loss_are_refused_by_name(chunk, stock):
    def only_a_report(mask, output):
        return framework_loss(mask, output)[-1]

    def loss_and_count(mask, output):
        return framework_loss(mask, output)[:2]

    without_a_tuple = with_loss(lambda mask: functools.partial(only_a_report, mask))
    for step in (without_a_tuple, with_loss(lambda mask: functools.partial(loss_and_count, mask))):
        with refused(ContractError, "from loss_func, expected a tuple of the masked sum"):
            run(a_hook().wrap(stock), chunk, batches(0), forward_step_func=step)
    mask, pair = torch.ones(4), (torch.ones(4), torch.ones(2))  # as pretrain_bert.py's
    with refused(
        ContractError, "got a tuple from forward_step, expected one tensor", "train it wi"
    ):
        PretrainIntegration().loss(functools.partial(framework_loss, mask), pair)


def check_a_mask_by_keyword_is_refused_by_name(chunk, stock):
    by_keyword = with_loss(lambda mask: functools.partial(framework_loss, mask=mask))
    with refused(ContractError, "expected functools.partial(loss_func, loss_mask"):
        run(a_hook().wrap(stock), chunk, batches(0), forward_step_func=by_keyword)


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


def check_a_loss_without_the_mask_as_its_first_argument_is_refused(chunk, stock):
    hidden = with_loss(lambda mask: lambda output: framework_loss(mask, output))
    with refused(ContractError, "expected functools.partial(loss_func, loss_mask"):
        run(a_hook().wrap(stock), chunk, batches(0), forward_step_func=hidden)


def check_data_of_another_kind_is_refused_by_name(chunk, stock):
    data = [tuple(batch.values()) for batch in batches(0)]
    with refused(PlanError, "got tuple from the data iterator", "dict", "with loss_mask"):
        run(a_hook().wrap(stock), chunk, iter(data))


def check_prompt_mean_without_prompt_ids_is_refused_before_the_first_step(chunk, stock):
    with refused(AggregationError, "prompt_mean needs prompt ids", "choose another"):
        ScheduleHook(Aggregation("prompt_mean"), PretrainIntegration())


def main():
    tiny_gpt.start(dtype=torch.float32)
    chunk = tiny_gpt.wrapped(tiny_gpt.config_of())
    stock = get_forward_backward_func()
    run_checks(globals(), chunk, stock)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
