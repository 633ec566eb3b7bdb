"""CPU milliseconds that a microbatch costs its rank in loss_func, next to Megatron's masked sum.

    python -m benchmarks.microbatch

One optimizer step has M = 64 microbatches of 4 and of 512 packed sequences, at CP 1 and 2. Ours:
``step.microbatch``, ``mb.reduce`` and ``mb.outputs``, with their guards; a GPU computes meanwhile.
Megatron's: the sum of masked losses and the count, as in Megatron-LM's ``loss_func``. Each is the
median over the microbatches of six steps that ran alternately, on one thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import thread_time

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.rank_step import a_chunk
from megatron_lossagg import LossAggregator, Options
from megatron_lossagg.cpu import launch

M, STEPS, WARMUP = 64, 8, 2
TOKENS = 16
"""Of a sequence; the last trains nothing."""
RANKS = "--ranks"

LossFunc = Callable[[Tensor], Tensor]


def main(arguments: list[str]) -> int:
    """Launch one and two ranks, or be one of them."""
    if arguments == [RANKS]:
        be_rank()
        return 0
    print("| CP | sequences | ours (ms) | Megatron's (ms) |\n|---|---|---|---|", flush=True)
    for processes in (1, 2):
        root = str(Path(__file__).resolve().parent.parent)
        command = ["-m", "benchmarks.microbatch", RANKS]
        done = launch(command, processes=processes, timeout=300, env={"PYTHONPATH": root})
        if done.returncode:
            raise SystemExit(f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        print("\n".join(row for row in done.stdout.splitlines() if row.startswith("|")), flush=True)
    return 0


def be_rank() -> None:
    """Measure on every rank; the first prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    chunk = a_chunk(splits_sequences=True)
    aggregator = LossAggregator(chunk, "sample_mean", options=Options(probe=False))
    for num_sequences in (4, 512):
        ours, stock = [], []
        for number in range(STEPS):
            spent = [*of_ours(aggregator, num_sequences)], [*of_stock(num_sequences)]
            if number >= WARMUP:
                ours += spent[0]
                stock += spent[1]
        if dist.get_rank() == 0:
            medians = f"{median(ours):.2f} | {median(stock):.2f}"
            print(f"| {aggregator.cp_size} | {num_sequences} | {medians} |", flush=True)
    dist.destroy_process_group()


def of_ours(aggregator: LossAggregator, num_sequences: int) -> Iterator[float]:
    """Train a step; yield the milliseconds of each microbatch."""
    offsets = torch.arange(num_sequences + 1) * TOKENS
    mask = torch.ones(num_sequences * TOKENS)
    mask[TOKENS - 1 :: TOKENS] = 0
    microbatch = [index // num_sequences for index in range(num_sequences * M)]
    step = aggregator.step(
        [TOKENS - 1] * len(microbatch), microbatch=microbatch, num_microbatches=M
    )
    with step:
        for number in range(M):
            sequences = range(number * num_sequences, (number + 1) * num_sequences)

            def loss_func(x: Tensor, sequences: range = sequences) -> Tensor:
                mb = step.microbatch(sequences, mask, cu_seqlens=offsets)
                return mb.outputs(mb.reduce(x))[0]

            yield milliseconds(loss_func, len(mask) // aggregator.cp_size)


def of_stock(num_sequences: int) -> Iterator[float]:
    """Yield the milliseconds of each microbatch of Megatron's own sum."""
    mask = torch.ones(num_sequences * TOKENS // dist.get_world_size())

    def loss_func(x: Tensor) -> Tensor:
        loss, num_tokens = (x * mask).sum(), mask.sum()
        torch.stack([loss.detach(), num_tokens])
        return loss

    for _ in range(M):
        yield milliseconds(loss_func, len(mask))


def milliseconds(loss_func: LossFunc, num_losses: int) -> float:
    """Return the CPU time of one call; its loss is trained afterwards."""
    x = torch.rand(num_losses, requires_grad=True)
    begin = thread_time()
    loss = loss_func(x)
    spent = 1e3 * (thread_time() - begin)
    (loss / M).backward()  # type: ignore[no-untyped-call]
    return spent


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
