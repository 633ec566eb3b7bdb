"""StepBuffer: read a step, count it, plan it, replay it."""

import itertools
import math

import pytest
import torch

from megatron_lossagg import Aggregation, Layout, Sequences
from megatron_lossagg.errors import PlanError
from megatron_lossagg.loop.buffer import StepBuffer
from megatron_lossagg.reduction.aggregation import Options


def count(microbatch):
    return [len(sequence) for sequence in microbatch]


def test_a_step_is_read_planned_and_replayed_in_order():
    source = iter([["a", "bbb"], [], ["cc"], ["the next step's"]])
    buffer = StepBuffer(source, 3)
    plan = buffer.plan(Aggregation("token_mean"), count)
    assert plan.weights.tolist() == [1 / 6] * 3
    replayed = [(mb.sequences, mb.data) for mb in buffer]
    assert replayed == [([0, 1], ["a", "bbb"]), ([], []), ([2], ["cc"])]
    assert [(mb.sequences, mb.data) for mb in buffer] == replayed
    assert next(source) == ["the next step's"]


def test_microbatches_without_sequences_count_in_m():
    buffer = StepBuffer(iter([["a", "bbb"], [], ["cc"]]), 3)
    plan = buffer.plan(Aggregation("microbatch_token_mean"), count)
    assert plan.sequences.num_microbatches == 3
    assert plan.weights.tolist() == [1 / 12, 1 / 12, 1 / 6]


def test_an_iterator_that_ends_within_a_step_is_an_error():
    buffer = StepBuffer(iter([["a"], ["b"]]), 3)  # reported by plan(), which every rank calls
    with pytest.raises(PlanError, match="ended after 2 of 3 microbatches: pass whole steps"):
        buffer.plan(Aggregation("token_mean"), count)


def test_an_error_of_the_iterator_or_of_count_is_the_cause_of_the_plan_error():
    def broken():
        yield ["a"]
        raise OSError("the file is gone")

    with pytest.raises(PlanError, match=r"iterator raised OSError.* after 1 of 2 micro") as caught:
        StepBuffer(broken(), 2).plan(Aggregation("token_mean"), count)
    assert isinstance(caught.value.__cause__, OSError)
    buffer = StepBuffer(iter([["a"], None]), 2)
    with pytest.raises(PlanError, match="counting microbatch 1 of 2 raised TypeErr") as caught:
        buffer.plan(Aggregation("token_mean"), count)
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_count_without_dimension_is_refused():
    with pytest.raises(
        PlanError, match=r"got 0 dimensions, expected one number per sequence.*: count gives"
    ):
        StepBuffer(iter([["a"]]), 1).plan(Aggregation("token_mean"), len)


@pytest.mark.parametrize("m", [0, -1, 2.0, 1.5, True, "2", None])
def test_num_microbatches_is_an_integer_from_1(m):
    with pytest.raises(PlanError, match=f"got num_microbatches {m!r}, expected an integer from 1"):
        StepBuffer(iter([["a"], ["b"]]), m)


@pytest.mark.parametrize("source", [[iter([]), iter([])], [None, None], ["a", "b"], ()])
def test_a_list_is_refused_as_an_iterator(source):
    with pytest.raises(PlanError, match=r"got a (list|tuple), .* StepBuffer of each chunk"):
        StepBuffer(source, 2)


def test_anything_with_next_is_an_iterator():  # Megatron's RerunDataIterator has no __iter__
    class Reader:
        def __next__(self):
            return ["abc"]

    plan = StepBuffer(Reader(), 2).plan(Aggregation("token_mean"), count)
    assert plan.totals.active_tokens == 6


def test_replaying_before_planning_is_an_error():
    with pytest.raises(PlanError, match=r"call plan\(\) before iterating"):
        next(iter(StepBuffer(iter([["a"]]), 1)))


def test_a_rank_without_iterator_needs_the_tensor_parallel_group():
    with pytest.raises(PlanError, match="pass tp_group=, whose first rank reads"):
        StepBuffer(None, 1).plan(Aggregation("token_mean"), count)


def test_an_endless_iterator_is_read_no_further_than_the_step():
    source = itertools.count()
    buffer = StepBuffer(source, 4)
    plan = buffer.plan(Aggregation("constant", divisor=8), lambda n: [n])
    assert plan.weights.tolist() == [0, 1 / 32, 1 / 32, 1 / 32]
    assert next(source) == 4


@pytest.mark.parametrize("n", [2.5, math.nan, math.inf, 1e300])
def test_a_fractional_count_is_refused_and_not_truncated(n):
    buffer = StepBuffer(iter([["a"]]), 1)
    with pytest.raises(PlanError, match="expected integers"):
        buffer.plan(Aggregation("token_mean"), lambda microbatch: [n])


TRAINED = torch.ones(2, requires_grad=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"active_tokens": [None, 1]}, "float"),
        ({"active_tokens": ["a", "b"]}, "float"),
        ({"num_padding": "3"}, "got num_padding '3', expected an integer"),
        ({"lengths": [3.5, 4]}, "Sequences.lengths: got float64"),
        ({"lengths": [None, 4]}, r"Sequences.lengths: got \[None, 4\]"),
        ({"lengths": [4]}, "Sequences.lengths: got 1 entries, expected 2"),
        ({"sequence_weight": TRAINED}, "sequence_weight requires a gradient"),
        ({"token_weight_sums": TRAINED}, "token_weight_sums requires a gradient"),
        ({"columns": {"turns": TRAINED}}, "turns requires a gradient"),
        ({"columns": [1, 2]}, r"got columns \[1, 2\], expected numbers per sequence by name"),
        ({"columns": {1: [1, 2]}}, "got columns .*, expected numbers per sequence by name"),
        ({"sample": "ab"}, "Sequences.sample: got 1 entries, expected 2"),
    ],
)
def test_a_microbatch_is_refused_before_ranks_wait_for_its_counts(given, message):
    """What only this rank sees, and what a list of numbers would no longer show."""
    whole = Sequences(active_tokens=[3, 1], columns={"turns": [1, 1]})
    parts = [whole, Sequences(**{"active_tokens": [2, 1]} | given)]
    buffer = StepBuffer(iter(parts), 2)
    with pytest.raises(PlanError, match=f"counting microbatch 1 of 2 raised .*{message}"):
        buffer.plan(Aggregation("token_mean"), lambda part: part)


def test_counts_may_be_the_sums_of_masks():
    masks = [torch.tensor([[1.0, 0, 1], [1, 1, 1]]), torch.tensor([[0.0, 0, 0]])]
    plan = StepBuffer(iter(masks), 2).plan(Aggregation("sample_mean"), lambda mask: mask.sum(1))
    assert plan.weights.tolist() == [1 / 6, 1 / 9, 0]


@pytest.mark.parametrize("of", [iter, lambda counts: torch.tensor(counts).view(-1, 1)])
def test_counts_may_come_from_a_generator_or_in_a_column(of):
    buffer = StepBuffer(iter([["aaa", "bb"]]), 1)
    plan = buffer.plan(Aggregation("token_mean"), lambda microbatch: of(count(microbatch)))
    assert plan.active_tokens.tolist() == [3, 2]


def test_a_step_may_be_planned_again_under_another_aggregation():
    buffer = StepBuffer(iter([["a", "bbb"], ["cc"]]), 2)
    for mode, weights in (("sample_mean", [1 / 3, 1 / 9, 1 / 6]), ("sample_sum", [1 / 3] * 3)):
        assert buffer.plan(Aggregation(mode), count).weights.tolist() == weights
        assert [mb.sequences for mb in buffer] == [[0, 1], [2]]


def test_the_options_reach_the_plan():
    with pytest.raises(PlanError, match="--loss-aggregation-empty-step"):
        StepBuffer(iter([[]]), 1).plan(
            Aggregation("token_mean"), count, options=Options(empty_step="error")
        )


def test_the_weights_reach_the_microbatch_that_the_sequences_name():
    texts = [["a", "bbb"], [], ["cc"]]
    buffer = StepBuffer(iter(texts), 3)
    plan = buffer.plan(Aggregation("sample_mean"), count)
    total = 0
    for microbatch in buffer:
        lengths = count(microbatch.data)
        layout = Layout.local(lengths, cp_size=1, cp_rank=0)
        mask = torch.ones(sum(lengths))
        total += plan.reducer(microbatch.sequences, mask, layout)(torch.ones(sum(lengths))).item()
    assert total == pytest.approx(1)


def test_a_microbatch_without_sequences_needs_no_ids_and_one_with_sequences_does():
    """Without ids each sequence would be a sample: .167, .167, .111 in place of these."""

    def of_samples(rows):
        active, *samples = zip(*rows, strict=True) if rows else ([],)
        return Sequences(active_tokens=active, sample=samples[0] if rows else None)

    rows = [[(2, "a"), (2, "a")], [], [(3, "b")]]
    ids = {"a": 8, "b": 9}
    read = [[(n, ids[sample]) for n, sample in of_one] for of_one in rows]
    plan = StepBuffer(iter(read), 3).plan(Aggregation("sample_mean"), of_samples)
    assert plan.weights.tolist() == [1 / 8, 1 / 8, 1 / 6]
    forgotten = [read[0], [], [(3, None)]]

    def of_some(rows):
        known = of_samples(rows)
        return known if known.sample != (None,) else Sequences(active_tokens=[3])

    with pytest.raises(PlanError, match="sample: got 2 entries, expected 3, one per sequence"):
        StepBuffer(iter(forgotten), 3).plan(Aggregation("sample_mean"), of_some)


def test_paddings_are_numbered_as_no_sequences():
    def sequences(data):
        return Sequences(active_tokens=[1, 0, 2], is_padding=data)

    buffer = StepBuffer(iter([[0, 1, 0], [1, 0, 0]]), 2)
    buffer.plan(Aggregation("token_mean"), sequences)
    assert [microbatch.sequences for microbatch in buffer] == [[0, -1, 1], [-1, 2, 3]]
    assert [microbatch.index for microbatch in buffer] == [0, 1]
