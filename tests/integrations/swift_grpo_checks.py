"""ms-swift as released: its ``MegatronGRPOTrainer`` trains the configured loss on the CPU.

Runs are launched (``swift_grpo_worker.py``). The gradients compared are whole, not their norms.
"""

import imports_swift  # noqa: F401  first
import pytest
import torch
from swift_runs import LAYOUTS, close, runs_of

from megatron_lossagg.errors import ContractError, ReducerError
from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify.frameworks.ms_swift import taken_apart


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    with runs_of("swift_grpo_worker.py", tmp_path_factory.mktemp("grpo")) as run:
        yield run


_TRUNCATES = "rollout_importance_sampling_threshold=0.4"


def difference(got, wanted):
    """Return how far two gradients differ, of the largest number in them."""
    got, wanted = (torch.tensor(one, dtype=torch.float64) for one in (got, wanted))
    found = ((got - wanted).abs().max() / wanted.abs().max()).item()
    print(f"gradients differ by {found:.2g}")
    return found


@pytest.mark.parametrize(
    ("mode", "data", "arguments"),
    [
        ("prompt_mean", "packed", ["beta=0.1"]),
        ("sample_mean", "packed", ["overlong_filter=true", 'loss_type="cispo"', "beta=0.1"]),
        ("token_mean", "padded", ['importance_sampling_level="sequence"']),
        ("constant", "packed", ['loss_type="sapo"', "corrects_rollout=true", _TRUNCATES]),
    ],
)
def test_on_one_process_loss_and_gradient_are_those_of_loops_over_tokens(
    train, mode, data, arguments
):
    numbers = train(mode, 1, 1, "average", data, *arguments)
    steps = zip(numbers["steps"], numbers["gradients"], numbers["by_hand"], strict=True)
    for step, gradient, hand in steps:
        assert step["loss"] == pytest.approx(hand["loss"], rel=0, abs=2e-7)
        assert difference(gradient, hand["gradient"]) < 1e-6
    assert len(numbers["steps"]) == 2
    assert numbers["hooked"] == 3
    if mode in ("prompt_mean", "token_mean"):  # old and new probabilities differ, and clip
        assert numbers["steps"][1]["clip_ratio/region_mean"] > 0.05


@pytest.mark.parametrize(
    ("layout", "data"), zip(LAYOUTS, ["packed", "padded", "packed", "padded"], strict=True)
)
def test_every_layout_and_loss_scaling_trains_and_evaluates_the_same_loss(train, layout, data):
    wanted = train("prompt_mean", 1, 1, "average", "packed", "beta=0.1")
    numbers = train("prompt_mean", *LAYOUTS[layout], data, "beta=0.1")
    # Packed at CP 2, ms-swift's own gradient differs as much: see the next test.
    is_split = LAYOUTS[layout][1] > 1 and data == "packed"
    tolerance = 2e-4 if is_split else 2e-6
    gradients = zip(numbers["gradients"], wanted["gradients"], strict=True)
    assert difference(*next(gradients)) < tolerance
    step, alone = numbers["steps"][0], wanted["steps"][0]
    assert close(step["loss"], alone["loss"])
    assert close(step["lossagg/weight_sum"], 1)
    assert step["stock/loss"] == pytest.approx(alone["stock/loss"], rel=0, abs=1e-7)
    if not is_split:
        assert difference(*next(gradients)) < tolerance
        evaluated = [one["evaluated"][0]["eval_loss"] for one in (numbers, wanted)]
        assert close(*evaluated)


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
