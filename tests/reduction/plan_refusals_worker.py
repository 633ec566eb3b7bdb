"""What ranks that plan together refuse, with one message on all; 2 and 3 ranks with gloo."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import raised_everywhere, run_worker
from steps import TOKEN_MEAN, planned

from benchmarks.counting import counted
from megatron_lossagg import Aggregation, Layout, Sequences, plan_step
from megatron_lossagg.errors import PlanError, ReducerError
from megatron_lossagg.reduction import faults
from megatron_lossagg.reduction.aggregation import Options
from megatron_lossagg.reduction.table import StepTotals


def fails_on_one_rank(counts):
    return 1 / (dist.get_rank() != 1)


def differs_on_one_rank(counts):
    """Weights whose sum is the same, as is that of their products with 0, 1, 2, ..."""
    return 2 + (dist.get_rank() == 1) * np.resize([0.1, -0.2, 0.1, 0.0], len(counts.n_s))


def of(**sequences):
    return TOKEN_MEAN, Sequences(**sequences)


def refused_everywhere(message, aggregation, sequences):
    """Assert that every rank refuses to plan, with the same message."""
    raised_everywhere(message, plan_step, aggregation, sequences, group=dist.group.WORLD)


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
    "weights of sequences on one rank": (
        "rank 0 has sequence_weight, rank 1 has no sequence_weight",
        lambda rank: of(active_tokens=[3, 1], sequence_weight=None if rank else [1, 2]),
    ),
    "a column on one rank": (
        "rank 0 has the columns turns, rank 1 has no columns",
        lambda rank: of(active_tokens=[3, 1], columns=None if rank else {"turns": [1, 2]}),
    ),
    "sequences left out on one rank": (
        "rank 0 has left_out, rank 1 has no left_out",
        lambda rank: of(active_tokens=[3, 1], left_out=None if rank else [True, False]),
    ),
    "what is no bool on one rank": (
        r"rank 1 of .*left_out: got \[1.0, 2.0\], expected bools, or 0 and 1",
        lambda rank: of(active_tokens=[3, 1], left_out=[1, 1 + (rank == 1)]),
    ),
    "a negative weight of a sequence": (
        r"rank 1 of .*sequence_weight: got -2\.0 at index 1, expected 0 or numbers",
        lambda rank: of(active_tokens=[3, 1], sequence_weight=[1, -2 if rank == 1 else 2]),
    ),
    "a sample in two groups": (
        r"sample 7 has sequences under \d groups .*: a sample belongs to one group",
        lambda rank: of(active_tokens=[3], sample=[7], group=[rank]),
    ),
    "a weights function that fails on one rank": (
        "rank 1 of the data-parallel group: the weights function .* raised ZeroDivisionError",
        lambda rank: (
            Aggregation(weights=fails_on_one_rank),
            Sequences(active_tokens=[3]),
        ),
    ),
    "a weights function of other code on one rank": (
        "rank 1 of the data-parallel group computes other weights than rank 0: install the same",
        lambda rank: (
            Aggregation(weights=differs_on_one_rank),
            Sequences(active_tokens=[3, 1]),
        ),
    ),
    "a weights function of another name": (
        "rank 0 has own_weights .*:fails_on_one_rank.*, rank 1 has own_weights .*:differs_on",
        lambda rank: (
            Aggregation(weights=differs_on_one_rank if rank else fails_on_one_rank),
            Sequences(active_tokens=[3]),
        ),
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
    "ids that restart on each rank, if the number of samples is known": (
        r"got sample_count \d, the step's ids have 2 samples; .* on each rank merge several",
        lambda rank: of(
            active_tokens=[3, 1], sample=[0, 1], sample_count=2 * dist.get_world_size()
        ),
    ),
    "different numbers of samples": (
        "rank 0 has sample_count 4, rank 1 has sample_count 3",
        lambda rank: of(active_tokens=[3], sample_count=4 - (rank == 1)),
    ),
    "a number of samples on one rank": (
        "rank 0 has sample_count None, rank 1 has sample_count 2",
        lambda rank: of(active_tokens=[3], sample_count=2 if rank == 1 else None),
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


def check_prompts_numbered_on_each_rank_are_found_by_samples_per_prompt():
    own = {"active_tokens": [3, 4], "prompt": [0, 0], "samples_per_prompt": 2}
    refused_everywhere(
        rf"prompt 0 has {2 * dist.get_world_size()} samples over the step, samples_per_prompt is 2",
        Aggregation("prompt_mean"),
        Sequences(**own),
    )
    own["prompt"] = [dist.get_rank()] * 2
    planned(Aggregation("prompt_mean"), **own)


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


def check_given_totals_are_verified_in_steps_1_2_4_and_so_on():
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
    for collectives in (1, 1, 0, 1, 0):
        with counted() as seen:
            plan = plan_step(*own, totals=right, group=world)
        assert seen.num_collectives == collectives, seen
        assert plan.weights.tolist() == [1 / (5 * size)] * 2
    for _ in range(2):  # steps 6 and 7 are not counted; step 8 is
        plan_step(*own, totals=right, group=world)
    with pytest.raises(PlanError, match=r"got StepTotals.*the group's sequences have"):
        plan_step(*own, totals=StepTotals(active_tokens=5), group=world)


def check_totals_that_a_plan_has_counted_may_be_passed():
    world, first = dist.group.WORLD, 2 * dist.get_rank()
    totals = plan_step(*of(active_tokens=[3, 2], sample=[first, first + 1]), group=world).totals
    plan = plan_step(*of(active_tokens=[4, 1]), totals=totals, group=world)  # as many
    assert plan.weights.tolist() == [1 / (5 * dist.get_world_size())] * 2


def check_options_of_another_type_on_one_rank_raise_on_all():
    options = None if dist.get_rank() == 1 else Options()
    message = r"rank 1 of the data-parallel group: got None, expected Options$"
    own = of(active_tokens=[3, 2])
    raised_everywhere(message, plan_step, *own, group=dist.group.WORLD, options=options)


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


def check_an_error_of_what_makes_the_sequences_reaches_all():
    def made():
        if dist.get_rank() == 1:
            raise KeyError("loss_mask")
        return Sequences(active_tokens=[3])

    message = r"^rank 1 of the data-parallel group: KeyError\('loss_mask'\)$"
    raised_everywhere(message, plan_step, TOKEN_MEAN, made, group=dist.group.WORLD)
    plan = plan_step(TOKEN_MEAN, lambda: Sequences(active_tokens=[3]), group=dist.group.WORLD)
    assert plan.totals.active_tokens == 3 * dist.get_world_size()


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


def main():
    run_worker(globals())


if __name__ == "__main__":
    main()
