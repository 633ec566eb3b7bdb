"""Which loss a name means, and what refuses to exist."""

import dataclasses
import math
import re
from fractions import Fraction

import numpy as np
import pytest
from drawn_step import Step

from megatron_lossagg import Aggregation
from megatron_lossagg.cli.explain import alias_lines, mode_lines
from megatron_lossagg.errors import AggregationError
from megatron_lossagg.reduction.aggregation import parsed_aggregation
from megatron_lossagg.reduction.aliases import ALIASES
from megatron_lossagg.reduction.modes import MODES

FORMULAS = {
    ("length_power", None, True): "1/(n_b^0.5 Z)",
    ("token_mean", None, True): "1/N",
    ("sample_mean", None, True): "1/(B n_b)",
    ("sample_mean", None, False): "1/(V n_b)",
    ("prompt_mean", None, True): "1/(P n_p)",
    ("prompt_mean", None, False): "1/(Q n_p)",
    ("constant", 4096, True): "1/(B 4096)",
    ("constant", 0.5, False): "1/(V 0.5)",
    ("constant", 1048577, True): "1/(B 1048577)",
    ("sample_sum", None, True): "1/B",
    ("sample_sum", None, False): "1/V",
    ("token_sum", None, True): "1/1",
    ("token_sum", 7, True): "1/7",
    ("microbatch_token_mean", None, True): "1/(M DP n_mb)",
}

DR_GRPO = [
    "dr_grpo",
    "drgrpo",
    "verl:seq-mean-token-sum-norm",
    "skyrl:seq_mean_token_sum_norm",
    "trl:dr_grpo",
]


@pytest.mark.parametrize(("mode", "divisor", "count_empty"), FORMULAS)
def test_a_mode_prints_its_weight(mode, divisor, count_empty):
    exponent = 0.5 if MODES[mode].has_exponent else None
    aggregation = Aggregation(mode, divisor=divisor, exponent=exponent, count_empty=count_empty)
    assert aggregation.formula == FORMULAS[mode, divisor, count_empty]
    assert str(aggregation) == f"{mode}: w_s = {aggregation.formula}"


@pytest.mark.parametrize("name", ALIASES)
def test_another_systems_name_stands_for_mode_and_count_empty(name):
    alias = ALIASES[name]
    divisor = None if MODES[alias.mode].divisor == "none" else 8
    expected = Aggregation(alias.mode, divisor=divisor, count_empty=alias.count_empty)
    assert Aggregation(name, divisor=divisor) == expected


@pytest.mark.parametrize("name", DR_GRPO)
def test_every_name_of_dr_grpo_is_constant_and_requires_a_divisor(name):
    assert Aggregation(name, divisor=8) == Aggregation("constant", divisor=8)
    with pytest.raises(AggregationError, match=r"got none.*--loss-aggregation-divisor"):
        Aggregation(name)


def test_a_count_empty_that_contradicts_an_alias_is_refused():
    name = "openrlhf:token_level_loss=False"
    assert Aggregation(name, count_empty=False) == Aggregation(name)
    with pytest.raises(AggregationError, match=r"count_empty=False, got count_empty=True: drop it"):
        Aggregation(name, count_empty=True)
    with pytest.raises(AggregationError, match=r"count_empty=True, got count_empty=False: drop it"):
        Aggregation("trl:grpo", count_empty=False)


@pytest.mark.parametrize("count_empty", [True, False])
def test_a_mode_takes_the_count_empty_it_is_given(count_empty):
    assert Aggregation("sample_mean", count_empty=count_empty).count_empty is count_empty
    assert Aggregation("sample_mean").count_empty is True


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("tokenmean", "token_mean"),
        ("promt_mean", "prompt_mean"),
        ("toekn_maen", "token_mean"),
        ("sample-means", "sample_mean"),
        ("lenght_power", "length_power"),
        ("balancd", "balanced"),
        ("gpro", "grpo"),
        ("scalrl", "scalerl"),
        ("VERL:token-men", "verl:token-mean"),
        ("trl:dr_gpro", "trl:dr_grpo"),
        ("openrlhf:token_levl_loss=true", "openrlhf:token_level_loss=True"),
    ],
)
def test_a_misspelling_is_answered_with_the_name(wrong, nearest):
    with pytest.raises(AggregationError, match=f"unknown .*{wrong}.*mean '{nearest}'"):
        Aggregation(wrong)


OF_NO_MODE = """
tinker:mean m2po vapo ppo rloo gepo gppo drpo dr_gspo rpgo arpo hgpo kto topr mean token_max
token_min sample_min sample_max batch_mean group_mean turn_mean seq_mean unbalanced per_token
token_norm length_norm constant_sum verl:prompt_mean trl:gspo trl:gppo trl:rloo unsloth:gpo
skyrl:sequence_sum roll:prompt-mean areal:token_mean torchrl:sequence_mean miles:sum
tunix:token-sum slime:token_mean prime-rl:token open-instruct:sum ms-swift:dr_gspo
"""


@pytest.mark.parametrize("name", OF_NO_MODE.split())
def test_no_other_loss_is_suggested_for_a_name_that_no_mode_has(name):
    with pytest.raises(AggregationError, match="unknown") as caught:
        Aggregation(name)
    answer = str(caught.value).partition(" Modes are ")[0].replace(name, "")
    assert "did you mean" not in answer
    assert not [known for known in [*MODES, *ALIASES] if repr(known) in answer]


@pytest.mark.parametrize("name", ["dpo", "IPO", "orpo", "SimPO", "trl:dpo", "verl:dpo"])
def test_a_loss_of_pairs_leads_to_the_example_that_trains_one(name):
    with pytest.raises(AggregationError, match=r"is a loss of pairs .*examples/pairs\.py"):
        Aggregation(name)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("bnpo", ["ms-swift:bnpo", "trl:bnpo", "unsloth:bnpo"]),
        ("token_level_loss", [name for name in ALIASES if ":token_level_loss=" in name]),
        ("nemo-rl:token_level_loss", [n for n in ALIASES if n.startswith("nemo-rl:token_level")]),
        ("seq-mean-token-mean", [f"{n}:seq-mean-token-mean" for n in ("rlinf", "roll", "verl")]),
        ("sequence_mean_token_scale", ["tunix:sequence-mean-token-scale"]),
    ],
)
def test_a_name_of_several_systems_is_answered_with_what_each_means(name, named):
    with pytest.raises(AggregationError, match=f"{name}', in full '") as caught:
        Aggregation(name)
    answer = str(caught.value).partition(", in full ")[2].partition(". Modes are ")[0]
    full = [f"{name!r} ({ALIASES[name].mode}" for name in named]
    empty = ["" if ALIASES[name].count_empty else ", count_empty=False" for name in named]
    assert answer.split(" or ") == [f"{one}{of})" for one, of in zip(full, empty, strict=True)]


def test_an_unrelated_name_is_answered_with_the_modes():
    with pytest.raises(AggregationError, match=r"'zzzz'. Modes are token_mean, sample_mean, "):
        Aggregation("zzzz")


@pytest.mark.parametrize("exponent", [math.nan, math.inf, True, "0.5", 10**400])
def test_an_exponent_is_a_finite_number(exponent):
    with pytest.raises(AggregationError, match=r"got exponent .*, expected a finite number: chan"):
        Aggregation("length_power", exponent=exponent)


def test_only_length_power_has_an_exponent_and_needs_it():
    with pytest.raises(AggregationError, match="needs an exponent and got none"):
        Aggregation("length_power")
    with pytest.raises(AggregationError, match="'token_mean' takes no exponent, got 0"):
        Aggregation("token_mean", exponent=0)
    assert Aggregation("length_power", exponent=1).formula == "1/(n_b^1 Z)"
    assert Aggregation("length_power", exponent=-0.25).exponent == -0.25


@pytest.mark.parametrize("divisor", [0, -1, math.nan, math.inf, -math.inf, True, "8", 10**400])
@pytest.mark.parametrize("mode", ["constant", "token_sum"])
def test_a_divisor_is_a_finite_number_above_zero(mode, divisor):
    with pytest.raises(
        AggregationError, match=r"got divisor .*, expected a finite number above 0: change"
    ):
        Aggregation(mode, divisor=divisor)


@pytest.mark.parametrize("divisor", [8, 8.0, np.int32(8), np.float32(8), Fraction(8)])
def test_a_divisor_of_any_kind_of_number_is_kept_as_a_float(divisor):
    kept = Aggregation("constant", divisor=divisor).divisor
    assert type(kept) is float
    assert kept == 8


@pytest.mark.parametrize("mode", [m for m, sequence in MODES.items() if sequence.divisor == "none"])
def test_a_mode_without_a_divisor_refuses_one(mode):
    path = "a.b:c" if mode == "custom" else None
    weights = len if mode == "own_weights" else None
    with pytest.raises(AggregationError, match=r"takes no divisor, got 8: drop"):
        Aggregation(mode, divisor=8, reducer_path=path, weights=weights)


@pytest.mark.parametrize("value", [0, 1, "yes"])
def test_count_empty_is_a_bool(value):
    with pytest.raises(
        AggregationError, match=f"got count_empty {value!r}, expected True or False"
    ):
        Aggregation("sample_mean", count_empty=value)


@pytest.mark.parametrize("mode", [None, 3])
def test_a_mode_is_a_name(mode):
    with pytest.raises(AggregationError, match=f"got {mode!r}, expected the name of a mode"):
        Aggregation(mode)


def test_a_reducer_path_belongs_to_custom_and_to_nothing_else():
    assert Aggregation("custom", reducer_path="a.b:c").reducer_path == "a.b:c"
    for mode, path in (("custom", None), ("token_mean", "a.b:c")):
        with pytest.raises(AggregationError, match="replaces the mode"):
            Aggregation(mode, reducer_path=path)


@pytest.mark.parametrize("path", [3, b"a.b:c", ["a.b:c"], 0, False, ""])
@pytest.mark.parametrize("mode", ["custom", "token_mean"])
def test_a_reducer_path_is_a_string(mode, path):
    with pytest.raises(
        AggregationError, match=r"got reducer path .*, expected pkg\.mod:name: change --loss-agg"
    ):
        Aggregation(mode, reducer_path=path)


def test_a_custom_reducer_prints_its_path():
    custom = Aggregation("custom", reducer_path="a.b:c")
    assert str(custom) == "custom a.b:c: w_s = known to the custom reducer"


def test_an_aggregation_is_frozen_and_compares_by_value():
    one = Aggregation("constant", divisor=8)
    assert one == Aggregation("constant", divisor=8.0)
    assert len({one, Aggregation("constant", divisor=8)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.divisor = 9


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("constant", ["w_s = 1/(B L)", f"{MODES['constant'].meaning}, needs a divisor"]),
        ("token_sum", ["w_s = 1/C", f"{MODES['token_sum'].meaning}, may have a divisor"]),
        ("verl:token-mean", ["token_mean"]),
        (
            "roll:seq-mean-token-mean",
            ["sample_mean, count_empty=False", f"({ALIASES['roll:seq-mean-token-mean'].note})"],
        ),
    ],
)
def test_the_table_has_the_divisor_of_a_mode_and_the_mode_and_note_of_an_alias(name, columns):
    lines = [re.split(r"\s{2,}", line) for line in [*mode_lines(), *alias_lines()]]
    assert [name, *columns] in lines


def test_rolls_token_mean_trains_what_its_mask_leaves_out():
    """``functionals.agg_loss`` at 8eb27cc2: the sum of all losses over the tokens of the mask."""
    step = Step()
    alias, tokens = Aggregation("roll:token-mean"), sum(step.lengths)

    def theirs(losses):
        return sum(x.sum() for x in losses) / tokens

    inside = [x * mb.mask for x, mb in zip(step.leaves, step.microbatches, strict=True)]
    assert theirs(inside).item() == pytest.approx(step.wanted(alias, inside).item(), rel=1e-12)
    ours = step.wanted(alias, step.leaves)
    rest = sum((x * ~mb.mask).sum() for x, mb in zip(step.leaves, step.microbatches, strict=True))
    assert theirs(step.leaves).item() == pytest.approx((ours + rest / tokens).item(), rel=1e-12)
    assert abs(rest.item() / tokens) > 0.1


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "fipo", "bnpo"])
def test_swifts_token_mean_is_that_of_the_step_from_4_6_0_on(loss_type):
    """``loss_func`` of its Megatron trainer, and Megatron's means over microbatches and ranks.

    4.5.3 divides all but bnpo by the tokens of the whole rollout and lacks the last factor; its
    bnpo is a mean of microbatch means.
    """
    step, rollout = Step([[[0], [1, 2, 3]], [[4], [5, 6, 7]]]), 100  # microbatches of unequal size
    M, tokens = step.num_microbatches, sum(step.lengths)

    def theirs(release, rank):
        of_rank = [mb for mb in step.microbatches if mb.place[0] == rank]
        sums = [(mb.log_probs * mb.mask).sum() for mb in of_rank]
        if release == "4.6.0":
            losses = [x / (tokens / step.dp_size) * M for x in sums]
        elif loss_type != "bnpo":
            losses = [x / (rollout / step.dp_size) for x in sums]
        else:
            losses = [x / mb.mask.sum().clamp(min=1) for x, mb in zip(sums, of_rank, strict=True)]
        return sum(losses) / M

    def mean(release):
        return sum(theirs(release, rank) for rank in range(step.dp_size)).item() / step.dp_size

    alias = Aggregation(f"ms-swift:{loss_type}")
    ours = step.wanted(alias, step.leaves).item()
    assert mean("4.6.0") == pytest.approx(ours, rel=1e-12)
    old = ours * tokens / rollout / M
    if loss_type == "bnpo":
        old = step.wanted(Aggregation("microbatch_token_mean"), step.leaves).item()
    assert mean("4.5.3") == pytest.approx(old, rel=1e-12)
    assert abs(old / ours - 1) > 0.01


@pytest.mark.parametrize("name", ["dapo", "DAPO"])
def test_a_name_of_two_losses_is_refused_with_both(name):
    """verl-project/verl#2776: the paper divides within each prompt's group."""
    with pytest.raises(AggregationError) as caught:
        Aggregation(name)
    assert str(caught.value).startswith(f"{name!r} names two losses: token_mean, ")
    assert " and prompt_mean, " in str(caught.value)
    assert Aggregation("trl:dapo") == Aggregation("token_mean")


@pytest.mark.parametrize(
    "name",
    ["fireworks:prompt_mean", "labs-molt:token-sum-norm", "tunic:sequence-mean-token-mean"],
)
def test_no_loss_of_another_system_is_suggested_for_a_name_of_an_unknown_one(name):
    with pytest.raises(AggregationError, match="unknown system in") as caught:
        Aggregation(name)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("name", ["constant:4096", "length_power:.5", "trl:dr_grpo:8"])
def test_a_number_after_a_name_is_refused_where_it_is_an_argument(name):
    message = rf"got '{name}', expected '{name.rpartition(':')[0]}' alone: pass .* divisor= or exp"
    with pytest.raises(AggregationError, match=message):
        Aggregation(name)


@pytest.mark.parametrize("name", ["cispo", "SAPO", "vespo", "gmpo", "gspo"])
def test_a_policy_loss_is_said_to_be_none_of_the_modes(name):
    with pytest.raises(AggregationError, match="is a policy loss and no aggregation"):
        Aggregation(name)


def test_a_papers_name_takes_its_number_after_a_colon():
    assert parsed_aggregation("dr_grpo:4096") == Aggregation("constant", divisor=4096)
    assert parsed_aggregation("scalerl") == Aggregation("prompt_mean")


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("Dr. GRPO", ["dr_grpo", "drgrpo"]),
        ("GRPO", ["grpo"]),
        ("verl:token_mean", ["verl:token-mean"]),
    ],
)
def test_a_name_of_a_paper_or_system_is_answered_with_its_own_modes(name, suggested):
    with pytest.raises(AggregationError) as caught:
        Aggregation(name)
    answer = str(caught.value).split("did you mean ")[1].split("?")[0]
    assert answer == " or ".join(map(repr, suggested))
