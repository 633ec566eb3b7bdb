"""ROLL's mcore_adapter, which LLaMA-Factory trains with under ``USE_MCA=1``: its loss over CP."""

import json

import pytest
from conftest import launched
from frameworks import checkout_of, needs


@pytest.mark.launches
@needs("ROLL")
@pytest.mark.parametrize("cp", [1, 2])
def test_at_cp_n_the_gradient_of_mcore_adapters_loss_is_one_nth_in_both_loss_scalings(cp, tmp_path):
    output = tmp_path / "rows.json"
    launched("integrations/mcore_adapter_worker.py", checkout_of("ROLL"), output, processes=cp)
    rows = json.loads(output.read_text())
    assert {(row["batch"], row["per_token"]) for row in rows} == {
        (batch, per_token) for batch in ("one token", "unequal") for per_token in (False, True)
    }
    # One microbatch on one data-parallel rank: at CP 1 it is the token mean.
    for row in rows:
        assert row["norm"] == pytest.approx(1 / cp, 1e-5)
        assert row["differs"] == pytest.approx(1 - 1 / cp, abs=1e-5)
