"""LLaMA-Factory's Megatron-Bridge backend: its workflow starts Bridge's loop, with our hook.

``FRAMEWORKS_DIR=... pytest tests/frameworks/llama_factory/test_llama_factory.py``: checkouts of
LLaMA-Factory, and what ``bridge_runs.py`` names. Its other Megatron backend is in
``test_mcore_adapter.py``.
"""

import pytest
from bridge_runs import BETWEEN_LAYOUTS, NEEDS, run_of, runs_of
from frameworks import checkout_of, needs
from laws import Comparison, Laws, close, difference

pytestmark = [needs("LLaMA-Factory/src"), *NEEDS]
LAYOUTS = {"DP 2": (2, 1, "average"), "CP 2": (2, 2, "average"), "DP 2 x CP 2": (4, 2, "average")}
"""Processes, CP and the loss scaling, which LLaMA-Factory changes at CP 2."""
SFT = {"LLAMA_FACTORY": "sft"}


@pytest.fixture(scope="module")
def train(launches, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama-factory")
    with runs_of(folder, checkout_of("LLaMA-Factory/src")) as train:
        yield train


@pytest.fixture(scope="module")
def alone(train):
    return run_of(train("sample_mean", 1, 1, "average", **SFT))


class TestSupervised(Laws):
    """``run_sft``."""

    @pytest.fixture
    def on_one_process(self, alone):
        return alone

    @pytest.fixture(params=LAYOUTS)
    def in_layout(self, train, alone, request):
        numbers = train("sample_mean", *LAYOUTS[request.param], **SFT)
        return Comparison(run=run_of(numbers), wanted=alone, tolerance=BETWEEN_LAYOUTS)


def test_pretraining_is_hooked_too(train, alone):
    run = run_of(train("sample_mean", 2, 2, "average", LLAMA_FACTORY="pt"))
    assert run.losses == pytest.approx(alone.losses, rel=1e-6)
    assert difference(run.gradients, alone.gradients) < BETWEEN_LAYOUTS.gradient


def test_without_us_sft_trains_another_loss_at_cp_2_than_at_dp_2_and_neither_is_ours(train, alone):
    at_dp_2 = run_of(train("stock", 2, 1, "average", **SFT))
    at_cp_2 = run_of(train("stock", 2, 2, "average", **SFT))
    by_tokens = run_of(train("token_mean", 1, 1, "average", **SFT))
    # One log, two gradients: the average loss scaling, and at CP 2 the per-token one.
    assert close(at_dp_2.losses[0], at_cp_2.losses[0])
    assert close(at_cp_2.gradients[0], by_tokens.gradients[0], 1e-5)
    assert difference(at_dp_2.gradients[0], at_cp_2.gradients[0]) > 0.01
    assert difference(alone.gradients[0], at_cp_2.gradients[0]) > 0.01
