"""A custom reducer: what it is given, what it may return, and the path that leads to it."""

import sys
import types

import pytest
import torch
from custom_reducer import custom
from steps import MASK, thd

from megatron_lossagg import Sequences, plan_step
from megatron_lossagg.errors import LossAggregationError, ReducerError, ReducerPathError
from megatron_lossagg.reduction.aggregation import load_reducer_factory


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
        (lambda x: x, r"reducer 'custom_reducer:\w+' returned .* shape \(6,\): return a 0-dim"),
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


def seven_sums(context):
    return lambda x: x.sum() * 7


@pytest.fixture
def module(monkeypatch):
    """Make a user's module importable by name."""
    made = types.ModuleType("a_users_module")
    made.factory = seven_sums
    made.nested = types.SimpleNamespace(factory=seven_sums)
    made.number = 3
    monkeypatch.setitem(sys.modules, "a_users_module", made)


@pytest.mark.parametrize(
    "path",
    [
        "a_users_module:factory",
        "a_users_module.factory",
        "a_users_module:nested.factory",
        "a_users_module.nested.factory",
    ],
)
@pytest.mark.usefixtures("module")
def test_a_path_has_a_colon_or_a_dot_and_may_go_deeper(path):
    assert load_reducer_factory(path) is seven_sums


WRONG = {
    "no_such_module_here:f": "ModuleNotFoundError.*no_such_module_here",
    "a_users_module:no_such": "AttributeError.*has no attribute 'no_such'",
    "a_users_module:nested.no_such": "has no attribute 'no_such'",
    "a_users_module:number": "leads to 3, which is not callable",
    "nothing": "ModuleNotFoundError.*'nothing'",
    "": "ValueError",
    ":f": "ValueError",
    "a_users_module:": "is not callable",
}


@pytest.mark.parametrize("path", WRONG)
@pytest.mark.usefixtures("module")
def test_an_invalid_path_is_refused_with_what_was_got_and_what_is_expected(path):
    with pytest.raises(ReducerPathError, match=WRONG[path]) as caught:
        load_reducer_factory(path)
    assert "write pkg.mod:name of a factory(context)" in str(caught.value)
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, LossAggregationError)


def test_a_module_that_fails_to_import_is_reported_with_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "a_broken_module.py").write_text("raise RuntimeError('no license')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ReducerPathError, match=r"raised RuntimeError\('no license'\).*PYTHONPATH"):
        load_reducer_factory("a_broken_module:factory")
