"""What this package and stock Megatron-Core do, side by side, at each layout of a job.

``python matrix_worker.py side|slices JOB``, JOB a file of ``Job.write``; run under
torch.distributed.run. ``side``: MoE and MTP losses under stock's loss_func and under this
package's, on two models. ``slices``: an unpacked batch as Megatron-Core and as ``Layout``
slice it. Rank 0 prints one JSON line per comparison, with what every rank found.
"""

import megatron_lossagg.cpu as cpu

cpu.install()

import json  # noqa: E402
import sys  # noqa: E402
from dataclasses import replace  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.utils import get_batch_on_this_cp_rank  # noqa: E402

from megatron_lossagg import Aggregation, Layout  # noqa: E402
from megatron_lossagg.verify import model as megatron  # noqa: E402
from megatron_lossagg.verify.cases import Case  # noqa: E402
from megatron_lossagg.verify.job import LOSS_SCALINGS, Job  # noqa: E402
from megatron_lossagg.verify.reference_gradient import Reference  # noqa: E402
from megatron_lossagg.verify.run import Run  # noqa: E402
from megatron_lossagg.verify.sequences import make_sequences  # noqa: E402

MODES = ("token_mean", "sample_mean")


def stock_step(chunks, run, *, main):
    """Run a step with the loss_func of Megatron-LM's pretrain_gpt.py, times ``main``.

    ``chunks``: a model that this package has not seen. Stock has one mask; where the training
    mask selects fewer tokens it counts the counting mask.
    """
    layout = run.parallelism

    def forward_step(iterator, chunk):
        batch, counting = next(iterator)
        output = megatron.forward(chunk, batch, layout)

        def loss_func(output):
            losses = megatron.token_losses(output, batch, layout) * batch.coefficient
            loss_mask, count_mask = batch.mask_here, counting.mask_here
            loss = torch.sum(losses * loss_mask)
            num_tokens = count_mask.sum().to(torch.int)
            report = torch.stack([loss.detach().clone(), num_tokens.to(loss.dtype)])
            return loss * main, num_tokens, {"loss": report}

        return output, loss_func

    megatron.run_schedule(forward_step, chunks, list(with_counting_masks(run)))
    return gradients(chunks)


def with_counting_masks(run):
    """Yield each microbatch, and a copy with the counting mask as its training mask."""
    sequences = [replace(sequence, trained=sequence.counted) for sequence in run._sequences]
    for batch in run.batches:
        yield batch, megatron.pack(sequences, batch.sequences[:-1], run.parallelism)


def our_step(run, mode, *, main):
    """Run a step whose loss is the partial loss times ``main``."""
    run._step(Case(aggregation=Aggregation(mode)), poison=False, main=main)
    return gradients(run.chunks)


def gradients(chunks):
    """Return every gradient buffer of the model, dense and experts', as finalize left it."""
    return [
        buffer.grad_data.clone()
        for chunk in chunks
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]


def the_same(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


def distance(left, right):
    """Return the largest relative difference over buffers."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(left, right, strict=True))


def compare(layout, *, per_token, rejected):
    sequences = make_sequences()
    if not rejected:
        sequences = [replace(sequence, counted=sequence.trained) for sequence in sequences]
    config = megatron.config_of(layout, per_token=per_token)
    stock = megatron.wrapped_chunks(layout, config)
    run = Run(layout, without_values(sequences), per_token=per_token)
    side = stock_step(stock, run, main=0)
    found = {
        "there": all(bool(g.isfinite().all() and g.any()) for g in side),
        "stock_twice": the_same(stock_step(stock, run, main=0), side),
        **{mode: the_same(our_step(run, mode, main=0), side) for mode in MODES},
    }
    same_loss = "token_mean" if per_token else "microbatch_token_mean"
    if not rejected and (per_token or layout.cp == 1):  # stock's average is also over CP ranks
        whole = stock_step(stock, run, main=1)
        found["main"] = distance(whole, side)
        found["whole"] = distance(our_step(run, same_loss, main=1), whole)
    return found


def without_values(sequences):
    """Make a reference with sequences only, because the comparison is with stock."""
    none = torch.zeros(0)
    return Reference(
        sequences=sequences, padded=4, losses_Y=none, gradients_YP=none.view(0, 0), parameters={}
    )


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
    place = {"cp_size": layout.cp, "cp_rank": parallel_state.get_context_parallel_rank()}
    for sequences, length in ((1, 2 * layout.cp), (3, 8 * layout.cp), (2, 10 * layout.cp)):
        whole = {
            "tokens": torch.arange(sequences * length).view(sequences, length),
            "loss_mask": torch.arange(sequences * length).view(sequences, length) % 3 % 2,
            "features": torch.arange(sequences * length * 4).view(sequences, length, 4),
        }
        ours = Layout.bshd_zigzag(sequences, length, **place)
        for group in (None, parallel_state.get_context_parallel_group()):
            cut = get_batch_on_this_cp_rank(dict(whole), cp_group=group)
            found = {
                name: torch.equal(cut[name].flatten(0, 1), value.flatten(0, 1)[ours.positions])
                for name, value in whole.items()
            }
            found["shorter"] = cut["tokens"].shape == (sequences, length // layout.cp)
            print_comparison(found, layout=str(layout), sequences=sequences, length=length)


def print_comparison(found, **key):
    """Print what every rank found, on rank 0."""
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    if dist.get_rank() == 0:
        print(json.dumps({**key, "ranks": ranks}), flush=True)


def main(what, job):
    megatron.join_world()
    for layout in Job.read(Path(job)).layouts:
        with megatron.split_world(layout):
            {"side": side, "slices": slices}[what](layout)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
