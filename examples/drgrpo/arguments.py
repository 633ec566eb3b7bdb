"""The command line of ``train.py``: its flags, and the contradictions between them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from model import Processes

from megatron_lossagg import add_loss_aggregation_args


def parse_args(
    argv: list[str] | None = None, *, description: str | None = None
) -> argparse.Namespace:
    """Read the flags; those that Megatron-LM has too have the same meaning."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", choices=("online", "replay"), default="online")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--save-interval", type=int, default=0, metavar="STEPS", help="0: never")
    parser.add_argument("--eval-interval", type=int, default=10, metavar="STEPS")

    model = parser.add_argument_group("model")
    model.add_argument("--num-layers", type=int, default=2)
    model.add_argument("--hidden-size", type=int, default=64)
    model.add_argument("--num-attention-heads", type=int, default=4)

    split_over = parser.add_argument_group("layout")
    split_over.add_argument("--tensor-model-parallel-size", type=int, default=1)
    split_over.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    split_over.add_argument("--context-parallel-size", type=int, default=1)
    split_over.add_argument("--num-microbatches", type=int, default=1, help="M, on each rank")
    split_over.add_argument(
        "--calculate-per-token-loss",
        action="store_true",
        help="how Megatron scales a loss, never which one is trained",
    )

    warmup = parser.add_argument_group("supervised warm-up (online)")
    warmup.add_argument("--warmup-steps", type=int, default=600)
    warmup.add_argument("--warmup-batch-size", type=int, default=128, help="sequences per step")
    warmup.add_argument("--warmup-lr", type=float, default=3e-3)
    warmup.add_argument("--warmup-weight-decay", type=float, default=0.1)

    rl = parser.add_argument_group("reinforcement learning")
    rl.add_argument("--steps", type=int, default=60)
    rl.add_argument("--prompts-per-step", type=int, default=16)
    rl.add_argument("--samples-per-prompt", type=int, default=8)
    rl.add_argument("--steps-per-rollout", type=int, default=2, help="1: always on-policy")
    rl.add_argument("--lr", type=float, default=2e-4)
    rl.add_argument("--adam-eps", type=float, default=1e-5, help="PPO's customary 1e-5")
    rl.add_argument("--clip-grad", type=float, default=1.0)
    rl.add_argument("--clip-ratio", type=float, default=0.2)
    rl.add_argument("--kl-coefficient", type=float, default=0.01)
    rl.add_argument("--kl-aggregation", default="token_mean", metavar="MODE")

    files = parser.add_argument_group("rollouts")
    files.add_argument("--record", type=Path, metavar="FILE", help="write rollouts (online)")
    files.add_argument("--record-steps", type=int, default=20, help="of the first steps")
    files.add_argument("--rollouts", type=Path, metavar="FILE", help="what to replay")
    files.add_argument(
        "--start-from", type=Path, metavar="FILE", help="weights to start from, at any layout"
    )
    args = add_loss_aggregation_args(parser).parse_args(argv)
    fault = next(contradictions(args), None)
    if fault is not None:
        parser.error(fault)
    return args


def contradictions(args: argparse.Namespace) -> Iterator[str]:
    """Yield the contradictions between flags."""
    tp, pp, cp = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
    )
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if min(tp, pp, cp) < 1 or world_size % (tp * pp * cp):
        yield (
            f"got {world_size} processes for TP {tp} x PP {pp} x CP {cp}: give --nproc_per_node a "
            f"multiple of {tp * pp * cp}"
        )
        return
    dp, m = world_size // (tp * pp * cp), args.num_microbatches
    if args.mode == "replay" and args.rollouts is None:
        yield "--mode replay trains on recorded rollouts: give --rollouts FILE"
    if args.mode == "online":
        if tp * pp > 1:
            yield (
                "--mode online samples on each data-parallel rank, "
                f"got TP {tp} x PP {pp}: set both to 1, or use --mode replay"
            )
        if args.warmup_batch_size % (dp * m):
            yield (
                f"--warmup-batch-size {args.warmup_batch_size} is not a multiple of DP {dp} x "
                f"--num-microbatches {m}: change one of them"
            )
        if args.prompts_per_step % dp:
            yield (
                f"--prompts-per-step {args.prompts_per_step} is not a multiple of DP {dp}: change "
                "it, or the number of processes"
            )
        if args.save_interval % args.steps_per_rollout or args.steps % args.steps_per_rollout:
            yield (
                f"--save-interval {args.save_interval} and --steps {args.steps} are multiples of "
                f"--steps-per-rollout {args.steps_per_rollout}: a checkpoint holds no rollouts"
            )
        if args.warmup_steps == 0 and args.start_from is None:
            yield "--warmup-steps 0 leaves random weights: give --start-from FILE"


def processes_of(args: argparse.Namespace) -> Processes:
    """Return the layout that flags and torchrun ask for."""
    return Processes(
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        tensor=args.tensor_model_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        context=args.context_parallel_size,
    )
