"""What stays the same over a run, and the files that it writes and goes on from."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import task
import torch
import torch.distributed as dist
from checkpoint import (
    CheckpointError,
    Position,
    cut_back,
    latest_position,
    read_checkpoint,
    save_checkpoint,
)
from metrics import Ratios, divide_over_ranks
from model import OptimizerWithSchedule, Processes, sync_weights
from rollouts import Rollout, append_rollouts, count_right

from megatron_lossagg import LossAggregator

NUM_HELD_OUT = 200


@dataclass(frozen=True, kw_only=True)
class Run:
    """What stays the same over a run."""

    args: argparse.Namespace
    processes: Processes
    model: Any
    aggregator: LossAggregator

    @property
    def dp_rank(self) -> int:
        """This rank's place in the data-parallel group."""
        return dist.get_rank(self.aggregator.dp_group)

    @property
    def output(self) -> Path:
        """Where everything is written."""
        path: Path = self.args.output
        return path


def record(run: Run, rollouts: list[Rollout]) -> None:
    """Append the step's rollouts of all data-parallel ranks, in rank order."""
    gathered: list[Any] = [None] * run.processes.data
    dist.all_gather_object(gathered, rollouts, group=run.aggregator.dp_group)
    if dist.get_rank() == 0:
        append_rollouts(run.args.record, [rollout for of_rank in gathered for rollout in of_rank])


def appended_files(run: Run) -> list[Path]:
    """Name the files that steps add lines to."""
    record_file = [run.args.record] if run.args.record is not None else []
    return [run.output / "metrics.jsonl", *record_file]


def settings(run: Run) -> dict[str, Any]:
    """Name what a resumed run must have in common with the killed one."""
    free = {"output", "resume", "save_interval", "steps", "record", "rollouts", "start_from"}
    return {f"--{k.replace('_', '-')}": v for k, v in vars(run.args).items() if k not in free}


def save_if_due(run: Run, position: Position, optimizer: OptimizerWithSchedule) -> None:
    """Write a checkpoint every ``--save-interval`` steps of a phase."""
    if run.args.save_interval and position.step % run.args.save_interval == 0:
        save_checkpoint(
            run.output / "checkpoints",
            position,
            processes=run.processes,
            settings=settings(run),
            model=run.model,
            optimizer=optimizer,
            appended_files=appended_files(run),
        )


def resumed(run: Run) -> tuple[Position, dict[str, Any] | None]:
    """Return where to go on, and the newest checkpoint under ``--resume``; one barrier."""
    position, state = (
        Position(0 if run.args.warmup_steps and run.args.mode == "online" else 1, 0),
        None,
    )
    metrics, folder = run.output / "metrics.jsonl", run.output / "checkpoints"
    if metrics.exists() and not run.args.resume:
        raise CheckpointError(
            f"{metrics} is another run's, and this one was not asked to resume it: add "
            "--resume, or give another --output"
        )
    newest = latest_position(folder)
    if run.args.resume and newest is not None:
        position = newest
        state = read_checkpoint(folder, newest, processes=run.processes, settings=settings(run))
    dist.barrier()  # every rank has looked: from here on rank 0 writes
    if run.args.resume and dist.get_rank() == 0:
        cut_back({} if state is None else state["file_bytes"], appended_files(run))
    return position, state


def accuracy(run: Run, sampler: torch.nn.Module) -> float:
    """Return the share of held-out problems that greedy responses solve, shared over ranks."""
    sync_weights(sampler, run.model)
    problems = task.held_out_problems(NUM_HELD_OUT)
    own = split(NUM_HELD_OUT, run.processes.data, run.dp_rank)
    right = count_right(sampler, [problems[i] for i in own])
    return divide_over_ranks({"accuracy": (right, len(own))})["accuracy"] or 0.0


def split(count: int, num_parts: int, part: int) -> range:
    """Return the positions of one of ``num_parts`` runs that are as equal as can be."""
    return range(part * count // num_parts, (part + 1) * count // num_parts)


def rollout_ratios(rollouts: list[Rollout]) -> Ratios:
    """Return reward, and mean response length of right and of wrong answers."""
    right = [len(r.mask) for r in rollouts if r.reward > 0]
    wrong = [len(r.mask) for r in rollouts if r.reward <= 0]
    return {
        "reward": (sum(r.reward for r in rollouts), len(rollouts)),
        "response_length_right": (sum(right), len(right)),
        "response_length_wrong": (sum(wrong), len(wrong)),
    }
