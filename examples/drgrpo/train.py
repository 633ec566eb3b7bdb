"""Dr.GRPO on Megatron-Core, the whole algorithm top to bottom.

*online*: a supervised warm-up, then reinforcement learning with rollouts sampled from the
current weights (DP x CP)::

    torchrun --nproc_per_node 2 examples/drgrpo/train.py --mode online --output runs/online

*replay*: the same loss on recorded rollouts, at any layout::

    torchrun --nproc_per_node 2 examples/drgrpo/train.py --mode replay --output runs/replay \\
        --rollouts examples/drgrpo/data/rollouts.jsonl \\
        --start-from examples/drgrpo/data/warmup_weights.pt --pipeline-model-parallel-size 2

Which loss is trained is the choice of ``--loss-aggregation``; by default it is ``constant``
over the longest response, Dr.GRPO's.

Shape suffixes: P = packed tokens of a microbatch; T = those that this context-parallel rank
holds.
"""

# ruff: noqa: E402  Megatron-Core binds CUDA's functions when it is imported: install() is first.
from __future__ import annotations

import warnings

from megatron_lossagg import cpu

# Once per process and import: Transformer Engine and Apex are not installed.
warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
cpu.install(allow_cuda=True)  # a laptop's GPU stays unused

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import task
import torch
import torch.distributed as dist
from batch import Microbatch, Row, pack
from checkpoint import (
    CheckpointError,
    Position,
    cut_back,
    latest_position,
    read_checkpoint,
    restore,
    save_checkpoint,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from metrics import MetricsLog, Ratios, add_reports, divide_over_ranks
from model import (
    MAX_TOKENS,
    OptimizerWithSchedule,
    Processes,
    Shape,
    WeightsError,
    build_model,
    build_optimizer,
    build_sampler,
    load_weights,
    save_weights,
    start_processes,
    stop_processes,
    sync_weights,
)
from rollouts import (
    Rollout,
    RolloutFileError,
    append_rollouts,
    count_right,
    read_rollouts,
    roll_out,
)
from torch import Tensor

from megatron_lossagg import (
    Aggregation,
    LossAggregationError,
    LossAggregator,
)
from megatron_lossagg.loop.buffer import StepBuffer
from megatron_lossagg.loop.flags import add_loss_aggregation_args, aggregation_from_args
from megatron_lossagg.loop.step import MicrobatchLoss, Step
from megatron_lossagg.reduction.options import Options

NUM_HELD_OUT = 200
WARM_UP = Aggregation("token_mean")

# From per-token negative log-probabilities [T] and the microbatch's coefficients [T] to the
# microbatch's partial loss and the partial losses to report.
LossOf = Callable[[MicrobatchLoss, Tensor, tuple[Tensor, ...]], tuple[Tensor, dict[str, Tensor]]]


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


# --------------------------------------------------------------------------------------
# One optimizer step


def schedule_step(
    run: Run, step: Step, microbatches: Iterator[Microbatch], loss_of: LossOf
) -> Ratios:
    """Run Megatron's schedule, forward and backward, over one step's microbatches."""

    def forward_step(data: Iterator[Microbatch], model: Any) -> tuple[Tensor, Any]:
        mb = next(data)
        layout = run.aggregator.thd(mb.cu_seqlens_padded)
        here_T = layout.positions
        coefficients_T = tuple(c_P[here_T] for c_P in mb.coefficient_P)

        def loss_func(nll: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            its = step.microbatch(mb.sequences, mb.mask_P, layout=layout)
            loss, report = loss_of(its, nll.view(-1), coefficients_T)
            return its.outputs(loss, report={"loss": loss, **report})

        nll = model(
            mb.token_P[here_T][None],
            mb.position_P[here_T][None],
            None,
            labels=mb.label_P[here_T][None],  # Megatron's cross entropy: -log p of each label
            packed_seq_params=mb.packed_seq_params(),
        )
        return nll, loss_func

    run.model.zero_grad_buffer()
    with step:
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=microbatches,
            model=[run.model],
            num_microbatches=step.num_microbatches,
            seq_length=MAX_TOKENS,
            micro_batch_size=1,
            forward_only=False,
        )
    return add_reports(reports)


# --------------------------------------------------------------------------------------
# Supervised warm-up, streamed


def demonstrations(run: Run, first_step: int) -> Iterator[list[Row]]:
    """Yield microbatches of this data-parallel rank without end, as a data loader would."""
    args, dp = run.args, run.processes.data
    sequences_each = args.warmup_batch_size // (dp * args.num_microbatches)
    stream = (first_step - 1) * args.num_microbatches
    while True:
        first = (stream * dp + run.dp_rank) * sequences_each
        drawn = [task.demonstration(args.seed, first + i) for i in range(sequences_each)]
        yield [
            Row(
                tokens=task.encode(problem.prompt + response),
                mask=[1] * len(response),
            )
            for problem, response in drawn
        ]
        stream += 1


def warmup_step(run: Run, stream: Iterator[list[Row]]) -> Ratios:
    """Take one step of supervised fine-tuning: the mean over all response tokens of the step."""

    def loss_of(
        mb: MicrobatchLoss, nll_T: Tensor, coefficients_T: tuple[Tensor, ...]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return mb.reduce(nll_T), {}

    buffer = StepBuffer(stream, run.args.num_microbatches)
    plan = buffer.plan(
        WARM_UP,
        count=lambda sequences: [sequence.active_tokens for sequence in sequences],
        group=run.aggregator.dp_group,
    )
    step = run.aggregator.begin(plan, num_microbatches=run.args.num_microbatches)
    packed = (pack(mb.data, mb.sequences, run.processes.context) for mb in buffer)
    return schedule_step(run, step, packed, loss_of)


# --------------------------------------------------------------------------------------
# Dr.GRPO


def policy_loss(nll_T: Tensor, behaviour_T: Tensor, advantage_T: Tensor, clip: float) -> Tensor:
    """Return PPO's clipped loss of each token: ``-min(r A, clip(r, 1 - c, 1 + c) A)``.

    r is the token's probability over that under the weights that sampled it.
    """
    ratio_T = torch.exp(-nll_T - behaviour_T)
    clipped_T = ratio_T.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)


def kl_loss(nll_T: Tensor, reference_T: Tensor) -> Tensor:
    """Estimate each token's KL to the reference, never negative: d^2 / 2, d the log-ratio.

    Its gradient d * grad log p is that of the KL in expectation over the policy's own samples
    (k2; Liu et al. 2025, "Rethinking KL Regularization in RLHF"); k3's e^-d - 1 explodes on tokens
    that have become unlikely.
    """
    return (nll_T + reference_T).square() / 2


def rl_step(run: Run, rollouts: list[Rollout]) -> Ratios:
    """Take one step on this data-parallel rank's rollouts; the weights move in the caller."""
    args, m = run.args, run.args.num_microbatches
    sequences = [
        Row(
            tokens=rollout.tokens,
            mask=rollout.mask,
            coefficients=(
                [rollout.advantage] * len(rollout.mask),
                rollout.behaviour_logprobs,
                rollout.reference_logprobs,
            ),
        )
        for rollout in rollouts
    ]
    parts = [split(len(sequences), m, i) for i in range(m)]
    # All counts of the step are known here, before the first forward: one weight per sequence
    # follows.
    step = run.aggregator.step(
        active_tokens=[sequence.active_tokens for sequence in sequences],
        prompt=[rollout.prompt_id for rollout in rollouts],
        microbatch=[i for i, part in enumerate(parts) for _ in part],
        num_microbatches=m,
    )

    def loss_of(
        mb: MicrobatchLoss, nll_T: Tensor, coefficients_T: tuple[Tensor, ...]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        advantage_T, behaviour_T, reference_T = coefficients_T
        policy = mb.reduce(policy_loss(nll_T, behaviour_T, advantage_T, args.clip_ratio))
        # Same tokens, another aggregation, no collective.
        kl = mb.reduce(kl_loss(nll_T, reference_T), args.kl_aggregation)
        return policy + args.kl_coefficient * kl, {"pg_loss": policy, "kl": kl}

    packed = (pack([sequences[i] for i in part], part, run.processes.context) for part in parts)
    return schedule_step(run, step, packed, loss_of) | rollout_ratios(rollouts)


def rollout_ratios(rollouts: list[Rollout]) -> Ratios:
    """Return reward, and mean response length of right and of wrong answers."""
    right = [len(r.mask) for r in rollouts if r.reward > 0]
    wrong = [len(r.mask) for r in rollouts if r.reward <= 0]
    return {
        "reward": (sum(r.reward for r in rollouts), len(rollouts)),
        "response_length_right": (sum(right), len(right)),
        "response_length_wrong": (sum(wrong), len(wrong)),
    }


def split(count: int, num_parts: int, part: int) -> range:
    """Return the positions of one of ``num_parts`` runs that are as equal as can be."""
    return range(part * count // num_parts, (part + 1) * count // num_parts)


# --------------------------------------------------------------------------------------
# The runs


def train_online(run: Run) -> None:
    """Warm up, then alternate between sampling and training; resumes from a checkpoint."""
    args = run.args
    at, state = resumed(run)
    sampler, reference = build_sampler(run.model), build_sampler(run.model)
    weights = run.output / "warmup_weights.pt" if args.warmup_steps else args.start_from
    steps_done = at.step if at.phase == "warmup" else args.warmup_steps + at.step
    total_steps = args.warmup_steps + args.steps

    with MetricsLog(run.output, num_steps=total_steps, first_step=steps_done) as log:
        log.note(run.aggregator.describe())
        if at == Position(0, 0):
            log.write("start", 0, {"accuracy": accuracy(run, sampler)})

        if at.phase == "warmup":
            optimizer = build_optimizer(
                run.model,
                lr=args.warmup_lr,
                num_steps=args.warmup_steps,
                decay="cosine",
                clip_grad=args.clip_grad,
                adam_eps=1e-8,
                weight_decay=args.warmup_weight_decay,
            )
            if state is not None:
                restore(state, run.model, optimizer)
            stream = demonstrations(run, first_step=at.step + 1)
            for step in range(at.step + 1, args.warmup_steps + 1):
                ratios = warmup_step(run, stream)
                metrics = {"grad_norm": optimizer.step(), **divide_over_ranks(ratios)}
                if step == args.warmup_steps:
                    metrics["accuracy"] = accuracy(run, sampler)
                log.write("warmup", step, metrics)
                save_if_due(run, Position(0, step), optimizer)
            if dist.get_rank() == 0:
                save_weights(weights, run.model)
            dist.barrier()
            at, state = Position(1, 0), None

        load_weights(weights, reference)  # the KL term's reference is the end of the warm-up
        optimizer = rl_optimizer(run, args.steps)
        if state is not None:
            restore(state, run.model, optimizer)
        my_prompts = split(args.prompts_per_step, run.processes.data, run.dp_rank)
        for step in range(at.step + 1, args.steps + 1):
            if (step - 1) % args.steps_per_rollout == 0:
                sync_weights(sampler, run.model)
                sampled = {
                    later: roll_out(
                        sampler,
                        reference,
                        seed=args.seed,
                        step=later,
                        prompts=my_prompts,
                        samples_per_prompt=args.samples_per_prompt,
                    )
                    for later in range(step, step + args.steps_per_rollout)
                }
            ratios = rl_step(run, sampled[step])
            metrics = {"grad_norm": optimizer.step(), **divide_over_ranks(ratios)}
            if step % args.eval_interval == 0 or step == args.steps:
                metrics["accuracy"] = accuracy(run, sampler)
            log.write("rl", step, metrics)
            if args.record is not None and step <= args.record_steps:
                record(run, sampled[step])
            save_if_due(run, Position(1, step), optimizer)


def train_replay(run: Run) -> None:
    """Train on recorded rollouts; every layout is to give the same curve."""
    args = run.args
    by_step = read_rollouts(args.rollouts)
    chosen = list(by_step.items())[: args.steps]
    at, state = resumed(run)
    optimizer = rl_optimizer(run, len(chosen))
    if state is not None:
        restore(state, run.model, optimizer)
    with MetricsLog(run.output, num_steps=len(chosen), first_step=at.step) as log:
        log.note(run.aggregator.describe())
        for step, (_, rollouts) in enumerate(chosen, start=1):
            if step <= at.step:
                continue
            own = split(len(rollouts), run.processes.data, run.dp_rank)
            ratios = rl_step(run, [rollouts[i] for i in own])
            metrics = {"grad_norm": optimizer.step(), **divide_over_ranks(ratios)}
            log.write("rl", step, metrics)
            save_if_due(run, Position(1, step), optimizer)


def rl_optimizer(run: Run, num_steps: int) -> OptimizerWithSchedule:
    """Build a fresh optimizer for the reinforcement learning."""
    return build_optimizer(
        run.model,
        lr=run.args.lr,
        num_steps=num_steps,
        decay="constant",
        clip_grad=run.args.clip_grad,
        adam_eps=run.args.adam_eps,
        weight_decay=0.0,
    )


def accuracy(run: Run, sampler: torch.nn.Module) -> float:
    """Return the share of held-out problems that greedy responses solve, shared over ranks."""
    sync_weights(sampler, run.model)
    problems = task.held_out_problems(NUM_HELD_OUT)
    own = split(NUM_HELD_OUT, run.processes.data, run.dp_rank)
    right = count_right(sampler, [problems[i] for i in own])
    return divide_over_ranks({"accuracy": (right, len(own))})["accuracy"] or 0.0


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


# --------------------------------------------------------------------------------------
# The command line


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the flags; those that Megatron-LM has too have the same meaning."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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


def build_run(args: argparse.Namespace) -> Run:
    """Build model and aggregator in a job that has started."""
    processes = processes_of(args)
    aggregation = aggregation_from_args(args) or Aggregation(
        "constant", divisor=task.MAX_RESPONSE_TOKENS
    )
    model = build_model(
        Shape(
            num_layers=args.num_layers,
            hidden_size=args.hidden_size,
            num_heads=args.num_attention_heads,
        ),
        processes,
        per_token=args.calculate_per_token_loss,
        seed=args.seed,
    )
    if args.start_from is not None:
        load_weights(args.start_from, model)
    aggregator = LossAggregator([model], aggregation, options=Options.from_args(args))
    aggregator.agree_on(WARM_UP)
    return Run(
        args=args,
        processes=processes,
        model=model,
        aggregator=aggregator,
    )


def train(args: argparse.Namespace) -> None:
    """Run in a job that has started."""
    run = build_run(args)
    (train_online if args.mode == "online" else train_replay)(run)


def main() -> None:
    """Run, and end with one line where the input is at fault."""
    args = parse_args()
    try:
        start_processes(processes_of(args), args.seed)
        train(args)
        stop_processes()
    except (LossAggregationError, RolloutFileError, CheckpointError, WeightsError) as error:
        sys.exit(f"train.py: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
