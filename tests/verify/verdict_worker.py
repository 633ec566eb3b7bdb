"""How ``lossagg verify`` judges a step, on two data-parallel ranks: ``test_verdict.py``."""

import math
from dataclasses import replace

import torch
import torch.distributed as dist
from check_runner import run_checks
from custom_reducer import custom
from ranks import messages_by_rank

from megatron_lossagg.cpu import install

install()

from megatron_lossagg import Aggregation  # noqa: E402
from megatron_lossagg.errors import ProofError  # noqa: E402
from megatron_lossagg.verify import verdict as judging  # noqa: E402
from megatron_lossagg.verify.cases import Case, expected  # noqa: E402
from megatron_lossagg.verify.job import Job  # noqa: E402
from megatron_lossagg.verify.parallelism import Parallelism  # noqa: E402
from megatron_lossagg.verify.reference_gradient import compute  # noqa: E402
from megatron_lossagg.verify.small_gpt import config_of, wrapped_chunks  # noqa: E402
from megatron_lossagg.verify.train_step import (  # noqa: E402
    WEIGHT_EXPECTED,
    WEIGHT_SUM,
    Run,
)
from megatron_lossagg.verify.world import join_world, split_world  # noqa: E402

LAYOUT = Parallelism(dp=2, microbatches=4)
CASE = Case(aggregation=Aggregation("token_mean"))


class Trained:
    """A right step, trained and evaluated, and what is to change in it."""

    def __init__(self, reference):
        self.reference = reference
        self.run = Run(LAYOUT, reference, per_token=False)
        self.wanted = expected(CASE, reference, self.run.facts.assignment)
        self.steps = [self.run.train(CASE), self.run.evaluate(CASE)]

    def verdict(self, *, train=None, evaluate=None):
        """Judge the steps with changes to one of them."""
        trained, evaluated = self.steps
        steps = [replace(trained, **(train or {})), replace(evaluated, **(evaluate or {}))]
        return judging._verdict(self.run, CASE, self.wanted, steps)

    def values(self, step, rank, **changes):
        """Return a step's reported values, other ones on one rank."""
        values = [dict(of_rank) for of_rank in self.steps[step].values]
        values[rank].update(changes)
        return {"values": values}


def check_a_right_step_passes_with_every_quantity_measured(right):
    verdict = right.verdict()
    assert verdict.passed, verdict
    assert verdict.tolerance == 1e-12
    assert max(verdict.gradient_error, verdict.loss_error, verdict.weights_error) < 1e-12
    assert verdict.weight_sum_error < 1e-6
    assert abs(verdict.measured_factor - 1) < 1e-12


def check_each_quantity_alone_fails_a_verdict_at_its_tolerance(right):
    verdict = right.verdict()
    limits = dict.fromkeys(("gradient_error", "loss_error", "weights_error"), 1e-12)
    for name, limit in (limits | {"weight_sum_error": 1e-6}).items():
        assert replace(verdict, **{name: 0.9 * limit}).passed, name
        for wrong in (1.1 * limit, math.inf, math.nan):
            assert not replace(verdict, **{name: wrong}).passed, (name, wrong)
    assert not replace(verdict, explanation="what a step raised").passed
    assert replace(verdict, weights_error=None, weight_sum_error=None).passed


def check_what_was_measured_is_said_and_near_predictions_are_told_apart(right):
    verdict, words = right.verdict(), judging._measured_in_words
    arrived = words(right.run, replace(verdict, weights_error=1.0), 1.0, 1.0, False)
    assert arrived == "the weights that arrived at the losses are not the reference's"
    reported = words(right.run, replace(verdict, weight_sum_error=1.0), 1.0, 1.0, False)
    assert reported == "the reported weight sum is not the reference's"
    for tolerance, wanted in ((1e-12, 1e-10), (1e-2, 0.1), (0.5, 0.5)):
        assert abs(replace(verdict, tolerance=tolerance).tolerance_of_causes / wanted - 1) < 1e-9


def check_a_reported_value_of_either_step_and_any_rank_is_judged(right):
    loss, slope_Y = right.wanted.loss, right.wanted.slope_Y
    terms = 0.1 * math.sqrt(
        math.fsum((s * y) ** 2 for s, y in zip(slope_Y, right.reference.losses_Y, strict=True))
    )
    for step, name in enumerate(("train", "evaluate")):
        for rank in range(2):
            off = right.values(step, rank, loss=loss + 1e-3)
            error = right.verdict(**{name: off}).loss_error
            assert abs(error - 1e-3 / max(abs(loss), terms)) < 1e-9, (name, rank, error)
            for what in (WEIGHT_SUM, WEIGHT_EXPECTED):
                error = right.verdict(**{name: right.values(step, rank, **{what: 9.0})})
                assert error.weight_sum_error > 1, (name, rank, what)
                nan = right.values(step, rank, **{what: math.nan})
                assert right.verdict(**{name: nan}).weight_sum_error == math.inf
            assert (
                right.verdict(**{name: right.values(step, rank, loss=math.nan)}).is_finite is False
            )
        assert right.verdict(**{name: {"fault": "raised"}}).explanation == "raised"


def check_a_weight_that_arrived_at_a_sequence_is_judged(right):
    *rest, largest = sorted(right.steps[0].weighed, key=lambda one: abs(one.weight_sum))
    off = replace(largest, weight_sum=2 * largest.weight_sum)
    assert right.verdict(train={"weighed": [off, *rest]}).weights_error > 0.1
    assert right.verdict(train={"weighed": None}).weights_error is None


def check_one_parameter_of_one_rank_is_compared_by_its_own_size(right):
    """Relative to the whole gradient it would not be seen."""
    trained, slope_Y, gradient_P = right.steps[0], right.wanted.slope_Y, right.wanted.gradient_P
    place, sizes = 0, {}
    for name, shape in right.reference.parameters.items():
        own = slice(place, place := place + math.prod(shape))
        terms = slope_Y[:, None] * right.reference.gradients_YP[:, own]
        sizes[name] = (gradient_P[own].norm().item(), terms.norm().item())
    smallest = min(sizes, key=lambda name: sizes[name][0])
    norm, terms = sizes[smallest]
    assert 0 < norm < 0.1 * gradient_P.norm()
    for value, wanted in ((0.0, norm / max(norm, terms)), (math.nan, math.inf)):
        gradients = [
            (shard, gradient * value if shard.name == smallest and dist.get_rank() else gradient)
            for shard, gradient in trained.gradients
        ]
        error = right.verdict(train={"gradients": gradients}).gradient_error
        assert error == wanted or abs(error - wanted) < 1e-9, (smallest, error, wanted)
    other = replace(trained.gradients[0][0], name="of a layer that the reference lacks")
    unreached = [(other, torch.full((1,), 0.5 * gradient_P.norm().item()))]
    verdict = right.verdict(train={"gradients": [*trained.gradients, *unreached]})
    assert abs(verdict.gradient_error - 0.5) < 1e-6, verdict


def check_the_worst_rank_is_reported_and_nan_is_the_worst(right):
    step = replace(right.steps[0], values=[{"loss": v} for v in (1.0, 1.5, 0.9)])
    assert step.worst("loss", 1.0) == 1.5
    assert math.isnan(replace(step, values=[*step.values, {"loss": math.nan}]).worst("loss", 1.0))


def check_what_one_rank_raises_is_the_fault_of_the_step_on_all(right):
    def raises_on_the_last(context):
        is_wrong = dist.get_rank() and not context.mask.any()
        return lambda losses: losses if is_wrong else losses.sum()

    step = right.run.train(Case(aggregation=custom(raises_on_the_last)))
    assert "return a 0-dim" in step.fault, step.fault


def check_the_options_of_a_layout_reach_megatron(right):
    """Else the layout that a verdict names would not be the one that was verified."""
    layout = replace(LAYOUT, recompute=True, moe=True)
    config = config_of(layout, per_token=False)
    assert (config.recompute_granularity, config.recompute_num_layers) == ("full", 1)
    assert config.num_moe_experts > 1
    assert min(config.moe_aux_loss_coeff, config.moe_z_loss_coeff) > 0
    config = config_of(replace(LAYOUT, mtp=True, float32=True), per_token=True)
    assert config.mtp_num_layers == 1
    assert config.mtp_loss_scaling_factor > 0
    assert config.recompute_granularity is None
    names = ("overlap_grad_reduce", "distributed_optimizer", "average_in_collective")
    for layout in (LAYOUT, replace(LAYOUT, **dict.fromkeys(names, True))):
        for per_token in (False, True):
            (chunk,) = wrapped_chunks(layout, config_of(layout, per_token=per_token))
            ddp, is_on = chunk.ddp_config, layout != LAYOUT
            assert (ddp.overlap_grad_reduce, ddp.use_distributed_optimizer) == (is_on, is_on)
            assert ddp.average_in_collective == (is_on and not per_token)  # as Megatron asks


def check_what_a_reducer_raises_of_tokens_ends_the_verification_with_its_own_words(right):
    def raises(context):
        return lambda losses: losses if context.mask.any() else losses.sum()

    messages = messages_by_rank(right.run.train, Case(aggregation=custom(raises)), of=ProofError)
    assert all("return a 0-dim" in str(each) for each in messages), messages


def check_a_parameter_that_no_rank_has_ends_the_verification(right):
    absent = {**right.reference.parameters, "absent": (1,)}
    lacking = replace(right.reference, parameters=absent)
    job = Job(layouts=[LAYOUT], cases=[CASE], loss_scalings=["average"])
    messages = messages_by_rank(
        judging._proven, LAYOUT, job, lacking, [right.wanted], ["a", "a"], of=ProofError
    )
    assert all("no rank has the parameters ['absent']" in str(each) for each in messages), messages


def main():
    join_world()
    last = check_a_parameter_that_no_rank_has_ends_the_verification
    with split_world(LAYOUT):
        shape, copies, padded = LAYOUT.reference
        right = Trained(compute(shape, copies=copies, padded=padded))
        run_checks({name: of for name, of in globals().items() if of is not last}, right)
    run_checks({last.__name__: last}, right)  # it splits the ranks itself
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
