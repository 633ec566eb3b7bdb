"""The laws of a framework whose schedule is hooked, written once for all of them.

A test module subclasses :class:`Laws` or :class:`PretrainingLaws`, and has the fixtures that they
ask for: :class:`Run` and :class:`Comparison` say what a framework logged, under names of ours.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a framework reports of a run."""

    losses: list[float]
    """Of each training step, then of each evaluation."""
    gradients: list[Any]
    """Of each training step: its norm, or all its numbers."""
    by_hand: list[tuple[float, Any]] = field(default_factory=list)
    """Loss and gradient of each training step by the reference."""
    others: dict[str, list[float]] = field(default_factory=dict)
    """What else is logged of each training step and no layout changes."""
    record: list[Any] = field(default_factory=list)
    """Of each training step, its number and a hash of its weights."""
    hooked: int | None = None
    """Steps and evaluations that the hook counted; None: the framework's script does not say."""

    def only_first(self):
        """Return the run's first step."""
        others = {name: values[:1] for name, values in self.others.items()}
        return Run(losses=self.losses[:1], gradients=self.gradients[:1], others=others)


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How much numbers may differ by: losses and others as arguments of ``pytest.approx``."""

    loss: dict[str, float] = field(default_factory=lambda: {"rel": 1e-6, "abs": 0})
    others: dict[str, float] = field(default_factory=lambda: {"rel": 1e-6, "abs": 0})
    gradient: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A run, and the one that it must equal."""

    run: Run
    wanted: Run
    tolerance: Tolerance = field(default_factory=Tolerance)


def close(got, wanted, tolerance=1e-6):
    """Whether two numbers differ by no more than this part of the wanted one."""
    return got == pytest.approx(wanted, rel=tolerance, abs=0)


def difference(got, wanted):
    """Return how far two gradients or their norms differ, of the largest number in them."""
    got, wanted = (torch.tensor(one, dtype=torch.float64) for one in (got, wanted))
    return ((got - wanted).abs().max() / wanted.abs().max()).item()


def assert_by_hand(run, by_hand, tolerance=Tolerance(), num_steps=3):
    """Assert that every step of a run has the reference's loss and gradient."""
    assert len(run.gradients) == len(by_hand) == num_steps
    steps = zip(run.losses[:num_steps], run.gradients, by_hand, strict=True)
    for loss, gradient, (wanted, wanted_gradient) in steps:
        assert loss == pytest.approx(wanted, **tolerance.loss)
        assert difference(gradient, wanted_gradient) < tolerance.gradient


def assert_same(run, wanted, tolerance=Tolerance()):
    """Assert that two runs trained and evaluated the same loss."""
    assert run.losses == pytest.approx(wanted.losses, **tolerance.loss)
    assert len(run.gradients) > 0
    for got, want in zip(run.gradients, wanted.gradients, strict=True):
        assert difference(got, want) < tolerance.gradient
    assert run.others.keys() == wanted.others.keys()
    for name, values in run.others.items():
        assert values == pytest.approx(wanted.others[name], **tolerance.others), name
    assert run.record == wanted.record


class Laws:
    """Of every framework. Fixtures: ``on_one_process`` (Run), ``in_layout`` (Comparison)."""

    to_hand = Tolerance()
    """Of a run next to the reference."""
    num_steps = 3

    def test_on_one_process_loss_and_gradient_are_the_references(self, on_one_process):
        run = on_one_process
        assert_by_hand(run, run.by_hand, self.to_hand, self.num_steps)
        if run.hooked is not None:
            assert run.hooked == len(run.losses)

    def test_every_layout_and_loss_scaling_trains_and_evaluates_the_same_loss(self, in_layout):
        assert_same(in_layout.run, in_layout.wanted, in_layout.tolerance)


class PretrainingLaws(Laws):
    """Of frameworks that have Megatron's own pretraining loop and loss.

    Fixtures: ``stock`` (Run of DP 2 and of CP 2), ``in_two_stages`` (Comparison of each stage).
    """

    def test_stock_reports_one_loss_at_dp_2_and_cp_2_and_trains_two(self, stock):
        dp, cp = stock["DP 2"], stock["CP 2"]
        assert close(dp.losses[0], cp.losses[0])
        assert difference(dp.gradients[0], cp.gradients[0]) > 0.05

    def test_two_stages_train_the_mean_over_tokens_and_then_over_conversations(self, in_two_stages):
        """The recipe of docs/recipes/nemotron-two-stage-sft.md."""
        for stage in in_two_stages:
            assert_by_hand(stage.run, stage.wanted.by_hand, stage.tolerance)
        first, second = (stage.wanted.by_hand[0][0] for stage in in_two_stages)
        assert abs(second / first - 1) > 0.01
