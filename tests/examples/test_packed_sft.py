"""The table of the first screen: step 7 of packed SFT, stock and with this package."""

import json
import re

import pytest
from conftest import TESTS, early, launched, new_folder

ROOT = TESTS.parent
ROWS = {
    "stock, default": "stock, default",
    "stock, `--calculate-per-token-loss`": "stock, --calculate-per-token-loss",
    "`--loss-aggregation token_mean`": "token_mean",
    "`--loss-aggregation sample_mean`": "sample_mean",
}
"""What the page calls the runs of the script."""


def table_of(page):
    rows = re.findall(r"^\| (.+?) \| (\S+) \| (\S+) \| (\S+) \|$", page.read_text(), re.M)
    return {name: values for name, *values in rows if name in ROWS}


@early
def worst_step():
    """Measure the step of the table, as the script does."""
    output = new_folder() / "steps.jsonl"
    launched(
        "../examples/packed_sft.py", "--worker", output, "--steps", 7, "--only-last", processes=2
    )
    (line,) = output.read_text().splitlines()
    return json.loads(line)


def norm(step, parallelism, name):
    return step[parallelism][name]["grad_norm"]


def test_the_first_screen_has_every_row():
    assert list(table_of(ROOT / "README.md")) == list(ROWS)


def test_the_table_is_what_the_script_measures(worst_step):
    for name, (dp, cp, by_hand) in table_of(ROOT / "README.md").items():
        for parallelism, shown in (("DP 2", dp), ("CP 2", cp)):
            assert float(shown) == pytest.approx(norm(worst_step, parallelism, ROWS[name]), 2e-4)
        mode = "sample_mean" if "sample_mean" in name else "token_mean"
        assert float(by_hand) == pytest.approx(worst_step["by hand"][mode], 2e-4)


@pytest.mark.parametrize("parallelism", ["DP 2", "CP 2"])
def test_a_configured_mode_is_the_computation_by_hand_in_both_loss_scalings(
    worst_step, parallelism
):
    for mode, by_hand in worst_step["by hand"].items():
        for name in (mode, f"{mode}, --calculate-per-token-loss"):
            assert norm(worst_step, parallelism, name) == pytest.approx(by_hand, 1e-5)


def test_stock_trains_the_token_mean_by_its_flag_only(worst_step):
    token_mean = worst_step["by hand"]["token_mean"]
    stock = {p: norm(worst_step, p, "stock, default") for p in ("DP 2", "CP 2")}
    assert stock["DP 2"] / stock["CP 2"] == pytest.approx(2.1, abs=0.05)  # the picture's text
    for parallelism, default in stock.items():
        assert default != pytest.approx(token_mean, 5e-3)
        flag = norm(worst_step, parallelism, "stock, --calculate-per-token-loss")
        assert flag == pytest.approx(token_mean, 1e-5)
    # Both log the token mean, whatever they train.
    losses = [worst_step[p]["stock, default"]["loss"] for p in stock]
    assert losses[0] == pytest.approx(losses[1], 1e-5)
