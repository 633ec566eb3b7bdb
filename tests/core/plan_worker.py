"""Planning over 2 and 3 data-parallel ranks with gloo, without Megatron; a launched worker."""

import contextlib
import dataclasses
import gc
import json
import re
import traceback
import types
import warnings
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from aggregations import AGGREGATIONS, for_the_reference
from step_data import assign, make_sequences

from megatron_lossagg import Aggregation, Layout, Sequences, plan_step
from megatron_lossagg.buffer import StepBuffer
from megatron_lossagg.counts import StepTotals
from megatron_lossagg.errors import PlanError, ReducerError
from megatron_lossagg.options import Options
from megatron_lossagg.verify import reference_loss

_STARTS = ("all_", "broadcast", "reduce", "gather", "scatter", "barrier", "monitored_barrier")
_STARTS += ("send", "isend", "recv", "irecv", "batch_isend_irecv")
COLLECTIVES = [name for name in dir(dist) if name.startswith(_STARTS)]


@contextlib.contextmanager
def collectives_counted():
    """Count every collective of torch.distributed that is called by name."""
    seen, originals = Counter(), {name: getattr(dist, name) for name in COLLECTIVES}

    def counted(name, original):
        def call(*arguments, **options):
            seen[name] += 1
            return original(*arguments, **options)

        return call

    for name, original in originals.items():
        setattr(dist, name, counted(name, original))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def sequences_of_this_rank(sequences, keys):
    return [index for index, key in enumerate(keys) if key[0] == dist.get_rank()]


def assigned(m, **leave_out):
    """Return all sequences with their keys, this rank's indices, and its Sequences."""
    sequences = make_sequences()
    keys = assign(sequences, dist.get_world_size(), [m] * dist.get_world_size())
    indices = sequences_of_this_rank(sequences, keys)
    fields = {
        "sample": [sequences[i]["sample"] for i in indices],
        "prompt": [sequences[i]["prompt"] for i in indices],
        "microbatch": [keys[i][1] for i in indices],
    }
    fields = {name: value for name, value in fields.items() if name not in leave_out}
    counts = [sum(sequences[i]["counted"]) for i in indices]
    return sequences, keys, indices, Sequences(active_tokens=counts, num_microbatches=m, **fields)


def refused_everywhere(message, aggregation, sequences):
    """Assert that every rank refuses to plan, with the same message."""
    raised_everywhere(message, plan_step, aggregation, sequences, group=dist.group.WORLD)


def raised_everywhere(message, call, *arguments, **options):
    """Assert that every rank raises the same message; all compare before any of them fails."""
    raised = None
    try:
        call(*arguments, **options)
    except Exception as error:
        raised = type(error).__name__, str(error)
    raised_by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(raised_by_rank, raised)
    assert len(set(raised_by_rank)) == 1, raised_by_rank
    assert raised is not None
    assert raised[0] == "PlanError", raised_by_rank
    assert re.search(message, raised[1]), raised_by_rank


def check_weights_are_the_references_over_ranks():
    for m in (1, 3, 4):
        sequences, keys, indices, own = assigned(m)
        for aggregation in AGGREGATIONS.values():
            plan = plan_step(aggregation, own, group=dist.group.WORLD)
            # The loss is linear in x: its derivative at one token of a sequence is the sequence's
            # weight.
            x = [
                torch.zeros(len(sequence["counted"]), dtype=torch.float64, requires_grad=True)
                for sequence in sequences
            ]
            live = [
                {**sequence, "trained": sequence["counted"], "x": list(v), "microbatch": k}
                for sequence, v, k in zip(sequences, x, keys, strict=True)
            ]
            loss = reference_loss.step_loss(
                aggregation.mode,
                live,
                **for_the_reference(aggregation),
                microbatches=[m] * dist.get_world_size(),
            )
            grads = torch.autograd.grad(loss, x, allow_unused=True)
            for weight, index in zip(plan.weights.tolist(), indices, strict=True):
                want = 0.0 if grads[index] is None else grads[index].abs().max().item()
                assert abs(weight - want) <= 1e-15 + 1e-13 * want, (aggregation, index)


def check_a_step_makes_two_collectives_with_ids_and_one_without():
    _, _, _, sequences = assigned(3)
    with collectives_counted() as seen:
        plan = plan_step(Aggregation("prompt_mean"), sequences, group=dist.group.WORLD)
        for aggregation in AGGREGATIONS.values():
            plan.under(aggregation).weights  # noqa: B018
    assert seen.total() == 2, seen
    _, _, _, sequences = assigned(3, sample=None, prompt=None)
    with collectives_counted() as seen:
        plan_step(Aggregation("sample_mean"), sequences, group=dist.group.WORLD)
    assert seen.total() == 1, seen


def check_totals_make_no_collective():
    with collectives_counted() as seen:
        plan = plan_step(
            Aggregation("constant", divisor=4),
            Sequences(active_tokens=[3] * (1 + dist.get_rank())),
            totals=StepTotals(samples=8),
        )
    assert seen.total() == 0, seen
    assert plan.weights[0] == 1 / 32


def check_without_ids_every_sequence_is_its_own_sample_on_every_rank():
    sequences = Sequences(active_tokens=[1 + dist.get_rank()])
    plan = plan_step(Aggregation("sample_mean"), sequences, group=dist.group.WORLD)
    assert plan.totals.samples == dist.get_world_size()
    assert plan.weights.tolist() == [1 / (dist.get_world_size() * (1 + dist.get_rank()))]


def check_equal_ids_on_two_ranks_are_one_prompt():
    sequences = Sequences(active_tokens=[1 + dist.get_rank()], prompt=[7])
    plan = plan_step(Aggregation("prompt_mean"), sequences, group=dist.group.WORLD)
    tokens = sum(range(1, dist.get_world_size() + 1))
    assert plan.totals.prompts == 1
    assert plan.weights.tolist() == [1 / tokens]


def check_a_rank_without_sequences_takes_part():
    counts = [] if dist.get_rank() == 0 else [2, 3]
    ids = [dist.get_rank()] * len(counts)
    sequences = Sequences(active_tokens=counts, sample=ids, prompt=ids)
    plan = plan_step(Aggregation("token_mean"), sequences, group=dist.group.WORLD)
    assert plan.totals.active_tokens == 5 * (dist.get_world_size() - 1)
    assert plan.totals.samples == dist.get_world_size() - 1


def check_bad_counts_on_one_rank_are_reported_on_all():
    counts = [3, -1] if dist.get_rank() == 1 else [3, 1]
    refused_everywhere(
        "rank 1 of the data-parallel group: Sequences.active_tokens: got -1 at index 1",
        Aggregation("token_mean"),
        Sequences(active_tokens=counts),
    )


def check_ids_of_the_wrong_length_on_one_rank_are_reported_on_all():
    ids = [1] if dist.get_rank() == 0 else [1, 2]
    refused_everywhere(
        "rank 0 of the data-parallel group: Sequences.sample: got 1 entries, expected 2",
        Aggregation("sample_mean"),
        Sequences(active_tokens=[3, 1], sample=ids),
    )


def check_ids_on_one_rank_only_are_refused():
    ids = [1, 2] if dist.get_rank() == 0 else None
    refused_everywhere(
        "rank 0 has prompt ids, rank 1 has no ids",
        Aggregation("token_mean"),
        Sequences(active_tokens=[3, 1], prompt=ids),
    )
    refused_everywhere(
        "rank 0 has microbatch ids, rank 1 has no ids",
        Aggregation("microbatch_token_mean"),
        Sequences(active_tokens=[3, 1], microbatch=ids),
    )


def check_a_value_that_is_not_a_count_on_one_rank_is_reported_on_all():
    refused_everywhere(
        "rank 1 of the data-parallel group: ",
        Aggregation("token_mean"),
        Sequences(active_tokens=[[1], [2, 3]] if dist.get_rank() == 1 else [3, 1]),
    )


def check_aggregations_that_differ_are_refused():
    refused_everywhere(
        r"rank 0 has .*1/\(B 8\).*, rank 1 has .*1/\(B 9\)",
        Aggregation("constant", divisor=8 + min(dist.get_rank(), 1)),
        Sequences(active_tokens=[3, 1]),
    )


def check_different_aggregations_with_the_same_formula_are_refused():
    other = dist.get_rank() == 1
    refused_everywhere(
        "rank 0 has .*, rank 1 has ",
        Aggregation("token_mean", count_empty=not other),  # both print 1/N
        Sequences(active_tokens=[3, 1]),
    )


def check_divisors_that_differ_by_one_token_are_refused():
    refused_everywhere(
        "rank 0 has .*1048576.*, rank 1 has .*1048577",
        Aggregation("constant", divisor=2**20 + min(dist.get_rank(), 1)),
        Sequences(active_tokens=[3, 1]),
    )


def check_every_rank_reports_an_empty_step():
    sequences = Sequences(active_tokens=[0] * (dist.get_rank() + 1))
    with pytest.warns(RuntimeWarning, match="no active tokens") as caught:
        plan_step(Aggregation("token_mean"), sequences, group=dist.group.WORLD)
    assert len(caught) == 1
    with pytest.raises(PlanError, match="--loss-aggregation-empty-step"):
        plan_step(
            Aggregation("token_mean"),
            sequences,
            group=dist.group.WORLD,
            options=Options(empty_step="error"),
        )


def check_a_rank_with_no_active_tokens_does_not_warn():
    sequences = Sequences(active_tokens=[0] if dist.get_rank() == 0 else [4])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = plan_step(Aggregation("token_mean"), sequences, group=dist.group.WORLD)
    live = dist.get_world_size() - 1
    assert plan.weights.tolist() == ([0.0] if dist.get_rank() == 0 else [1 / (4 * live)])


def check_counts_are_int64_over_ranks():
    sequences = Sequences(active_tokens=[2**33 + dist.get_rank()], sample=[0])
    plan = plan_step(Aggregation("token_mean"), sequences, group=dist.group.WORLD)
    size = dist.get_world_size()
    whole = size * 2**33 + size * (size - 1) // 2
    assert plan.totals.active_tokens == whole
    assert plan.sample_tokens.tolist() == [whole]


def check_the_plan_knows_the_ranks_it_was_counted_over():
    sequences = Sequences(active_tokens=[3])
    world = plan_step(Aggregation("token_mean"), sequences, group=dist.group.WORLD)
    assert world.group_ranks == tuple(range(dist.get_world_size()))
    assert world.under("sample_mean").group_ranks == world.group_ranks
    known = plan_step(Aggregation("token_sum"), sequences, totals=StepTotals())
    assert known.group_ranks is None


def check_prompts_numbered_on_each_rank_are_found_by_samples_per_prompt():
    own = {"active_tokens": [3, 4], "prompt": [0, 0], "samples_per_prompt": 2}
    refused_everywhere(
        rf"prompt 0 has {2 * dist.get_world_size()} samples over the step, samples_per_prompt is 2",
        Aggregation("prompt_mean"),
        Sequences(**own),
    )
    own["prompt"] = [dist.get_rank()] * 2
    plan_step(Aggregation("prompt_mean"), Sequences(**own), group=dist.group.WORLD)


def check_ranks_that_disagree_on_samples_per_prompt_raise_together():
    number = 2 + (dist.get_rank() == 1)
    refused_everywhere(
        "rank 0 has .*samples_per_prompt 2, rank 1 has .*samples_per_prompt 3",
        Aggregation("prompt_mean"),
        Sequences(
            active_tokens=[3] * number, prompt=[dist.get_rank()] * number, samples_per_prompt=number
        ),
    )


def check_what_is_no_sequences_on_one_rank_is_raised_on_all():
    sequences = None if dist.get_rank() == 1 else Sequences(active_tokens=[3])
    refused_everywhere("rank 1 of .*AttributeError", Aggregation("token_mean"), sequences)
    grads = [torch.tensor(3.0, requires_grad=True)] if dist.get_rank() == 1 else [3]
    refused_everywhere("rank 1 of", Aggregation("token_mean"), Sequences(active_tokens=grads))
    aggregation = "token_mean" if dist.get_rank() == 1 else Aggregation("token_mean")
    message = "rank 1 of .*got 'token_mean', expected an Aggregation"
    refused_everywhere(message, aggregation, Sequences(active_tokens=[3]))


def check_ids_that_are_strings_on_one_rank_only_are_refused():
    prompt = ["7", "8"] if dist.get_rank() == 1 else [7, 8]
    refused_everywhere(
        r"rank 0 has prompt ids, rank 1 has prompt \(strings\) ids",
        Aggregation("prompt_mean"),
        Sequences(active_tokens=[3, 4], prompt=prompt),
    )
    prompt = [] if dist.get_rank() == 1 else ["7", "8"]  # with no sequences, ids have no kind
    sequences = Sequences(active_tokens=[1] * len(prompt), prompt=prompt)
    plan_step(Aggregation("prompt_mean"), sequences, group=dist.group.WORLD)


def check_string_ids_are_the_same_on_every_rank():
    sequences = Sequences(active_tokens=[3, 5], prompt=["shared", f"of rank {dist.get_rank()}"])
    plan = plan_step(Aggregation("prompt_mean"), sequences, group=dist.group.WORLD)
    size = dist.get_world_size()
    assert plan.totals.prompts == 1 + size
    assert plan.prompt_tokens.tolist() == [3 * size, 5]


def check_a_loss_that_is_not_finite_names_the_rank_that_holds_it():
    plan = plan_step(
        Aggregation("token_mean"), Sequences(active_tokens=[3]), group=dist.group.WORLD
    )
    reducer = plan.reducer([0], torch.ones(3), Layout.local([3], cp_size=1, cp_rank=0))
    with pytest.raises(ReducerError, match=rf"^rank {dist.get_rank()} \(context-parallel rank 0"):
        reducer(torch.tensor([1, 1, torch.nan]))


def check_counts_whose_sum_over_ranks_is_not_exact_are_refused_on_all():
    for n in (2**53, 2**53 // dist.get_world_size() + 1):
        refused_everywhere(
            r"of all \d ranks sum to \d+, the most .* 2\^53",
            Aggregation("sample_mean"),
            Sequences(active_tokens=[n], sample=[5]),
        )


def check_an_error_beside_totals_names_its_rank_and_makes_no_collective():
    rank, live = dist.get_rank(), Sequences(active_tokens=[3])
    mode, known = Aggregation("sample_sum"), StepTotals(samples=0)
    with collectives_counted() as seen:
        with pytest.raises(PlanError, match=rf"^rank {rank}: got StepTotals\(samples=0\)"):
            plan_step(mode, live, totals=known)
        with pytest.raises(PlanError, match=rf"^rank {rank}: Sequences\.active_tokens: got -1"):
            plan_step(mode, Sequences(active_tokens=[-1]), totals=StepTotals(samples=9))
        with pytest.raises(PlanError, match=rf"^rank {rank}: sample_sum: .* needs StepTotals"):
            plan_step(mode, live, totals=StepTotals())
    assert seen.total() == 0, seen


def check_given_totals_are_verified_in_the_groups_first_step():
    """Those of one rank, and those of ten times the step, trained other weights silently."""
    mode, size = Aggregation("token_mean"), dist.get_world_size()
    own = Sequences(active_tokens=[3, 2])
    for wrong in ({"active_tokens": 5}, {"active_tokens": 50 * size}, {"samples": 3 * size}):
        with pytest.raises(PlanError, match=r"got StepTotals.*the group's sequences have"):
            plan_step(mode, own, totals=StepTotals(**wrong), group=dist.group.WORLD)
    raised_everywhere(
        r"disagree: rank 0 has .*active_tokens=0, .*rank 1 has .*active_tokens=1,",
        plan_step,
        mode,
        own,
        totals=StepTotals(active_tokens=dist.get_rank()),
        group=dist.group.WORLD,
    )
    fault = "its own fault" if dist.get_rank() == 1 else ""
    right = StepTotals(active_tokens=5 * size, samples=2 * size)
    raised_everywhere(
        "rank 1 of the data-parallel group: its own fault$",
        plan_step,
        mode,
        own,
        totals=right,
        group=dist.group.WORLD,
        fault=fault,
    )
    for collectives in (1, 0):
        with collectives_counted() as seen:
            plan = plan_step(mode, own, totals=right, group=dist.group.WORLD)
        assert seen.total() == collectives, seen
        assert plan.weights.tolist() == [1 / (5 * size)] * 2


def check_ranks_that_disagree_on_an_option_raise_together():
    """One would stop on an empty step while the others enter the schedule."""
    is_second = dist.get_rank() == 1
    for name, values in {
        "empty_step": ("zero", "error"),
        "rejects_tokens": (False, True),
    }.items():
        raised_everywhere(
            f"disagree: rank 0 has {name} {values[0]!r}, rank 1 has {name} {values[1]!r}: start",
            plan_step,
            Aggregation("token_mean"),
            Sequences(active_tokens=[0]),
            group=dist.group.WORLD,
            options=Options(**{name: values[is_second]}),
        )


def check_a_fault_that_utf_8_cannot_encode_reaches_all():
    fault = "cannot read \udcff" if dist.get_rank() == 1 else ""
    raised_everywhere(
        r"rank 1 of the data-parallel group: cannot read \?$",
        plan_step,
        Aggregation("token_mean"),
        Sequences(active_tokens=[3]),
        group=dist.group.WORLD,
        fault=fault,
    )


def check_a_warning_of_one_ranks_sample_is_raised_on_all_where_warnings_are_errors():
    from megatron_lossagg import faults

    sequences = Sequences(active_tokens=[9 if dist.get_rank() == 1 else 2])
    for ids in ({}, {"sample": [dist.get_rank()]}):
        faults._warned.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeWarning, match="divides by 5, and a sample has 9 tokens"):
                plan_step(
                    Aggregation("constant", divisor=5),
                    dataclasses.replace(sequences, **ids),
                    group=dist.group.WORLD,
                )


def check_ids_that_start_anew_on_every_rank_are_warned_of_on_all():
    from megatron_lossagg import faults

    def warned(**ids):
        faults._warned.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plan_step(
                Aggregation("token_mean"),
                Sequences(active_tokens=[3, 2], **ids),
                group=dist.group.WORLD,
            )
        return [str(w.message) for w in caught]

    rank, size = dist.get_rank(), dist.get_world_size()
    for kind in ("sample", "prompt"):
        (message,) = warned(**{kind: [0, 1]})
        assert f"the data-parallel ranks have the same {kind} ids" in message
        (message,) = warned(**{kind: [7, 7]})
        assert f"all {2 * size} sequences of the step have one {kind} id" in message
        assert not warned(**{kind: [2 * rank, 2 * rank + 1]})
    assert not warned(prompt=[0, 0], samples_per_prompt=2 * size)


def check_after_a_refused_step_all_ranks_can_plan_again():
    refused_everywhere(
        "rank 0 of the data-parallel group",
        Aggregation("token_mean"),
        Sequences(active_tokens=[-1] if dist.get_rank() == 0 else [1]),
    )
    plan = plan_step(
        Aggregation("token_mean"), Sequences(active_tokens=[1]), group=dist.group.WORLD
    )
    assert plan.totals.active_tokens == dist.get_world_size()


def check_a_sample_under_two_prompts_on_two_ranks_is_named():
    refused_everywhere(
        "sample 5 has sequences under",
        Aggregation("token_mean"),
        Sequences(active_tokens=[3], sample=[5], prompt=[dist.get_rank()]),
    )


def check_a_forgotten_group_is_refused():
    with pytest.raises(PlanError, match=r"one of \d and no group.*aggregator\.dp_group"):
        plan_step(Aggregation("token_mean"), Sequences(active_tokens=[3]))


def check_a_microbatch_mean_with_totals_needs_the_group():
    sequences = Sequences(active_tokens=[3], microbatch=[0])
    mode = Aggregation("microbatch_token_mean")
    with pytest.raises(PlanError, match="needs group=, also with totals="):
        plan_step(mode, sequences, totals=StepTotals())
    plan = plan_step(mode, sequences, totals=StepTotals(), group=dist.group.WORLD)
    assert plan.weights.tolist() == [1 / (3 * dist.get_world_size())]


def check_tensor_parallel_ranks_without_data_plan_the_same_step():
    alone, _ = dist.new_subgroups(group_size=1)  # data-parallel size 1, all ranks in one TP group
    first = dist.get_rank() == 0
    buffer = StepBuffer(iter([["a", "bbb"], ["cc"]]) if first else None, 2)
    with collectives_counted() as seen:
        plan = buffer.plan(
            Aggregation("sample_mean"),
            lambda sequences: [len(sequence) for sequence in sequences],
            group=alone,
            tp_group=dist.group.WORLD,
        )
    assert seen["all_gather_object"] == 1
    assert plan.weights.tolist() == [1 / 3, 1 / 9, 1 / 6]
    assert [mb.sequences for mb in buffer] == [[0, 1], [2]]
    assert [mb.data for mb in buffer] == ([["a", "bbb"], ["cc"]] if first else [None, None])


def raising():
    yield ["a"]
    raise OSError("the file is gone")


def lengths(sequences):
    return [len(sequence) for sequence in sequences]


BUFFERS = {
    "ended after 1 of 2 microbatches: pass whole steps": (lambda: iter([["a"]]), lengths),
    r"raised OSError\('the file is gone'\) after 1 of 2": (raising, lengths),
    "counting microbatch 1 of 2 raised ": (lambda: iter([["a"], [3]]), lengths),
    "counting microbatch 0 of 2 raised ": (lambda: iter([["a"], ["b"]]), lambda sequences: 1),
    "Sequences.active_tokens: got -1 at index 1": (
        lambda: iter([[2], [-1]]),
        lambda sequences: sequences,
    ),
}


def check_a_buffer_that_cannot_read_or_count_on_one_rank_is_reported_on_all():
    for message, (iterator, count) in BUFFERS.items():
        faulty = dist.get_rank() == 1
        buffer = StepBuffer(iterator() if faulty else iter([["a"], ["bb"]]), 2)
        raised_everywhere(
            f"rank 1 of the data-parallel group: .*{message}",
            buffer.plan,
            Aggregation("token_mean"),
            count if faulty else lengths,
            group=dist.group.WORLD,
        )
        with pytest.raises(PlanError, match=r"call plan\(\)"):  # nothing to replay
            next(iter(buffer))
    whole = StepBuffer(iter([["a"], ["bb"]]), 2)
    plan = whole.plan(Aggregation("token_mean"), lengths, group=dist.group.WORLD)
    assert plan.totals.active_tokens == 3 * dist.get_world_size()


def check_a_buffer_that_cannot_read_is_reported_on_tensor_parallel_ranks_without_data():
    alone, _ = dist.new_subgroups(group_size=1)
    for faulty in range(dist.get_world_size()):
        for message, (iterator, count) in BUFFERS.items():
            if dist.get_rank() == faulty:
                source, own_count = iterator(), count
            else:
                source, own_count = (
                    (iter([["a"], ["bb"]]) if dist.get_rank() == 0 else None),
                    lengths,
                )
            if faulty and "got -1" in message:
                continue  # the counts of the first rank are taken
            raised_everywhere(
                message if "got -1" in message else f"tensor-parallel rank {faulty}: .*{message}",
                StepBuffer(source, 2).plan,
                Aggregation("token_mean"),
                own_count,
                group=alone,
                tp_group=dist.group.WORLD,
            )


def check_a_rank_without_iterator_and_counts_is_reported_on_all():
    source = None if dist.get_rank() == 1 else iter([["a"]])
    raised_everywhere(
        "rank 1 of the data-parallel group: this rank has no data iterator .* pass tp_group=",
        StepBuffer(source, 1).plan,
        Aggregation("token_mean"),
        lengths,
        group=dist.group.WORLD,
    )


def main():
    dist.init_process_group("gloo")
    checks = {
        name: check
        for name, check in globals().items()
        if name.startswith("check_") and isinstance(check, types.FunctionType)
    }
    for name, check in checks.items():
        failed = None
        try:
            check()
        except (Exception, pytest.fail.Exception):  # printed below; the next check still runs
            failed = traceback.format_exc()
        failed_by_rank = [None] * dist.get_world_size()
        dist.all_gather_object(failed_by_rank, failed)
        if dist.get_rank() == 0:
            print("CHECK", json.dumps([name, failed_by_rank]), flush=True)
    gc.collect()  # caught errors hold frames, and these the group, whose threads end with it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
