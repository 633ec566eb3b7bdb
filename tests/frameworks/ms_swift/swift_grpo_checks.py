"""ms-swift as released: its ``MegatronGRPOTrainer`` trains the configured loss on the CPU.

Runs are launched (``swift_grpo_worker.py``). The gradients compared are whole, not their norms.
"""

from dataclasses import replace

import imports_swift  # noqa: F401  first
import pytest
import torch
from laws import Comparison, Laws, Tolerance, difference
from swift_functions import taken_apart
from swift_runs import CLOSE, LAYOUTS, close, run_of, runs_of
from verified import assert_trains_every_mode

from megatron_lossagg.errors import ContractError, ReducerError
from megatron_lossagg.reduction.aggregation import Aggregation


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    with runs_of("swift_grpo_worker.py", tmp_path_factory.mktemp("grpo")) as run:
        yield run


_TRUNCATES = "rollout_importance_sampling_threshold=0.4"
BETWEEN_LAYOUTS = Tolerance(
    loss={**CLOSE, "abs": 5e-9},  # the second step's is near 0
    others={**CLOSE, "abs": 1e-7},
    gradient=2e-6,
)


@pytest.fixture(
    params=[
        ("prompt_mean", "packed", "beta=0.1"),
        ("sample_mean", "packed", "overlong_filter=true", 'loss_type="cispo"', "beta=0.1"),
        ("token_mean", "padded", 'importance_sampling_level="sequence"'),
        ("constant", "packed", 'loss_type="sapo"', "corrects_rollout=true", _TRUNCATES),
    ],
    ids=lambda case: case[0],
)
def on_one_process(train, request):
    mode, data, *arguments = request.param
    numbers = train(mode, 1, 1, "average", data, *arguments)
    if mode in ("prompt_mean", "token_mean"):  # old and new probabilities differ, and clip
        assert numbers["steps"][1]["clip_ratio/region_mean"] > 0.05
    assert numbers["hooked"] == 3
    return run_of(numbers)


@pytest.fixture(
    params=zip(LAYOUTS, ["packed", "padded", "packed", "padded"], strict=True), ids=LAYOUTS
)
def in_layout(train, request):
    layout, data = request.param
    wanted = run_of(train("prompt_mean", 1, 1, "average", "packed", "beta=0.1"))
    run = run_of(train("prompt_mean", *LAYOUTS[layout], data, "beta=0.1"))
    assert close(run.others["lossagg/weight_sum"][0], 1, 2e-6)
    if LAYOUTS[layout][1] > 1 and data == "packed":
        # Packed at CP 2, ms-swift's own gradient differs as much: see the next test.
        run, wanted = run.only_first(), wanted.only_first()
        return Comparison(run=run, wanted=wanted, tolerance=replace(BETWEEN_LAYOUTS, gradient=2e-4))
    return Comparison(run=run, wanted=wanted, tolerance=BETWEEN_LAYOUTS)


class TestMegatronGRPOTrainer(Laws):
    """``megatron rlhf --rlhf_type grpo``."""

    to_hand = Tolerance(loss={"rel": 0, "abs": 2e-7})
    num_steps = 2


@pytest.mark.parametrize(
    ("aggregation", "loss_type", "trained"),
    [
        ("stock", "grpo", "sample_mean"),
        ("stock", "dapo", "token_mean"),
        ("sample_mean", "dapo", "sample_mean"),
        ("token_mean", "grpo", "token_mean"),
    ],
)
@pytest.mark.parametrize(("layout", "data"), [("DP 2", "padded"), ("CP 2", "packed")])
def test_each_token_weighs_what_loops_over_completions_say(
    train, layout, data, aggregation, loss_type, trained
):
    options = ["weigh=true", f'loss_type="{loss_type}"', "beta=0.1"]
    numbers = train(aggregation, *LAYOUTS[layout], data, *options)
    for tokens, weighed in zip(numbers["tokens"], numbers["weighed"], strict=True):
        per_token = [
            1 / len(tokens) / n if trained == "sample_mean" else 1 / sum(tokens) for n in tokens
        ]
        wanted = sorted(zip(tokens, per_token, per_token, strict=True))
        for got, want in zip(sorted(weighed), wanted, strict=True):
            assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("aggregation", ["prompt_mean", "sample_mean"])
@pytest.mark.parametrize(("layout", "data"), [("DP 2", "padded"), ("CP 2", "packed")])
def test_our_own_mode_is_named(train, layout, data, aggregation):
    numbers = train(aggregation, *LAYOUTS[layout], data, "weigh=true", 'loss_type="dapo"')
    assert {one.split(" ")[0] for one in numbers["trains"]} == {aggregation}


def test_packed_at_cp_2_ms_swifts_own_gradient_differs_as_much(train):
    alone = train("stock", 1, 1, "average", "packed")
    split = train("stock", 2, 2, "average", "packed")
    assert 1e-6 < difference(split["gradients"][0], alone["gradients"][0]) < 2e-4


def test_the_ratio_of_a_sequence_gets_the_gradient_of_all_context_parallel_ranks(train):
    sequence = 'importance_sampling_level="sequence"'
    alone = train("token_mean", 1, 1, "average", "padded", sequence)
    split = train("token_mean", 2, 2, "average", "padded", sequence)
    for got, wanted in zip(split["gradients"], alone["gradients"], strict=True):
        assert difference(got, wanted) < 2e-6


def test_a_shadow_trains_ms_swifts_loss_and_logs_what_the_modes_would_give(train):
    stock = train("stock", 2, 2, "average", "padded", "beta=0.1")
    shadow = train("shadow", 2, 2, "average", "padded", "beta=0.1")
    ours = train("prompt_mean", 1, 1, "average", "packed", "beta=0.1")
    assert close(shadow["steps"][0]["lossagg/shadow/prompt_mean"], ours["steps"][0]["loss"])
    for step, wanted in zip(shadow["steps"], stock["steps"], strict=True):
        assert {name: step[name] for name in wanted} == wanted
    assert shadow["gradients"] == stock["gradients"]
    assert difference(ours["gradients"][0], stock["gradients"][0]) > 0.01


@pytest.mark.parametrize(
    ("processes", "cp", "argument", "message"),
    [
        (2, 2, 'loss_type="real"', "REFUSED loss_type is 'real', expected one of grpo, sapo"),
        (1, 1, "off_policy_sequence_mask_delta=-9", "Options(rejects_tokens=True)"),
    ],
)
def test_a_loss_that_is_no_sum_over_the_counted_tokens_is_refused(
    train, processes, cp, argument, message
):
    printed = train("sample_mean", processes, cp, "average", "padded", argument)
    assert printed.count("REFUSED") == printed.count(message) == processes


def returning(change):
    """Wrap ``loss_func``; ``change(loss, output)`` is the loss that a release would return."""

    def changed(loss_func):
        def run(output, data):
            loss, report = loss_func(output, data)
            return change(loss, output), report

        return run

    return changed


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda loss, output: 1.01 * loss, ReducerError, "terms or factors that 4.6.0 has not"),
        (lambda loss, output: loss + 0.01 * output.mean(), ReducerError, "terms or factors"),
        (lambda loss, output: loss + 0.01, ReducerError, "terms or factors"),
        (lambda loss, output: loss + (output - output.detach()).mean(), ReducerError, "gradients"),
        (lambda loss, output: output.mean(), ContractError, "not summed from one product"),
    ],
    ids=["a factor", "a term", "a constant", "a gradient", "another sum"],
)
def test_a_release_that_returns_another_loss_is_an_error(change, error, message):
    taken_apart(Aggregation("sample_mean"), "dapo")
    with pytest.raises(error, match=message):
        taken_apart(Aggregation("sample_mean"), "dapo", changed=returning(change))


def test_a_width_that_ranks_cannot_share_is_padded():
    found = taken_apart(Aggregation("prompt_mean"), "grpo", cp_size=5)
    assert found.loss_error < 1e-12
    assert found.gradient_error < 1e-12


def test_a_loss_func_of_a_subclass_is_refused():
    from swift.megatron.trainers.grpo_trainer import MegatronGRPOTrainer

    from megatron_lossagg.integrations.ms_swift import SwiftIntegration
    from megatron_lossagg.integrations.ms_swift_grpo import GRPOIntegration

    class Own(MegatronGRPOTrainer):
        def loss_func(self, output_tensor, data):
            return output_tensor.sum(), {}

    call = {"forward_step_func": object.__new__(Own).forward_step, "model": None}
    with pytest.raises(ContractError, match="got the loss of a Own, expected"):
        GRPOIntegration().applies(call)
    call["forward_step_func"] = object.__new__(MegatronGRPOTrainer).forward_step
    call["model"] = torch.nn.Module()
    call["model"].config = None
    with pytest.raises(ContractError, match="ms_swift_grpo"):
        SwiftIntegration().applies(call)


def test_the_step_of_a_checkout_trains_every_mode():
    assert_trains_every_mode("ms-swift-grpo", cp=2)
