"""What a step tracks, returns and refuses, on a live model; DP 2, two processes."""

import contextlib
import gc
import tempfile
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_gpt
import torch
import torch.distributed as dist
from live_steps import (
    CONSTANT,
    a_chunk,
    a_microbatch,
    a_plan,
    a_reducer,
    a_step,
    abandoned,
    backward,
    made,
    outputs,
    partial_loss_of,
    refused,
    run_worker,
)
from megatron.core.rerun_state_machine import (
    RerunMode,
    RerunState,
    destroy_rerun_state_machine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)

from megatron_lossagg import (
    Aggregation,
)
from megatron_lossagg.contract.finalize import hook_of
from megatron_lossagg.errors import PlanError, ReducerError
from megatron_lossagg.loop.buffer import StepBuffer
from megatron_lossagg.record.step_record import read_record


@contextlib.contextmanager
def rerunning():
    """Let Megatron's own rerun machine run a step again."""
    destroy_rerun_state_machine()
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    machine = get_rerun_state_machine()
    machine.state = RerunState.RERUNNING_IN_PLACE
    try:
        yield
    finally:
        destroy_rerun_state_machine()


def check_what_the_rerun_machine_repeats_is_not_doubled(chunk, aggregator):
    for calls in ([[0], [1]], [[-1], [0], [1]]):
        plan = a_plan(aggregator)
        with aggregator.begin(plan, num_microbatches=len(calls)) as step:
            for sequences in calls:
                outputs(step, sequences)
            with rerunning():
                for sequences in calls:
                    outputs(step, sequences)


def check_what_the_rerun_machine_repeats_is_recorded_once(chunk, aggregator):
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    record = Path(*folder, "record.jsonl")
    with a_step(made(chunk, record=str(record)), 2) as step:
        outputs(step, [0])
        outputs(step, [1])
        with rerunning():
            outputs(step, [0])
            outputs(step, [1])
    dist.barrier()  # the first rank writes it
    (recorded,) = read_record(record).values()
    assert recorded.weight_sum == pytest.approx(recorded.weight_expected, rel=1e-14)


def check_fewer_calls_than_planned_are_refused_when_it_finishes(chunk, aggregator):
    step = a_step(aggregator, 3)
    with refused("ran for 1 microbatches, 3 were planned"), step:
        outputs(step, [0, 1])
    step = a_step(aggregator, 2)
    with refused("ran for 0 microbatches, 2 were planned"):
        step.finish()
    step.finish()  # refused once


def check_a_fault_that_a_device_found_is_raised_when_the_step_finishes(chunk, aggregator):
    plan = a_plan(aggregator)
    step = aggregator.begin(plan, num_microbatches=1)
    outputs(step, [0, 1])
    plan.state.faults.record([torch.tensor(torch.nan)], lambda values: "found on the device")
    with pytest.raises(ReducerError, match=r"^found on the device$"):
        step.finish()
    with a_step(aggregator) as step:
        outputs(step, [0, 1])


def check_a_value_that_is_already_a_mean_is_reported_with_its_count(chunk, aggregator):
    with abandoned(a_step(aggregator, 2)) as step:
        mb = a_microbatch(step, [0])
        means = {
            "clipfrac": (torch.tensor(3.0, requires_grad=True), 12),
            "reward": (torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor(2)),
        }
        _, _, report = mb.outputs(partial_loss_of(mb), means=means)
    assert report["clipfrac"].tolist() == [3, 12]
    assert not report["clipfrac"].requires_grad
    assert (report["reward"].dtype, report["reward"].tolist()) == (torch.float32, [1.5, 2])


def check_an_evaluation_in_steps_of_other_sizes_is_one_loss(chunk, aggregator):
    """Two samples on each of two ranks, of 3 and 2 tokens, then of 1 and 0.

    A term under another mode stays a mean over the steps, reported detached or not, by either call;
    made first, it is not what shadows are of.
    """
    other = made(chunk, Aggregation("token_mean"), shadow="token_mean,sample_sum,token_sum")
    sums, kl_of_steps = {}, []
    losses = iter(torch.tensor([[0.5, 2.0, -1.0], [4.0, 1.0, 8.0]]))
    for active, values in zip(((3, 2), (1, 0)), losses, strict=True):
        with (
            torch.no_grad(),
            other.step(active_tokens=active, num_microbatches=1, forward_only=True) as step,
        ):
            mb = a_microbatch(step, [0, 1])
            x = values[0] + values[1] * torch.arange(mb.layout.num_local_tokens)
            first = mb.under("sample_mean").reduce(x.square())
            loss, kl = mb.reduce(x), mb.reduce(x.square(), "sample_mean")
            report = {"loss": loss, "twice": 2 * loss, "kl": kl, "detached": kl.detach()}
            *_, reports = mb.outputs(loss, report={**report, "first": first})
        for name, pair in reports.items():
            sums[name] = sums.get(name, 0) + pair.double()
        means = [
            sum(float(values[0] + values[1] * (4 * row + t)) ** 2 for t in range(n)) / n
            for row, n in enumerate(active)
            if n
        ]
        kl_of_steps.append(sum(means) / len(active))
    of_first_step = [0.5 + 2 * at for at in (0, 1, 2, 4, 5)]
    tokens, samples = [*of_first_step, 4.0], 4
    for pair in sums.values():
        dist.all_reduce(pair)
    found = {name: (pair[0] / pair[1]).item() for name, pair in sums.items()}
    wanted = {
        "loss": sum(tokens) / len(tokens),
        "twice": 2 * sum(tokens) / len(tokens),
        "kl": sum(kl_of_steps) / 2,
        "detached": sum(kl_of_steps) / 2,
        "first": sum(kl_of_steps) / 2,
        "lossagg/weight_sum": 1,
        "lossagg/weight_expected": 1,
        "lossagg/shadow/token_mean": sum(tokens) / len(tokens),
        "lossagg/shadow/sample_sum": sum(tokens) / samples,
        "lossagg/shadow/token_sum": 2 * sum(tokens) / 2,  # of both ranks, a mean over two steps
    }
    assert found == pytest.approx(wanted, rel=1e-6), (found, wanted)


def check_a_zero_in_place_of_a_term_is_one_of_an_evaluations_mean(chunk, aggregator):
    """Of a later microbatch, whose rank has no tokens of the term."""
    other, sums = made(chunk, Aggregation("token_mean")), torch.zeros(2)
    for active in ((3, 2), (1, 4)):
        with (
            torch.no_grad(),
            other.step(active_tokens=active, num_microbatches=2, forward_only=True) as step,
        ):
            for row in range(2):
                mb = a_microbatch(step, [row])
                x = torch.arange(1.0, 1 + mb.layout.num_local_tokens)
                kl = torch.zeros(()) if row else mb.reduce(x, "sample_mean")
                *_, reports = mb.outputs(mb.reduce(x), report={"kl": kl})
                sums += reports["kl"]
    # On each of two ranks one of the two samples is 0, in both steps.
    assert (sums[0] / sums[1]).item() == pytest.approx(((1 + 2 + 3) / 3 / 2 + 1 / 2) / 2)


def check_outputs_are_of_the_steps_own_aggregation(chunk, aggregator):
    with abandoned(a_step(aggregator)) as step:
        mb = a_microbatch(step, [0, 1])
        loss = partial_loss_of(mb)
        with refused(r"got outputs under token_mean.*the step's constant", r"not of its under"):
            mb.under("token_mean").outputs(loss)


def check_a_microbatch_has_one_layout(chunk, aggregator):
    with abandoned(a_step(aggregator)) as step:
        mask = torch.tensor([1, 1, 1, 0, 1, 1, 0, 0])
        for given in ({}, {"cu_seqlens": [0, 4, 8], "lengths": [4, 4]}):
            with refused(rf"got {len(given)} of cu_seqlens=, lengths= and layout="):
                step.microbatch([0, 1], mask, **given)


def check_what_outputs_is_given_is_checked(chunk, aggregator):
    one, pair = torch.ones((), requires_grad=True), torch.ones(2)
    wrong = [
        ({"loss": pair}, ["^loss is", "0-dim floating-point"]),
        ({"report": {"kl": torch.ones(1)}}, ["kl is", "0-dim floating-point"]),
        ({"means": {"kl": (pair, 2)}}, ["the sum of kl is", "0-dim floating-point"]),
        ({"report": {"lossagg/weight_sum": one}}, [r"\['lossagg/weight_sum'\]", "rename"]),
        ({"report": {"kl": one}, "means": {"kl": (one, 1)}}, [r"\['kl'\]", "each once"]),
        ({"report": {7: one}}, [r"\['7'\]", "expected strings"]),
        ({"report": [one]}, ["got report", "expected partial losses by name"]),
        ({"means": {"kl": 0.5}}, ["and means", r"\(sum, count\) by name"]),
        ({"means": {"kl": (one, pair)}}, ["the count of kl is", "a number or a 0-dim tensor"]),
    ]
    for given, words in wrong:
        with abandoned(a_step(aggregator)) as step:
            mb = a_microbatch(step, [0, 1])
            loss = partial_loss_of(mb)
            with refused(*words):
                mb.outputs(**{"loss": loss, **given})
    with abandoned(a_step(aggregator)) as step:
        mb = a_microbatch(step, [0, 1])
        counts = {"kl": (one, np.float32(2)), "clip": pair}
        reports = mb.outputs(partial_loss_of(mb), means=counts)[-1]
        assert [reports[name].tolist() for name in counts] == [[1, 2], [1, 1]]
    with refused("got 7, expected what plan_step returns"):
        aggregator.begin(7, num_microbatches=1)


def check_a_microbatch_of_another_step_is_refused(chunk, aggregator):
    for active in ((1, 1, 1), (1, 1)):
        with abandoned(a_step(aggregator, active=active)) as step:
            stale = a_microbatch(step, list(range(len(active))))
            loss = partial_loss_of(stale)
        with abandoned(a_step(aggregator)) as step:
            with pytest.raises(ReducerError, match="other than the running step's"):
                partial_loss_of(stale)
            with refused("a microbatch of a step that has ended", "step.microbatch"):
                stale.outputs(loss)


def check_the_returned_values_have_the_form_that_the_schedule_takes(chunk, aggregator):
    with abandoned(a_step(aggregator, 4)) as step:
        mb = a_microbatch(step, [0, 1])
        partial_loss = partial_loss_of(mb)
        loss, num_tokens, report = mb.outputs(partial_loss, report={"loss": partial_loss})
        assert step.k == 4 * 2
        assert not loss.is_leaf
        assert loss._base is None
        assert loss.data_ptr() != partial_loss.data_ptr()
        assert (num_tokens.dtype, num_tokens.dim(), num_tokens.item()) == (torch.int32, 0, 1)
        before = {name: value.clone() for name, value in report.items()}
        loss /= 7  # the schedule scales in place
        assert all(torch.equal(report[name], before[name]) for name in report)
        assert not any(value.requires_grad for value in report.values())
        assert set(report) == {"loss", "lossagg/weight_sum", "lossagg/weight_expected"}


def check_a_partial_loss_in_bfloat16_is_scaled_in_float32(chunk, aggregator):
    with abandoned(a_step(aggregator, 3)) as step:
        mb = a_microbatch(step, [0, 1])
        partial_loss = partial_loss_of(mb).bfloat16()
        loss, _, report = mb.outputs(partial_loss, report={"x": partial_loss})
        assert (loss.dtype, loss.item()) == (torch.float32, 6 * partial_loss.item())
        assert report["x"].dtype == torch.float32
        assert report["x"].tolist() == [partial_loss.item(), pytest.approx(1 / 6)]


def check_a_step_without_active_tokens_has_zero_gradient(chunk, aggregator):
    for per_token in (False, True):
        live = a_chunk(per_token=per_token)
        its = made(live, Aggregation("token_mean"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step = its.step(active_tokens=[0], num_microbatches=1)
        assert [str(w.message) for w in caught] == [
            "the plan counts no active tokens: its loss and gradient are zero"
        ]
        packed, positions = tiny_gpt.packed_at([0, 2]), torch.arange(2)[None]

        def forward_step(iterator, model, packed=packed, positions=positions, step=step):
            logits = model(next(iterator), positions, None, packed_seq_params=packed)

            def loss_func(logits):
                mask = torch.zeros(2, dtype=torch.int64)
                mb = step.microbatch([0], mask, cu_seqlens=packed.cu_seqlens_q)
                loss = mb.reduce(logits[0].logsumexp(-1))
                return mb.outputs(loss, report={"loss": loss})

            return logits, loss_func

        data = tiny_gpt.run_schedule(forward_step, live, [torch.tensor([[1, 2]])])
        step.finish()
        assert live.buffers[0].grad_data.count_nonzero() == 0
        assert tiny_gpt.reported(data, "loss") == 0


def check_the_masks_of_a_step_are_not_kept_until_it_ends(chunk, aggregator):
    with a_step(aggregator, 2) as step:
        kept = []
        for sequence in (0, 1):
            mb = a_microbatch(step, [sequence])
            backward(step, mb.outputs(partial_loss_of(mb)))
            kept.append(weakref.ref(mb))
        del mb
        gc.collect()
        assert [one() for one in kept] == [None, None]


def check_a_reducer_of_another_plan_makes_no_loss_that_is_trained(chunk, aggregator):
    its = made(a_chunk(), probe=False)
    own, other = a_plan(aggregator), a_plan(aggregator, active=(2, 2))
    reducer, x = a_reducer(aggregator, other, [0, 1]), torch.ones(8, requires_grad=True)
    expected = r"other than the running step's: .*reduce\(losses, mode\)"
    with abandoned(aggregator.begin(own, num_microbatches=1)):
        with a_step(its) as inner:  # of a critic; its end leaves the actor's step open
            outputs(inner, [0, 1])
        with pytest.raises(ReducerError, match=expected):
            reducer(x)
    gc.collect()  # aggregators of other checks whose steps were given up
    reducer(x)  # no step runs


def check_a_step_plans_what_it_is_given(chunk, aggregator):
    counts = {"sample": [0, 0], "prompt": ["a", "a"], "microbatch": [0, 0]}
    with aggregator.step(active_tokens=[3, 2], **counts, num_microbatches=1) as step:
        outputs(step, [0, 1])
    assert step.plan.aggregation == CONSTANT
    assert (step.plan.totals.active_tokens, step.plan.totals.samples) == (10, 1)
    assert step.plan.sequences.num_microbatches == 1


def check_a_rank_without_counts_does_not_leave_the_others_waiting(chunk, aggregator):
    counts = {"active_tokens": [3, 2]} if dist.get_rank() == 0 else {}
    with pytest.raises(PlanError, match=r"^rank 1 of .*: got no counts: pass active_tokens="):
        aggregator.step(**counts, num_microbatches=2)
    with refused("got no counts on the last pipeline stage"):
        aggregator.begin(None, num_microbatches=2)


def check_an_evaluation_that_is_given_up_leaves_the_finalize_function(chunk, aggregator):
    """It may have listened there, for a schedule that trains it."""
    gc.collect()  # steps of other checks that were given up
    step = a_step(made([chunk]), forward_only=True)
    mb = a_microbatch(step, [0, 1])
    loss = partial_loss_of(mb)  # with a gradient
    mb.outputs(loss)
    assert hook_of(chunk.config.finalize_model_grads_func) is not None
    del mb, step, loss
    gc.collect()
    assert hook_of(chunk.config.finalize_model_grads_func) is None


def check_a_run_begins_with_its_aggregator_and_has_its_first_steps_memory_looked_at(
    chunk, aggregator
):
    """In a loop that numbers no steps; the third step of a run is not looked at."""

    def refilling():
        tokens = torch.zeros(8)
        while True:
            yield {"a": SimpleNamespace(of=SimpleNamespace(held=[tokens.add_(1)]))}

    for _ in range(2):
        made(chunk)
        for is_looked_at in (True, True, False):
            named = pytest.raises(PlanError, match="was filled again after it was read")
            with named if is_looked_at else contextlib.nullcontext():
                buffer = StepBuffer(refilling(), 2)
                buffer.plan(CONSTANT, lambda data: [8], group=aggregator.dp_group)


def main():
    run_worker(globals())


if __name__ == "__main__":
    main()
