"""The options of a run: read once, and an invalid one does not exist."""

import argparse

import pytest

from megatron_lossagg.errors import AggregationError
from megatron_lossagg.flags import add_loss_aggregation_args
from megatron_lossagg.options import Options

MODE = ("--loss-aggregation", "token_mean")


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        ((), Options()),
        (("--loss-aggregation-empty-step", "zero"), Options()),
        (("--loss-aggregation-empty-step", "error"), Options(empty_step="error")),
        (("--loss-aggregation-probe",), Options()),
        (("--no-loss-aggregation-probe",), Options(probe=False)),
        (("--loss-aggregation-rejects-tokens",), Options(rejects_tokens=True)),
    ],
)
def test_each_flag_sets_its_option_and_leaves_the_others(argv, wanted):
    parser = add_loss_aggregation_args(argparse.ArgumentParser())
    assert Options.from_args(parser.parse_args([*MODE, *argv])) == wanted
    reducer = ("--loss-aggregation-reducer-path", "math:fsum")
    assert Options.from_args(parser.parse_args([*reducer, *argv])) == wanted


def test_arguments_without_the_flags_have_the_defaults():
    found = Options.from_args(argparse.Namespace(lr=1e-6))
    assert (found.empty_step, found.probe, found.rejects_tokens) == ("zero", True, False)


@pytest.mark.parametrize(
    ("name", "value"), [("empty_step", "skip"), ("probe", "yes"), ("rejects_tokens", 1)]
)
def test_an_invalid_option_is_refused_however_it_comes(name, value):
    with pytest.raises(AggregationError, match=f"got {name} {value!r}"):
        Options(**{name: value})
    with pytest.raises(AggregationError, match=f"got {name} {value!r}"):
        Options.from_args(argparse.Namespace(**{f"loss_aggregation_{name}": value}))
