"""``lossagg verify --host``: a system is found without importing it, or what it lacks is named."""

import importlib
import os
from pathlib import Path

import pytest

from megatron_lossagg.cli.main import main
from megatron_lossagg.verify.hosts import HOSTS, host_fact

CHECKOUTS = {"megatron-lm": "Megatron-LM", "bridge": "Megatron-Bridge/src", "nemo-rl": "NeMo-RL"}


@pytest.fixture
def a_host(tmp_path, monkeypatch):
    """Write a package that has what slime's adapter uses, and put it on the path."""
    for file, texts in HOSTS["slime"].uses.items():
        path = tmp_path / "slime" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(texts))
    (tmp_path / "slime" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return tmp_path / "slime"


def test_a_host_that_has_everything_is_found_and_not_imported(a_host):
    fact = host_fact("slime")
    assert fact.state == "found"
    assert str(a_host) in fact.detail


def test_what_a_host_lacks_is_named_with_its_file_and_the_commit(a_host, capsys):
    arguments = a_host / "utils" / "arguments.py"
    arguments.write_text(arguments.read_text().replace("--rollout-data-postprocess-path", ""))
    assert main(["verify", "--host", "slime"]) == 2
    error = capsys.readouterr().err
    assert "lacks '--rollout-data-postprocess-path' in utils/arguments.py" in error
    assert "written for 624b824a" in error


def test_a_host_that_is_not_installed_is_wrong_usage(capsys):
    assert main(["verify", "--host", "miles"]) == 2
    assert "nothing to verify: miles is not installed here" in capsys.readouterr().err


@pytest.mark.skipif("HOSTS_DIR" not in os.environ, reason="HOSTS_DIR is not set")
@pytest.mark.parametrize("name", HOSTS)
def test_the_hosts_own_code_has_what_the_adapter_uses(name, monkeypatch):
    checkout = Path(os.environ["HOSTS_DIR"]) / CHECKOUTS.get(name, name)
    if not checkout.exists():
        pytest.skip(f"no checkout in {checkout}")
    monkeypatch.syspath_prepend(checkout)
    importlib.invalidate_caches()
    if name in ("megatron-lm", "bridge"):  # a namespace whose folders were looked up before
        import megatron

        monkeypatch.setattr(megatron, "__path__", [str(checkout / "megatron")])
    assert host_fact(name).state == "found"
