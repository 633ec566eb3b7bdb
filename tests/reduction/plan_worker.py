"""Planning over 2 and 3 data-parallel ranks with gloo, without Megatron; a launched worker."""

import math
import random
import re
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_worker
from steps import (
    AGGREGATIONS,
    ANY_LAYOUT,
    TOKEN_MEAN,
    assign,
    make_sequences,
    planned,
    sequences_of,
)

from benchmarks.counting import counted
from megatron_lossagg import Aggregation, Layout, Sequences, plan_step
from megatron_lossagg.errors import PlanError
from megatron_lossagg.reduction.aggregation import Options
from megatron_lossagg.reduction.table import StepTotals
from megatron_lossagg.verify import reference_loss
from megatron_lossagg.verify.cases import mean_of_prompts, reference_options


def sequences_of_this_rank(sequences, keys):
    return [index for index, key in enumerate(keys) if key[0] == dist.get_rank()]


def assigned(m, **leave_out):
    """Return all sequences with their keys, this rank's indices, and its Sequences."""
    sequences = make_sequences()
    keys = assign(sequences, [m] * dist.get_world_size())
    indices = sequences_of_this_rank(sequences, keys)
    given = {"microbatch": [keys[i][1] for i in indices], "num_microbatches": m}
    given |= dict.fromkeys(leave_out)
    return sequences, keys, indices, sequences_of([sequences[i] for i in indices], **given)


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


def check_sequence_weights_multiply_the_weights_and_the_expected_sum_over_ranks():
    sequences, keys, indices, own = assigned(3)
    omega = [(0.5, 3.0, 0.0, 1.0)[i % 4] for i in range(len(sequences))]
    weighted = replace(own, sequence_weight=[omega[i] for i in indices])
    for aggregation in (*ANY_LAYOUT.values(), Aggregation(weights=mean_of_prompts)):
        plan = plan_step(aggregation, weighted, group=dist.group.WORLD)
        whole = plan_step(aggregation, own, group=dist.group.WORLD)
        assert plan.weights.tolist() == [
            w * omega[i] for w, i in zip(whole.weights.tolist(), indices, strict=True)
        ]
        live = [
            {
                **one,
                "trained": one["counted"],
                "x": [torch.ones((), dtype=torch.float64)] * len(one["counted"]),
                "sequence_weight": omega[i],
                "microbatch": keys[i],
            }
            for i, one in enumerate(sequences)
        ]
        options = reference_options(aggregation, [3] * dist.get_world_size())
        want = reference_loss.step_loss(aggregation.mode, live, **options).item()
        assert abs(plan.expected_weight / want - 1) < 1e-12, aggregation


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
            group=[sequences[i]["group"] for i in order],
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


def check_columns_are_of_all_ranks_in_the_order_of_sequences():
    sequences, _, indices, own = assigned(3)
    turns = [1 + i % 3 for i in range(len(sequences))]
    columns = {"turns": [turns[i] for i in indices]}
    plan = plan_step(
        Aggregation(weights=lambda counts: counts.columns["turns"] / counts.columns["turns"].sum()),
        replace(own, columns=columns),
        group=dist.group.WORLD,
    )
    wanted = [turns[i] / sum(turns) if any(sequences[i]["counted"]) else 0 for i in indices]
    assert plan.weights.tolist() == wanted


def check_a_step_makes_two_collectives_with_ids_and_one_without():
    _, _, _, sequences = assigned(3)
    with counted() as seen:
        plan = plan_step(Aggregation("prompt_mean"), sequences, group=dist.group.WORLD)
        for aggregation in AGGREGATIONS.values():
            plan.under(aggregation).weights  # noqa: B018
    assert seen.num_collectives == 2, seen
    _, _, _, sequences = assigned(3, sample=None, prompt=None, group=None)
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


def check_what_was_counted_is_of_all_ranks():
    size = dist.get_world_size()
    plan = planned(
        active_tokens=[3, 0],
        sample=[0, 1 + dist.get_rank()],  # sample 0 has a sequence on each rank
        prompt=[0, dist.get_rank()],
        num_padding=dist.get_rank(),
        sample_count=1 + size,
    )
    assert plan.counted == {
        "active_tokens": 3 * size,
        "sequences": 2 * size,
        "empty_sequences": size,
        "samples": 1 + size,
        "empty_samples": size,
        "prompts": size,
        "empty_prompts": size - 1,
        "padding": sum(range(size)),
    }
    assert (
        planned(active_tokens=[3], num_padding=dist.get_rank() or None).counted.get("padding")
        is None
    )


def check_a_rank_without_sequences_takes_part():
    counts = [] if dist.get_rank() == 0 else [2, 3]
    ids = [dist.get_rank()] * len(counts)
    plan = planned(active_tokens=counts, sample=ids, prompt=ids)
    assert plan.totals.active_tokens == 5 * (dist.get_world_size() - 1)
    assert plan.totals.samples == dist.get_world_size() - 1


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
    assert plan.counts.n_b[plan.table.own].tolist() == [whole]


def check_the_plan_knows_the_ranks_it_was_counted_over():
    world = planned(active_tokens=[3])
    assert world.group_ranks == tuple(range(dist.get_world_size()))
    assert world.under("sample_mean").group_ranks == world.group_ranks
    known = plan_step(TOKEN_MEAN, Sequences(active_tokens=[3]), totals=StepTotals(active_tokens=3))
    assert known.group_ranks is None


def check_string_ids_are_the_same_on_every_rank():
    plan = planned(active_tokens=[3, 5], prompt=["shared", f"of rank {dist.get_rank()}"])
    size = dist.get_world_size()
    assert plan.totals.prompts == 1 + size
    assert plan.counts.n_p[plan.table.own].tolist() == [3 * size, 5]


def of_kinds():
    """Return this rank's masks, kinds and losses, and those of all ranks."""
    draw = torch.Generator().manual_seed(5)
    size = 3 * dist.get_world_size()
    masks, kinds = (torch.randint(2, (size, 7), generator=draw) for _ in range(2))
    losses = torch.randn(size, 7, generator=draw, dtype=torch.float64).requires_grad_()
    own = slice(3 * dist.get_rank(), 3 * dist.get_rank() + 3)
    return masks, kinds.bool(), losses, own


def check_kinds_of_tokens_have_a_mean_each_as_the_page_says():
    page = Path(__file__).parents[2] / "docs/which-mode.md"
    (lines,) = re.findall(r"```python\n(tokens = .*?)```", page.read_text(), re.DOTALL)
    masks, kinds, losses, own = of_kinds()
    aggregator = SimpleNamespace(dp_group=dist.group.WORLD)
    given = {"torch": torch, "dist": dist, "aggregator": aggregator}
    given |= {"mask": masks[own], "is_image": kinds[own]}
    exec(lines, given)
    v = given["v"]
    plan = planned(
        Aggregation("token_sum", count="weights"),
        active_tokens=masks[own].sum(-1),
        token_weight_sums=[math.fsum(one) for one in v.tolist()],
    )
    layout = Layout.thd_zigzag([0, 7, 14, 21], cp_size=1, cp_rank=0)
    reducer = plan.reducer(range(3), masks[own].flatten(), layout, token_weights=v.flatten())
    compare_with_means(reducer(losses[own].flatten()), masks, kinds, losses)


def check_kinds_of_sequences_have_a_mean_each_as_prompts():
    masks, _, losses, own = of_kinds()
    kind_A = [place % 2 for place in range(len(masks))]
    active = masks[own].sum(-1)
    plan = planned(Aggregation("prompt_mean"), active_tokens=active, prompt=kind_A[own])
    layout = Layout.thd_zigzag([0, 7, 14, 21], cp_size=1, cp_rank=0)
    reducer = plan.reducer(range(3), masks[own].flatten(), layout)
    kinds = torch.tensor(kind_A).bool()[:, None].expand(-1, 7)
    compare_with_means(reducer(losses[own].flatten()), masks, kinds, losses)


def compare_with_means(partial_loss, masks, kinds, losses):
    """Compare loss and gradient with half of each kind's mean over the tokens of all ranks."""
    means = []
    for kind in (False, True):
        tokens = [
            losses[row, t]
            for row in range(len(masks))
            for t in range(7)
            if masks[row, t] and bool(kinds[row, t]) == kind
        ]
        means.append(sum(tokens) / len(tokens))
    expected = sum(means) / 2
    found = [partial_loss, *torch.autograd.grad(partial_loss, losses)]
    for one in found:
        dist.all_reduce(one.detach())
    wanted = [expected, *torch.autograd.grad(expected, losses)]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


def main():
    run_worker(globals())


if __name__ == "__main__":
    main()
