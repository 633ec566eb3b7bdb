"""Planning over 2 and 3 data-parallel ranks with gloo, without Megatron; a launched worker."""

import gc
import math
import random
import re
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from aggregations import AGGREGATIONS, ANY_LAYOUT
from check_runner import run_checks
from step_data import assign, make_sequences

from benchmarks.counting import counted
from megatron_lossagg import Aggregation, Layout, Sequences, plan_step
from megatron_lossagg.errors import PlanError, ReducerError
from megatron_lossagg.loop.buffer import StepBuffer
from megatron_lossagg.reduction import faults
from megatron_lossagg.reduction.counts import StepTotals
from megatron_lossagg.reduction.options import Options
from megatron_lossagg.verify import reference_loss
from megatron_lossagg.verify.cases import reference_options

TOKEN_MEAN = Aggregation("token_mean")


def of(**sequences):
    return TOKEN_MEAN, Sequences(**sequences)


def planned(aggregation=TOKEN_MEAN, **sequences):
    """Plan this rank's sequences over all ranks."""
    return plan_step(aggregation, Sequences(**sequences), group=dist.group.WORLD)


def sequences_of_this_rank(sequences, keys):
    return [index for index, key in enumerate(keys) if key[0] == dist.get_rank()]


def assigned(m, **leave_out):
    """Return all sequences with their keys, this rank's indices, and its Sequences."""
    sequences = make_sequences()
    keys = assign(sequences, [m] * dist.get_world_size())
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
                **reference_options(aggregation, [m] * dist.get_world_size()),
            )
            grads = torch.autograd.grad(loss, x, allow_unused=True)
            for weight, index in zip(plan.weights.tolist(), indices, strict=True):
                want = 0.0 if grads[index] is None else grads[index].abs().max().item()
                assert abs(weight - want) <= 1e-15 + 1e-13 * want, (aggregation, index)


def check_token_weights_give_the_same_bits_over_ranks_and_on_one():
    """Sums of fractions depend neither on the order of sequences nor on how ranks share them."""
    sequences, _, indices, own = assigned(3)
    draw = random.Random(1)
    sums = [
        math.fsum(m * draw.random() for m in one["counted"]) if i % 5 else 0.0
        for i, one in enumerate(sequences)
    ]
    over_ranks = plan_step(
        Aggregation("token_mean", count="weights"),
        replace(own, token_weight_sums=[sums[i] for i in indices]),
        group=dist.group.WORLD,
    )
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    order = draw.sample(range(len(sequences)), len(sequences))
    on_one = plan_step(
        over_ranks.aggregation,
        Sequences(
            active_tokens=[sum(sequences[i]["counted"]) for i in order],
            sample=[sequences[i]["sample"] for i in order],
            prompt=[sequences[i]["prompt"] for i in order],
            token_weight_sums=[sums[i] for i in order],
        ),
        group=alone,
    )
    for aggregation in ANY_LAYOUT.values():
        weighing = replace(aggregation, count="weights")
        whole = dict(zip(order, on_one.under(weighing).weights.tolist(), strict=True))
        assert over_ranks.under(weighing).weights.tolist() == [whole[i] for i in indices]
        assert over_ranks.under(weighing).expected_weight == on_one.under(weighing).expected_weight
    dist.destroy_process_group(alone)


def check_a_step_makes_two_collectives_with_ids_and_one_without():
    _, _, _, sequences = assigned(3)
    with counted() as seen:
        plan = plan_step(Aggregation("prompt_mean"), sequences, group=dist.group.WORLD)
        for aggregation in AGGREGATIONS.values():
            plan.under(aggregation).weights  # noqa: B018
    assert seen.num_collectives == 2, seen
    _, _, _, sequences = assigned(3, sample=None, prompt=None)
    with counted() as seen:
        plan_step(Aggregation("sample_mean"), sequences, group=dist.group.WORLD)
    assert seen.num_collectives == 1, seen


def check_totals_make_no_collective():
    with counted() as seen:
        plan = plan_step(
            Aggregation("constant", divisor=4),
            Sequences(active_tokens=[3] * (1 + dist.get_rank())),
            totals=StepTotals(samples=8),
        )
    assert seen.num_collectives == 0, seen
    assert plan.weights[0] == 1 / 32


def check_without_ids_every_sequence_is_its_own_sample_on_every_rank():
    plan = planned(Aggregation("sample_mean"), active_tokens=[1 + dist.get_rank()])
    assert plan.totals.samples == dist.get_world_size()
    assert plan.weights.tolist() == [1 / (dist.get_world_size() * (1 + dist.get_rank()))]


def check_equal_ids_on_two_ranks_are_one_prompt():
    plan = planned(Aggregation("prompt_mean"), active_tokens=[1 + dist.get_rank()], prompt=[7])
    tokens = sum(range(1, dist.get_world_size() + 1))
    assert plan.totals.prompts == 1
    assert plan.weights.tolist() == [1 / tokens]


def check_a_rank_without_sequences_takes_part():
    counts = [] if dist.get_rank() == 0 else [2, 3]
    ids = [dist.get_rank()] * len(counts)
    plan = planned(active_tokens=counts, sample=ids, prompt=ids)
    assert plan.totals.active_tokens == 5 * (dist.get_world_size() - 1)
    assert plan.totals.samples == dist.get_world_size() - 1


REFUSED = {
    "an id too few": (
        "rank 0 of the data-parallel group: Sequences.sample: got 1 entries, expected 2",
        lambda rank: of(active_tokens=[3, 1], sample=[1, 2][: 1 + min(rank, 1)]),
    ),
    "a negative count on one rank": (
        "rank 1 of the data-parallel group: Sequences.active_tokens: got -1 at index 1",
        lambda rank: of(active_tokens=[3, -1 if rank == 1 else 1]),
    ),
    "prompt ids on one rank": (
        "rank 0 has prompt ids, rank 1 has no ids",
        lambda rank: of(active_tokens=[3, 1], prompt=None if rank else [1, 2]),
    ),
    "microbatches on one rank": (
        "rank 0 has microbatch ids, rank 1 has no ids",
        lambda rank: of(active_tokens=[3, 1], microbatch=None if rank else [1, 2]),
    ),
    "strings on one rank": (
        r"rank 0 has prompt ids, rank 1 has prompt \(strings\) ids",
        lambda rank: of(active_tokens=[3, 4], prompt=["7", "8"] if rank == 1 else [7, 8]),
    ),
    "a value that is not a count": (
        "rank 1 of the data-parallel group: ",
        lambda rank: of(active_tokens=[[1], [2, 3]] if rank == 1 else [3, 1]),
    ),
    "a count with a gradient": (
        "rank 1 of",
        lambda rank: of(
            active_tokens=[torch.tensor(3.0, requires_grad=True)] if rank == 1 else [3]
        ),
    ),
    "no sequences": (
        "rank 1 of .*AttributeError",
        lambda rank: (TOKEN_MEAN, None if rank == 1 else Sequences(active_tokens=[3])),
    ),
    "a name of an aggregation": (
        "rank 1 of .*got 'token_mean', expected an Aggregation",
        lambda rank: ("token_mean" if rank == 1 else TOKEN_MEAN, Sequences(active_tokens=[3])),
    ),
    "different divisors": (
        r"rank 0 has .*1/\(B 8\).*, rank 1 has .*1/\(B 9\)",
        lambda rank: (
            Aggregation("constant", divisor=8 + min(rank, 1)),
            Sequences(active_tokens=[3]),
        ),
    ),
    "divisors that differ by one token": (
        "rank 0 has .*1048576.*, rank 1 has .*1048577",
        lambda rank: (
            Aggregation("constant", divisor=2**20 + min(rank, 1)),
            Sequences(active_tokens=[3]),
        ),
    ),
    "different aggregations with the same formula": (
        "rank 0 has .*, rank 1 has ",
        lambda rank: (
            Aggregation("token_mean", count_empty=rank != 1),
            Sequences(active_tokens=[3]),
        ),
    ),
    "different samples_per_prompt": (
        "rank 0 has .*samples_per_prompt 2, rank 1 has .*samples_per_prompt 3",
        lambda rank: of(
            active_tokens=[3] * 6, prompt=[rank] * 6, samples_per_prompt=2 + (rank == 1)
        ),
    ),
    "a sample under two prompts": (
        "sample 5 has sequences under",
        lambda rank: of(active_tokens=[3], sample=[5], prompt=[rank]),
    ),
    "a count whose sum over ranks is not exact": (
        r"of all \d ranks sum to \d+, the most .* 2\^53",
        lambda rank: of(active_tokens=[2**53], sample=[5]),
    ),
    "counts whose sum over ranks is one too many": (
        r"of all \d ranks sum to \d+, the most .* 2\^53",
        lambda rank: of(active_tokens=[2**53 // dist.get_world_size() + 1], sample=[5]),
    ),
}


def check_what_one_rank_passes_wrongly_is_raised_on_all():
    for message, passed_by in REFUSED.values():
        refused_everywhere(message, *passed_by(dist.get_rank()))
    plan = planned(active_tokens=[1])  # all can plan again
    assert plan.totals.active_tokens == dist.get_world_size()


def check_a_weight_beyond_float32_on_one_rank_is_refused_on_all():
    tokens, is_first = [700 if dist.get_rank() == 0 else 2], dist.get_rank() == 0
    of_lengths = Sequences(active_tokens=tokens)
    for exponent, words in ((15, "beyond what float32 holds"), (200, "beyond float64")):
        power = Aggregation("length_power", exponent=exponent)
        refused_everywhere(words, power, of_lengths)
        refused_everywhere(words, replace(power, count="weights"), weighed(tokens, tokens))
    on_one = Sequences(active_tokens=tokens if is_first else [])
    refused_everywhere("beyond what float32", Aggregation("token_sum", divisor=1e39), on_one)
    tiny = weighed(tokens, [1e-40 if is_first else 1.0])
    refused_everywhere("0 or a number from", Aggregation("sample_mean", count="weights"), tiny)


def weighed(tokens, sums):
    return Sequences(active_tokens=tokens, token_weight_sums=[float(value) for value in sums])


def check_a_rank_without_sequences_may_pass_ids_of_any_kind():
    prompt = [] if dist.get_rank() == 1 else ["7", "8"]
    planned(active_tokens=[1] * len(prompt), prompt=prompt)


def check_every_rank_reports_an_empty_step():
    sequences = Sequences(active_tokens=[0] * (dist.get_rank() + 1))
    with pytest.warns(RuntimeWarning, match="no active tokens") as caught:
        plan_step(TOKEN_MEAN, sequences, group=dist.group.WORLD)
    assert len(caught) == 1
    stop = Options(empty_step="error")
    with pytest.raises(PlanError, match="--loss-aggregation-empty-step"):
        plan_step(TOKEN_MEAN, sequences, group=dist.group.WORLD, options=stop)


def check_a_rank_with_no_active_tokens_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = planned(active_tokens=[0] if dist.get_rank() == 0 else [4])
    live = dist.get_world_size() - 1
    assert plan.weights.tolist() == ([0.0] if dist.get_rank() == 0 else [1 / (4 * live)])


def check_counts_are_int64_over_ranks():
    plan = planned(active_tokens=[2**33 + dist.get_rank()], sample=[0])
    size = dist.get_world_size()
    whole = size * 2**33 + size * (size - 1) // 2
    assert plan.totals.active_tokens == whole
    assert plan.totals.sample_tokens.tolist() == [whole]


def check_the_plan_knows_the_ranks_it_was_counted_over():
    world = planned(active_tokens=[3])
    assert world.group_ranks == tuple(range(dist.get_world_size()))
    assert world.under("sample_mean").group_ranks == world.group_ranks
    known = plan_step(TOKEN_MEAN, Sequences(active_tokens=[3]), totals=StepTotals(active_tokens=3))
    assert known.group_ranks is None


def check_prompts_numbered_on_each_rank_are_found_by_samples_per_prompt():
    own = {"active_tokens": [3, 4], "prompt": [0, 0], "samples_per_prompt": 2}
    refused_everywhere(
        rf"prompt 0 has {2 * dist.get_world_size()} samples over the step, samples_per_prompt is 2",
        Aggregation("prompt_mean"),
        Sequences(**own),
    )
    own["prompt"] = [dist.get_rank()] * 2
    planned(Aggregation("prompt_mean"), **own)


def check_string_ids_are_the_same_on_every_rank():
    plan = planned(active_tokens=[3, 5], prompt=["shared", f"of rank {dist.get_rank()}"])
    size = dist.get_world_size()
    assert plan.totals.prompts == 1 + size
    assert plan.totals.prompt_tokens.tolist() == [3 * size, 5]


def check_a_loss_that_is_not_finite_names_the_rank_that_holds_it():
    plan = planned(active_tokens=[3])
    reducer = plan.reducer([0], torch.ones(3), Layout.local([3], cp_size=1, cp_rank=0))
    with pytest.raises(ReducerError, match=rf"^rank {dist.get_rank()} \(context-parallel rank 0"):
        reducer(torch.tensor([1, 1, torch.nan]))


def check_an_error_beside_totals_names_its_rank_and_makes_no_collective():
    rank, live = dist.get_rank(), Sequences(active_tokens=[3])
    mode, known = Aggregation("sample_sum"), StepTotals(samples=0)
    with counted() as seen:
        with pytest.raises(PlanError, match=rf"^rank {rank}: got StepTotals\(samples=0\)"):
            plan_step(mode, live, totals=known)
        with pytest.raises(PlanError, match=rf"^rank {rank}: Sequences\.active_tokens: got -1"):
            plan_step(mode, Sequences(active_tokens=[-1]), totals=StepTotals(samples=9))
        with pytest.raises(PlanError, match=rf"^rank {rank}: sample_sum: .* needs StepTotals"):
            plan_step(mode, live, totals=StepTotals())
    assert seen.num_collectives == 0, seen


def check_given_totals_are_verified_in_the_groups_first_step():
    """Those of one rank, and those of ten times the step, would train other weights."""
    size, world = dist.get_world_size(), dist.group.WORLD
    own = of(active_tokens=[3, 2])
    for wrong in ({"active_tokens": 5}, {"active_tokens": 50 * size}, {"samples": 3 * size}):
        with pytest.raises(PlanError, match=r"got StepTotals.*the group's sequences have"):
            plan_step(*own, totals=StepTotals(**wrong), group=world)
    message = r"disagree: rank 0 has .*active_tokens=0, .*rank 1 has .*active_tokens=1,"
    different = StepTotals(active_tokens=dist.get_rank())
    raised_everywhere(message, plan_step, *own, totals=different, group=world)
    right = StepTotals(active_tokens=5 * size, samples=2 * size)
    fault = "its own fault" if dist.get_rank() == 1 else ""
    message = "rank 1 of the data-parallel group: its own fault$"
    raised_everywhere(message, plan_step, *own, totals=right, group=world, fault=fault)
    for collectives in (1, 0):
        with counted() as seen:
            plan = plan_step(*own, totals=right, group=world)
        assert seen.num_collectives == collectives, seen
        assert plan.weights.tolist() == [1 / (5 * size)] * 2


def check_ranks_that_disagree_on_an_option_raise_together():
    """One would stop on an empty step while the others enter the schedule."""
    is_second, own, world = dist.get_rank() == 1, of(active_tokens=[0]), dist.group.WORLD
    for name, one, other in (("empty_step", "zero", "error"), ("rejects_tokens", False, True)):
        message = f"disagree: rank 0 has {name} {one!r}, rank 1 has {name} {other!r}: start"
        options = Options(**{name: other if is_second else one})
        raised_everywhere(message, plan_step, *own, group=world, options=options)


def check_a_fault_that_utf_8_cannot_encode_reaches_all():
    fault = "cannot read \udcff" if dist.get_rank() == 1 else ""
    message = r"rank 1 of the data-parallel group: cannot read \?$"
    own = of(active_tokens=[3])
    raised_everywhere(message, plan_step, *own, group=dist.group.WORLD, fault=fault)


def check_a_warning_of_one_ranks_sample_is_raised_on_all_where_warnings_are_errors():
    constant = Aggregation("constant", divisor=5)
    tokens = [9 if dist.get_rank() == 1 else 2]
    for ids in ({}, {"sample": [dist.get_rank()]}):
        faults._warned.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeWarning, match="divides by 5, and a sample has 9 tokens"):
                planned(constant, active_tokens=tokens, **ids)


def check_ids_that_start_anew_on_every_rank_are_warned_of_on_all():
    def warned(**ids):
        faults._warned.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            planned(active_tokens=[3, 2], **ids)
        return [str(w.message) for w in caught]

    rank, size = dist.get_rank(), dist.get_world_size()
    for kind in ("sample", "prompt"):
        (message,) = warned(**{kind: [0, 1]})
        assert f"the data-parallel ranks have the same {kind} ids" in message
        (message,) = warned(**{kind: [7, 7]})
        assert f"all {2 * size} sequences of the step have one {kind} id" in message
        assert not warned(**{kind: [2 * rank, 2 * rank + 1]})
    assert not warned(prompt=[0, 0], samples_per_prompt=2 * size)


def check_a_forgotten_group_is_refused():
    with pytest.raises(PlanError, match=r"one of \d and no group.*aggregator\.dp_group"):
        plan_step(TOKEN_MEAN, Sequences(active_tokens=[3]))


def check_a_microbatch_mean_with_totals_needs_the_group():
    sequences = Sequences(active_tokens=[3], microbatch=[0])
    mode = Aggregation("microbatch_token_mean")
    with pytest.raises(PlanError, match="needs group=, also with totals="):
        plan_step(mode, sequences, totals=StepTotals())
    plan = plan_step(mode, sequences, totals=StepTotals(), group=dist.group.WORLD)
    assert plan.weights.tolist() == [1 / (3 * dist.get_world_size())]


def lengths(sequences):
    return [len(sequence) for sequence in sequences]


def check_tensor_parallel_ranks_without_data_plan_the_same_step():
    alone, _ = dist.new_subgroups(group_size=1)  # data-parallel size 1, all ranks in one TP group
    first = dist.get_rank() == 0
    buffer = StepBuffer(iter([["a", "bbb"], ["cc"]]) if first else None, 2)
    with counted() as seen:
        plan = buffer.plan(
            Aggregation("sample_mean"), lengths, group=alone, tp_group=dist.group.WORLD
        )
    assert seen.num_collectives == 2, seen  # of one all_gather_object
    assert plan.weights.tolist() == [1 / 3, 1 / 9, 1 / 6]
    assert [mb.sequences for mb in buffer] == [[0, 1], [2]]
    assert [mb.data for mb in buffer] == ([["a", "bbb"], ["cc"]] if first else [None, None])


def raising():
    yield ["a"]
    raise OSError("the file is gone")


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
            TOKEN_MEAN,
            count if faulty else lengths,
            group=dist.group.WORLD,
        )
        with pytest.raises(PlanError, match=r"call plan\(\)"):  # nothing to replay
            next(iter(buffer))
    whole = StepBuffer(iter([["a"], ["bb"]]), 2)
    plan = whole.plan(TOKEN_MEAN, lengths, group=dist.group.WORLD)
    assert plan.totals.active_tokens == 3 * dist.get_world_size()


def check_a_buffer_that_cannot_read_is_reported_on_tensor_parallel_ranks_without_data():
    alone, _ = dist.new_subgroups(group_size=1)
    groups = {"group": alone, "tp_group": dist.group.WORLD}
    for faulty in range(dist.get_world_size()):
        for message, (iterator, count) in BUFFERS.items():
            if faulty and "got -1" in message:
                continue  # the counts of the first rank are taken
            source = iter([["a"], ["bb"]]) if dist.get_rank() == 0 else None
            own_count = lengths
            if dist.get_rank() == faulty:
                source, own_count = iterator(), count
            if "got -1" not in message:
                message = f"tensor-parallel rank {faulty}: .*{message}"
            raised_everywhere(message, StepBuffer(source, 2).plan, TOKEN_MEAN, own_count, **groups)


def check_a_rank_without_iterator_and_counts_is_reported_on_all():
    source = None if dist.get_rank() == 1 else iter([["a"]])
    raised_everywhere(
        "rank 1 of the data-parallel group: this rank has no data iterator .* pass tp_group=",
        StepBuffer(source, 1).plan,
        TOKEN_MEAN,
        lengths,
        group=dist.group.WORLD,
    )


def main():
    dist.init_process_group("gloo")
    run_checks(globals())
    gc.collect()  # caught errors hold frames, and these the group, whose threads end with it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
