"""The command line: every mode is reachable, nothing given is ignored."""

import argparse
from dataclasses import fields

import pytest

from megatron_lossagg import Aggregation, add_loss_aggregation_args
from megatron_lossagg.errors import AggregationError, ReducerPathError
from megatron_lossagg.loop.flags import aggregation_from_args, args_of
from megatron_lossagg.reduction.aggregation import Options
from megatron_lossagg.reduction.modes import ALIASES, CUSTOM, MODES, OWN_WEIGHTS
from megatron_lossagg.verify.cases import CASES

NAMES = [name for name in (*MODES, *ALIASES) if name not in (CUSTOM, OWN_WEIGHTS)]


def numbers_of(name):
    """Return the numbers that a mode or alias takes, by their names."""
    mode = MODES[ALIASES[name].mode if name in ALIASES else name]
    numbers = {"divisor": 8.0} if mode.divisor != "none" else {}
    return numbers | ({"exponent": 0.5} if mode.has_exponent else {})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_arguments_of_an_aggregation_read_back_as_it_is(case):
    args = argparse.Namespace(**args_of(case.aggregation))
    assert aggregation_from_args(args) == case.aggregation


def flags_of(numbers):
    return [f"--loss-aggregation-{name}={number!r}" for name, number in numbers.items()]


def parser():
    return add_loss_aggregation_args(argparse.ArgumentParser(allow_abbrev=False))


def read(*argv):
    return aggregation_from_args(parser().parse_args(argv))


def test_the_set_of_flags_is_frozen():
    flags = {flag for action in parser()._actions for flag in action.option_strings}
    assert flags - {"-h", "--help"} == {
        "--loss-aggregation",
        "--loss-aggregation-divisor",
        "--loss-aggregation-exponent",
        "--loss-aggregation-count",
        "--loss-aggregation-count-empty",
        "--no-loss-aggregation-count-empty",
        "--loss-aggregation-empty-step",
        "--loss-aggregation-probe",
        "--no-loss-aggregation-probe",
        "--loss-aggregation-record",
        "--loss-aggregation-shadow",
        "--loss-aggregation-side-losses",
        "--loss-aggregation-guards",
        "--loss-aggregation-rejects-tokens",
        "--loss-aggregation-reducer-path",
        "--loss-aggregation-weights-path",
    }


def test_without_flags_there_is_no_aggregation():
    assert read() is None


def test_the_parser_comes_back_as_megatrons_extra_args_provider_wants_it():
    given_parser = argparse.ArgumentParser()
    assert add_loss_aggregation_args(given_parser) is given_parser


@pytest.mark.parametrize("name", NAMES)
def test_every_mode_and_alias_is_reachable(name):
    numbers = numbers_of(name)
    assert read("--loss-aggregation", name, *flags_of(numbers)) == Aggregation(name, **numbers)


@pytest.mark.parametrize(("flag", "kept"), [("--", True), ("--no-", False)])
def test_count_empty_is_read_both_ways(flag, kept):
    found = read("--loss-aggregation", "sample_mean", f"{flag}loss-aggregation-count-empty")
    assert found == Aggregation("sample_mean", count_empty=kept)


@pytest.mark.parametrize("name", [field.name for field in fields(Options)])
def test_an_option_of_the_run_changes_no_aggregation(name):
    flag = f"--loss-aggregation-{name.replace('_', '-')}"
    values = {"empty_step": ["error"], "record": ["a.jsonl"], "shadow": ["sample_mean"]}
    values |= {"side_losses": ["follow"], "guards": ["warn"]}
    argv = [flag, *values.get(name, [])]
    assert read("--loss-aggregation", "token_mean", *argv) == Aggregation("token_mean")
    custom = read("--loss-aggregation-reducer-path", "math:fsum", *argv)
    assert custom == Aggregation("custom", reducer_path="math:fsum")


def test_only_a_shadow_names_no_aggregation_and_may_say_that_tokens_are_rejected():
    shadow = ["--loss-aggregation-shadow", "token_mean,constant:8"]
    assert read(*shadow) is None
    assert read(*shadow, "--loss-aggregation-rejects-tokens") is None
    with pytest.raises(AggregationError, match=r"-divisor 8\.0 without --loss-aggregation"):
        read(*shadow, "--loss-aggregation-divisor", "8")


def test_the_loss_scaling_flag_of_megatron_is_not_read():
    framework = argparse.Namespace(calculate_per_token_loss=True, loss_aggregation="sample_mean")
    assert aggregation_from_args(framework) == Aggregation("sample_mean")
    assert aggregation_from_args(argparse.Namespace(calculate_per_token_loss=True)) is None


def test_a_weights_path_is_given_without_a_mode_and_with_what_is_counted():
    path = "megatron_lossagg.verify.cases:mean_of_prompts"
    argv = ["--loss-aggregation-weights-path", path]
    assert read(*argv) == Aggregation(weights=path)
    found = read(*argv, "--no-loss-aggregation-count-empty", "--loss-aggregation-count", "weights")
    assert found == Aggregation(weights=path, count_empty=False, count="weights")
    for more in (["--loss-aggregation", "token_mean"], ["--loss-aggregation-reducer-path", "a:b"]):
        with pytest.raises(AggregationError, match="replaces the mode"):
            read(*argv, *more)
    with pytest.raises(ReducerPathError, match=r"weights path 'no\.such:f' raised"):
        read("--loss-aggregation-weights-path", "no.such:f")


def test_help_has_one_line_for_each_mode_where_text_is_raw():
    flags = parser()
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    lines = [line.split(maxsplit=1) for line in flags.format_help().splitlines()]
    for mode in MODES.values():
        assert ([mode.name, f"w_s = {mode.formula};"] in lines) == (
            mode.name not in (CUSTOM, OWN_WEIGHTS)
        )


def test_help_says_how_a_path_is_written():
    text = parser().format_help()
    for what in ("reducer", "weights"):
        assert f"--loss-aggregation-{what}-path PKG.MOD:NAME\n" in text


def test_a_reducer_path_is_given_alone():
    found = read("--loss-aggregation-reducer-path", "math:fsum")
    assert found == Aggregation("custom", reducer_path="math:fsum")


CONTRADICTIONS = {
    (
        "--loss-aggregation-reducer-path",
        "math:fsum",
        "--loss-aggregation",
        "token_mean",
    ): "replaces",
    ("--loss-aggregation-reducer-path", "math:fsum", "--loss-aggregation-divisor", "3"): "replaces",
    (
        "--loss-aggregation-reducer-path",
        "math:fsum",
        "--no-loss-aggregation-count-empty",
    ): "replaces",
    ("--loss-aggregation-divisor", "3"): "-divisor 3.0 without --loss-aggregation",
    ("--no-loss-aggregation-count-empty",): "-count-empty False without",
    ("--no-loss-aggregation-probe",): "-probe False without --loss-aggregation",
    ("--loss-aggregation-rejects-tokens",): "-rejects-tokens True without",
    ("--loss-aggregation-empty-step", "error"): "-empty-step error without",
    ("--loss-aggregation-record", "a"): "-record a without --loss-aggregation",
    ("--loss-aggregation-shadow", "token_mean", "--loss-aggregation-record", "a"): "-record a with",
    ("--loss-aggregation-exponent", "0.5"): "-exponent 0.5 without --loss-aggregation",
    ("--loss-aggregation-count", "weights"): "-count weights without --loss-aggregation",
}


@pytest.mark.parametrize("argv", CONTRADICTIONS, ids=" ".join)
def test_flags_that_contradict_or_would_be_ignored_are_refused(argv):
    with pytest.raises(AggregationError, match=CONTRADICTIONS[argv]):
        read(*argv)


def test_an_empty_step_has_two_choices(capsys):
    with pytest.raises(SystemExit):
        read("--loss-aggregation", "token_mean", "--loss-aggregation-empty-step", "skip")
    assert "invalid choice: 'skip'" in capsys.readouterr().err


def test_a_divisor_that_is_not_a_number_is_refused_by_the_parser(capsys):
    with pytest.raises(SystemExit):
        read("--loss-aggregation", "constant", "--loss-aggregation-divisor", "many")
    assert "invalid float value: 'many'" in capsys.readouterr().err


def test_arguments_from_a_file_have_the_flags_defaults():
    framework = argparse.Namespace(
        loss_aggregation="constant", loss_aggregation_divisor="4e4", lr=1e-6
    )
    assert aggregation_from_args(framework) == Aggregation("constant", divisor=40000)
    framework.loss_aggregation_divisor = "many"
    with pytest.raises(
        AggregationError, match="got --loss-aggregation-divisor 'many', expected a number"
    ):
        aggregation_from_args(framework)


def test_a_command_line_gives_what_the_api_gives():
    hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
    st = hypothesis.strategies

    @hypothesis.given(
        name=st.sampled_from([*NAMES, CUSTOM, OWN_WEIGHTS, "token_meen"]),
        divisor=st.none() | st.floats(),
        exponent=st.none() | st.floats(),
        count_empty=st.sampled_from([None, True, False]),
    )
    def gives(name, divisor, exponent, count_empty):
        numbers = {"divisor": divisor, "exponent": exponent}
        given_numbers = {name: number for name, number in numbers.items() if number is not None}
        argv = ["--loss-aggregation", name, *flags_of(given_numbers)]
        if count_empty is not None:
            argv += [f"--{'' if count_empty else 'no-'}loss-aggregation-count-empty"]
        by_api = result_or_message(Aggregation, name, count_empty=count_empty, **numbers)
        assert result_or_message(read, *argv) == by_api

    gives()


def result_or_message(build, *arguments, **options):
    """Return what a call returns, or the message of its refusal."""
    try:
        return build(*arguments, **options)
    except AggregationError as error:
        return str(error)
