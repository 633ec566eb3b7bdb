"""Each row of ``faults.FILES`` is refused with its message, and they have all that refuses."""

import importlib
import inspect
import pkgutil
from importlib.util import find_spec

import pytest
from conftest import RELEASE, early, launched
from faults import FILES, names_of
from ranks import assert_told

from megatron_lossagg import guards
from megatron_lossagg.guards import GUARDS
from megatron_lossagg.guards.before import BEFORE_A_STEP
from megatron_lossagg.guards.guard import Guard

GUARD_OF = {name: guard for guard, name in names_of(*FILES)}
"""By the name of a row."""
FUNCTIONS = pytest.mark.parametrize("function", BEFORE_A_STEP, ids=lambda one: one.__name__)
CLASSES = pytest.mark.parametrize("guard", GUARDS, ids=lambda one: one.__name__)


@early
def refusals():
    return launched("guards/guard_worker.py", processes=2)


@pytest.mark.parametrize("row", GUARD_OF)
def test_the_fault_is_refused(refusals, launches, row):
    assert_told(row, refusals)


@early
def refusals_on_fsdp():
    return launched("guards/guard_worker.py", "optim_grads", processes=2).splitlines()


@pytest.mark.skipif(
    RELEASE < (0, 16) or find_spec("einops") is None, reason="refused, or without einops"
)
def test_each_fault_that_megatron_fsdp_can_have_is_refused_there(refusals_on_fsdp):
    assert [line for line in refusals_on_fsdp if line.startswith("FAILED")] == []
    assert len([line for line in refusals_on_fsdp if line.startswith("PASSED")]) >= 70


def test_each_row_has_a_name_of_its_own():
    assert len(GUARD_OF) == len(names_of(*FILES))


def test_the_table_of_guards_has_every_class_of_the_folder():
    found = set()
    for module in pkgutil.iter_modules(guards.__path__, f"{guards.__name__}."):
        members = vars(importlib.import_module(module.name)).values()
        found |= {one for one in members if inspect.isclass(one) and issubclass(one, Guard)}
    assert found - {Guard} == set(GUARDS)
    assert len(set(GUARDS)) == len(GUARDS)


@CLASSES
def test_a_guard_says_what_it_catches_and_costs(guard):
    assert vars(guard)["catches"]
    assert guard.costs
    assert guard.__doc__


@CLASSES
def test_a_guard_has_a_row(guard):
    only_warns = guard.__name__ == "Outcome"  # its programs are in outcome_worker.py
    assert (guard.__name__ in {*GUARD_OF.values()}) != only_warns


@FUNCTIONS
def test_a_refusal_before_a_step_says_in_one_sentence_what_it_refuses(function):
    sentence = inspect.getdoc(function)
    assert sentence.endswith(".")
    assert "\n\n" not in sentence
    assert sentence.count(". ") == 0


@FUNCTIONS
def test_a_refusal_before_a_step_has_a_row(function):
    assert function.__name__ in {*GUARD_OF.values()}


def test_a_row_is_of_a_guard_or_a_refusal():
    known = {guard.__name__ for guard in GUARDS} | {one.__name__ for one in BEFORE_A_STEP}
    assert {*GUARD_OF.values()} <= known | {"agree"}
