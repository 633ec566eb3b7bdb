"""The public names have an example each, which runs, and say what they take, return and raise."""

import argparse
import doctest
import inspect
import re
import sys
import types

import pytest
import torch
from conftest import launched

import megatron_lossagg

NAMES = megatron_lossagg.__all__
NEEDS_A_MODEL = "LossAggregator"
GIVEN = {
    **{name: getattr(megatron_lossagg, name) for name in NAMES},
    "argparse": argparse,
    "torch": torch,
}


@pytest.mark.parametrize("name", [name for name in NAMES if name != NEEDS_A_MODEL])
def test_the_example_of_a_public_name_prints_what_it_shows(name, monkeypatch):
    docstring = inspect.getdoc(getattr(megatron_lossagg, name))
    example = doctest.DocTestParser().get_doctest(docstring, GIVEN, name, None, 0)
    module = types.ModuleType("my_losses")
    monkeypatch.setitem(sys.modules, "my_losses", module)
    example.globs = vars(module)
    example.globs.update(GIVEN)
    failed, attempted = doctest.DocTestRunner().run(example)  # prints what differs
    assert attempted
    assert not failed


@pytest.mark.launches
def test_the_aggregators_example_runs_on_a_live_model():
    assert "ran its example" in launched("docs/reference_worker.py", processes=1)


def documented():
    """Yield every public function, method and class of the public names that takes arguments."""
    for name in NAMES:
        value = getattr(megatron_lossagg, name)
        if inspect.isfunction(value) or name in ("Aggregation", "LossAggregator", "Sequences"):
            yield name, value
        if inspect.isclass(value) and name in ("Integration", "LossAggregator", "StepPlan"):
            for method, function in vars(value).items():
                function = getattr(function, "__func__", function)
                if inspect.isfunction(function) and re.search(r"\n *Args:", function.__doc__ or ""):
                    yield f"{name}.{method}", function


@pytest.mark.parametrize(("name", "value"), [pytest.param(*one, id=one[0]) for one in documented()])
def test_what_a_public_name_takes_is_listed(name, value):
    sections = re.split(r"^(Args|Returns|Raises|Examples):\n", inspect.getdoc(value), flags=re.M)
    listed = re.findall(r"^    (\w+): ", sections[sections.index("Args") + 1], re.M)
    taken = [parameter for parameter in inspect.signature(value).parameters if parameter != "self"]
    assert listed == taken
    if inspect.isfunction(value):
        assert "Returns" in sections
