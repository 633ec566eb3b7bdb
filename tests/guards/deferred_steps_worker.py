"""Deferred steps of the loops that may be written, and those that are refused.

On two ranks: DP 2, CP 2 and PP 2, in both loss scalings.
"""

import functools
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from audit_cases import own
from check_runner import run_checks
from faults import LAYOUTS
from legal_worker import same
from megatron.core import parallel_state
from ranks import begin, of_ranks
from torch.cuda import OutOfMemoryError
from training_steps import SEQUENCES, Training, _reset_groups, returning, right

from megatron_lossagg import Aggregation, LossAggregator
from megatron_lossagg.errors import ContractError
from megatron_lossagg.record.step_record import read_record
from megatron_lossagg.reduction.aggregation import Options
from megatron_lossagg.verify.small_gpt import gather_gradients
from megatron_lossagg.verify.world import split_world


class Calls:
    """A training whose microbatches are schedule calls of their own."""

    def __init__(self, layout, per_token, **more):
        self.training = Training(layout, per_token=per_token, **more)
        self.layout, self.per_token, self.more = layout, per_token, more
        rank = parallel_state.get_data_parallel_rank()
        self.own = range(rank, len(SEQUENCES), layout.dp)

    def ids(self, kind, number):
        """Return the ids of a call's sequences here."""
        places = [place for place in self.training.batches[number].sequences if place >= 0]
        return [getattr(SEQUENCES[self.own[place]], kind) for place in places]

    def call(self, number, loss_func=right, **options):
        """Run a schedule call of one microbatch on the gradients of the earlier ones."""
        training = self.training
        batch = training.batches[number]
        counts = [training.counts[place] for place in batch.sequences if place >= 0]
        batch = replace(batch, sequences=[*range(len(counts)), -1])
        chunk = type(training.chunks[0])
        zero = chunk.zero_grad_buffer if number == 0 else _reset_groups
        with (
            patch.object(chunk, "zero_grad_buffer", zero),
            training.aggregator.step(counts, num_microbatches=1, **options) as step,
        ):
            training.run(functools.partial(loss_func, step), [batch])

    def train(self, total=None, loss_func=right):
        """Train a deferred step of both calls; return the gradient, and what finish returned."""
        with self.training.aggregator.deferred() as deferred:
            for number in range(2):
                self.call(number, loss_func)
            factor = deferred.finish(total)
        return self.training.gradient(), factor


def anew(make, **more):
    made = make()
    return Calls(made.layout, made.per_token, **{**made.more, **more})


def config_of(training):
    names = ("finalize_model_grads_func", "no_sync_func", "grad_sync_func")
    return [getattr(training.config, name) for name in names]


def raising(step, batch, x):
    raise OutOfMemoryError


def refused(message, calls, program):
    """Expect a deferred step to end with a message."""

    def run():
        with calls.training.aggregator.deferred() as deferred:
            program(deferred)

    with pytest.raises(ContractError, match=message):
        run()


def check_a_deferred_step_is_one_step(make):
    calls = make()
    expected, before = calls.training.plain(own), config_of(calls.training)
    for _ in range(3):
        found, factor = calls.train()
        same(found, expected)
        assert factor == 1 / len(SEQUENCES)
        assert config_of(calls.training) == before
    same(calls.training.step(right), expected)


def check_calls_reduce_once_with_overlap(make):
    for more in ({}, {"distributed_optimizer": True}):
        calls = anew(make, ddp={"overlap_grad_reduce": True, **more})
        training = calls.training

        def whole(training=training, more=more):
            if more:  # each rank has its shard
                gather_gradients(training.chunks)
            return training.gradient()

        training.plain(own)  # from the second step on a chunk reduces in the backward pass
        expected = whole()
        for _ in range(3):
            calls.train()
            same(whole(), expected)


def check_a_loss_scale(make):
    calls = make()
    expected = calls.training.plain(own)
    calls.training.config.grad_scale_func = lambda loss: loss * 512.0
    same(calls.train()[0], 512 * expected)


def check_a_declared_coefficient(make):
    calls = make()
    expected = calls.training.plain(own)
    half = returning(lambda mb, x: 0.5 * mb.reduce(x), coefficient=0.5)
    same(calls.train(loss_func=half)[0], 0.5 * expected)


def check_a_total_that_is_passed(make):
    calls = make()
    expected = calls.training.plain(own)
    found, factor = calls.train(total=7)
    same(found, expected * len(SEQUENCES) / 7)
    assert factor == 1 / 7


def check_an_evaluation_between_calls(make):
    calls = make()
    training = calls.training
    expected = training.plain(own)
    with training.aggregator.deferred() as deferred:
        calls.call(0)
        with (
            training.plan(forward_only=True) as step,
            patch.object(type(training.chunks[0]), "zero_grad_buffer", _reset_groups),
        ):
            training.run(functools.partial(right, step), forward_only=True)
        calls.call(1)
        deferred.finish()
    same(training.gradient(), expected)


def check_a_step_without_a_division_is_refused(make):
    calls = make()
    before = config_of(calls.training)
    with (
        pytest.raises(ContractError, match=r"left without its division.*call its finish\(\)"),
        calls.training.aggregator.deferred(),
    ):
        calls.call(0)
    assert config_of(calls.training) == before
    same(calls.train()[0], calls.training.plain(own))


def check_an_error_goes_through(make):
    calls = make()
    if calls.layout.pp > 1:  # the other stage waits for it in the model
        return
    before = config_of(calls.training)
    with suppress(OutOfMemoryError), calls.training.aggregator.deferred():
        calls.call(0)
        calls.call(1, raising)
    assert config_of(calls.training) == before
    same(calls.train()[0], calls.training.plain(own))


def check_an_error_on_one_rank_is_refused_on_all(make):
    calls = make()
    if calls.layout.dp == 1:  # other ranks wait for it in the model
        return

    def on_rank_1(step, batch, x):
        return (raising if dist.get_rank() == 1 else right)(step, batch, x)

    def program(deferred):
        with suppress(OutOfMemoryError):
            calls.call(0, on_rank_1)
        deferred.finish()

    refused("rank 1: a schedule call of the deferred step failed", calls, program)


def check_a_division_is_done_once(make):
    calls = make()
    deferred = calls.training.aggregator.deferred()
    with pytest.raises(ContractError, match=r"not open.*with aggregator\.deferred"):
        deferred.finish()
    with deferred:
        for number in range(2):
            calls.call(number)
        deferred.finish()
        found = calls.training.gradient()
        with pytest.raises(ContractError, match=r"not open.*once"):
            deferred.finish()
    with pytest.raises(ContractError, match="not open"):
        deferred.finish()
    same(calls.training.gradient(), found, 0)


def check_totals_are_numbers_above_0(make):
    calls = make()
    for total in (0, -1, float("inf"), float("nan"), True, "2", [2]):

        def program(deferred, total=total):
            calls.call(0)
            deferred.finish(total)

        refused("got total=.*expected a finite number above 0", calls, program)


def check_totals_are_those_of_every_rank(make):
    calls = make()

    def program(deferred):
        calls.call(0)
        deferred.finish(5 + dist.get_rank())

    refused("got the total 5, on rank 1 6, .*: pass the same total", calls, program)


def check_a_deferred_step_has_calls(make):
    refused("without schedule calls", make(), lambda deferred: deferred.finish())


def check_a_step_that_was_not_run_is_no_call(make):
    calls = make()

    def program(deferred):
        calls.call(0)
        calls.training.plan()
        deferred.finish()

    refused("failed or was not finished", calls, program)


def check_one_deferred_step_at_a_time(make):
    calls = make()
    training = calls.training
    other = LossAggregator(training.chunks, "sample_mean", options=Options(probe=False))
    for aggregator in (training.aggregator, other):
        with suppress(ZeroDivisionError), training.aggregator.deferred():
            with (
                pytest.raises(ContractError, match="deferred step inside a step of the same model"),
                aggregator.deferred(),
            ):
                pass
            raise ZeroDivisionError
    with training.plan() as step:
        training.run(functools.partial(right, step))
        if parallel_state.is_pipeline_last_stage():  # the others keep no step
            with pytest.raises(ContractError, match="deferred step inside a step"):
                training.aggregator.deferred().__enter__()
    training.plan()  # never run
    same(calls.train()[0], training.plain(own))


SHARED = "the same sample has sequences in two schedule calls .* train a sample in one call"


def check_a_sample_in_two_calls(make):
    """Its sequences are on one rank, or on both: in both it would count twice."""
    calls = make()
    rank = calls.own[0]
    over_ranks = [(7 + rank, 8 - rank)] if calls.layout.dp > 1 else []
    for ids in ((7, 7), *over_ranks):

        def program(deferred, ids=ids):
            for number, first in enumerate(ids):
                others = [10 * number + 100 * rank + 1000 + id_ for id_ in range(9)]
                sample = [first, *others][: len(calls.ids("sample", number))]
                calls.call(number, sample=sample)
            deferred.finish()

        refused(SHARED, calls, program)


def check_a_sample_in_two_calls_where_it_does_not_matter(make):
    """Of token_mean, and of constant, with a term under sample_sum, if B is passed."""
    for mode, total in (("token_mean", None), ("constant", 10)):
        both = returning(lambda mb, x: mb.reduce(x) + mb.reduce(x * x, "sample_sum"))
        calls = anew(make, mode="token_sum")
        more = {"divisor": 64} if mode == "constant" else {}
        options = Options(probe=False)
        training = calls.training
        training.aggregator = LossAggregator(training.chunks, mode, options=options, **more)
        squares = 64 if mode == "constant" else 0
        expected = training.plain(lambda x, w, t, n=squares: (t * (x + n * x * x)).sum())
        with training.aggregator.deferred() as deferred:
            for number in range(2):
                ids = [0] * len(calls.ids("sample", number))
                calls.call(number, both if squares else right, sample=ids)
            deferred.finish(total)
        times = 1 if mode == "token_mean" else training.total / (64 * total)
        same(training.gradient(), expected * times)


def check_terms_and_shadows_with_the_total_of_the_step(make):
    """B divides all; L is of each."""
    calls = make()
    training = calls.training
    training.aggregator = LossAggregator(
        training.chunks,
        "constant",
        divisor=4,
        options=Options(probe=False, shadow="sample_mean,constant:20"),
    )
    n, b = training.total, len(SEQUENCES)
    expected = training.plain(
        lambda x, w, t: n / b * (t * (x / 4 + x**2 / 20)).sum() + (w * x**3).sum()
    )

    def loss(mb, x):
        term = mb.reduce(x**2, Aggregation("constant", divisor=20))
        return mb.reduce(x) + term + mb.reduce(x**3, "row_mean")

    ids = []
    with training.aggregator.deferred() as deferred:
        for number in range(2):
            rank = calls.own[0]
            ids = [
                100 * rank + 10 * number + one for one in range(len(calls.ids("sample", number)))
            ]
            calls.call(number, returning(loss), sample=ids, group=[7] * len(ids))
        deferred.finish()
    same(training.gradient(), expected)


def check_terms_under_token_sum_have_a_divisor_each(make):
    """Also one that names none: it is divided by 1."""
    calls = anew(make, mode=Aggregation("token_sum", divisor=4))
    expected = calls.training.plain(
        lambda x, w, t: calls.training.total * (t * (x / 4 + x**2 / 20 + x**3)).sum()
    )

    def loss(mb, x):
        term = mb.reduce(x**2, Aggregation("token_sum", divisor=20))
        return mb.reduce(x) + term + mb.reduce(x**3, Aggregation("token_sum"))

    with calls.training.aggregator.deferred() as deferred:
        for number in range(2):
            calls.call(number, returning(loss))
        assert deferred.finish() == 1 / 4
    same(calls.training.gradient(), expected)


def recorded(calls, folder):
    """Train two steps, in one call and deferred; return the lines of both, on the rank that has."""
    lines = {}
    for name in ("one", "deferred"):
        options = Options(probe=False, record=str(folder / name))
        chunks = calls.training.chunks
        calls.training.aggregator = LossAggregator(chunks, "sample_mean", options=options)
        for _ in range(2):
            if name == "one":
                calls.training.step(right)
            else:
                calls.train()
        if (folder / name).exists() and calls.training.aggregator.groups.is_first:
            lines[name] = read_record(folder / name)
    return lines


def check_the_record_is_that_of_one_step(make):
    calls = make()
    with tempfile.TemporaryDirectory() as own:
        lines = recorded(calls, Path(of_ranks(own)[0]))
        dist.barrier()
    if not calls.training.aggregator.groups.is_first:
        return
    assert [*lines["deferred"]] == [*lines["one"]] == [1, 2]
    for step in (1, 2):
        one, deferred = lines["one"][step], lines["deferred"][step]
        assert abs(deferred.weight_sum - one.weight_sum) < 1e-12
        assert abs(deferred.weight_expected - one.weight_expected) < 1e-12
        sums = {"weight_sum": one.weight_sum, "weight_expected": one.weight_expected}
        k = 1 if calls.per_token else one.k
        assert replace(deferred, **sums) == replace(one, k=k)


def main():
    begin()
    for name in ("DP 2", "CP 2", "PP 2"):
        for per_token in (False, True):
            with split_world(LAYOUTS[name]):
                run_checks(globals(), functools.partial(Calls, LAYOUTS[name], per_token))


if __name__ == "__main__":
    main()
