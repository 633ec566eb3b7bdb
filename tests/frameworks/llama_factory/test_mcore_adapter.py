"""ROLL's mcore_adapter, which LLaMA-Factory trains with under ``USE_MCA=1``: its loss over CP.

``FRAMEWORKS_DIR=... pytest tests/frameworks/llama_factory/test_mcore_adapter.py``, after ``make
test-frameworks``: its trainer imports Transformers.
"""

import json
import os
from pathlib import Path

import llama_factory_page
import pytest
from conftest import launched, worker_path
from fork_server import ForkServer
from frameworks import INSTALLED, checkout_of, needs

from megatron_lossagg.errors import ContractError
from megatron_lossagg.integrations import mcore_adapter

LAYOUTS = {(2, 1): "DP 2", (1, 2): "CP 2", (2, 2): "DP 2 x CP 2"}
NEEDS_TRAINER = needs("ROLL/mcore_adapter/src", installed=True)


@pytest.mark.launches
@needs("ROLL")
@pytest.mark.parametrize("cp", [1, 2])
def test_at_cp_n_the_gradient_of_mcore_adapters_loss_is_one_nth_in_both_loss_scalings(cp, tmp_path):
    output = tmp_path / "rows.json"
    launched(
        "frameworks/llama_factory/mcore_adapter_worker.py",
        checkout_of("ROLL"),
        output,
        processes=cp,
    )
    rows = json.loads(output.read_text())
    assert {(row["batch"], row["per_token"]) for row in rows} == {
        (batch, per_token) for batch in ("one token", "unequal") for per_token in (False, True)
    }
    # One microbatch on one data-parallel rank: at CP 1 it is the token mean.
    for row in rows:
        assert row["norm"] == pytest.approx(1 / cp, 1e-5)
        assert row["differs"] == pytest.approx(1 - 1 / cp, abs=1e-5)


@pytest.fixture(scope="module")
def written(launches, tmp_path_factory):
    """Return what its trainer trained, logged and evaluated, on two processes and on four."""
    folder = tmp_path_factory.mktemp("mcore_adapter")
    source = checkout_of("ROLL/mcore_adapter/src")
    paths = [source, *worker_path().split(os.pathsep), INSTALLED]
    path = os.pathsep.join(map(str, paths))
    server = ForkServer(["tiny_gpt", "mcore_adapter.trainer"], path=path)
    found = []
    for processes in (2, 4):
        file = folder / f"{processes}.json"
        worker = [str(Path(__file__).with_name("mca_trainer_worker.py")), str(file)]
        done = server.launch(worker, processes=processes, timeout=600)
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        found.append(json.loads(file.read_text()))
    server.close()
    return found


@pytest.fixture(params=LAYOUTS, ids=LAYOUTS.values())
def rows(written, request):
    """Return the rows of a layout: two loss scalings, padded and packed, and what was installed."""
    rows = [row for one in written for row in one["rows"]]
    rows = [row for row in rows if (row["DP"], row["CP"]) == request.param]
    assert len(rows) == 16
    return rows


@NEEDS_TRAINER
@pytest.mark.launches
@pytest.mark.parametrize("mode", ["sample_mean", "token_mean"])
def test_its_trainer_trains_logs_and_evaluates_the_configured_loss(rows, mode):
    for row in (row for row in rows if row["how"] == mode):
        wanted = row["losses"][mode]
        assert row["to"][mode]["differs"] < 1e-6
        assert row["logged"]["loss"] == pytest.approx(wanted, abs=1e-4)  # it rounds
        assert row["logged"]["lossagg/weight_sum"] == pytest.approx(1)
        assert row["evaluated"]["eval_loss"] == pytest.approx(wanted)
        assert row["steps"] == 2


@NEEDS_TRAINER
@pytest.mark.launches
def test_a_shadow_changes_no_gradient_and_logs_what_the_mode_would_give(rows):
    by_kind = {(row["per_token"], row["packed"], row["how"]): row for row in rows}
    for (per_token, packed, how), row in by_kind.items():
        if how == "shadow":
            stock = by_kind[per_token, packed, "stock"]
            assert row["to"] == stock["to"]
            assert row["logged"]["loss"] == stock["logged"]["loss"]
            shadow = row["logged"]["lossagg/shadow/sample_mean"]
            assert shadow == pytest.approx(row["losses"]["sample_mean"])


@NEEDS_TRAINER
@pytest.mark.launches
def test_without_us_it_trains_one_cpth_and_in_the_per_token_scaling_of_the_token_mean(rows):
    for row in (row for row in rows if row["how"] == "stock"):
        found = row["to"]["token_mean"]
        if row["per_token"]:
            assert found["norm"] == pytest.approx(1 / row["CP"], rel=1e-5)
            assert found["differs"] == pytest.approx(1 - 1 / row["CP"], abs=1e-5)
        else:
            assert found["norm"] == pytest.approx(1 / row["CP"], rel=0.1)
            assert found["differs"] > 0.01


@NEEDS_TRAINER
@pytest.mark.launches
def test_its_trainer_of_preferences_is_refused(written):
    for one in written:
        assert "_post_compute_loss of DPOTrainer, expected McaTrainer's own" in one["refused"]


def test_without_mcore_adapter_install_says_what_it_expected():
    with pytest.raises(ContractError, match="expected mcore_adapter of ROLL: install it"):
        mcore_adapter.install("sample_mean")


@pytest.mark.launches
@needs("LLaMA-Factory/src", installed=True)
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(name, marks=needs(checkout))
        for name, (_, checkout) in llama_factory_page.BACKENDS.items()
    ],
)
def test_llama_factory_reads_its_file_and_its_backend_has_the_mode(tmp_path, backend):
    found, done = llama_factory_page.start(tmp_path, backend)
    assert found == {"aggregation": "sample_mean: w_s = 1/(B n_b)"}, done.stderr
