"""ms-swift as released: its ``MegatronTrainer`` on the CPU, and the loss of its GRPO trainer.

The trainer's runs are launched (``swift_worker.py``); ``MegatronGRPOTrainer.loss_func`` is called
per microbatch and rank. Runs of the GRPO trainer are those of ``swift_grpo_checks.py``.
"""

import imports_swift  # noqa: F401  first
import ms_swift_page
import pytest
import torch
from drawn_step import Step
from laws import Comparison, Laws, Tolerance
from swift.version import __version__
from swift_functions import ALIASED, checks, grpo_loss, grpo_losses
from swift_runs import CLOSE, LAYOUTS, close, run_of, runs_of
from verified import assert_trains_every_mode


def test_every_loss_type_that_is_a_sum_over_tokens_has_an_alias():
    assert __version__ == "4.6.0"
    assert {*ALIASED} == {"grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "fipo"}


@pytest.mark.parametrize("check", checks(), ids=lambda check: check.name)
def test_the_loss_of_grpo_is_the_references(check):
    check.passes()


@pytest.mark.parametrize("loss_type", ["grpo", "sapo", "dr_grpo"])
def test_ms_swift_averages_microbatches_which_differs_if_they_have_unequally_many_sequences(
    loss_type,
):
    step = Step([[(4, 5, 7), (8,)]])
    losses = [
        grpo_loss(step, loss_type),
        step.wanted(ALIASED[loss_type], grpo_losses(step, loss_type)),
    ]
    grads = [torch.autograd.grad(loss, step.leaves, retain_graph=True) for loss in losses]
    ratio = [(a.norm() / b.norm()).item() for a, b in zip(*grads, strict=True)]
    assert ratio == pytest.approx([4 / 6, 4 / 2])


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    with runs_of("swift_worker.py", tmp_path_factory.mktemp("swift")) as run:
        yield run


DFT = "enable_dft_loss=true"
ACTIVE = {"packed": 8 / 9, "padded": 7 / 8}
"""Conversations of a step that train a token, of all: one is masked."""
BETWEEN_LAYOUTS = Tolerance(loss=CLOSE, others=CLOSE, gradient=3e-6)


@pytest.fixture(
    params=[
        ("sample_mean", "packed"),
        ("sample_mean", "padded"),
        ("sample_mean+weights", "packed"),
        ("sample_mean", "packed", DFT),
        ("sample_mean", "padded", DFT),
        ("sample_mean+weights", "packed", DFT),
    ],
    ids="-".join,
)
def on_one_process(train, request):
    aggregation, data, *more = request.param
    run = run_of(train(aggregation, 1, 1, "average", data, *more))
    assert all(close(found, ACTIVE[data]) for found in run.others["lossagg/weight_sum"])
    assert run.hooked == 4
    return run


@pytest.fixture(params=LAYOUTS)
def in_layout(train, request):
    wanted = run_of(train("sample_mean", 1, 1, "average", "packed"))
    run = run_of(train("sample_mean", *LAYOUTS[request.param], "packed"))
    return Comparison(run=run, wanted=wanted, tolerance=BETWEEN_LAYOUTS)


class TestMegatronTrainer(Laws):
    """``megatron sft``."""

    to_hand = Tolerance(loss=CLOSE, gradient=2e-6)


def test_counted_weights_train_the_same_loss_at_cp_2(train):
    alone = train("sample_mean+weights", 1, 1, "average", "packed")["steps"]
    steps = train("sample_mean+weights", 2, 2, "per_token", "packed")["steps"]
    assert not close(
        alone[0]["loss"], train("sample_mean", 1, 1, "average", "packed")["steps"][0]["loss"], 0.01
    )
    for step, wanted in zip(steps, alone, strict=True):
        assert close(step["loss"], wanted["loss"])
        assert close(step["grad_norm"], wanted["grad_norm"], 3e-6)


def test_stock_trains_the_mean_over_tokens(train):
    stock = train("stock", 2, 2, "per_token", "packed")["steps"][0]
    ours = train("sample_mean", 1, 1, "average", "packed")["steps"][0]
    assert close(stock["loss"], ours["stock/loss"])
    assert not close(stock["loss"], ours["loss"], 0.01)
    tokens = train("token_mean", 2, 2, "per_token", "packed")["steps"][0]
    assert close(tokens["loss"], stock["loss"])
    assert close(tokens["grad_norm"], stock["grad_norm"])


def test_a_shadow_trains_stock_and_logs_what_the_mode_would_give(train):
    ours = train("sample_mean", 1, 1, "average", "packed")["steps"][0]
    stock = train("stock", 2, 2, "per_token", "packed")["steps"]
    shadow = train("shadow", 2, 2, "per_token", "packed")["steps"]
    assert close(shadow[0]["lossagg/shadow/sample_mean"], ours["loss"])
    for step, wanted in zip(shadow, stock, strict=True):
        assert {name: step[name] for name in wanted} == wanted
        assert close(step["lossagg/shadow/stock"], wanted["loss"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loss_times_its_probability_is_weighed_in_every_layout(train, layout):
    alone = train("sample_mean", 1, 1, "average", "packed", DFT)["steps"]
    steps = train("sample_mean", *LAYOUTS[layout], "packed", DFT)["steps"]
    plain = train("sample_mean", 1, 1, "average", "packed")["steps"]
    assert not close(alone[0]["loss"], plain[0]["loss"], 0.01)
    for step, wanted in zip(steps, alone, strict=True):
        assert close(step["loss"], wanted["loss"])
        assert close(step["stock/loss"], wanted["stock/loss"])
        assert close(step["grad_norm"], wanted["grad_norm"], 3e-6)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ('task_type="seq_cls"', "REFUSED task_type is 'seq_cls', expected 'causal_lm'"),
        ('cp_partition_mode="contiguous"', "REFUSED cp_partition_mode is 'contiguous'"),
    ],
)
def test_what_trains_another_loss_is_refused_by_every_rank_before_the_first_step(
    train, argument, message
):
    printed = train("sample_mean", 2, 2, "average", "packed", argument)
    assert printed.count(message) == 2
    assert "loss aggregation sample_mean" not in printed


@pytest.mark.parametrize(
    ("trained", "trainer"),
    [
        ("sft", "MegatronTrainer"),
        ("grpo", "MegatronGRPOTrainer"),
        ("gkd", "MegatronGKDTrainer"),
    ],
)
def test_ms_swift_starts_by_the_pages_line_and_the_plugin_is_in_its_process(
    tmp_path, trained, trainer
):
    found, done = ms_swift_page.start(tmp_path, trained)
    assert found == {"trainer": trainer, "aggregation": "sample_mean: w_s = 1/(B n_b)"}, done.stderr


def test_the_step_of_a_checkout_trains_every_mode():
    assert_trains_every_mode("ms-swift", cp=2)
