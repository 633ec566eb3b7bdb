"""What a microbatch costs its rank in loss_func, next to Megatron's masked sum.

    python -m benchmarks.microbatch

One optimizer step has M = 64 microbatches of 12 and of 512 packed sequences, at CP 1 and 2. Ours:
``step.microbatch``, ``mb.reduce`` and ``mb.outputs`` with one report, and their guards. Flat: the
same operations in one function without objects (``flat.py``), the bound; at first its loss is
compared with ours. Megatron's: the sum of masked losses, the count and their report, as in
Megatron-LM's ``loss_func``.

Counted, in the second microbatch of a step: calls of this package's Python functions, operations
(``counting.py``), and their bytes per token. Timed: CPU microseconds, the 10th percentile over the
microbatches of steps that ran alternately on one thread of one process, and ours over the others'.
And CPU milliseconds of a whole step, the median: planned or not, M times loss_func and its backward
pass, and finished.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from time import thread_time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_lossagg
from benchmarks.counting import counted
from benchmarks.flat import flat
from benchmarks.rank_step import a_chunk
from megatron_lossagg import LossAggregator, Options
from megatron_lossagg.cpu import launch

M, STEPS, WARMUP = 64, 14, 2
TOKENS = 16
"""Of a sequence; the last trains nothing."""
SEQUENCES = (12, 512)
PARTS = ("microbatch", "reduce", "outputs")
"""What loss_func calls, in order."""
RANKS = "--ranks"
PACKAGE = str(Path(megatron_lossagg.__file__).parent)
_FILES = {
    str(Path(PACKAGE, "loop", "step.py")): {"microbatch"},
    str(Path(PACKAGE, "reduction", "microbatch.py")): {"reduce", "outputs"},
}
"""Where they are."""
_STAND_INS = str(Path(PACKAGE, "cpu"))
"""What replaces functions of torch on a machine without a GPU; its calls are left out."""

LossFunc = Callable[[Tensor], Tensor]


def main(arguments: list[str]) -> int:
    """Launch one and two ranks, or be one of them."""
    if arguments == [RANKS]:
        be_rank()
        return 0
    calls = f"calls ({', '.join(PARTS)})"
    names = ["CP", "sequences", calls, "operations", "bytes per token"]
    names += ["ours (us)", "flat (us)", "Megatron's (us)", "ours / flat", "ours / Megatron's"]
    names += [f"{M} of ours (ms)", f"{M} of Megatron's (ms)"]
    print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|", flush=True)
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
    for num_sequences in SEQUENCES:
        check_flat(aggregator, num_sequences)
        count = counts(aggregator, num_sequences)
        taken: dict[str, list[float]] = {"ours": [], "flat": [], "stock": []}
        whole: dict[str, list[float]] = {name: [] for name in taken}
        for number in range(STEPS):
            steps = {
                "ours": of_ours(aggregator, num_sequences),
                "flat": of_flat(aggregator, num_sequences),
                "stock": of_stock(num_sequences),
            }
            for name, step in steps.items():
                begin = thread_time()
                times = [*step]
                if number >= WARMUP:
                    taken[name] += times
                    whole[name].append(1e3 * (thread_time() - begin))
        ours, bound, stock = (quantiles(times, n=10)[0] for times in taken.values())
        if dist.get_rank() == 0:
            row = f"{aggregator.cp_size} | {num_sequences} | {count} | {ours:.0f} | {bound:.0f}"
            row += f" | {stock:.1f} | {ours / bound:.2f} | {ours / stock:.0f}"
            row += f" | {median(whole['ours']):.0f} | {median(whole['stock']):.0f}"
            print(f"| {row} |", flush=True)
    dist.destroy_process_group()


@dataclass(frozen=True)
class Counts:
    """What one call of loss_func did."""

    calls_of_parts: tuple[int, ...]
    """Of each of ``PARTS``."""
    operations: int
    bytes_per_token: float

    @property
    def calls(self) -> int:
        """Of all parts."""
        return sum(self.calls_of_parts)

    def __str__(self) -> str:
        calls = f"{self.calls} ({', '.join(map(str, self.calls_of_parts))})"
        return f"{calls} | {self.operations} | {self.bytes_per_token:.0f}"


def drawn(num_losses: int) -> Tensor:
    """Draw the losses of a microbatch."""
    return torch.rand(num_losses, requires_grad=True)


def counts(
    aggregator: LossAggregator,
    num_sequences: int,
    losses: Callable[[int], Tensor] = drawn,
) -> Counts:
    """Count in the second and in the third microbatch of a step, which is trained.

    ``losses``: makes those of a microbatch, of their number.
    """
    found: dict[int, Any] = {}

    def listened(number: int, loss_func: LossFunc, x: Tensor) -> Tensor:
        if number == 1:
            with counted() as found[number]:
                return loss_func(x)
        if number == 2:
            calls = found[number] = _Calls()
            sys.setprofile(calls)
            try:
                return loss_func(x)
            finally:
                sys.setprofile(None)
        return loss_func(x)

    for number, (loss_func, num_losses) in enumerate(our_losses(aggregator, num_sequences)):
        x = losses(num_losses)
        (listened(number, loss_func, x) / M).backward()  # type: ignore[no-untyped-call]
    operations = found[1]
    return Counts(
        calls_of_parts=tuple(found[2].of_part.values()),
        operations=operations.num_operations,
        bytes_per_token=operations.bytes / (num_sequences * TOKENS),
    )


class _Calls:
    """Counts calls of this package's functions by part; a profile function."""

    def __init__(self) -> None:
        self.of_part = dict.fromkeys(PARTS, 0)
        self._part = PARTS[0]

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE) and not name.startswith(_STAND_INS):
            if frame.f_code.co_name in _FILES.get(name, ()):
                self._part = frame.f_code.co_name
            self.of_part[self._part] += 1


def of_ours(aggregator: LossAggregator, num_sequences: int) -> Iterator[float]:
    """Train a step; yield the microseconds of each microbatch."""
    for loss_func, num_losses in our_losses(aggregator, num_sequences):
        yield microseconds(loss_func, num_losses)


def our_losses(aggregator: LossAggregator, num_sequences: int) -> Iterator[tuple[LossFunc, int]]:
    """Begin a step; yield loss_func and the number of losses of each microbatch, and finish it."""
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
                loss = mb.reduce(x)
                return mb.outputs(loss, report={"loss": loss})[0]

            yield loss_func, len(mask) // aggregator.cp_size


def of_flat(aggregator: LossAggregator, num_sequences: int) -> Iterator[float]:
    """Yield the microseconds of each microbatch of the flat function."""
    loss_func = flat_loss(aggregator, num_sequences)
    for _ in range(M):
        yield microseconds(lambda x: loss_func(x)[0], num_sequences * TOKENS // aggregator.cp_size)


def flat_loss(aggregator: LossAggregator, num_sequences: int) -> Callable[[Tensor], Any]:
    """Return the flat function of a step of the same microbatches."""
    cp = {"cp_size": aggregator.cp_size, "cp_rank": aggregator.cp_rank}
    return flat(num_sequences, TOKENS, num_microbatches=M, **cp)


def check_flat(aggregator: LossAggregator, num_sequences: int) -> None:
    """Compare loss and gradient: only a function that computes the same loss is a bound."""
    bound = flat_loss(aggregator, num_sequences)
    for loss_func, num_losses in our_losses(aggregator, num_sequences):
        x = torch.rand(num_losses, requires_grad=True)
        loss = loss_func(x)
        (loss / M).backward()  # type: ignore[no-untyped-call]
        ours, x.grad = x.grad, None
        other = bound(x)[0]
        (other / M).backward()
        torch.testing.assert_close([loss, ours], [other, x.grad])


def of_stock(num_sequences: int) -> Iterator[float]:
    """Yield the microseconds of each microbatch of Megatron's own sum."""
    mask = torch.ones(num_sequences * TOKENS // dist.get_world_size())

    def loss_func(x: Tensor) -> Tensor:
        loss, num_tokens = (x * mask).sum(), mask.sum()
        torch.stack([loss.detach(), num_tokens])
        return loss

    for _ in range(M):
        yield microseconds(loss_func, len(mask))


def microseconds(loss_func: LossFunc, num_losses: int) -> float:
    """Return the CPU time of one call; its loss is trained afterwards."""
    x = torch.rand(num_losses, requires_grad=True)
    begin = thread_time()
    loss = loss_func(x)
    spent = 1e6 * (thread_time() - begin)
    (loss / M).backward()  # type: ignore[no-untyped-call]
    return spent


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
