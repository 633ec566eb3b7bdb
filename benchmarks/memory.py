"""Resident memory of a long run: stock, with the package, and with a record.

    python -m benchmarks.memory [STEPS]

Each run is a process of its own on one rank. A step has two microbatches of packed sequences whose
lengths differ from step to step, and their backward passes. Printed: the resident memory after a
tenth of the steps and after the last.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.rank_step import a_chunk
from megatron_lossagg import LossAggregator, Options
from megatron_lossagg.cpu import launch

KINDS = ("stock", "sample_mean", "sample_mean with a record")
STEPS = 20_000
M = 2
MIB = 2**20
RANK = "--rank"


def main(arguments: list[str]) -> int:
    """Launch each kind of run, or be its rank."""
    if arguments[:1] == [RANK]:
        be_rank(arguments[1], int(arguments[2]))
        return 0
    steps = int(arguments[0]) if arguments else STEPS
    print(f"| run | MiB after {steps // 10:,} steps | after {steps:,} |\n|---|---|---|", flush=True)
    for kind in KINDS:
        root = str(Path(__file__).resolve().parent.parent)
        command = ["-m", "benchmarks.memory", RANK, kind, str(steps)]
        done = launch(command, processes=1, timeout=3600, env={"PYTHONPATH": root})
        if done.returncode:
            raise SystemExit(f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        print("\n".join(row for row in done.stdout.splitlines() if row.startswith("|")), flush=True)
    return 0


def be_rank(kind: str, steps: int) -> None:
    """Train and print the memory."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    chunk = a_chunk()
    with tempfile.TemporaryDirectory() as folder:
        record = f"{folder}/record.jsonl" if kind == KINDS[2] else None
        options = Options(probe=False, record=record)
        aggregator = None
        if kind != KINDS[0]:
            aggregator = LossAggregator(chunk, "sample_mean", options=options)
        early = 0.0
        for number in range(steps):
            chunk.zero_grad_buffer()
            lengths = [3 + (number + sequence) % 14 for sequence in range(8)]
            if aggregator is None:
                stock(chunk, lengths)
            else:
                ours(aggregator, chunk, lengths)
            if number + 1 == steps // 10:
                early = resident()
        print(f"| {kind} | {early:.1f} | {resident():.1f} |")
    dist.destroy_process_group()


def losses_of(chunk: torch.nn.Module, tokens: int) -> torch.Tensor:
    """Run the model for some tokens."""
    return chunk(torch.ones(tokens, 2)).sum(dim=1)


def stock(chunk: torch.nn.Module, lengths: list[int]) -> None:
    """Train a step as Megatron-LM does: a mean of token means."""
    for _ in range(M):
        losses = losses_of(chunk, sum(lengths))
        (losses.sum() / len(losses) / M).backward()


def ours(aggregator: LossAggregator, chunk: torch.nn.Module, lengths: list[int]) -> None:
    """Train a step under the aggregation, with its guards."""
    mask = torch.ones(sum(lengths), dtype=torch.bool)
    ends = torch.tensor(lengths).cumsum(0) - 1
    mask[ends] = False
    active = [length - 1 for length in lengths] * M
    with aggregator.step(active, num_microbatches=M) as step:
        for index in range(M):
            first = index * len(lengths)
            mb = step.microbatch(range(first, first + len(lengths)), mask, lengths=lengths)
            (mb.outputs(mb.reduce(losses_of(chunk, len(mask))))[0] / M).backward()


def resident() -> float:
    """Return this process's resident memory, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
