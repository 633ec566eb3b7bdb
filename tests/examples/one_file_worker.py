"""Steps on Megatron-Core's DDP at DP 2 x CP 2, by examples/one_file.py and by the package."""

import sys
from pathlib import Path

import torch
from ranks import run_worker
from stock_step import gradients, run_of

from megatron_lossagg import Aggregation
from megatron_lossagg.verify.cases import Case
from megatron_lossagg.verify.parallelism import Parallelism
from megatron_lossagg.verify.small_gpt import forward, reported, run_schedule, token_losses
from megatron_lossagg.verify.world import split_world

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import one_file

LAYOUT = Parallelism(dp=2, cp=2, microbatches=3)
MODES = {
    "token_mean": {},
    "sample_mean": {"count_empty": False},
    "prompt_mean": {},
    "constant": {"divisor": 40.0},
    "sample_sum": {},
    "token_sum": {"divisor": 7.0},
    "length_power": {"exponent": 0.5},
    "balanced": {},
    "row_mean": {},
    "microbatch_token_mean": {},
}


def step_by_one_file(run, mode, numbers, *, per_token):
    """Run a step; return the loss that is logged, and the gradients."""
    group, cp_rank = run.aggregator.dp_group, run.aggregator.cp_rank
    ids = {
        kind: [getattr(one, kind) for one in run.sequences]
        for kind in ("sample", "prompt", "group")
    }
    step = one_file.plan(
        mode,
        [sum(one.counted) for one in run.sequences],
        **ids,
        microbatch=run._numbers,
        num_microbatches=run.num_microbatches,
        dp_group=group,
        **numbers,
    )

    def forward_step(iterator, chunk):
        batch = next(iterator)
        output = forward(chunk, batch, LAYOUT)

        def loss_func(output):
            losses = token_losses(output, batch, LAYOUT) * batch.coefficient
            sequences = batch.sequences
            loss = one_file.partial_loss(
                step, losses, sequences, batch.mask, batch.offsets, LAYOUT.cp, cp_rank
            )
            ranks = LAYOUT.dp * LAYOUT.cp
            return one_file.outputs(step, loss, sequences, ranks, cp_rank, per_token=per_token)

        return output, loss_func

    reports = run_schedule(forward_step, run.chunks, run.batches)
    return reported(reports, "loss"), gradients(run.chunks)


def equals_the_package(*, per_token):
    with split_world(LAYOUT):
        run = run_of(LAYOUT, per_token=per_token)
        for mode, numbers in MODES.items():
            loss, (gradient,) = step_by_one_file(run, mode, numbers, per_token=per_token)
            measured = run.train(Case(aggregation=Aggregation(mode, **numbers)))
            (wanted,) = gradients(run.chunks)
            assert (gradient - wanted).norm() <= 1e-13 * wanted.norm(), mode
            assert wanted.norm() > 0
            for values in measured.values:
                assert abs(loss - values["loss"]) <= 1e-13 * abs(loss), mode


def check_every_mode_in_the_average_loss_scaling():
    equals_the_package(per_token=False)


def check_every_mode_in_the_per_token_loss_scaling():
    equals_the_package(per_token=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    run_worker(globals())
