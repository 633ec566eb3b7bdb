"""A custom reducer's path leads to its factory, or to an error that names the fault."""

import sys
import types

import pytest
import torch

from megatron_lossagg import Aggregation, Layout, Sequences, plan_step
from megatron_lossagg.custom import load_reducer_factory
from megatron_lossagg.errors import LossAggregationError, ReducerError, ReducerPathError


def seven_sums(context):
    return lambda x: x.sum() * 7


@pytest.fixture(autouse=True)
def module(monkeypatch):
    """Make a user's module importable by name."""
    made = types.ModuleType("a_users_module")
    made.factory = seven_sums
    made.nested = types.SimpleNamespace(factory=seven_sums)
    made.number = 3
    monkeypatch.setitem(sys.modules, "a_users_module", made)
    return made


@pytest.mark.parametrize(
    "path",
    [
        "a_users_module:factory",
        "a_users_module.factory",
        "a_users_module:nested.factory",
        "a_users_module.nested.factory",
    ],
)
def test_a_path_has_a_colon_or_a_dot_and_may_go_deeper(path):
    assert load_reducer_factory(path) is seven_sums


def test_an_aggregations_path_makes_the_reducer_of_each_microbatch():
    aggregation = Aggregation("custom", reducer_path="a_users_module:factory")
    plan = plan_step(aggregation, Sequences(active_tokens=[3, 2]))
    layout = Layout.thd_zigzag([0, 4, 6], cp_size=1, cp_rank=0)
    reducer = plan.reducer([0, 1], torch.tensor([1, 0, 1, 1, 1, 1]), layout)
    assert reducer(torch.ones(6)).item() == 35


def test_an_error_about_a_partial_loss_names_the_reducer_path(module):
    module.factory = lambda context: lambda x: x
    plan = plan_step(
        Aggregation("custom", reducer_path="a_users_module:factory"), Sequences(active_tokens=[2])
    )
    layout = Layout.thd_zigzag([0, 2], cp_size=1, cp_rank=0)
    with pytest.raises(ReducerError, match="custom reducer 'a_users_module:factory' returned a"):
        plan.reducer([0], torch.ones(2), layout)(torch.ones(2))


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
