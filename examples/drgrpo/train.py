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
import sys
from collections.abc import Callable, Iterator
from typing import Any

import task
import torch
import torch.distributed as dist
from arguments import parse_args, processes_of
from batch import Microbatch, Row, pack
from checkpoint import CheckpointError, Position, restore
from megatron.core.pipeline_parallel import get_forward_backward_func
from metrics import MetricsLog, Ratios, add_reports, divide_over_ranks
from model import (
    MAX_TOKENS,
    OptimizerWithSchedule,
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
from rollouts import Rollout, RolloutFileError, read_rollouts, roll_out
from torch import Tensor
from training_run import Run, accuracy, record, resumed, rollout_ratios, save_if_due, split

from megatron_lossagg import (
    Aggregation,
    LossAggregationError,
    LossAggregator,
    Options,
    StepBuffer,
)
from megatron_lossagg.loop.flags import aggregation_from_args
from megatron_lossagg.loop.step import Step
from megatron_lossagg.reduction.microbatch import Microbatch as MicrobatchLoss

WARM_UP = Aggregation("token_mean")

# From per-token negative log-probabilities [T] and the microbatch's coefficients [T] to the
# microbatch's partial loss and the partial losses to report.
LossOf = Callable[[MicrobatchLoss, Tensor, tuple[Tensor, ...]], tuple[Tensor, dict[str, Tensor]]]


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
            warm_up(run, log, sampler, at.step, state)
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


def warm_up(
    run: Run,
    log: MetricsLog,
    sampler: torch.nn.Module,
    steps_done: int,
    state: dict[str, Any] | None,
) -> None:
    """Train on demonstrations, from a checkpoint's ``state`` on if there is one."""
    args = run.args
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
    stream = demonstrations(run, first_step=steps_done + 1)
    for step in range(steps_done + 1, args.warmup_steps + 1):
        ratios = warmup_step(run, stream)
        metrics = {"grad_norm": optimizer.step(), **divide_over_ranks(ratios)}
        if step == args.warmup_steps:
            metrics["accuracy"] = accuracy(run, sampler)
        log.write("warmup", step, metrics)
        save_if_due(run, Position(0, step), optimizer)


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


# --------------------------------------------------------------------------------------
# The command line


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
    args = parse_args(description=__doc__)
    try:
        start_processes(processes_of(args), args.seed)
        train(args)
        stop_processes()
    except (LossAggregationError, RolloutFileError, CheckpointError, WeightsError) as error:
        sys.exit(f"train.py: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
