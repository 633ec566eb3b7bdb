"""What the schedule hook refuses of a framework, its data and its integration; DP 2."""

import functools
from importlib.util import find_spec

import pytest
import tiny_gpt
import torch
import torch.distributed as dist
from hooked_loop import (
    LENGTH,
    SAMPLE_MEAN,
    M,
    OfDicts,
    a_hook,
    batches,
    forward_step,
    framework_loss,
    refused,
    run,
    run_worker,
    with_loss,
)

from megatron_lossagg import Aggregation
from megatron_lossagg.errors import AggregationError, ContractError, PlanError, ReducerError
from megatron_lossagg.integrations import megatron_lm
from megatron_lossagg.integrations.megatron_lm import PretrainIntegration
from megatron_lossagg.loop.schedule_hook import ScheduleHook
from megatron_lossagg.reduction.sequences import Sequences


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


def check_rejected_tokens_are_an_error_unless_they_were_declared(chunk, stock):
    def rejecting(mask):
        mask[:, 0] = 0
        return functools.partial(framework_loss, mask)

    rejects = {"forward_step_func": with_loss(rejecting)}
    run(a_hook(rejects_tokens=True).wrap(stock), chunk, batches(0), **rejects)
    with pytest.raises(ReducerError, match="segment 0 trains 4 tokens, the plan counted 5"):
        run(a_hook().wrap(stock), chunk, batches(0), **rejects)


def check_an_integration_without_token_weights_cannot_count_them(chunk, stock):
    class NoWeights(PretrainIntegration):
        gives_token_weights = False

    with refused(AggregationError, "NoWeights knows no token weights", "--loss-aggregation-count"):
        ScheduleHook(Aggregation("token_mean", count="weights"), NoWeights())


def check_a_framework_that_is_not_there_is_refused_by_name(chunk, stock):
    words = ("cannot be imported", "Megatron-LM", "put its checkout on PYTHONPATH")
    if find_spec("megatron.training") is None:  # it is in the wheel of 0.19.2
        with refused(ContractError, *words):
            megatron_lm.install(SAMPLE_MEAN)


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
        for integration in (Own(), OfDicts()):
            hook = ScheduleHook(SAMPLE_MEAN, integration)
            with refused(ContractError, "dynamic_context_parallel is True, which is not supported"):
                run(hook.wrap(stock), chunk, batches(0))
    finally:
        del chunk.config.dynamic_context_parallel


def check_an_integration_without_lengths_is_refused(chunk, stock):
    class NoLengths(PretrainIntegration):
        def sequences(self, data):
            return Sequences(active_tokens=data["loss_mask"].sum(1))

    with refused(ContractError, "NoLengths.sequences gave no lengths"):
        run(ScheduleHook(SAMPLE_MEAN, NoLengths()).wrap(stock), chunk, batches(0))


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


def check_a_schedule_is_wrapped_once_in_a_process(chunk, stock):
    once = a_hook().wrap(stock)
    with refused(ContractError, "wrapped already (--loss-aggregation sample_mean"):
        a_hook().wrap(once)


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
    with refused(AggregationError, "balanced needs group ids", "choose another"):
        ScheduleHook(Aggregation("balanced"), PretrainIntegration())


def main():
    run_worker(globals())


if __name__ == "__main__":
    main()
