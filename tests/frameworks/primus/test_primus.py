"""AMD's Primus: its own trainer on Megatron-LM's loop, data and optimizer, with our hook.

``FRAMEWORKS_DIR=... pytest tests/frameworks/primus/test_primus.py``, with what
``megatron_lm_runs.py`` names.
"""

import atexit
import sys
from pathlib import Path
from types import SimpleNamespace

import primus_page
import pytest
from frameworks import checkout_of, needs
from megatron_lm_runs import NEEDED, PER_TOKEN, SAMPLE_MEAN, SIZES, run_of, runs_of, steps

from megatron_lossagg.errors import ContractError
from megatron_lossagg.integrations import primus
from megatron_lossagg.integrations._shared import report_if_unused

pytestmark = needs("Megatron-LM", *NEEDED)
SCRIPT = Path(__file__).with_name("primus_pretrain.py")
LAYOUTS = [("DP2", "average"), ("CP2", "average"), ("CP2", "per_token"), ("PP2", "per_token")]


@pytest.fixture(scope="module")
def run(launches, tmp_path_factory):
    with runs_of(tmp_path_factory.mktemp("primus")) as run:
        yield run


@pytest.fixture(scope="module")
def by_hand(run):
    """Return a run of Megatron-LM on one process, and each step by the reference."""
    return run_of(run("mock", *SAMPLE_MEAN, before=["--wanted", "sample_mean"]))


def trained(run, *more, processes, hook="primus", **options):
    return run(
        "mock",
        *more,
        processes=processes,
        before=["--plain"],
        script=SCRIPT,
        env={"HOOK": hook},
        **options,
    )


@needs("Primus")
@pytest.mark.parametrize(("layout", "scaling"), LAYOUTS)
def test_the_hook_survives_primus_and_trains_the_configured_loss(run, by_hand, layout, scaling):
    processes, more = SIZES[layout]
    more = [*more, *(PER_TOKEN if scaling == "per_token" else [])]
    found = run_of(trained(run, *SAMPLE_MEAN, *more, processes=processes))
    wanted = {"rel": 1e-5}
    assert found.losses == pytest.approx(by_hand.losses, **wanted)
    assert found.gradients == pytest.approx(by_hand.gradients, **wanted)
    assert [norm for _, norm in by_hand.by_hand] == pytest.approx(found.gradients, **wanted)
    assert "loss aggregation sample_mean" in run.output


@needs("Primus")
def test_without_a_flag_primus_trains_as_megatron_lm_does(run):
    found = trained(run, processes=2)
    assert steps(found)
    assert found == run("mock", processes=2, before=["--plain"])


@needs("Primus")
def test_a_hook_in_megatron_lms_loop_is_lost_and_stock_trains(run):
    found = trained(run, *SAMPLE_MEAN, processes=2, hook="megatron_lm")
    assert steps(found)
    assert found == trained(run, processes=2)


@pytest.fixture
def trainers(monkeypatch):
    monkeypatch.syspath_prepend(str(checkout_of("Primus")))
    from primus.backends.megatron import megatron_pretrain_trainer, megatron_sft_trainer

    classes = (
        megatron_pretrain_trainer.MegatronPretrainTrainer,
        megatron_sft_trainer.MegatronSFTTrainer,
    )
    for trainer in classes:
        monkeypatch.setattr(trainer, "train", trainer.train)
    yield classes
    atexit.unregister(report_if_unused)
    for name in [name for name in sys.modules if name.partition(".")[0] == "primus"]:
        del sys.modules[name]


@needs("Primus")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("schedule", ["patch_zero_bubble", "patch_primus_pipeline"])
def test_primus_own_schedules_are_refused_by_name(trainers, schedule):
    primus.install("sample_mean")
    args = SimpleNamespace(**{schedule: True})
    with pytest.raises(ContractError, match=f"got {schedule} with --loss-aggregation sample_mean"):
        trainers[0].train(SimpleNamespace(backend_args=args))


@needs("Primus")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_its_sft_trainer_is_refused(trainers):
    primus.install("sample_mean")
    with pytest.raises(ContractError, match="expected MegatronPretrainTrainer"):
        trainers[1].train(SimpleNamespace(backend_args=None))


@pytest.mark.launches
@needs("Primus", installed=True)
def test_primus_trainer_reaches_megatron_lm_with_the_mode(tmp_path):
    found, done = primus_page.start(tmp_path)
    assert found == {"aggregation": "sample_mean: w_s = 1/(B n_b)"}, done.stdout
