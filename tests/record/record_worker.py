"""Records and shadows on live Megatron-Core, in every layout of this world size.

``record_worker.py FOLDER``: each layout trains six steps by a loop of its own and through the
schedule hook, three over one batch and three over a second one, of which one sequence differs; each
run writes FOLDER/LAYOUT-WAY-MODE.jsonl. It then compares shadows with the reference, and stock
under a shadow with stock. Each check prints its name.
"""

import functools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import stock_step
import torch
import torch.distributed as dist
from check_runner import run_checks
from megatron.core import parallel_state

from megatron_lossagg import Aggregation, LossAggregator
from megatron_lossagg.errors import AggregationError, ContractError, ReducerError
from megatron_lossagg.loop.schedule_hook import ScheduleHook
from megatron_lossagg.reduction.aggregation import Options
from megatron_lossagg.verify.cases import CASES, Case, expected
from megatron_lossagg.verify.parallelism import Parallelism
from megatron_lossagg.verify.reference_gradient import compute
from megatron_lossagg.verify.small_gpt import forward, reported, run_schedule, token_losses
from megatron_lossagg.verify.step_data import make_sequences
from megatron_lossagg.verify.train_step import Run, _Integration
from megatron_lossagg.verify.world import join_world, split_world

LAYOUTS = {
    1: {"DP1": Parallelism(microbatches=4)},
    2: {
        "DP2": Parallelism(dp=2, microbatches=3),
        "CP2": Parallelism(cp=2, microbatches=3),
        "PP2": Parallelism(pp=2, microbatches=2),
    },
}
MODES = {
    "sample_mean": Aggregation("sample_mean"),
    "prompt_mean": Aggregation("prompt_mean"),
    "length_power": Aggregation("length_power", exponent=0.5),
    "weights": Aggregation("sample_mean", count="weights", count_empty=False),
}
SHADOW = (
    *("token_mean", "sample_mean", "prompt_mean", "constant:40", "sample_sum", "token_sum:7"),
    *("length_power:0.5", "microbatch_token_mean", "roll:seq-mean-token-mean"),
)
QUICK = {"probe": False, "rejects_tokens": True}
FOLDER = Path(sys.argv[1])


def recording(path):
    return Options(record=str(path), **QUICK)


def other_sequences():
    """Give one token of a sequence to another: the same counts but for two sequences'."""
    sequences = make_sequences()
    giver, taker = (
        index for index in (7, 9) if 0 < sum(sequences[index].counted) < len(sequences[index])
    )
    sequences[giver] = changed(sequences[giver], 1, 0)
    sequences[taker] = changed(sequences[taker], 0, 1)
    return sequences


def changed(sequence, old, new):
    counted = list(sequence.counted)
    place = counted.index(old)
    counted[place] = new
    trained = list(sequence.trained)
    trained[place] = new
    return replace(sequence, counted=counted, trained=trained)


def looped(run, aggregation, options, *, iteration=None):
    """Begin a run of an own loop; returns a function that trains a step."""
    case = Case(aggregation=aggregation)
    aggregator = run._aggregators[aggregation] = LossAggregator(
        run.chunks, aggregation, options=options
    )
    step, number = aggregator.step, iteration

    def train():
        nonlocal number
        if number is not None:
            aggregator.step = functools.partial(step, iteration=number)
            number += 1
        return run._looped(case, poison=False, main=1.0, forward_only=False).reports

    return train


def hooked(run, aggregation, options):
    """Begin a run through the schedule hook, whose framework numbers no steps."""
    integration = _Integration(run, Case(aggregation=aggregation), False, 1.0)
    hook = ScheduleHook(aggregation, integration, options=options)
    return lambda: stock(run, run.chunks, wrap=hook.wrap)


def stock(run, chunks, wrap=lambda schedule: schedule, **more):
    """Run a step with a framework's own loss_func, which returns a masked sum."""
    layout = run.parallelism

    def loss_func(batch, output):
        mask = batch.mask_here
        losses = token_losses(output, batch, layout) * batch.coefficient
        loss, num_tokens = (losses * mask).sum(), mask.sum()
        report = torch.stack([loss.detach(), num_tokens.to(loss.dtype)])
        return loss, num_tokens.int(), {"loss": report}

    def forward_step(iterator, chunk):
        batch = next(iterator)
        return forward(chunk, batch, layout), functools.partial(loss_func, batch)

    return run_schedule(forward_step, chunks, run.batches, wrap=wrap, **more)


def is_last_stage():
    return parallel_state.is_pipeline_last_stage(ignore_virtual=True)


def close(got, wanted, tolerance=1e-12):
    return abs(got - wanted) <= tolerance * max(abs(wanted), 1e-12)


def check_every_layout_and_way_writes_a_record(name, runs):
    ways = [*((looped, "loop", mode) for mode in MODES), (hooked, "hook", "sample_mean")]
    for begin, way, mode in ways:
        options = recording(FOLDER / f"{name}-{way}-{mode}.jsonl")
        for run in runs:  # the second run continues the file, as a resumed one
            train = begin(run, MODES[mode], options)
            for _ in range(3):
                train()


def check_a_run_that_is_resumed_and_one_with_another_mode_write_records(name, runs):
    first = runs[0]
    resumed = recording(FOLDER / f"{name}-resumed.jsonl")
    for iteration, steps in ((1, 4), (3, 4)):  # killed after step 4, its checkpoint is of step 2
        train = looped(first, MODES["sample_mean"], resumed, iteration=iteration)
        for _ in range(steps):
            train()
    wrong = recording(FOLDER / f"{name}-wrong.jsonl")
    for mode in ("sample_mean", "sample_mean", "token_mean"):
        looped(first, Aggregation(mode), wrong)()


def check_an_evaluation_and_a_step_that_failed_are_not_recorded(name, runs):
    path = FOLDER / f"{name}-failed.jsonl"
    aggregator = LossAggregator(runs[0].chunks, CASES[0].aggregation, options=recording(path))
    runs[0]._aggregators[CASES[0].aggregation] = aggregator
    runs[0].evaluate(CASES[0])
    step = aggregator.step(active_tokens=[1], num_microbatches=1)
    if is_last_stage():
        with pytest.raises(ContractError, match="loss_func ran for 0 microbatches"):
            step.finish()
    else:
        step.finish()
    dist.barrier()
    assert path.read_text() == ""


def check_a_record_that_cannot_be_written_is_an_error_on_every_rank(name, runs):
    for path, words in ((FOLDER / "none" / "a.jsonl", "cannot be written"), (FOLDER, "written")):
        with pytest.raises(ContractError, match=f"^rank .*--loss-aggregation-record.*{words}"):
            LossAggregator(runs[0].chunks, CASES[0].aggregation, options=recording(path))
    foreign = FOLDER / f"{name}-foreign.txt"
    if dist.get_rank() == 0:
        foreign.write_text("what somebody wrote, without a line's end")
    dist.barrier()
    with pytest.raises(ContractError, match="is no record of steps"):
        LossAggregator(runs[0].chunks, CASES[0].aggregation, options=recording(foreign))
    assert foreign.read_text() == "what somebody wrote, without a line's end"


def check_shadows_are_the_references_next_to_a_trained_loss(name, runs):
    run, modes = runs[0], Options(shadow=SHADOW).shadows
    trained = Aggregation("constant", divisor=3)
    for begin in (looped, hooked):
        plain = begin(run, trained, Options(**QUICK))()
        without = stock_step.gradients(run.chunks)
        reports = begin(run, trained, Options(shadow=SHADOW, **QUICK))()
        for one, other in zip(stock_step.gradients(run.chunks), without, strict=True):
            assert torch.equal(one, other)
        if is_last_stage():
            assert reported(reports, "loss") == reported(plain, "loss")
            assert_shadows(run, reports, modes)


def assert_shadows(run, reports, modes):
    for shadow, aggregation in modes.items():
        wanted = expected(Case(aggregation=aggregation), run.reference, run.facts.assignment).loss
        assert close(reported(reports, f"lossagg/shadow/{shadow}"), wanted), (shadow, wanted)


class Compared(_Integration):
    """Its framework's loss is compared with the masked sum, as Megatron-LM's is."""

    def loss(self, loss_func, output):
        found = super().loss(loss_func, output)
        (batch,) = loss_func.args
        return replace(found, mask=batch.mask_here, masked_sum=loss_func(output)[0])


def check_under_a_shadow_stock_trains_bit_for_bit_and_its_own_loss_is_reported(name, runs):
    for per_token in (False, True):
        run = Run(runs[0].parallelism, runs[0].reference, per_token=per_token)
        chunks = stock_step.stock_model(run.parallelism, per_token=per_token)
        plain = stock(run, chunks)
        without = stock_step.gradients(chunks)
        options = Options(shadow=SHADOW, rejects_tokens=True)
        kind = Compared if run.parallelism.cp == 1 else _Integration
        integration = kind(run, Case(aggregation=Aggregation("token_mean")), False, 1.0)
        hook = ScheduleHook(None, integration, options=options)
        reports = stock(run, chunks, wrap=hook.wrap)
        for one, other in zip(stock_step.gradients(chunks), without, strict=True):
            assert torch.equal(one, other)
        assert hook.aggregator.probe is None
        if is_last_stage():
            assert len(plain) == len(reports)
            for one, other in zip(plain, reports, strict=True):
                assert torch.equal(one["loss"], other["loss"])
            assert_shadows(run, reports, hook.options.shadows)
            trained = reported(reports, "lossagg/shadow/stock")
            assert close(trained, trained_by_stock(run, per_token=per_token)), name
            with torch.no_grad():
                evaluated = stock(run, chunks, wrap=hook.wrap, forward_only=True)
            assert_shadows(run, evaluated, hook.options.shadows)
        else:
            with torch.no_grad():
                stock(run, chunks, wrap=hook.wrap, forward_only=True)


def trained_by_stock(run, *, per_token):
    """Return what stock Megatron's factors make of each rank's and microbatch's own masked sum."""
    total, tokens, of_microbatches = 0.0, 0, []
    for part in parts_of(run).values():
        loss, count = sum(x for x, m in part if m), sum(m for _, m in part)
        total, tokens = total + loss, tokens + count
        of_microbatches.append(loss / max(count, 1))
    ranks = run.parallelism.dp * run.parallelism.cp
    return total / tokens if per_token else sum(of_microbatches) / run.num_microbatches / ranks


def parts_of(run):
    """Return (loss, mask) of the tokens of each rank's microbatches, context parallelism split."""
    reference, cp = run.reference, run.parallelism.cp
    parts = {}
    for index, sequence in enumerate(reference.sequences):
        rank, number = run.facts.assignment.keys[index]
        start, end = reference.starts[index : index + 2]
        for position in range(end - start):
            chunk = position * 2 * cp // (end - start)
            held_by = min(chunk, 2 * cp - 1 - chunk)
            is_real = position < len(sequence)
            x = float(reference.losses_Y[start + position])
            of_rank = parts.setdefault(((rank, held_by), number), [])
            if is_real:
                of_rank.append((x * sequence.coefficient[position], sequence.trained[position]))
    return parts


def check_a_loss_that_is_not_finite_is_stocks_affair_under_a_shadow(name, runs):
    run = runs[0]
    # masked losses are inf, and one trained is NaN
    integration = _Integration(run, Case(aggregation=Aggregation("token_mean")), True, 1.0)
    hook = ScheduleHook(None, integration, options=Options(shadow=("token_sum",), **QUICK))
    spoiled = integration.loss

    def loss(loss_func, output):
        found = spoiled(loss_func, output)
        return replace(found, losses=found.losses * torch.nan)

    integration.loss = loss
    reports = stock(run, run.chunks, wrap=hook.wrap)
    if is_last_stage():
        assert reported(reports, "lossagg/shadow/token_sum") != reported(
            reports, "lossagg/shadow/token_sum"
        )
    trained = ScheduleHook(CASES[0].aggregation, integration, options=Options(**QUICK))
    if dist.get_world_size() == 1:  # else the other ranks would wait
        with pytest.raises(ReducerError, match="is nan"):
            stock(run, run.chunks, wrap=trained.wrap)


def check_what_a_shadow_lacks_is_refused(name, runs):
    integration = _Integration(runs[0], Case(aggregation=Aggregation("token_mean")), False, 1.0)
    with pytest.raises(AggregationError, match="got no aggregation"):
        ScheduleHook(None, integration)
    with pytest.raises(AggregationError, match="got no aggregation"):
        ScheduleHook(None, integration, options=Options(shadow="token_mean", record="a.jsonl"))
    integration.gives_prompts = False
    with pytest.raises(AggregationError, match="prompt_mean needs prompt ids"):
        ScheduleHook(None, integration, options=Options(shadow="token_mean,prompt_mean"))


def check_a_shadow_makes_no_collective_but_plannings(name, runs):
    names = ("all_gather", "all_reduce", "all_gather_object", "broadcast", "reduce_scatter")
    run = runs[0]

    def collectives(shadow):
        counted = []
        options = Options(shadow=shadow, **QUICK)
        train = hooked(run, Aggregation("sample_mean"), options)
        train()  # makes the aggregator
        with pytest.MonkeyPatch.context() as patch:
            for one in names:
                made = getattr(dist, one)

                def call(*args, made=made, one=one, **kwargs):
                    counted.append(one)
                    return made(*args, **kwargs)

                patch.setattr(dist, one, call)
            train()
        return counted

    made = collectives(())  # a plan with ids gathers lengths already
    assert collectives(SHADOW) == made
    assert made or dist.get_world_size() == 1


def main():
    join_world()
    size = dist.get_world_size()
    with split_world(Parallelism(dp=size)):
        needed = {layout.reference for layout in LAYOUTS[size].values()}
        references = {
            (shape, copies, padded): compute(shape, copies=copies, padded=padded)
            for shape, copies, padded in needed
        }
    for name, layout in LAYOUTS[size].items():
        with split_world(layout):
            reference = references[layout.reference]
            runs = [
                Run(layout, reference, per_token=False),
                stock_step.run_of(layout, sequences=other_sequences()),
            ]
            if dist.get_rank() == 0:
                print("LAYOUT", name, flush=True)
            run_checks(globals(), name, runs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
