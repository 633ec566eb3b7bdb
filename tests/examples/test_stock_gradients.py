"""What stock Megatron-Core does to a gradient over DP, CP and M, and the page that shows it."""

import json
import re

import pytest
from conftest import TESTS, early, launched, new_folder

PAGE = TESTS.parent / "docs" / "upstream.md"


def measured(processes):
    output = new_folder() / "rows.json"
    launched("../examples/stock_gradients.py", "--worker", output, processes=processes)
    return json.loads(output.read_text())


@early
def alone():
    return measured(1)


@early
def on_two():
    return measured(2)


@early
def on_four():
    return measured(4)


@pytest.fixture
def rows(alone, on_two, on_four):
    return [*alone, *on_two, *on_four]


def test_one_token_is_halved_at_cp_2_and_quartered_at_cp_4_by_default(rows):
    norms = {r["CP"]: r["norm"] for r in rows if r["batch"] == "one token" and not r["per_token"]}
    assert norms == pytest.approx({1: 1, 2: 1 / 2, 4: 1 / 4}, 1e-5)


def test_the_flag_trains_the_token_mean_in_every_layout(rows):
    differs = [row["differs"] for row in rows if row["per_token"]]
    assert len(differs) == 12
    assert max(differs) < 1e-5


def test_the_page_has_the_table_that_is_measured(rows):
    line = r"^> (one token|unequal) +(\d) +(\d) +(\d) +([\d.]+)% +([\d.]+) +([\d.]+)% +([\d.]+)$"
    shown = {}
    for name, dp, cp, m, *numbers in re.findall(line, PAGE.read_text(), re.M):
        shown[name, int(dp), int(cp), int(m)] = [float(number) for number in numbers]
    found = {}
    for row in sorted(rows, key=lambda row: row["per_token"]):
        numbers = found.setdefault((row["batch"], row["DP"], row["CP"], row["M"]), [])
        numbers += [100 * row["differs"], row["norm"]]
    assert list(shown) == sorted(found)
    for key, numbers in found.items():
        assert shown[key] == pytest.approx(numbers, abs=0.051), key
