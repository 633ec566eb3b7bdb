"""Side losses that follow the mode, next to stock's; a launched worker.

``python follow_worker.py JOB``: for each layout of the job and loss scaling, rank 0 prints what
every rank found, as one JSON line. W is computed by loops over sequences.
"""

import sys
from pathlib import Path

import torch.distributed as dist
from matrix_worker import distance, stock_gradients
from ranks import of_ranks, print_row
from stock_step import gradients, run_of, stock_model

from megatron_lossagg import Aggregation, LossAggregator, Options
from megatron_lossagg.verify.cases import Case
from megatron_lossagg.verify.job import LOSS_SCALINGS, read_job
from megatron_lossagg.verify.world import join_world, split_world

DIVISOR = 5.0
MODES = {
    "constant": Aggregation("constant", divisor=DIVISOR),
    "sample_mean": Aggregation("sample_mean"),
    "token_mean": Aggregation("token_mean"),
}
SCALE = 8.0
"""A loss scale as for fp16: the optimizer divides by it."""


def weight_sums(sequences):
    """Sum the weights of all tokens, as the modes' papers write them."""
    samples = {}
    for sequence in sequences:
        samples.setdefault(sequence.sample, []).extend(sequence.counted)
    active = [sum(mask) for mask in samples.values()]
    return {
        "constant": sum(active) / (len(active) * DIVISOR),
        "sample_mean": sum(1 for n in active if n) / len(active),
        "token_mean": 1.0,
    }


def scaled(found, factor):
    return [gradient * factor for gradient in found]


def compare(layout, *, per_token):
    stock = stock_model(layout, per_token=per_token)
    run = run_of(layout, per_token=per_token)
    side = stock_gradients(stock, run, main=0)
    wanted = weight_sums(run.reference.sequences)
    config = run.chunks[0].config
    found = {"there": all(bool(g.any()) for g in side), "wanted": wanted}
    for name, aggregation in MODES.items():
        options = Options(side_losses="follow", probe=False, rejects_tokens=True)
        run._aggregators[aggregation] = LossAggregator(run.chunks, aggregation, options=options)
        case = Case(aggregation=aggregation)
        run._step(case, poison=False, main=0.0)
        found[name] = distance(gradients(run.chunks), scaled(side, wanted[name]))
        config.grad_scale_func = lambda loss: SCALE * loss
        run._step(case, poison=False, main=0.0)
        found[f"{name}, loss scale"] = distance(
            gradients(run.chunks), scaled(side, SCALE * wanted[name])
        )
        config.grad_scale_func = None
        config.moe_grad_scale_func = config.mtp_grad_scale_func = lambda: 3.0
        run._step(case, poison=False, main=0.0)
        found[f"{name}, own scale"] = distance(
            gradients(run.chunks), scaled(side, 3 * wanted[name])
        )
        config.moe_grad_scale_func = config.mtp_grad_scale_func = None
    # constant is token_mean times W: with side losses that follow, so is the whole gradient.
    run._step(Case(aggregation=MODES["token_mean"]), poison=False)
    token_mean = gradients(run.chunks)
    found["main"] = distance(token_mean, side)
    run._step(Case(aggregation=MODES["constant"]), poison=False)
    found["whole"] = distance(gradients(run.chunks), scaled(token_mean, wanted["constant"]))
    found["left"] = config.moe_grad_scale_func is None and config.mtp_grad_scale_func is None
    return found


def main(job):
    join_world()
    for layout in read_job(Path(job)).layouts:
        with split_world(layout):
            for loss_scaling in LOSS_SCALINGS:
                found = compare(layout, per_token=loss_scaling == "per_token")
                key = {"layout": str(layout), "loss_scaling": loss_scaling}
                print_row({**key, "ranks": of_ranks(found)})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
