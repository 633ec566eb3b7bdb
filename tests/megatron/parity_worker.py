"""Stock Megatron's own loss and loss scale and this package's, DP 2 x CP 2; a launched worker."""

from dataclasses import replace

import torch
import torch.distributed as dist
from stock_step import gradients, run_of, stock_step

from megatron_lossagg import Aggregation
from megatron_lossagg.verify.cases import Case
from megatron_lossagg.verify.parallelism import Parallelism
from megatron_lossagg.verify.small_gpt import reported
from megatron_lossagg.verify.step_data import make_sequences
from megatron_lossagg.verify.world import split_world

LAYOUT = Parallelism(dp=2, cp=2, microbatches=3)


def trained(run, mode):
    """Train a step; return the loss, which every rank must report alike, and the gradient."""
    measured = run.train(Case(aggregation=Aggregation(mode)))
    (loss,) = {values["loss"] for values in measured.values}
    return loss, gradients(run.chunks)[0]


def check_a_loss_scale(run):
    """Megatron's grad_scale_func runs on top of what mb.outputs returns."""
    loss, unscaled = trained(run, "prompt_mean")
    scale = torch.tensor([1024.0])  # of one dimension, as that of Megatron's scalers
    run.chunks[0].config.grad_scale_func = lambda loss: loss * scale
    again, scaled = trained(run, "prompt_mean")
    run.chunks[0].config.grad_scale_func = None
    assert again == loss
    assert unscaled.norm() > 0
    assert torch.equal(scaled, unscaled * 1024)
    if dist.get_rank() == 0:
        print(f"SCALED by 1024 exactly, {run.aggregator.loss_scaling}", flush=True)


def main():
    dist.init_process_group("gloo")
    # Stock counts the training mask; the plan counts the counting mask: take them equal.
    sequences = [replace(sequence, counted=sequence.trained) for sequence in make_sequences()]
    with split_world(LAYOUT):
        for per_token in (False, True):
            run = run_of(LAYOUT, per_token=per_token, sequences=sequences)
            config = vars(run.chunks[0].config)
            before_config = dict(config)
            (reports, (before,)), (again, (after,)) = (
                stock_step(run.chunks, run.batches, LAYOUT) for _ in range(2)
            )
            loss = reported(reports, "loss")
            assert torch.equal(before, after)
            assert loss == reported(again, "loss")
            assert config == before_config
            if per_token:
                ours, gradient = trained(run, "token_mean")
                assert abs(ours - loss) < 1e-12 * abs(loss)
                assert (gradient - before).norm() < 1e-12 * before.norm()
                if dist.get_rank() in (0, 3):
                    print("PARITY bit for bit, token_mean within 1e-12", flush=True)
            assert "(DP 2, CP 2)" in run.aggregator.describe()
            check_a_loss_scale(run)
        del run
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
