"""A custom reducer's path leads to its factory, or to an error that names the fault."""

import importlib
import sys
import types

import pytest
import torch

from megatron_lossagg import Aggregation, Layout, Sequences, plan_step
from megatron_lossagg.errors import LossAggregationError, ReducerError, ReducerPathError
from megatron_lossagg.plugins import load_reducer_factory


def seven_sums(context):
    return lambda x: x.sum() * 7


@pytest.fixture(autouse=True)
def module(monkeypatch):
    """Make a user's module importable by name; clear the cache of loaded factories."""
    made = types.ModuleType("a_users_module")
    made.factory = seven_sums
    made.nested = types.SimpleNamespace(factory=seven_sums)
    made.number = 3
    monkeypatch.setitem(sys.modules, "a_users_module", made)
    load_reducer_factory.cache_clear()
    yield made
    load_reducer_factory.cache_clear()


@pytest.mark.parametrize(
    "path", ["a_users_module:factory", "a_users_module.factory", "a_users_module:nested.factory"]
)
def test_a_path_has_a_colon_or_a_dot_and_may_go_deeper_after_a_colon(path):
    assert load_reducer_factory(path) is seven_sums


def test_an_aggregations_path_makes_the_reducer_of_each_microbatch():
    aggregation = Aggregation("custom", reducer_path="a_users_module:factory")
    plan = plan_step(aggregation, Sequences(active_tokens=[3, 2]))
    layout = Layout.thd_zigzag([0, 4, 6], cp_size=1, cp_rank=0)
    reducer = plan.reducer([0, 1], torch.tensor([1, 0, 1, 1, 1, 1]), layout)
    assert reducer(torch.ones(6)).item() == 35


def test_an_error_about_a_share_names_the_reducer_path(module):
    module.factory = lambda context: lambda x: x
    plan = plan_step(
        Aggregation("custom", reducer_path="a_users_module:factory"), Sequences(active_tokens=[2])
    )
    layout = Layout.thd_zigzag([0, 2], cp_size=1, cp_rank=0)
    with pytest.raises(ReducerError, match="custom reducer 'a_users_module:factory' returned a"):
        plan.reducer([0], torch.ones(2), layout)(torch.ones(2))


def test_a_given_factory_takes_precedence_over_the_path():
    aggregation = Aggregation("custom", reducer_path="a_users_module:factory")
    plan = plan_step(aggregation, Sequences(active_tokens=[2]))
    layout = Layout.thd_zigzag([0, 2], cp_size=1, cp_rank=0)
    assert plan.reducer([0], torch.ones(2), layout, factory=seven_sums)(torch.ones(2)).item() == 14


def test_a_path_is_imported_once(monkeypatch):
    imported = []
    original = importlib.import_module
    monkeypatch.setattr(
        importlib, "import_module", lambda name: imported.append(name) or original(name)
    )
    load_reducer_factory("a_users_module:factory")
    load_reducer_factory("a_users_module:factory")
    assert imported == ["a_users_module"]


WRONG = {
    "no_such_module_here:f": "importing 'no_such_module_here' raised ModuleNotFoundError",
    "a_users_module:no_such": "'a_users_module' has no 'no_such'",
    "a_users_module:nested.no_such": "has no 'nested.no_such'",
    "a_users_module.nested.factory": "importing 'a_users_module.nested' raised",
    "a_users_module:number": "leads to 3, which is not callable",
    "nothing": "'nothing' is not an attribute of a module",
    "": "'' is not an attribute",
    ":f": "is not an attribute",
    "a_users_module:": "is not an attribute",
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
