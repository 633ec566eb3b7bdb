"""What lossagg weigh refuses before it runs a script."""

import sys

import pytest

from megatron_lossagg.cli.main import main


@pytest.mark.parametrize("option", ["--at", "--steps"])
def test_a_step_that_cannot_be_is_wrong_usage(capsys, option):
    assert main(["weigh", option, "0", "pretrain_gpt.py"]) == 2
    assert "expected a step from 1 on" in capsys.readouterr().err


def test_a_script_that_is_not_there_is_named(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lossagg"])
    assert main(["weigh", "no_such_script.py"]) == 2
    assert "no_such_script.py, which does not exist" in capsys.readouterr().err


def test_only_a_mode_that_weights_show_can_be_expected(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["weigh", "--expect", "prompt_mean", "pretrain_gpt.py"])
    assert ended.value.code == 2
    assert "token_mean" in capsys.readouterr().err
