"""Weighing reinforcement learning without its frameworks: what is refused, and what is heard.

Their own code is weighed in ``verl_checks.py``, ``swift_grpo_checks.py``, ``test_skyrl.py``,
``test_nemo_rl_own.py`` and ``test_areal.py``.
"""

import sys
import types

import pytest

from megatron_lossagg.errors import ContractError
from megatron_lossagg.integrations import weigh_rl
from megatron_lossagg.integrations._shared import WEIGH, is_asked


@pytest.mark.parametrize(("value", "asks"), [("1", True), ("0", False), ("", False), (None, False)])
def test_the_environment_asks_by_a_value_other_than_0(monkeypatch, value, asks):
    monkeypatch.delenv(WEIGH, raising=False)
    if value is not None:
        monkeypatch.setenv(WEIGH, value)
    assert is_asked() == asks


def test_a_framework_that_is_not_in_the_table_is_refused():
    with pytest.raises(ContractError, match="got 'trl', expected one of verl, skyrl, nemo-rl"):
        weigh_rl.install("trl")


def test_a_release_that_reduces_its_losses_elsewhere_is_refused(monkeypatch):
    for name in ("nemo_rl", "nemo_rl.models", "nemo_rl.models.megatron"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    train = types.ModuleType("nemo_rl.models.megatron.train")
    train.get_forward_backward_func = lambda: None
    monkeypatch.setitem(sys.modules, train.__name__, train)
    with pytest.raises(ContractError, match=r"without one of nemo_rl\..*\.masked_mean"):
        weigh_rl.install("nemo-rl")


@pytest.mark.parametrize("framework", weigh_rl.FRAMEWORKS)
def test_a_process_without_the_framework_is_refused(framework):
    with pytest.raises(ContractError, match=f"expected the training of {framework} on Megatron"):
        weigh_rl.install(framework)
