"""examples/loop.py trains the mean over texts of their token means, however they are laid out."""

import re

import pytest
from conftest import TESTS, early, launched
from ranks import rows_of

ROOT = TESTS.parent
LAYOUTS = [("--cp", cp, *kind) for cp in (1, 2) for kind in ((), ("--unpacked",))]
STEP = re.compile(r"^step (\d): loss (\S+), gradient norm (\S+)$", re.M)


@early
def steps_of_layouts():
    return {
        layout: STEP.findall(launched("../examples/loop.py", *layout, processes=2))
        for layout in LAYOUTS
    }


@early
def first_by_hand():
    (row,) = rows_of(launched("examples/loop_worker.py", processes=1))
    return row


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_its_first_step_is_loops_over_texts(steps_of_layouts, first_by_hand, layout):
    (number, *found), *_ = steps_of_layouts[layout]
    assert number == "1"
    assert [float(value) for value in found] == pytest.approx(first_by_hand, rel=5e-6)


def test_it_trains_the_same_in_every_layout(steps_of_layouts):
    first, *others = (
        [float(value) for step in steps for value in step] for steps in steps_of_layouts.values()
    )
    assert len(first) == 9
    for steps in others:
        assert steps == pytest.approx(first, rel=1e-5)


def test_the_page_shows_its_lines():
    file = (ROOT / "examples" / "loop.py").read_text()
    page = (ROOT / "docs" / "own-loop.md").read_text()
    shown = re.search(r"^```python\n(.*?)^```", page, re.M | re.S)[1]
    parts = re.split(r"^\.\.\.\n", shown, flags=re.M)
    assert len(parts) > 4
    for part in parts:
        assert unindented(part) in unindented(file)


def unindented(text):
    return "\n" + re.sub(r"^ +", "", text, flags=re.M).strip() + "\n"
