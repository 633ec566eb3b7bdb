"""A column is declared in one place: what checks, joins, gathers and compares goes over it."""

import ast
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from steps import Threads, in_threads

import megatron_lossagg
from megatron_lossagg import Aggregation, Sequences, StepBuffer, StepTotals, plan_step
from megatron_lossagg.errors import PlanError
from megatron_lossagg.reduction import plan as plans
from megatron_lossagg.reduction.sequences import column, columns_of

PACKAGE = Path(megatron_lossagg.__file__).parent


def check_reward(reward_S, n_S):
    if (reward_S < 0).any():
        raise PlanError(f"Sequences.reward: got {reward_S.min()}, expected numbers from 0")


@dataclass(frozen=True, kw_only=True)
class WithReward(Sequences):
    """One more column of numbers, and one more kind of ids.

    In the package each is a field and a line of docstring in sequences.py, what reads it in
    table.py or modes.py, a test and a line of CHANGELOG.
    """

    reward: object = field(default=None, metadata=column(float, check=check_reward))
    judge: object = field(default=None, metadata=column(int, is_id=True))


def by_reward(counts):
    rows = counts.every().rows
    per_judge = counts._table.ids("judge").sums(rows.reward)
    return rows.reward / per_judge[counts._table.ids("judge").index_A]


def planned(monkeypatch, of_ranks, aggregation):
    """Plan on all ranks at once, threads of this process; return each one's plan or message."""
    monkeypatch.setattr(plans, "Exchange", Threads)

    def plan(rank, group):
        try:
            return plan_step(aggregation, of_ranks[rank], group=group)
        except PlanError as error:
            return str(error)

    return in_threads(plan, len(of_ranks))


OF_RANKS = [
    WithReward(active_tokens=[3, 1], reward=[1, 2], judge=["x", "y"], left_out=[False, False]),
    WithReward(active_tokens=[2, 5], reward=[3, 4], judge=["x", "x"], left_out=[False, True]),
]


def test_a_column_of_ones_own_class_is_gathered_left_out_and_read(monkeypatch):
    found = planned(monkeypatch, OF_RANKS, Aggregation(weights=by_reward))
    assert [plan.weights.tolist() for plan in found] == [[1 / 4, 1], [3 / 4, 0]]
    counts_all = Aggregation(weights=by_reward, count_left_out=True)
    whole = [plan.under(counts_all).weights.tolist() for plan in found]
    assert whole == [[1 / 8, 1], [3 / 8, 4 / 8]]
    assert found[1].sequences.reward.tolist() == [3, 4]
    assert not found[1].sequences.reward.flags.writeable


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"reward": [3, -4]}, "rank 1 of the data-parallel group: Sequences.reward: got -4.0"),
        ({"reward": [3]}, "Sequences.reward: got float64|Sequences.reward: got int64"),
        ({"reward": None}, "rank 0 has reward, rank 1 has no reward"),
        ({"judge": None}, r"rank 0 has judge \(strings\) ids, rank 1 has no ids"),
        ({"judge": [1, 2]}, r"rank 0 has judge \(strings\) ids, rank 1 has judge ids"),
    ],
)
def test_it_is_checked_and_compared_on_all_ranks(monkeypatch, other, message):
    given = {name: getattr(OF_RANKS[1], name) for name in columns_of(WithReward)}
    of_ranks = [OF_RANKS[0], WithReward(**given | other)]
    found = planned(monkeypatch, of_ranks, Aggregation("token_mean"))
    assert found[0] == found[1]
    with pytest.raises(PlanError, match=message):
        raise PlanError(found[0])


def test_ranks_whose_columns_have_the_same_names_in_a_row_disagree(monkeypatch):
    """They would wait for columns of another size."""
    of_ranks = [
        Sequences(active_tokens=[3], columns=columns)
        for columns in ({"a, b": [1]}, {"a": [1], "b": [2]})
    ]
    found = planned(monkeypatch, of_ranks, Aggregation("token_mean"))
    assert found[0] == found[1]
    assert "ranks of the data-parallel group disagree" in found[0]


def test_microbatches_are_joined_with_it_and_without_padding():
    parts = [
        WithReward(active_tokens=[3, 0], reward=[1, np.nan], judge=["x", "-"], is_padding=[0, 1]),
        WithReward(active_tokens=[]),
        WithReward(active_tokens=[2], reward=[3], judge=["x"], lengths=[8]),
    ]
    buffer = StepBuffer(iter(parts), 3)
    plan = buffer.plan(Aggregation(weights=by_reward), lambda part: part)
    assert plan.weights.tolist() == [1 / 4, 3 / 4]
    assert plan.counted["padding"] == 1
    assert [mb.sequences for mb in buffer] == [[0, -1], [], [1]]
    alone = plan_step(Aggregation("token_mean"), parts[0])
    assert (alone.weights.tolist(), alone.sequences.reward.tolist()) == ([1 / 3], [1])


def test_what_depends_on_other_ranks_is_refused_next_to_totals():
    sequences = WithReward(active_tokens=[3], reward=[1])
    with pytest.raises(PlanError, match=r"got totals= and reward=, .* drop totals= or reward="):
        plan_step(Aggregation("token_mean"), sequences, totals=StepTotals(active_tokens=3))


def test_context_parallel_ranks_compare_it():
    own = [WithReward(active_tokens=[3], reward=[one]).checked().own for one in (1, 1, 2)]
    assert own[0] == own[1] != own[2]
    assert own[0].startswith("reward=")


def test_columns_are_declared_in_one_file_and_counted_in_one():
    """A file that names four of them would have to name the next one."""
    names = set(columns_of(Sequences)) - {"active_tokens", "group", "columns", "lengths"}
    listing = {}
    for folder in ("reduction", "loop", "contract", "record", "guards"):
        for path in (PACKAGE / folder).rglob("*.py"):
            tree = ast.walk(ast.parse(path.read_text()))
            said = {node.value for node in tree if isinstance(node, ast.Constant)}
            if len(found := {one for one in said if isinstance(one, str)} & names) > 3:
                listing[path.name] = found
    assert set(listing) == {"sequences.py", "table.py"}


def test_the_former_name_leads_here_and_warns_once(monkeypatch):
    monkeypatch.delitem(vars(megatron_lossagg), "MicrobatchSequences", raising=False)
    with pytest.warns(DeprecationWarning, match="MicrobatchSequences is Sequences now") as warned:
        from megatron_lossagg import MicrobatchSequences
    assert MicrobatchSequences is Sequences
    assert len(warned) == 1


@pytest.mark.parametrize("tokens", [7, 2**40])
@pytest.mark.parametrize("m", [3, 2**30])
def test_microbatches_of_other_ranks_arrive_whatever_their_tokens(monkeypatch, tokens, m):
    """They travel with the tokens as one number if that is below 2^62, else on their own."""
    of_ranks = [
        Sequences(active_tokens=[tokens, 1, 0], microbatch=[0, 2, 2], num_microbatches=m),
        Sequences(active_tokens=[2, 5], microbatch=[2, 2], num_microbatches=m),
    ]
    mean = Aggregation(weights=lambda c: 1 / (c.M * c.DP * c.n_mb))
    found = planned(monkeypatch, of_ranks, mean)
    wanted = [[1 / (m * 2 * tokens), 1 / (m * 2), 0], [1 / (m * 2 * 7)] * 2]
    assert [plan.weights.tolist() for plan in found] == wanted
    table = found[1].table
    assert (table.rows.microbatch.tolist(), table.m_W.tolist()) == ([0, 2, 2, 2, 2], [m, m])
    assert table.rows.active_tokens.tolist() == [tokens, 1, 0, 2, 5]


@pytest.mark.parametrize("has_ids", [False, True])
def test_the_m_of_a_rank_is_its_own(monkeypatch, has_ids):
    """Whether the sequences of other ranks are gathered or not."""
    tokens_RM = [[[4], [], [1, 1]], [[3, 2], [6]], [[8]], []]
    of_ranks, wanted = [], []
    for r, tokens_M in enumerate(tokens_RM):
        rows = [(n, m) for m, ns in enumerate(tokens_M) for n in ns]
        of_ranks.append(
            Sequences(
                active_tokens=[n for n, _ in rows],
                microbatch=[m for _, m in rows],
                num_microbatches=len(tokens_M) or 5,
                sample=[f"{r}/{i}" for i in range(len(rows))] if has_ids else None,
            )
        )
        wanted.append([1 / (len(tokens_M) * 4 * sum(tokens_M[m])) for _, m in rows])
    found = planned(monkeypatch, of_ranks, Aggregation("microbatch_token_mean"))
    assert [plan.weights.tolist() for plan in found] == [pytest.approx(one) for one in wanted]


def test_sequences_that_only_fill_a_shape_are_counted_as_padding():
    given = {"active_tokens": [3, 9, 1], "is_padding": [0, 1, 0], "num_padding": 2}
    plan = plan_step(Aggregation("sample_mean"), Sequences(**given, lengths=[4, 9, 1]))
    assert plan.weights.tolist() == [1 / 6, 1 / 2]
    assert plan.counted["padding"] == 3
    buffer = StepBuffer(iter([given, {"active_tokens": [2]}]), 2)
    plan = buffer.plan(Aggregation("sample_sum"), lambda data: Sequences(**data))
    assert (plan.weights.tolist(), plan.counted["padding"]) == ([1 / 3] * 3, 3)


def test_every_rank_knows_the_longest_sequence_of_all(monkeypatch):
    """So that a divisor below it is warned of on all ranks alike, also without their rows."""
    of_ranks = [Sequences(active_tokens=tokens) for tokens in ([3], [2, 50], [])]
    found = planned(monkeypatch, of_ranks, Aggregation("constant", divisor=64))
    assert [plan.table.longest for plan in found] == [50] * 3
