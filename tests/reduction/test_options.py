"""The options of a run: read once, and an invalid one does not exist."""

import argparse
import re

import pytest

from megatron_lossagg.errors import AggregationError
from megatron_lossagg.loop.flags import add_loss_aggregation_args
from megatron_lossagg.reduction.aggregation import Aggregation, Options

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
        (("--loss-aggregation-record", "a.jsonl"), Options(record="a.jsonl")),
        (("--loss-aggregation-side-losses", "stock"), Options()),
        (("--loss-aggregation-side-losses", "follow"), Options(side_losses="follow")),
        (("--loss-aggregation-guards", "warn"), Options(guards="warn")),
        (("--loss-aggregation-shadow", "token_mean"), Options(shadow=("token_mean",))),
        (
            ("--loss-aggregation-shadow", "constant:4096, trl:dr_grpo:8"),
            Options(shadow=["constant:4096", "trl:dr_grpo:8"]),
        ),
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
    ("name", "value"),
    [
        ("empty_step", "skip"),
        ("probe", "yes"),
        ("rejects_tokens", 1),
        ("record", 3),
        ("side_losses", "mean"),
        ("guards", "off"),
        ("shadow", 3),
        ("shadow", ["token_mean", "token_mean"]),
    ],
)
def test_an_invalid_option_is_refused_however_it_comes(name, value):
    with pytest.raises(AggregationError, match=re.escape(f"got {name} {value!r}")):
        Options(**{name: value})
    with pytest.raises(AggregationError, match=re.escape(f"got {name} {value!r}")):
        Options.from_args(argparse.Namespace(**{f"loss_aggregation_{name}": value}))


def test_a_shadow_is_a_mode_with_its_number():
    names = "token_mean,constant:4096,length_power:0.5,token_sum,roll:seq-mean-token-mean"
    assert Options(shadow=names).shadows == {
        "token_mean": Aggregation("token_mean"),
        "constant:4096": Aggregation("constant", divisor=4096),
        "length_power:0.5": Aggregation("length_power", exponent=0.5),
        "token_sum": Aggregation("token_sum"),
        "roll:seq-mean-token-mean": Aggregation("sample_mean", count_empty=False),
    }


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("constant", "without its divisor, expected such as constant:4096"),
        ("length_power", "without its exponent"),
        ("trl:dr_grpo", "without its divisor"),
        ("sample_mean:3", "expected a mode that takes a number"),
        ("constant:many", "expected a number after the last colon"),
        ("constant:-1", "expected a finite number above 0"),
        ("custom", "expected a mode of the table"),
        ("sample_mena", "did you mean 'sample_mean'"),
        ("constnat:4096", "did you mean 'constant'"),
        ("rlinf:tokenmean", "unknown name 'rlinf:tokenmean'"),
        ("token_mean,", "expected names of modes"),
    ],
)
def test_an_ambiguous_or_unknown_shadow_is_refused(name, words):
    with pytest.raises(AggregationError) as raised:
        Options(shadow=name)
    assert words in str(raised.value)
