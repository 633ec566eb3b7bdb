"""Public failures of ``tests/public_failures.md``: the shape of each input, the reference's loss.

A step runs over simulated ranks (``simulated_step.py``). ``test_gradients.py`` tests live
Megatron-Core.
"""

import argparse
import itertools

import numpy as np
import pytest
import torch
from simulated_step import (
    MODES,
    assigned,
    gradients,
    lengths,
    plans,
    run,
    run_and_compare,
    sequence,
)
from steps import Threads, a_step

from megatron_lossagg import Aggregation, Layout, Sequences, add_loss_aggregation_args, plan_step
from megatron_lossagg.contract.scaling import LOSS_SCALINGS
from megatron_lossagg.errors import (
    AggregationError,
    ContractError,
    LayoutError,
    PlanError,
    ReducerError,
)
from megatron_lossagg.loop.flags import aggregation_from_args
from megatron_lossagg.reduction.aggregation import Options
from megatron_lossagg.reduction.table import StepTotals


@pytest.fixture(autouse=True)
def ranks_are_threads(monkeypatch):
    monkeypatch.setattr("megatron_lossagg.reduction.plan.Exchange", Threads)


# (a) denominators


def test_a1_microbatches_of_1_and_7_tokens_are_weighted_by_tokens():
    for m in (1, 2):
        run_and_compare("token_mean", assigned(lengths(1, 7), m=m), m=m)


def test_a2_ranks_of_1_and_7_tokens_are_weighted_by_tokens():
    run_and_compare("token_mean", assigned(lengths(1, 7), dp=2), dp=2)


@pytest.mark.parametrize("mode", MODES)
def test_a3_every_mode_is_invariant_to_the_number_of_microbatches(mode):
    for m in (1, 2, 4):
        run_and_compare(mode, assigned(lengths(1, 7, 2, 5), m=m), m=m)


def test_a4_eight_microbatches_are_not_eight_times_the_loss():
    run_and_compare("token_mean", assigned(lengths(*range(1, 9)), m=8), m=8)


def test_a5_equal_numbers_of_sequences_are_weighted_by_tokens():
    run_and_compare("token_mean", assigned(lengths(1, 9, 2, 8), m=2), m=2)


def test_a6_four_ranks_of_equal_losses_give_that_loss():
    sequences = assigned(lengths(2, 2, 2, 2), dp=4)
    for r in sequences:
        r["x"].data.fill_(3.0)
    assert run_and_compare("sample_mean", sequences, dp=4).loss.item() == 3.0


def test_a7_more_samples_of_equal_loss_do_not_change_the_loss():
    for b in (1, 2, 8):
        sequences = assigned(lengths(*[5] * b))
        for r in sequences:
            r["x"].data.fill_(2.0)
        assert run_and_compare("constant", sequences).loss.item() == 10 / 40


@pytest.mark.parametrize("mode", ["constant", "sample_mean"])
def test_a8_more_padding_changes_nothing(mode):
    sequences = assigned(lengths(3, 6))
    for pad in (0, 50):
        run_and_compare(mode, sequences, pad=pad, cp=2)


@pytest.mark.parametrize("divisor", [None, 0, -1, float("nan")])
def test_a9_constant_has_no_default_divisor(divisor):
    with pytest.raises(AggregationError, match="--loss-aggregation-divisor"):
        Aggregation("constant", divisor=divisor)


def test_a10_a_sample_masked_late_is_not_counted_in_n():
    sequences = assigned([*lengths(25), sequence(*[0] * 5)])
    assert run_and_compare("token_mean", sequences, loss_scaling="per_token").tokens == 25


def test_a11_a_masked_token_with_a_non_finite_loss_is_in_neither_sum_nor_count():
    sequences = assigned([sequence(1, 0, 1), sequence(1, 1)])
    out = run_and_compare(
        "token_mean", sequences, loss_scaling="per_token"
    )  # inf where nothing is trained
    assert out.tokens == 4


def test_a12_a_microbatch_of_another_window_is_refused():
    first = plans(Aggregation("token_mean"), assigned(lengths(2, 3)), 1, 1)[0][1]
    other = plans(Aggregation("token_mean"), assigned(lengths(4, 3)), 1, 1)[0][1]
    layout = Layout.thd_zigzag([0, 4, 7], cp_size=1, cp_rank=0)
    stale = a_step(other, 1).microbatch([0, 1], torch.ones(7), layout=layout)
    loss = stale.reduce(torch.ones(7, requires_grad=True))
    stale.step.end()
    a_step(first, 1)
    with pytest.raises(ContractError, match="of a step that has ended"):
        stale.outputs(loss)


@pytest.mark.parametrize("loss_scaling", LOSS_SCALINGS)
def test_a13_four_microbatches_train_the_same_loss_as_one(loss_scaling):
    for m in (1, 4):
        run_and_compare(
            "sample_mean", assigned(lengths(1, 7, 2, 5), m=m), m=m, loss_scaling=loss_scaling
        )


def test_a14_a_microbatch_that_bypasses_the_step_is_reported():
    own_sequences, plan = plans(Aggregation("token_mean"), assigned(lengths(2, 3), m=2), 1, 2)[0]
    step = a_step(plan, 2)
    layout = Layout.thd_zigzag([0, 2], cp_size=1, cp_rank=0)
    mb = step.microbatch([0], torch.ones(2), layout=layout)
    mb.outputs(mb.reduce(own_sequences[0]["x"]))
    with pytest.raises(ContractError, match="ran for 1 microbatches, 2 were planned"):
        step.finish()


def test_a15_tokens_that_were_not_counted_yet_are_refused():
    plan = plan_step(Aggregation("token_mean"), Sequences(active_tokens=[0, 2]))
    layout = Layout.thd_zigzag([0, 3], cp_size=1, cp_rank=0)
    with pytest.raises(ReducerError, match="trains 3 tokens, the plan counted 0"):
        plan.reducer([0], torch.ones(3), layout)
    known = StepTotals(active_tokens=0)
    with pytest.raises(PlanError, match=r"active_tokens=0.*, expected an integer from 3"):
        plan_step(Aggregation("token_mean"), Sequences(active_tokens=[3]), totals=known)


def test_a16_holes_inside_a_response_are_in_no_count():
    sequences = assigned([sequence(1, 0, 0, 1), sequence(0, 1, 1)])
    assert run_and_compare("token_mean", sequences, loss_scaling="per_token").tokens == 4


@pytest.mark.parametrize("loss_scaling", LOSS_SCALINGS)
def test_a17_a_fully_masked_sample_adds_no_phantom_token(loss_scaling):
    sequences = assigned([*lengths(3), sequence(0, 0), sequence(0), *lengths(1)], m=2)
    run_and_compare("token_mean", sequences, m=2, loss_scaling=loss_scaling)


def test_a19_a_longer_prompt_changes_nothing():
    for prompt in (1, 30):
        sequences = assigned([sequence(*[0] * prompt, 1, 1), *lengths(5)])
        assert run_and_compare("token_mean", sequences, loss_scaling="per_token").tokens == 7


@pytest.mark.parametrize("mode", ["sample_mean", "prompt_mean"])
def test_a22_a_sample_split_over_microbatches_and_ranks_is_one_sample(mode):
    sequences = assigned([*lengths(4, 9, 3), *lengths(2, 6)], dp=2, m=2)
    sequences[0]["sample"] = sequences[1]["sample"] = sequences[4]["sample"] = 7
    for loss_scaling in LOSS_SCALINGS:
        run_and_compare(mode, sequences, dp=2, m=2, loss_scaling=loss_scaling)


def test_a23_a_prompt_may_span_microbatches_but_not_steps():
    sequences = assigned(lengths(2, 6, 3), m=3)
    sequences[2]["prompt"] = 1
    run_and_compare("prompt_mean", sequences, m=3)
    part = Sequences(active_tokens=[2], prompt=[0], samples_per_prompt=3)
    with pytest.raises(PlanError, match="prompt 0 has 1 samples over the step"):
        plan_step(Aggregation("prompt_mean"), part)


def test_a24_a_prompt_of_1_and_9_tokens_is_sum_over_sum():
    run_and_compare("prompt_mean", assigned([*lengths(1, 9), *lengths(4, prompt=1)]))


def test_a25_five_samples_on_two_ranks_count_as_five():
    run_and_compare("sample_mean", assigned(lengths(1, 7, 2, 5, 3), dp=2, m=3), dp=2, m=3)


def test_a26_a_hundred_tokens_are_divided_by_a_hundred():
    sequences = assigned(lengths(100))
    sequences[0]["x"].data.fill_(1.0)
    assert run_and_compare("token_mean", sequences).loss.item() == pytest.approx(1, rel=1e-14)


def test_a27_no_divisor_contains_an_epsilon():
    plan = plan_step(Aggregation("sample_mean"), Sequences(active_tokens=[3, 7]))
    assert plan.weights.tolist() == [1 / 6, 1 / 14]


def test_a28_every_rank_compensates_the_same_n():
    both = plans(Aggregation("constant", divisor=9), assigned(lengths(1, 7), dp=2), 2, 1)
    ks = [a_step(plan, 1, dp=2, loss_scaling="per_token").k for _, plan in both]
    assert ks == [8, 8]


# (b) parallel factors


@pytest.mark.parametrize("loss_scaling", LOSS_SCALINGS)
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_b3_context_parallelism_does_not_dilute_a_single_valid_token(cp, loss_scaling):
    run_and_compare(
        "token_mean", assigned([sequence(*[0] * 9, 1, *[0] * 6)]), cp=cp, loss_scaling=loss_scaling
    )


@pytest.mark.parametrize("m", [2, 5])
def test_b8_two_and_five_microbatches_give_the_same_gradient(m):
    run_and_compare("constant", assigned(lengths(1, 7, 2, 5, 3), m=m), m=m, cp=2)


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_b10_the_mean_over_ranks_is_compensated(dp):
    run_and_compare("sample_sum", assigned(lengths(1, 7, 2, 5), dp=dp), dp=dp)


def test_b27_losses_gathered_over_context_parallelism_are_refused():
    plan = plan_step(Aggregation("token_mean"), Sequences(active_tokens=[8]))
    layout = Layout.thd_zigzag([0, 8], cp_size=2, cp_rank=0)
    with pytest.raises(ReducerError, match="pass the losses of this rank's slice"):
        plan.reducer([0], torch.ones(8), layout)(torch.ones(8))


# (c) layouts


def test_c8_unpadded_offsets_are_refused_and_sequences_below_2_cp_tokens_are_right():
    with pytest.raises(LayoutError, match="cu_seqlens_padded"):
        Layout.thd_zigzag([0, 7], cp_size=2, cp_rank=0)
    run_and_compare("sample_mean", assigned(lengths(1, 3, 7)), cp=4)


# (d) degenerate input


@pytest.mark.parametrize("loss_scaling", LOSS_SCALINGS)
def test_d1_a_microbatch_or_shard_with_no_active_tokens_is_finite(loss_scaling):
    run_and_compare(
        "token_mean",
        assigned([sequence(0, 0), *lengths(1, 3)], m=3),
        m=3,
        cp=2,
        loss_scaling=loss_scaling,
    )


def test_d2_a_masked_sample_does_not_change_the_others():
    run_and_compare("sample_mean", assigned([sequence(0, 0), *lengths(2, 5)]))


@pytest.mark.filterwarnings("ignore:the plan counts no active token")
@pytest.mark.parametrize("loss_scaling", LOSS_SCALINGS)
@pytest.mark.parametrize("mode", MODES)
def test_d3_a_step_with_no_active_tokens_is_zero_in_every_mode(mode, loss_scaling):
    assert (
        run_and_compare(
            mode, assigned([sequence(0, 0), sequence(0)]), loss_scaling=loss_scaling
        ).loss.item()
        == 0
    )


@pytest.mark.parametrize("count_empty", [True, False])
def test_d9_one_masked_sample_of_four_counts_toward_b_only_if_configured(count_empty):
    sequences = assigned([*lengths(2, 5, 1), sequence(0)])
    run_and_compare("sample_mean", sequences, count_empty=count_empty)


def test_d12_a_step_with_no_sequences_warns_or_stops():
    nothing = Sequences(active_tokens=[])
    with pytest.warns(RuntimeWarning, match="no active token"):
        assert plan_step(Aggregation("sample_mean"), nothing).weights.tolist() == []
    with pytest.raises(PlanError, match="no active token"):
        plan_step(Aggregation("sample_mean"), nothing, options=Options(empty_step="error"))


@pytest.mark.parametrize("cp", [1, 4])
def test_d18_one_giant_sample_beside_single_tokens(cp):
    run_and_compare("sample_mean", assigned(lengths(1, 10_000, 1, 1), m=2), m=2, cp=cp)


# (e) to (h): types, keys, loss scalings, reports


def test_e1_counts_are_int32_and_add_up_in_an_int():
    for loss_scaling in LOSS_SCALINGS:
        numbers = run_and_compare(
            "token_mean", assigned(lengths(2, 3), m=2), m=2, loss_scaling=loss_scaling
        ).numbers
        total = torch.zeros((), dtype=torch.int)
        for number in numbers:
            total += number
            assert (number.dtype, number.dim()) == (torch.int32, 0)


def test_f7_a_rank_with_no_active_tokens_reports_the_same_keys():
    out = run_and_compare("token_mean", assigned([sequence(0, 0), *lengths(3)], dp=2), dp=2)
    assert len({tuple((k, tuple(v.shape)) for k, v in r.items()) for r in out.reports}) == 1


@pytest.mark.parametrize("loss_scaling", LOSS_SCALINGS)
@pytest.mark.parametrize("mode", MODES)
def test_g2_a_mode_is_the_same_loss_in_both_loss_scalings(mode, loss_scaling):
    sequences = assigned(lengths(1, 7, 2, 5, 3), dp=2, m=2)
    run_and_compare(mode, sequences, dp=2, m=2, cp=2, loss_scaling=loss_scaling)


def test_g6_each_mode_set_by_flag_trains_a_different_loss():
    sequences = [*lengths(1, 7, sample=1), *lengths(3, sample=2), *lengths(5, prompt=1)]
    for one, group in zip(sequences, (0, 0, 1, 1), strict=True):
        one["group"] = group
    sequences, found = assigned(sequences), []
    for mode, options in MODES.items():
        argv = ["--loss-aggregation", mode]
        argv += [f"--loss-aggregation-{name}={value}" for name, value in options.items()]
        parser = add_loss_aggregation_args(argparse.ArgumentParser())
        out = run(aggregation_from_args(parser.parse_args(argv)), sequences)
        found.append(torch.cat(gradients(out.loss, sequences)))
    for one, other in itertools.combinations(found, 2):
        assert not torch.allclose(one, other)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_h2_the_reported_loss_does_not_grow_with_context_parallelism(cp):
    run_and_compare("sample_mean", assigned(lengths(1, 7)), cp=cp)


def test_h4_the_mean_of_the_reports_is_the_loss_like_their_sum():
    out = run_and_compare("token_mean", assigned(lengths(1, 7), dp=2), dp=2)
    ratios = [(r["loss"][0] / r["loss"][1]).item() for r in out.reports]
    assert np.mean(ratios) == pytest.approx(out.loss.item(), rel=1e-12)
