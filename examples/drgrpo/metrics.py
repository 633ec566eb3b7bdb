"""metrics.jsonl, TensorBoard and the progress bar.

A metric is a (total, count) pair until every rank's are added, and is divided once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

Ratios = dict[str, tuple[float, float]]

_PRINT_EVERY = 10


def add_reports(reports: Iterable[Mapping[str, Tensor]]) -> Ratios:
    """Add what the microbatches' loss functions reported, ``[total, count]`` each."""
    sums: dict[str, tuple[float, float]] = {}
    for report in reports:
        for name, pair in report.items():
            total, count = sums.get(name, (0.0, 0.0))
            sums[name] = (total + float(pair[0]), count + float(pair[1]))
    return sums


def divide_over_ranks(ratios: Ratios) -> dict[str, float | None]:
    """Add every rank's pairs and divide; None where the count is 0. One all_gather_object.

    Only the last pipeline stage has a loss, and its tensor-parallel ranks have the same.
    """
    has_loss = parallel_state.is_pipeline_last_stage()
    reports = has_loss and parallel_state.get_tensor_model_parallel_rank() == 0
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, ratios if reports else {})
    sums: Ratios = {}
    for of_rank in gathered:
        for name, (total, count) in of_rank.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + total, before[1] + count)
    return {name: total / count if count else None for name, (total, count) in sums.items()}


class MetricsLog:
    """Writes one line per step on rank 0; does nothing on the others.

    ``first_step``: steps already written, over both phases, for TensorBoard to overwrite what
    a killed run wrote after its checkpoint.
    """

    def __init__(self, folder: Path, *, num_steps: int, first_step: int) -> None:
        self._count = first_step
        self._started = time.perf_counter()
        self._speaks = dist.get_rank() == 0
        if self._speaks:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / "metrics.jsonl").open("a")
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)
            self._terminal = sys.stderr.isatty()
            self._bar = tqdm(total=num_steps, initial=first_step, disable=not self._terminal)

    def write(self, phase: str, step: int, metrics: Mapping[str, float | None]) -> None:
        """Write a step's line, or the phase ``start``'s; ``seconds``: since the line before."""
        seconds, self._started = time.perf_counter() - self._started, time.perf_counter()
        if not self._speaks:
            return
        is_step = phase != "start"
        self._count += is_step
        line = {"phase": phase, "step": step, **metrics, "seconds": round(seconds, 4)}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        for name, value in metrics.items():
            if value is not None:
                self._board.add_scalar(f"{phase}/{name}", value, self._count)
        self._bar.set_description(phase, refresh=False)
        shown = [
            n for n in ("loss", "grad_norm", "reward", "accuracy") if metrics.get(n) is not None
        ]
        text = "  ".join(f"{name} {metrics[name]:.4g}" for name in shown)
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(int(is_step))
        if not self._terminal and (step % _PRINT_EVERY == 0 or "accuracy" in metrics):
            print(f"{phase} {step}  {text}  {seconds:.2f} s", flush=True)

    def note(self, text: str) -> None:
        """Print a line beside the progress bar."""
        if self._speaks:
            tqdm.write(text)
            sys.stdout.flush()

    def __enter__(self) -> MetricsLog:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the files."""
        if self._speaks:
            self._bar.close()
            self._board.close()
            self._file.close()
