"""Checkpoints that a killed run resumes from exactly.

A checkpoint is a folder with one file per rank. It gets its name when all ranks have written,
so a folder with a checkpoint's name is whole. Files that a run appends to are truncated to
their length at the checkpoint.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from model import OptimizerWithSchedule, Processes

PHASES = ("warmup", "rl")
_KEPT = 2
_NAME = re.compile(r"(warmup|rl)_(\d{6})")


class CheckpointError(ValueError):
    """A checkpoint that this run cannot resume from."""


@dataclass(frozen=True, order=True)
class Position:
    """How far a run has come: steps done in a phase."""

    phase_index: int
    step: int

    @property
    def phase(self) -> str:
        """``warmup`` or ``rl``."""
        return PHASES[self.phase_index]

    @property
    def name(self) -> str:
        """The checkpoint's folder; names sort as positions do."""
        return f"{self.phase}_{self.step:06d}"


def save_checkpoint(
    folder: Path,
    position: Position,
    *,
    processes: Processes,
    settings: dict[str, Any],
    model: DistributedDataParallel,
    optimizer: OptimizerWithSchedule,
    appended_files: list[Path],
) -> None:
    """Write model, optimizer, schedule, random states and file lengths; three barriers.

    ``settings``: what a resumed run must have in common with this one.
    """
    unfinished = folder / "unfinished"
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    state = {
        "processes": asdict(processes),
        "settings": settings,
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "rng_tracker": get_cuda_rng_tracker().get_states(),
        "file_bytes": {path.name: path.stat().st_size for path in appended_files if path.exists()},
    }
    torch.save(state, unfinished / f"rank_{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        unfinished.rename(folder / position.name)
        for old in _positions(folder)[:-_KEPT]:
            shutil.rmtree(folder / old.name)
    dist.barrier()


def latest_position(folder: Path) -> Position | None:
    """Find the newest whole checkpoint."""
    positions = _positions(folder)
    return positions[-1] if positions else None


def read_checkpoint(
    folder: Path, position: Position, *, processes: Processes, settings: dict[str, Any]
) -> dict[str, Any]:
    """Read this rank's file; raises :class:`CheckpointError` where the run is another one."""
    # Rank 0 exists at every layout, so that each rank sees the same mismatch.
    first = _read(folder / position.name / "rank_0.pt")
    saved = Processes(**first["processes"])
    if saved != processes:
        raise CheckpointError(
            f"{folder / position.name} was written at {saved}, this run is {processes}: resume "
            f"with --nproc_per_node {saved.world_size} --tensor-model-parallel-size {saved.tensor} "
            f"--pipeline-model-parallel-size {saved.pipeline} --context-parallel-size "
            f"{saved.context}, or start anew with another --output"
        )
    for name, value in settings.items():
        before = first["settings"].get(name)
        if before != value:
            raise CheckpointError(
                f"{folder / position.name} was written with {name} {before!r}, "
                f"this run has {value!r}: resume with the same, or start anew with another --output"
            )
    return _read(folder / position.name / f"rank_{dist.get_rank()}.pt")


def restore(
    state: dict[str, Any], model: DistributedDataParallel, optimizer: OptimizerWithSchedule
) -> None:
    """Put weights, optimizer, schedule and random states back."""
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    get_cuda_rng_tracker().set_states(state["rng_tracker"])


def cut_back(file_bytes: Mapping[str, int], appended_files: list[Path]) -> None:
    """Drop what was appended after a checkpoint; a file it does not know is emptied."""
    for path in appended_files:
        if path.exists():
            with path.open("r+b") as file:
                file.truncate(file_bytes.get(path.name, 0))


def _positions(folder: Path) -> list[Position]:
    names = (_NAME.fullmatch(path.name) for path in folder.glob("*"))
    return sorted(Position(PHASES.index(name[1]), int(name[2])) for name in names if name)


def _read(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}): delete its folder to go on from the one before"
        ) from error
    return state
