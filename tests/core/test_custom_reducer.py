"""A custom reducer: what it is given, and what it may return."""

import pytest
import torch
from custom_reducer import custom
from reducing import MASK, thd

from megatron_lossagg import Sequences, plan_step
from megatron_lossagg.errors import ReducerError


def a_reducer(factory):
    plan = plan_step(custom(factory), Sequences(active_tokens=[3, 2]))
    return plan.reducer([0, 1], torch.tensor(MASK), thd(4, 2))


def doubled_sum(context):
    assert context.sequences.tolist() == [0, 1]
    assert context.mask.tolist() == [bool(m) for m in MASK]
    assert context.layout.num_tokens == 6
    assert context.aggregation.mode == "custom"
    weights = context.plan.under("token_mean").weights
    return lambda x: 2 * x.sum() + 0 * weights.sum()


def test_a_custom_reducer_gets_float32_for_half_precision_losses():
    seen = []
    reducer = a_reducer(lambda c: lambda x: (seen.append(x.dtype), x.sum())[1])
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        reducer(torch.ones(6, dtype=dtype))
    assert seen == [torch.float32, torch.float32, torch.float64]


def test_a_custom_reducer_gets_masked_losses_and_the_whole_context():
    reducer = a_reducer(doubled_sum)
    assert reducer(torch.tensor([1.0, torch.nan, 1, 1, 1, 1])).item() == 10
    assert reducer.weight_sum() is None
    assert reducer.under("token_mean")(torch.ones(6)).item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("partial_loss", "message"),
    [
        (lambda x: x, r"float32 tensor of shape \(6,\): return a 0-dim"),
        (lambda x: 1.0, r"returned 1\.0: return a 0-dim"),
        (lambda x: x.sum().long(), "int64"),
    ],
)
def test_a_custom_partial_loss_is_a_floating_point_scalar(partial_loss, message):
    reducer = a_reducer(lambda c: partial_loss)
    with pytest.raises(ReducerError, match=message):
        reducer(torch.ones(6))


def test_a_custom_partial_loss_may_be_of_any_float_type_and_keeps_its_graph():
    x = torch.ones(6, requires_grad=True)
    reducer = a_reducer(lambda c: lambda x: x.double().sum())
    partial_loss = reducer(x)
    partial_loss.backward()
    assert partial_loss.dtype == torch.float64
    assert x.grad.tolist() == MASK


def test_a_custom_reducer_sees_only_this_ranks_slice():
    seen = {}

    def factory(context):
        seen["mask"], seen["rank"] = context.mask.tolist(), context.layout.cp_rank
        return lambda x: seen.setdefault("x", x).sum()

    plan = plan_step(custom(factory), Sequences(active_tokens=[6]))
    layout = thd(8, cp_size=2, cp_rank=1)  # holds 2, 3, 4, 5
    reducer = plan.reducer([0], torch.tensor([1, 1, 0, 1, 1, 1, 0, 1]), layout)
    assert reducer(torch.tensor([[2.0, 3, 4, 5]])).item() == 12
    assert (seen["mask"], seen["rank"]) == ([False, True, True, True], 1)
    assert seen["x"].tolist() == [0, 3, 4, 5]


def test_a_factory_returns_a_callable():
    with pytest.raises(ReducerError, match="factory returned 3: return a callable"):
        a_reducer(lambda c: 3)
