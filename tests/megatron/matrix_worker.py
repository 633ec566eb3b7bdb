"""What this package and stock Megatron-Core do, side by side, at each layout of a job.

``python matrix_worker.py side|slices JOB``, JOB a file of ``write_job``; run under
torch.distributed.run. ``side``: MoE and MTP losses under stock's loss_func and under this
package's, on two models. ``slices``: an unpacked batch as Megatron-Core and as ``Layout``
slice it. Rank 0 prints one JSON line per comparison, with what every rank found.
"""

import inspect
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import of_ranks, print_row
from stock_step import gradients, run_of, stock_model, stock_step

from megatron_lossagg import Aggregation, Layout
from megatron_lossagg.verify.cases import Case
from megatron_lossagg.verify.job import LOSS_SCALINGS, read_job
from megatron_lossagg.verify.small_gpt import pack
from megatron_lossagg.verify.step_data import make_sequences
from megatron_lossagg.verify.world import join_world, parallel_state, split_world

MODES = ("token_mean", "sample_mean")


def stock_gradients(chunks, run, *, main):
    """Run a step of stock whose loss is multiplied by ``main``.

    Stock has one mask. Where the training mask selects fewer tokens, it counts the counting mask.
    """
    sequences = [replace(sequence, trained=sequence.counted) for sequence in run.sequences]
    counting = [pack(sequences, batch.sequences[:-1], run.parallelism) for batch in run.batches]

    def returns(loss, num_tokens):
        return loss * main, num_tokens

    return stock_step(chunks, run.batches, run.parallelism, returns, counting=counting)[1]


def our_step(run, mode, *, main):
    """Run a step whose loss is the partial loss times ``main``."""
    run._step(Case(aggregation=Aggregation(mode)), poison=False, main=main)
    return gradients(run.chunks)


def the_same(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


def distance(left, right):
    """Return the largest relative difference over buffers."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(left, right, strict=True))


def compare(layout, *, per_token, rejected):
    sequences = make_sequences()
    if not rejected:
        sequences = [replace(sequence, counted=sequence.trained) for sequence in sequences]
    stock = stock_model(layout, per_token=per_token)
    run = run_of(layout, per_token=per_token, sequences=sequences)
    side = stock_gradients(stock, run, main=0)
    found = {
        "there": all(bool(g.isfinite().all() and g.any()) for g in side),
        **{mode: the_same(our_step(run, mode, main=0), side) for mode in MODES},
    }
    if rejected:
        return found
    found["stock_twice"] = the_same(stock_gradients(stock, run, main=0), side)
    same_loss = "token_mean" if per_token else "microbatch_token_mean"
    if per_token or layout.cp == 1:  # stock's average is also over CP ranks
        whole = stock_gradients(stock, run, main=1)
        found["main"] = distance(whole, side)
        found["whole"] = distance(our_step(run, same_loss, main=1), whole)
    return found


def side(layout):
    """Compare the gradients of side losses, and of whole steps where stock has the mode."""
    for loss_scaling in LOSS_SCALINGS:
        for rejected in (False, True):
            found = compare(layout, per_token=loss_scaling == "per_token", rejected=rejected)
            print_comparison(
                found, layout=str(layout), loss_scaling=loss_scaling, rejected=rejected
            )


def slices(layout):
    """Slice a batch for this rank as Megatron-Core and as the layout does."""
    from megatron.core.utils import get_batch_on_this_cp_rank  # the stand-ins are there by now

    place = {"cp_size": layout.cp, "cp_rank": parallel_state.get_context_parallel_rank()}
    live = parallel_state.get_context_parallel_group()
    # Later releases ask for `is_hybrid_cp` too, and take no group for the whole world.
    parameters = inspect.signature(get_batch_on_this_cp_rank).parameters
    calls = (
        [{"cp_group": live, "is_hybrid_cp": False}]
        if "is_hybrid_cp" in parameters
        else [{"cp_group": None}, {"cp_group": live}]
    )
    for sequences, length in ((1, 2 * layout.cp), (3, 8 * layout.cp), (2, 10 * layout.cp)):
        whole = {
            "tokens": torch.arange(sequences * length).view(sequences, length),
            "loss_mask": torch.arange(sequences * length).view(sequences, length) % 3 % 2,
            "features": torch.arange(sequences * length * 4).view(sequences, length, 4),
        }
        ours = Layout.bshd_zigzag(sequences, length, **place)
        for call in calls:
            cut = get_batch_on_this_cp_rank(dict(whole), **call)
            found = {
                name: torch.equal(cut[name].flatten(0, 1), value.flatten(0, 1)[ours.positions])
                for name, value in whole.items()
            }
            found["shorter"] = cut["tokens"].shape == (sequences, length // layout.cp)
            print_comparison(found, layout=str(layout), sequences=sequences, length=length)


def print_comparison(found, **key):
    """Print what every rank found, on rank 0."""
    print_row({**key, "ranks": of_ranks(found)})


def main(what, job):
    join_world()
    for layout in read_job(Path(job)).layouts:
        with split_world(layout):
            {"side": side, "slices": slices}[what](layout)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
