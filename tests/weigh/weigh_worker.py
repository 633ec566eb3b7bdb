"""The weights that are measured are the gradient: ``main_grad`` of a model of token losses.

DP 2, and CP 2 with four ranks. The loss of token t is weight t, so that the
gradient of the step at weight t is the token's weight: both sides of the sum rule are compared, by
token sums of each sequence and by the whole gradient.
"""

import os
from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest
import tiny_gpt
import token_model
import torch
import torch.distributed as dist
from check_runner import run_checks
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_lossagg import Layout
from megatron_lossagg.weigh.weighing import Weighing

CP = int(os.environ["WORLD_SIZE"]) // 2
M = 3
CUTS = [0, 8, 12, 16]
"""Offsets of each microbatch's sequences; the last one is padding."""
RNG = np.random.default_rng(3)
ACTIVE = RNG.random((4, M, 16)) < 0.6
ACTIVE[..., 12:] = False
ACTIVE[..., [0, 1, 8]] = True  # no sequence is empty
LOSS_SCALE = 1024.0


def coordinates():
    return parallel_state.get_data_parallel_rank(), parallel_state.get_context_parallel_rank()


def layout():
    return Layout.thd_zigzag(CUTS, cp_size=CP, cp_rank=coordinates()[1])


def batches():
    """Return this rank's tokens and mask of each microbatch; no two tokens of a step are one."""
    dp, _ = coordinates()
    mine = layout().positions.numpy()
    return [((dp * M + m) * 16 + mine, ACTIVE[dp, m][mine]) for m in range(M)]


def mean_of_microbatches(losses, mask):
    return token_model.masked_sum(mask, losses)


def half_of_it(losses, mask):
    loss, num_tokens, report = token_model.masked_sum(mask, losses)
    return loss / 2, num_tokens, report


def squared(losses, mask):
    """A loss whose weights differ from token to token, and with the losses."""
    return (losses**2 * mask).sum(), mask.sum().int(), {}


def one_output(losses, mask):
    loss = (losses * mask).sum() / mask.sum()
    return loss, {}


def run_schedule(chunk, forward_step):
    """Run Megatron's schedule over this rank's microbatches."""
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches()),
        model=[chunk],
        num_microbatches=M,
        seq_length=16,
        micro_batch_size=1,
        forward_only=False,
    )


def trained(
    *,
    per_token,
    loss_func,
    passes_mask=False,
    finalizes=True,
    listens=True,
    makes_view=False,
    ddp=None,
    **config,
):
    """Run a step; return what was weighed on all ranks, and the step's reduced gradient."""
    made = tiny_gpt.config_of(per_token=per_token, **config)
    num_tokens = dist.get_world_size() // CP * M * 16
    chunk = token_model.wrapped(made, num_tokens, **(ddp or {}))
    scale = made.grad_scale_func
    if not finalizes:
        made.finalize_model_grads_func = None
    weighing = Weighing([chunk])

    def forward_step(iterator, model):
        tokens, mask = next(iterator)
        losses = model(torch.from_numpy(tokens))
        if makes_view:
            losses = losses.view(1, -1)[0]
        kept = torch.from_numpy(mask).to(losses)
        if listens:
            losses = weighing.losses(losses, kept if passes_mask else None, cu_seqlens=CUTS)
        return losses, lambda output: loss_func(output, kept)

    chunk.zero_grad_buffer()
    with weighing if listens else nullcontext():
        run_schedule(chunk, forward_step)
    gradient = chunk.module.weight.main_grad.double().numpy()
    return weighing.weighed(), gradient / (float(scale(torch.ones(()))) if scale else 1.0)


def assert_sums(step, gradient, *, tolerance=1e-12):
    """Both sides of the sum rule, by sequence and in all."""
    wanted = {}
    for dp in range(dist.get_world_size() // CP):
        for m in range(M):
            for sequence, (begin, end) in enumerate(pairwise(CUTS)):
                part = gradient[(dp * M + m) * 16 :][begin:end]
                if part.any():
                    wanted[dp, m, sequence] = part
    assert {(s.dp_rank, s.microbatch, s.sequence) for s in step.sequences} == {*wanted}
    for s in step.sequences:
        part = wanted[s.dp_rank, s.microbatch, s.sequence]
        trained = part[part != 0]
        found = [s.tokens, s.weight_sum, s.weight_min, s.weight_max]
        expected = [len(trained), trained.sum(), trained.min(), trained.max()]
        np.testing.assert_allclose(found, expected, rtol=tolerance)
    assert step.weight_sum == pytest.approx(gradient.sum(), rel=tolerance)


def check_the_weights_are_the_gradient_of_the_step():
    for per_token in (False, True):
        for loss_func in (mean_of_microbatches, half_of_it, squared):
            assert_sums(*trained(per_token=per_token, loss_func=loss_func))


def check_a_weighed_step_trains_bit_for_bit_as_an_unweighed_one():
    for loss_func in (mean_of_microbatches, squared):
        _, weighed = trained(per_token=True, loss_func=loss_func)
        _, unweighed = trained(per_token=True, loss_func=loss_func, listens=False)
        assert (weighed == unweighed).all()


def check_a_loss_scale_is_taken_out():
    def scaled(loss):
        return loss * LOSS_SCALE

    for per_token in (False, True):
        step, gradient = trained(
            per_token=per_token, loss_func=mean_of_microbatches, grad_scale_func=scaled
        )
        assert_sums(step, gradient)
        assert step.weight_sum == pytest.approx(1.0)


def check_a_collective_that_averages_does_so_over_data_and_context_parallel_ranks():
    for loss_func in (mean_of_microbatches, squared):
        step, gradient = trained(
            per_token=False, loss_func=loss_func, ddp={"average_in_collective": True}
        )
        assert_sums(step, gradient)


def check_a_gradient_that_a_script_asks_for_itself_is_none_of_the_step():
    def asks(losses, mask):
        loss, num_tokens, report = token_model.masked_sum(mask, losses)
        torch.autograd.grad(loss, losses, retain_graph=True)
        return loss, num_tokens, report

    assert_sums(*trained(per_token=True, loss_func=asks))


def check_two_outputs_are_weighed():
    step, gradient = trained(per_token=False, loss_func=one_output)
    assert_sums(step, gradient)


def check_stock_trains_means_of_microbatches_and_of_context_parallel_ranks():
    step, _ = trained(per_token=False, loss_func=mean_of_microbatches)
    where = "microbatch" if CP == 1 else "microbatch and context-parallel rank"
    assert step.causes == (f"a mean of one token mean per {where}",)
    assert step.trains == ("microbatch_token_mean" if CP == 1 else None)
    assert step.weight_sum == pytest.approx(1.0)


def check_the_per_token_loss_scaling_trains_a_token_mean():
    step, _ = trained(per_token=True, loss_func=mean_of_microbatches)
    assert (step.trains, step.causes) == ("token_mean", ())
    assert step.modes["token_mean"] == pytest.approx((1.0, 1.0))


def check_a_constant_factor_is_named():
    step, _ = trained(per_token=True, loss_func=half_of_it)
    assert (step.trains, step.nearest) == (None, "token_mean")
    assert step.factor == pytest.approx(0.5)
    assert step.causes[0].startswith("a constant factor on token_mean: 0.5")


def check_a_step_that_is_not_finalized_is_named():
    step, _ = trained(per_token=True, loss_func=mean_of_microbatches, finalizes=False)
    assert step.causes[0].startswith("it was not finalized")
    assert step.trains is None


def check_a_token_of_the_mask_that_gets_no_gradient_is_missed():
    def half_detached(losses, mask):
        first = torch.arange(len(losses)) < len(losses) // 2
        return token_model.masked_sum(mask, torch.where(first, losses, losses.detach()))

    step, gradient = trained(per_token=True, loss_func=half_detached, passes_mask=True)
    n = ACTIVE[: dist.get_world_size() // CP].sum()
    assert (step.trains, step.missed) == (None, n - np.count_nonzero(gradient))
    assert f"{step.missed} tokens of the mask have no weight" in step.verdict


def check_a_step_of_an_aggregation_weighs_as_its_mode():
    for per_token in (False, True):
        weighed, gradient = weighed_sample_mean(ACTIVE, per_token=per_token)
        assert_sums(weighed, gradient)
        assert (weighed.trains, weighed.weight_sum) == ("sample_mean", pytest.approx(1.0))


def check_a_sample_mean_over_empty_sequences_is_told_from_one_over_the_others():
    """One sequence is empty on purpose, and so is the padding that ends each microbatch."""
    active = ACTIVE.copy()
    active[0, 1, 8:12] = False
    num_samples = dist.get_world_size() // CP * M * 2
    for count_empty in (True, False):
        weighed, _ = weighed_sample_mean(active, per_token=False, count_empty=count_empty)
        assert weighed.num_empty == 1 + num_samples // 2
        name = "sample_mean" if count_empty else "sample_mean without its 1 empty"
        assert (weighed.trains, weighed.counted_empty) == (name, int(count_empty))
        assert weighed.fits_mode("sample_mean")
        assert weighed.weight_sum == pytest.approx(1 - count_empty / num_samples)


def weighed_sample_mean(active, *, per_token, count_empty=True):
    """Train a step of this package's sample mean; return its weights, and the gradient."""
    from megatron_lossagg import Aggregation, LossAggregator, Sequences, plan_step

    dp, _ = coordinates()
    made = tiny_gpt.config_of(per_token=per_token)
    chunk = token_model.wrapped(made, dist.get_world_size() // CP * M * 16)
    aggregator = LossAggregator([chunk], Aggregation("sample_mean", count_empty=count_empty))
    counts = [active[dp, m][a:b].sum() for m in range(M) for a, b in ((0, 8), (8, 12))]
    plan = plan_step(
        aggregator.aggregation,
        Sequences(active_tokens=counts, microbatch=np.repeat(range(M), 2)),
        group=aggregator.dp_group,
    )
    weighing, microbatch = Weighing([chunk]), iter(range(M))

    def forward_step(iterator, model):
        tokens, _ = next(iterator)
        m = next(microbatch)
        ids = [(dp, m, 0), (dp, m, 1), None]
        losses = weighing.losses(model(torch.from_numpy(tokens)), cu_seqlens=CUTS, sample=ids)

        def loss_func(output):
            mask = torch.from_numpy(active[dp, m].astype(np.int64))
            mb = step.microbatch([2 * m, 2 * m + 1, -1], mask, cu_seqlens=torch.tensor(CUTS))
            loss = mb.reduce(output)
            return mb.outputs(loss, report={"loss": loss})

        return losses, loss_func

    chunk.zero_grad_buffer()
    with aggregator.begin(plan, num_microbatches=M) as step, weighing:
        run_schedule(chunk, forward_step)
    return weighing.weighed(), chunk.module.weight.main_grad.double().numpy()


def check_a_model_in_torchs_ddp_is_weighed():
    dp, world = dist.get_rank(), dist.get_world_size()
    model = token_model.OneWeightPerToken(world * 16)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    mask = torch.from_numpy(ACTIVE[dp, 0]).double()
    with Weighing(ddp) as weighing:
        losses = weighing.losses(ddp(torch.arange(16) + 16 * dp), cu_seqlens=CUTS)
        ((losses * mask).sum() / mask.sum()).backward()
    step = weighing.weighed()
    gradient = model.weight.grad.numpy()
    for s in step.sequences:
        part = gradient[s.dp_rank * 16 :][CUTS[s.sequence] : CUTS[s.sequence + 1]]
        np.testing.assert_allclose([s.weight_sum, s.weight_max], [part.sum(), part.max()])
    assert step.weight_sum == pytest.approx(gradient.sum())
    assert step.trains == "microbatch_token_mean"
    assert str(step).startswith("weighed step: ")


def check_losses_that_are_changed_in_place_are_weighed():
    """As loss_func may: ``output *= mask`` on what GPT returns, a view."""

    def in_place(losses, mask):
        view = losses.view(1, -1)
        view *= mask
        return losses.sum(), mask.sum().int(), {}

    for per_token in (False, True):
        assert_sums(*trained(per_token=per_token, loss_func=in_place, makes_view=True))


if __name__ == "__main__":
    tiny_gpt.start(cp=CP)
    run_checks(globals())
