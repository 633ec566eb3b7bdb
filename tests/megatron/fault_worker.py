"""A step in which something goes wrong.

``python fault_worker.py FAULT``, run under torch.distributed.run. ``killed LAYOUT FILE``: the last
rank kills itself in loss_func of its second microbatch and leaves the time in FILE.
``unwatched FOLDER``, on one process: ranks that no launcher watches lose one; a row per loss.
``nan``: a loss of one rank is NaN. ``stock``: what stock Megatron-Core does wrong by itself; a row
per fault.
"""

import multiprocessing
import os
import signal
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import begin, print_row
from stock_step import gradients, run_of, stock_model, stock_step

import megatron_lossagg.cpu as cpu
from megatron_lossagg import Aggregation
from megatron_lossagg.verify.cases import Case
from megatron_lossagg.verify.job import LOSS_SCALINGS
from megatron_lossagg.verify.parallelism import Parallelism
from megatron_lossagg.verify.small_gpt import forward, reported, run_schedule, token_losses
from megatron_lossagg.verify.step_data import zigzag
from megatron_lossagg.verify.world import parallel_state, split_world

TOKEN_MEAN = Case(aggregation=Aggregation("token_mean"))
LAYOUTS = {
    "DP2": Parallelism(dp=2),
    "PP2": Parallelism(pp=2),
    "DP2xCP2": Parallelism(dp=2, cp=2, microbatches=4),
}
LOST = {
    "DP2-killed": (LAYOUTS["DP2"], signal.SIGKILL),
    "PP2-killed": (LAYOUTS["PP2"], signal.SIGKILL),
    "DP2-stopped": (LAYOUTS["DP2"], signal.SIGSTOP),
}
HANGS_AFTER = 150
"""Seconds until a rank that has not ended, start and training included, is called hung."""


def our_step(run, meddle, *, main=1):
    """Run a step of token_mean times ``main``; return the loss that the last stage reports.

    ``meddle(losses, batch, number)`` returns what is reduced.
    """
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    def forward_step(iterator, chunk):
        number, batch = next(iterator)
        output = forward(chunk, batch, run.parallelism)

        def loss_func(output):
            losses = meddle(token_losses(output, batch, run.parallelism), batch, number)
            mb = step.microbatch(batch.sequences, batch.mask, cu_seqlens=batch.offsets)
            loss = mb.reduce(losses)
            return mb.outputs(loss * main, report={"loss": loss})

        return output, loss_func

    with run.begin(TOKEN_MEAN) as step:
        reports = run_schedule(forward_step, run.chunks, list(enumerate(run.batches)))
    return reported(reports, "loss") if last else None


def killed(name, file):
    begin()
    train(LAYOUTS[name], losing_the_last_rank(signal.SIGKILL, Path(file)))


def losing_the_last_rank(by, file):
    def meddle(losses, batch, number):
        if number == 1 and dist.get_rank() == dist.get_world_size() - 1:
            file.write_text(str(time.time()))
            os.kill(os.getpid(), by)
        return losses

    return meddle


def unwatched(folder):
    """Run each of ``LOST`` on two processes, and print how and when the first one ended."""
    fork = multiprocessing.get_context("fork")  # Megatron-Core is imported once
    for name, (layout, by) in LOST.items():
        meeting_folder = Path(folder, name)
        meeting_folder.mkdir()
        ranks = [
            fork.Process(target=lone_rank, args=(r, meeting_folder, layout, by)) for r in range(2)
        ]
        for rank in ranks:
            rank.start()
        ranks[0].join(HANGS_AFTER)
        seconds = time.time() - float((meeting_folder / "time").read_text())
        ended = ranks[0].exitcode
        for rank in ranks:
            rank.kill()
            rank.join()
        outcome = {"lost": name, "ended": ended, "other": ranks[1].exitcode, "seconds": seconds}
        print_row(outcome)


def lone_rank(rank, meeting_folder, layout, by):
    meet = {
        "init_method": f"file://{meeting_folder}/meet",
        "rank": rank,
        "world_size": layout.world_size,
    }
    begin(**meet)
    train(layout, losing_the_last_rank(by, meeting_folder / "time"), timeout=timedelta(seconds=10))


def nan():
    """Print which loss is made NaN: its place in the sequence is found without the package."""
    layout = LAYOUTS["DP2xCP2"]

    def meddle(losses, batch, number):
        if number != 1 or dist.get_rank() != 3:
            return losses
        index = int(batch.mask_here[: -layout.sequence_multiple // layout.cp].nonzero()[-1])
        offsets = batch.offsets.tolist()
        cp_rank = parallel_state.get_context_parallel_rank()
        position = zigzag(offsets, layout.cp, cp_rank)[index]
        segment = max(s for s, begin in enumerate(offsets[:-1]) if begin <= position)
        where = {
            "microbatch": number,
            "sequences": batch.sequences[:-1],
            "sequence": batch.sequences[segment],
        }
        where |= {"token": position - offsets[segment], "time": time.time()}
        print_row(where, of_first=False)
        return losses.index_fill(0, torch.tensor([index]), torch.nan)

    begin()
    train(layout, meddle)


def train(layout, meddle, *, timeout=None):
    """Run a step; ``timeout``: of the gradients' all-reduce, minutes in Megatron-Core."""
    with split_world(layout):
        run = run_of(layout)
        if timeout is not None:
            dist.distributed_c10d._set_pg_timeout(timeout, run.chunks[0].dp_cp_group)
        our_step(run, meddle)
    print("THE STEP WENT THROUGH", flush=True)


def a_masked_microbatch_under_mtp(layout):
    """Compare stock and this package with only MTP's loss and a masked microbatch on rank 0."""
    found = {}
    for loss_scaling in LOSS_SCALINGS:
        per_token = loss_scaling == "per_token"
        run = run_of(layout, per_token=per_token)
        if dist.get_rank() == 0:
            first = run.batches[0]
            masks = ("mask", "mask_here", "side_mask_here")
            nothing = {name: torch.zeros_like(getattr(first, name)) for name in masks}
            run.batches[0] = replace(first, **nothing)
        model = stock_model(layout, per_token=per_token)
        _, stock = stock_step(model, run.batches, layout, lambda loss, n: (loss * 0, n))
        loss = our_step(run, lambda losses, batch, number: losses, main=0)
        found[loss_scaling] = {
            "stock_nan": any(bool(g.isnan().any()) for g in stock),
            "nan_where_stock_is": all(
                torch.equal(ours.isnan(), theirs.isnan())
                for ours, theirs in zip(gradients(run.chunks), stock, strict=True)
            ),
            "our_loss": loss,
        }
    return found


def copies_of_experts_over_tensor_ranks(layout):
    """Compare the two ranks' gradients of an expert that both hold, and of the router."""
    model = stock_model(layout)
    stock_step(model, run_of(layout).batches, layout)
    apart = {}
    for shard in cpu.named_shards(model):
        own_gradient = shard.parameter.main_grad
        both = [torch.empty_like(own_gradient) for _ in range(2)]
        dist.all_gather(both, own_gradient)
        if "experts" in shard.name or "router" in shard.name:
            kind = "experts" if "experts" in shard.name else "router"
            error = float((both[0] - both[1]).norm() / both[0].norm().clamp_min(1e-300))
            apart[kind] = max(error, apart.get(kind, 0.0))
    return apart


def counts_past_int32(layout):
    """Measure N times the gradient over the undivided one, for N below 2^31 and N = 2^31."""
    model, batches = stock_model(layout, per_token=True), run_of(layout).batches

    def step(count):
        """Run a step in which this rank's first microbatch returns ``count``, the others 0."""
        counts = iter([count, *(0 for _ in batches[1:])])

        def returns(loss, num_tokens):
            return loss, num_tokens.new_tensor(next(counts))

        return stock_step(model, batches, layout, returns)[1]

    undivided = step(1 - dist.get_rank())  # N = 1
    return {str(2 * n): 2 * n * ratio(step(n), undivided) for n in (2**29, 2**30)}


def ratio(left, right):
    """Return the multiple of one gradient that another is; both have one buffer."""
    (left,), (right,) = left, right
    factor = float((left * right).sum() / (right * right).sum())
    assert (left - factor * right).norm() < 1e-12 * left.norm()
    return factor


def loss_scaling_flipped_after_wrapping(layout):
    """Divide the gradient of a model wrapped in the other loss scaling by the right one."""
    batches, found = run_of(layout).batches, {}
    for loss_scaling in LOSS_SCALINGS:
        per_token = loss_scaling == "per_token"
        _, right = stock_step(stock_model(layout, per_token=per_token), batches, layout)
        wrong = stock_model(layout, per_token=not per_token)
        wrong[0].config.calculate_per_token_loss = per_token
        _, flipped = stock_step(wrong, batches, layout)
        found[loss_scaling] = ratio(flipped, right)
    return found


def two_outputs_per_token(layout):
    """Divide router gradients without a returned count by those with one; return N too."""
    model, batches = stock_model(layout, per_token=True), run_of(layout).batches
    _, three = stock_step(model, batches, layout, lambda loss, n: (loss * 0, n))
    _, two = stock_step(model, batches, layout, lambda loss, n: (loss * 0,))
    count = torch.tensor(sum(int(batch.mask_here.sum()) for batch in batches))
    dist.all_reduce(count)
    factors = [float(a.norm() / b.norm()) for a, b in zip(two, three, strict=True)]
    return {"factors": factors, "N": int(count)}


STOCK = {
    a_masked_microbatch_under_mtp: Parallelism(dp=2, mtp=True, float32=True),
    copies_of_experts_over_tensor_ranks: Parallelism(tp=2, sequence_parallel=True, moe=True),
    counts_past_int32: LAYOUTS["DP2"],
    loss_scaling_flipped_after_wrapping: LAYOUTS["DP2"],
    two_outputs_per_token: Parallelism(dp=2, moe=True),
}


def stock():
    begin()
    for fault, layout in STOCK.items():
        with split_world(layout):
            found = fault(layout)
        print_row({fault.__name__: found})
    dist.destroy_process_group()


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    {"killed": killed, "nan": nan, "stock": stock, "unwatched": unwatched}[what](*arguments)
