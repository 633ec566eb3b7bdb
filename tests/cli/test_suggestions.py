"""A command, an option or a choice that is misspelt is answered with the near name."""

import argparse

import pytest

from megatron_lossagg.cli.main import _COMMANDS, _parser, main
from megatron_lossagg.errors import ReducerPathError
from megatron_lossagg.reduction.aggregation import resolved


def command_of(name):
    """Return the parser of a command."""
    (commands,) = (a for a in _parser([name])._actions if isinstance(a.choices, dict))
    return commands.choices[name]


def misspelt(name):
    """Leave out a letter in the middle."""
    middle = len(name) // 2
    return name[:middle] + name[middle + 1 :]


def ending(arguments, capsys):
    """Return what the command printed last when it refused its arguments."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name", _COMMANDS)
def test_of_a_command(name, capsys):
    assert ending([misspelt(name)], capsys).endswith(f", did you mean {name!r}?")


CHOICES = [
    (command, action.option_strings[0], choice)
    for command in _COMMANDS
    for action in command_of(command)._actions
    for choice in action.choices or ()
]
OPTIONS = [
    (command, option)
    for command in _COMMANDS
    for action in command_of(command)._actions
    if action.help != argparse.SUPPRESS
    for option in action.option_strings
    if len(option) > 6  # of a shorter one the rest is an abbreviation, or near to several
]


def test_the_options_of_names_are_tried():
    assert {("verify", "--framework", "megatron-lm"), ("verify", "--packing", "bshd")} <= {*CHOICES}
    assert ("plot", "--column") in OPTIONS


@pytest.mark.parametrize(("command", "option", "choice"), CHOICES)
def test_of_an_options_value(command, option, choice, capsys):
    said = ending([command, option, misspelt(choice), "a", "b"], capsys)
    assert said.endswith(f", did you mean {choice!r}?")


@pytest.mark.parametrize(("command", "option"), OPTIONS)
def test_of_an_option(command, option, capsys):
    said = ending([command, misspelt(option), "a", "b"], capsys)
    assert f"unrecognized arguments: {misspelt(option)}" in said
    assert said.endswith(f", did you mean {option!r}?")


@pytest.mark.parametrize("name", ["zzz", "--zzz"])
def test_of_what_is_near_to_none_nothing_is_suggested(name, capsys):
    assert "did you mean" not in ending([name], capsys)
    assert "did you mean" not in ending(["explain", "--loss-scaling", name], capsys)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_a_time_limit_is_a_time(seconds, capsys):
    said = ending(["verify", "--timeout", seconds], capsys)
    assert said.endswith(f"argument --timeout: invalid seconds value: '{seconds}'")


def test_what_is_to_be_explained_has_to_be_named(capsys):
    assert main(["explain"]) == 2
    assert "got no MODE: give one of those that --list prints" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sample_maen", "did you mean 'sample_mean'?"),
        ("token_max", "unknown mode 'token_max'. Modes are"),  # and no other loss is suggested
        ("custom", "got 'custom'; expected some that weights show: token_mean, "),
    ],
)
def test_of_the_loss_that_is_expected(name, said, capsys):
    assert said in ending(["weigh", "--expect", name, "pretrain_gpt.py"], capsys)


def test_of_a_column(tmp_path, capsys):
    said = ending(["plot", "a.jsonl", "--column", "lenghts=n"], capsys)
    assert said.endswith("did you mean 'lengths'?")
    (tmp_path / "a.jsonl").write_text('{"tokens_of_response": 3}\n')
    column = "lengths=token_of_response"
    assert main(["plot", str(tmp_path / "a.jsonl"), "--html", "/dev/null", "--column", column]) == 2
    assert "did you mean 'tokens_of_response'?" in capsys.readouterr().err


def test_of_a_function_of_a_module():
    with pytest.raises(ReducerPathError, match="did you mean 'fsum'"):
        resolved("math:fsom", "loss_func", "loss_func(microbatch, output)")


def test_a_module_that_raises_an_error_of_no_name_is_answered_too(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "has_no_name.py").write_text("raise AttributeError('of the module')\n")
    with pytest.raises(ReducerPathError, match=r"AttributeError\('of the module'\): write"):
        resolved("has_no_name:loss", "loss_func", "loss_func(microbatch, output)")
