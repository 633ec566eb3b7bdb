"""verl's adapter without verl; ``make test-hosts`` runs verl's own code."""

import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import launched

from megatron_lossagg import Aggregation
from megatron_lossagg.errors import AggregationError, ContractError
from megatron_lossagg.hosts import verl

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def host_reference(tmp_path_factory):
    """Compute the oracle's losses and gradients of the step that the hosts' adapters train."""
    file = tmp_path_factory.mktemp("hosts") / "reference.pt"
    launched("host_worker.py", "reference", file, processes=1)
    return file


@pytest.mark.parametrize(("host", "cases"), [("verl", 3), ("skyrl", 6), ("nemo_rl", 3)])
def test_on_live_megatron_the_hosts_own_scaling_makes_it_the_configured_loss(
    host_reference, host, cases
):
    out = launched("host_worker.py", "compare", host_reference, host, processes=4)
    assert out.count(": the oracle") == 2 * cases


def test_importing_the_adapters_imports_no_host():
    code = "import sys\nfrom megatron_lossagg.hosts import nemo_rl, skyrl, verl\n"
    code += "print(*sys.modules)"
    out = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT)
    roots = {name.partition(".")[0] for name in out.split()}
    assert not {"verl", "skyrl", "nemo_rl", "ray", "megatron"} & roots


@pytest.mark.parametrize(
    ("name", "mode", "count_empty", "loss"),
    [
        ("lossagg_constant", "constant", True, "vanilla"),
        ("lossagg_prompt_mean_no_count_empty", "prompt_mean", False, "vanilla"),
        ("lossagg_sample_mean_no_count_empty+gspo", "sample_mean", False, "gspo"),
        ("lossagg_token_mean+dppo_tv", "token_mean", True, "dppo_tv"),
    ],
)
def test_a_loss_mode_names_mode_empty_samples_and_verls_own_loss(name, mode, count_empty, loss):
    read = verl.LossMode.named(name)
    assert (read.mode, read.count_empty, read.loss) == (mode, count_empty, loss)
    assert read.name == name


def test_a_loss_mode_of_verls_own_is_left_alone():
    assert verl.LossMode.named("vanilla") is None


def test_the_divisor_is_verls_loss_scale_factor():
    constant = verl.LossMode.named("lossagg_constant")
    assert constant.aggregation(8) == Aggregation("constant", divisor=8)
    with pytest.raises(AggregationError, match=r"set actor_rollout_ref\.actor\.loss_scale_factor"):
        constant.aggregation(None)
    assert verl.LossMode.named("lossagg_token_sum").aggregation(None).divisor is None
    assert verl.LossMode.named("lossagg_sample_mean").aggregation(8).divisor is None


def test_a_registration_that_fails_is_not_silent(monkeypatch):
    monkeypatch.setitem(sys.modules, "verl", types.ModuleType("verl"))
    verl._register.cache_clear()
    with (
        pytest.warns(UserWarning, match="not registered with verl: ModuleNotFoundError"),
        pytest.raises(ModuleNotFoundError),
    ):
        verl.plugin  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'plugins'"):
        verl.plugins  # noqa: B018


def test_dynamic_context_parallelism_is_refused_when_the_engine_is_built():
    engine = verl._engine(object)
    with pytest.raises(ContractError, match="counted once per rank: set actor_rollout_ref"):
        engine(None, SimpleNamespace(dynamic_context_parallel=True))


def test_padding_rows_of_verl_are_in_no_count():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0]])
    uids = ["a", "b", "a", f"pad{'0' * 32}"]
    plan, rows = verl._plan_batch(
        Aggregation("prompt_mean"), {"loss_mask": mask, "uid": uids}, None
    )
    assert rows.tolist() == [0, 1, 2, -1]
    assert plan.weights.tolist() == [1 / 6, 0, 1 / 6]
    with pytest.raises(ValueError, match="batch has no uid: keep uid"):
        verl._plan_batch(Aggregation("prompt_mean"), {"loss_mask": mask}, None)
