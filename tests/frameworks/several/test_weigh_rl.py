"""Weighing reinforcement learning without its frameworks: what is refused, and what is heard.

Their own code is weighed in the tests of each.
"""

import importlib
import subprocess
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
    names = ", ".join(weigh_rl.FRAMEWORKS)
    with pytest.raises(ContractError, match=f"got 'absent', expected one of {names}"):
        weigh_rl.install("absent")


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


LOADED = """
import importlib, sys
from megatron_lossagg.integrations import weigh_rl
print(*sys.modules)
for name in weigh_rl.FRAMEWORKS.values():
    importlib.import_module(name)
print(*sys.modules)
"""


@pytest.mark.launches
def test_importing_the_integrations_imports_no_framework_and_listening_no_integration():
    out = subprocess.check_output([sys.executable, "-c", LOADED], text=True)
    of_listening, of_all = map(str.split, out.splitlines())
    assert not {*weigh_rl.FRAMEWORKS.values()} & {*of_listening}
    rows = [importlib.import_module(name).HEARD for name in weigh_rl.FRAMEWORKS.values()]
    frameworks = {row.schedule.partition(".")[0] for row in rows}
    assert len(frameworks) == len(rows)
    assert not {*frameworks, "ray", "megatron"} & {name.partition(".")[0] for name in of_all}
