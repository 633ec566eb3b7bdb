"""Which ranks' counts a step takes, at TP 2 and at DP 2 x PP 2; four processes."""

import contextlib
import functools
import gc
import io

import pytest
import tiny_gpt
import torch
import torch.distributed as dist
from hooked_loop import OfDicts
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from ranks import messages_by_rank, of_ranks, run_worker
from token_model import wrapped

from megatron_lossagg import (
    Aggregation,
    LossAggregationError,
    LossAggregator,
    Sequences,
    plan_step,
)
from megatron_lossagg.errors import ContractError
from megatron_lossagg.loop.schedule_hook import ScheduleHook
from megatron_lossagg.reduction import faults
from megatron_lossagg.reduction.aggregation import Options


@contextlib.contextmanager
def an_aggregator(**sizes):
    """Make one for a model of one weight at these sizes."""
    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(1)
    chunk = wrapped(tiny_gpt.config_of(), 1)
    yield LossAggregator(chunk, "token_mean", options=Options(probe=False))
    dist.barrier()
    parallel_state.destroy_model_parallel()
    gc.collect()


def message_by_rank(aggregator, counts, **options):
    """Begin a step, and return the error that each rank raises; None if it raises none."""

    def begins():
        aggregator.step(**counts, num_microbatches=1, **options).end()

    return messages_by_rank(begins, of=LossAggregationError)


def check_tensor_parallel_ranks_with_different_counts_get_one_error():
    with an_aggregator(tensor_model_parallel_size=2) as aggregator:
        tp_rank = dist.get_rank(aggregator.tp_group)
        for counts in ({"active_tokens": [3, 2 + tp_rank]}, {"active_tokens": [3, 2][tp_rank:]}):
            (message,) = set(message_by_rank(aggregator, counts))
            assert "tensor-parallel ranks 0 and 1 pass different counts" in message, message


def check_counts_over_tensor_parallel_ranks_are_of_the_types_that_were_passed():
    with an_aggregator(tensor_model_parallel_size=2) as aggregator:
        mixed = message_by_rank(aggregator, {"active_tokens": [3, 2], "prompt": ["1", 1]})
        assert all("Sequences.prompt" in message for message in mixed), mixed
        sums = torch.tensor([1.5, 2.0], dtype=torch.bfloat16)
        for given in ({"token_weight_sums": sums}, {"prompt": ["1", "2"], "samples_per_prompt": 2}):
            counts = {"active_tokens": torch.tensor([3, 2]), **given}
            assert message_by_rank(aggregator, counts) == [None] * 4
        trained = sums.clone().requires_grad_()
        for given in ({"token_weight_sums": trained}, {"columns": {"turns": trained}}):
            messages = message_by_rank(aggregator, {"active_tokens": [3, 2], **given})
            assert all("requires a gradient, expected" in one for one in messages), messages


def check_a_tensor_parallel_rank_takes_the_counts_of_the_first():
    with an_aggregator(tensor_model_parallel_size=2) as aggregator:
        is_first = dist.get_rank(aggregator.tp_group) == 0
        for counts in ({"active_tokens": [3, 2]}, {"active_tokens": [3, 2]} if is_first else {}):
            step = aggregator.step(**counts, num_microbatches=1)
            assert step.plan.active_tokens.tolist() == [3, 2]
            assert step.plan.totals.active_tokens == 10
            step.end()


def check_counts_that_the_first_tensor_parallel_rank_lacks_are_an_error_on_all():
    with an_aggregator(tensor_model_parallel_size=2) as aggregator:
        is_first = dist.get_rank(aggregator.tp_group) == 0
        counts = {} if is_first else {"active_tokens": [3, 2]}
        assert None not in message_by_rank(aggregator, counts)


def check_a_step_takes_sequences_and_columns_as_keywords():
    with an_aggregator(tensor_model_parallel_size=2) as aggregator:
        given = Sequences(active_tokens=[3, 2], sample=["a", "b"])
        step = aggregator.step(given, prompt=[1, 1], num_microbatches=1, forward_only=True)
        sequences = step.plan.sequences
        step.end()
        assert (sequences.string_ids, sequences.prompt.tolist()) == (("sample",), [1, 1])
        assert (sequences.active_tokens.tolist(), sequences.num_microbatches) == ([3, 2], 1)
        other = Sequences(active_tokens=[3], num_microbatches=2)
        (message,) = set(message_by_rank(aggregator, {"active_tokens": other}))
        assert "got num_microbatches 1 and Sequences(num_microbatches=2)" in message, message
        for wrong in ("1", [1, 1], torch.tensor([1, 1])):
            other = Sequences(active_tokens=[3], num_microbatches=wrong)
            (message,) = set(message_by_rank(aggregator, {"active_tokens": other}))
            assert "got num_microbatches 1 and Sequences(num_microbatches=" in message, message
        with pytest.raises(TypeError, match="turns"):
            aggregator.step([3], turns=[1], num_microbatches=1)


def check_an_earlier_stage_ignores_counts_that_only_some_of_its_ranks_pass():
    """A rank of it that planned them would wait for the others."""
    with an_aggregator(pipeline_model_parallel_size=2) as aggregator:
        is_last, dp_rank = aggregator.groups.is_last_stage, dist.get_rank(aggregator.dp_group)
        second = {"active_tokens": [3, -2]}
        for on_first_stage in ({"active_tokens": [1]}, second):
            counts = {"active_tokens": [3, 2]}
            if not is_last:
                counts = on_first_stage if dp_rank == 0 else {}
            step = aggregator.step(**counts, num_microbatches=1)
            if is_last:
                assert step.plan.totals.active_tokens == 10
            else:
                with pytest.raises(ContractError, match="computes no loss"):
                    step.plan  # noqa: B018
            step.end()


def check_wrong_counts_on_the_last_stage_are_an_error_on_all_stages():
    with an_aggregator(pipeline_model_parallel_size=2) as aggregator:
        dp_rank = dist.get_rank(aggregator.dp_group)
        for counts in ({"active_tokens": [3, -2 * dp_rank]}, {}):
            if not aggregator.groups.is_last_stage:
                counts = {"active_tokens": [3, 2]}
            messages = message_by_rank(aggregator, counts)
            own = messages[dist.get_process_group_ranks(aggregator.groups.pp_group)[-1]]
            assert own is not None
            if not aggregator.groups.is_last_stage:
                assert messages[dist.get_rank()] == f"pipeline stage 1: {own}"


def message_of_schedule_by_rank(wrap, chunks, data_iterator):
    """As :func:`message_by_rank`, of a wrapped schedule; if it runs, the message says so."""

    def schedule(**call):
        raise AssertionError("the schedule ran")

    call = {"data_iterator": data_iterator, "model": chunks, "num_microbatches": 2}
    kinds = (LossAggregationError, AssertionError)
    return messages_by_rank(wrap(schedule), forward_step_func=None, of=kinds, **call)


BATCH = {"loss_mask": torch.ones(1, 4)}


def check_a_wrapped_schedule_that_cannot_plan_is_an_error_on_all_stages():
    wrong_by_reason = {
        "the data iterator ended after 1 of 2": [BATCH],
        "counting microbatch 1 of 2 raised": [BATCH, {"no": "mask"}],
        "the data iterator raised TypeError": "no iterator",
    }
    with an_aggregator(pipeline_model_parallel_size=2) as aggregator:
        last_stage = dist.get_process_group_ranks(aggregator.groups.pp_group)[-1]
        wrap = functools.partial(aggregator.wrap, integration=OfDicts())
        for reason, wrong in wrong_by_reason.items():
            source = iter([BATCH, BATCH])
            if aggregator.groups.is_last_stage and dist.get_rank(aggregator.dp_group) == 1:
                source = wrong if isinstance(wrong, str) else iter(wrong)
            messages = message_of_schedule_by_rank(wrap, aggregator.chunks, source)
            assert f"rank 1 of the data-parallel group: {reason}" in messages[last_stage], messages
            if not aggregator.groups.is_last_stage:
                assert messages[dist.get_rank()] == f"pipeline stage 1: {messages[last_stage]}"
        if not aggregator.groups.is_last_stage:
            aggregator.chunks[0].config.calculate_per_token_loss = True
        messages = message_of_schedule_by_rank(wrap, aggregator.chunks, iter([BATCH, BATCH]))
        assert all("wrapped in the average loss scaling" in message for message in messages)


def check_what_is_flipped_on_every_stage_after_a_step_is_refused_before_the_schedule_runs():
    with an_aggregator(pipeline_model_parallel_size=2) as aggregator:
        chunks = aggregator.chunks
        hook = ScheduleHook(Aggregation("sample_mean"), OfDicts(), options=Options(probe=False))
        messages = message_of_schedule_by_rank(hook.wrap, chunks, iter([BATCH, BATCH]))
        assert messages == ["the schedule ran"] * 4
        chunks[0].config.calculate_per_token_loss = True
        messages = message_of_schedule_by_rank(hook.wrap, chunks, iter([BATCH, BATCH]))
        assert all("wrapped in the average loss scaling" in message for message in messages)


def check_an_error_of_an_earlier_stage_reaches_the_last():
    with an_aggregator(pipeline_model_parallel_size=2) as aggregator:
        if not aggregator.groups.is_last_stage:
            aggregator.chunks[0].config.calculate_per_token_loss = True
        messages = message_by_rank(aggregator, {"active_tokens": [3, 2]})
        assert all("wrapped in the average loss scaling" in message for message in messages)
        if aggregator.groups.is_last_stage:
            assert messages[dist.get_rank()].startswith("pipeline stage 0: ")
        aggregator.chunks[0].config.calculate_per_token_loss = False
        assert message_by_rank(aggregator, {"active_tokens": [3, 2]}) == [None] * 4


def check_stages_with_different_numbers_of_microbatches_do_not_wait_for_each_other():
    with an_aggregator(pipeline_model_parallel_size=2) as aggregator:
        m = 1 + aggregator.groups.is_last_stage
        with pytest.raises(ContractError, match="0 and 1 train 1 and train 2 microbatches: pass"):
            aggregator.step([3, 2], num_microbatches=m)
        aggregator.step([3, 2], num_microbatches=2).end()


def message_by_rank_if_one_evaluates(aggregator, is_one):
    return message_by_rank(aggregator, {"active_tokens": [3, 2]}, forward_only=is_one)


def check_a_data_parallel_rank_that_alone_evaluates_is_named_on_all():
    with an_aggregator() as aggregator:
        (message,) = set(message_by_rank_if_one_evaluates(aggregator, dist.get_rank() == 2))
        assert "rank 0 has a training step, rank 2 has an evaluation: " in message, message
        for forward_only in (True, False):
            assert message_by_rank_if_one_evaluates(aggregator, forward_only) == [None] * 4


def check_a_data_parallel_rank_in_another_training_step_is_named_on_all():
    with an_aggregator() as aggregator:
        counts, rank = {"active_tokens": [3, 2]}, dist.get_rank()
        (message,) = set(message_by_rank(aggregator, counts, iteration=7 + (rank == 1)))
        assert "rank 0 has training step 7, rank 1 has training step 8: " in message, message
        for iteration in (7, 7, 3, 7 if rank == 0 else None):  # given up on all, and begun again
            assert message_by_rank(aggregator, counts, iteration=iteration) == [None] * 4
        evaluated = message_by_rank(aggregator, counts, iteration=1 + rank, forward_only=True)
        assert evaluated == [None] * 4


def check_a_plan_without_a_step_goes_with_plans_of_steps():
    with an_aggregator() as aggregator:
        if dist.get_rank() == 1:
            sequences = Sequences(active_tokens=[3, 2], num_microbatches=1)
            options = {"group": aggregator.dp_group, "options": aggregator.options}
            plan = plan_step(aggregator.aggregation, sequences, **options)
            aggregator.begin(plan, num_microbatches=1).end()
        else:
            aggregator.step([3, 2], num_microbatches=1, iteration=3).end()


def check_one_rank_says_what_the_first_training_step_counted():
    """The first of the last stage, once per run, and not of an evaluation."""
    for sizes in (
        {"tensor_model_parallel_size": 2},
        {"context_parallel_size": 2},
        {"pipeline_model_parallel_size": 2},
        {"context_parallel_size": 2, "pipeline_model_parallel_size": 2},
    ):
        with an_aggregator(**sizes) as aggregator:
            faults._warned.clear()
            counts = {"active_tokens": [3, 0], "num_padding": 1}
            lines = []
            for forward_only in (True, False, False):
                with contextlib.redirect_stderr(io.StringIO()) as printed:
                    message_by_rank(aggregator, counts, forward_only=forward_only)
                lines += ["".join(of_ranks(printed.getvalue()))]
            size = aggregator.groups.dp_size
            assert lines == [
                "",
                f"lossagg: token_mean: w_s = 1/N; its first step counted {3 * size} active tokens, "
                f"{2 * size} sequences ({size} empty), {2 * size} samples ({size} empty), "
                f"each sequence one, {size} of padding\n",
                "",
            ], lines


def check_a_context_parallel_rank_that_alone_evaluates_or_fails_is_named_on_all():
    """Data-parallel ranks count without it, and the others would wait for it in the model."""
    with an_aggregator(context_parallel_size=2) as aggregator:
        is_one = aggregator.cp_rank == 1
        (message,) = set(message_by_rank_if_one_evaluates(aggregator, is_one))
        assert "parallel ranks 0 and 1 train 1 and evaluate 1 microbatches: " in message, message
        counts = {"active_tokens": [3, 2 - 4 * is_one]}
        messages = message_by_rank(aggregator, counts)
        assert all("active_tokens" in message for message in messages), messages
        assert sum("context-parallel rank 1: " in message for message in messages) == 2, messages
        assert message_by_rank(aggregator, {"active_tokens": [3, 2]}) == [None] * 4


def check_columns_that_differ_between_context_or_tensor_parallel_ranks_are_an_error_on_all():
    for sizes in ({"context_parallel_size": 2}, {"tensor_model_parallel_size": 2}):
        with an_aggregator(**sizes) as aggregator:
            is_second = bool(aggregator.cp_rank or dist.get_rank(aggregator.tp_group))
            for turns, is_right in (([1, 4], True), ([1, 4 + is_second], False)):
                counts = {"active_tokens": [3, 2], "columns": {"turns": torch.tensor(turns)}}
                (message,) = set(message_by_rank(aggregator, counts))
                assert is_right == (message is None), message
            assert "parallel ranks 0 and 1 pass different co" in message, message


def check_a_tensor_parallel_rank_or_a_stage_that_alone_evaluates_is_named_on_all():
    with an_aggregator(tensor_model_parallel_size=2) as aggregator:
        is_one = dist.get_rank(aggregator.tp_group) == 1
        (message,) = set(message_by_rank_if_one_evaluates(aggregator, is_one))
        assert "parallel rank 0 begins a training step, rank 1 an evaluation: begin" in message
    with an_aggregator(pipeline_model_parallel_size=2) as aggregator:
        is_one = aggregator.groups.is_last_stage
        (message,) = set(message_by_rank_if_one_evaluates(aggregator, is_one))
        assert "stages 0 and 1 train 1 and evaluate 1 microbatches: " in message, message


def check_an_error_of_another_package_reaches_the_first_stage_with_its_type():
    def plan():
        raise KeyError("labels")

    with an_aggregator(pipeline_model_parallel_size=2) as aggregator:
        kind, message = ContractError, r"pipeline stage 1: KeyError\('labels'\)"
        if aggregator.groups.is_last_stage:
            kind, message = KeyError, "labels"
        with pytest.raises(kind, match=message):
            aggregator.begin_together(plan, num_microbatches=2)


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    run_worker(globals())
