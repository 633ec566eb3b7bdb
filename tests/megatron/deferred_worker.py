"""Deferred steps of three schedule calls next to the reference of ``lossagg verify``.

``python deferred_worker.py JOB``: for each layout of the job, loss scaling and case, rank 0 prints
the errors of gradient, loss and weight sums as one JSON line, and of an evaluation in three steps.
The calls have different M; the second one has no active token.
"""

import sys
import warnings
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import stock_step  # noqa: F401  installs the stand-ins
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from ranks import of_ranks, print_row

from megatron_lossagg.contract.side_losses import side_losses_of
from megatron_lossagg.verify.cases import expected
from megatron_lossagg.verify.job import LOSS_SCALINGS, read_job
from megatron_lossagg.verify.reference_gradient import relative
from megatron_lossagg.verify.small_gpt import all_reported, pack
from megatron_lossagg.verify.train_step import Run
from megatron_lossagg.verify.verdict import _references
from megatron_lossagg.verify.world import join_world, split_world

PROMPTS = ((0,), (2,), (1, 3))
"""Of each call: all sequences of a sample, prompt and group are in one."""
SUMS = ["lossagg/weight_sum", "lossagg/weight_expected"]


def calls_of(run):
    """Cut the step into calls, as this rank's sequences, their microbatches and M of each."""
    layout, sequences = run.parallelism, run.reference.sequences
    rank = parallel_state.get_data_parallel_rank()
    for call, prompts in enumerate(PROMPTS):
        m = layout.m_of_ranks[rank] * (2 if call == 2 else 1)
        of_call = [one for one in sequences if one.prompt % 10 in prompts]
        own = of_call[rank :: layout.dp]
        yield own, [place * place % m for place in range(len(own))], m


def load(run, sequences, numbers, m):
    """Let the run's next step be a call."""
    run.sequences, run._numbers, run.num_microbatches = sequences, numbers, m
    places = [[at for at, number in enumerate(numbers) if number == n] for n in range(m)]
    run.batches = [pack(sequences, own, run.parallelism) for own in places]


def train(run, case, *, total=None, main=1.0):
    """Train a deferred step; return gradients, and the sums of what its calls reported."""
    for chunk in run.chunks:
        chunk.zero_grad_buffer()
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    sums = torch.zeros(3, dtype=torch.float64)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="the plan counts no active tokens")
        stack.enter_context(
            patch.object(type(run.chunks[0]), "zero_grad_buffer", lambda self: None)
        )
        deferred = stack.enter_context(run.aggregator_of(case).deferred())
        for call in calls_of(run):
            load(run, *call)
            ran = run._looped(case, poison=True, main=main, forward_only=False)
            assert not ran.faults, ran.faults
            if is_last:
                sums += torch.tensor([*all_reported(ran.reports, ["loss", *SUMS]).values()])
        factor = deferred.finish(total)
    return run._gradients(), sums * factor


def evaluate(run, case):
    """Evaluate each call as a step; return what Megatron's ``evaluate`` makes of the reports."""
    pairs = torch.zeros(3, 2, dtype=torch.float64)
    for call in calls_of(run):
        load(run, *call)
        with torch.no_grad():
            ran = run._looped(case, poison=True, main=1.0, forward_only=True)
        assert not ran.faults, ran.faults
        for report in ran.reports:
            pairs += torch.stack([report[name].double() for name in ["loss", *SUMS]])
    dist.all_reduce(pairs, group=run.aggregator.groups.dp_cp_group)
    return (pairs[:, 0] / pairs[:, 1]).tolist()


def side_of_one_call(run, case):
    """Return the side losses' gradients of a plain step of all calls' microbatches."""
    sequences, numbers, m = [], [], 0
    for own, places, m_of_call in calls_of(run):
        sequences += own
        numbers += [m + number for number in places]
        m += m_of_call
    load(run, sequences, numbers, m)
    run._looped(case, poison=False, main=0.0, forward_only=False)
    return run._gradients()


class Main:
    """Gradients without side losses, as :meth:`Run.compared` reads them."""

    def __init__(self, gradients):
        self.gradients = gradients


def errors(run, case, wanted, total=None):
    gradients, (loss, weight_sum, weight_expected) = train(run, case, total=total)
    of_side = {}
    if side_losses_of(run.chunks[0].config):
        side, _ = train(run, case, total=total, main=0.0)
        whole = torch.cat([g.flatten() for _, g in side_of_one_call(run, case)])
        difference = torch.cat([g.flatten() for _, g in side]) - whole
        of_side = {"side": float(difference.norm() / whole.norm())}
        gradients = [(s, g - h) for (s, g), (_, h) in zip(gradients, side, strict=True)]
    times = 1.0 if total is None else counted_total(run, case) / total
    slope, gradient = wanted.slope_Y * times, wanted.gradient_P * times
    (error,), _ = run.compared(Main(gradients), slope[None], gradient[None])
    found = {"gradient": error, **of_side}
    evaluated = evaluate(run, case)
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        terms = run.reference.size_of_loss_terms(slope)
        found["loss"] = relative(float(loss), wanted.loss * times, terms)
        found["weights"] = max(
            relative(float(weight_sum), wanted.weight_sum * times),
            relative(float(weight_expected), wanted.weight_expected * times),
        )
        # A mean over the three steps, if no total is counted.
        steps = len(PROMPTS) if case.aggregation.mode == "token_sum" else 1
        loss, weight_sum, weight_expected = (steps * value for value in evaluated)
        found["evaluated"] = relative(
            loss, wanted.loss, run.reference.size_of_loss_terms(wanted.slope_Y)
        )
        found["evaluated weights"] = max(
            relative(weight_sum, wanted.weight_sum),
            relative(weight_expected, wanted.weight_expected),
        )
    return found


def counted_total(run, case):
    """Count N or B as the paper writes it."""
    sequences = run.reference.sequences
    if case.aggregation.mode == "token_mean":
        return sum(sum(one.counted) for one in sequences)
    return len({one.sample for one in sequences})


def prints(run, case, wanted, per_token, total=None):
    found = errors(run, case, wanted, total)
    ranks = of_ranks(found)
    key = [
        str(run.parallelism),
        LOSS_SCALINGS[per_token],
        f"{case}{f' / {total}' * bool(total)}",
    ]
    most = {name: max(one.get(name, 0) for one in ranks) for name in ranks[-1]}
    print_row([key, most, run.parallelism.tolerance])


def main(job):
    join_world()
    job = read_job(Path(job))
    references = _references(job)
    for layout in job.layouts:
        reference = references[layout.reference]
        with split_world(layout):
            for per_token in (False, True):
                if not per_token and layout.mtp:
                    continue
                run = Run(layout, reference, per_token=per_token)
                if not per_token and layout.moe:  # experts without side losses
                    config = run.chunks[0].config
                    config.moe_aux_loss_coeff, config.moe_z_loss_coeff = 0.0, None
                has_side = bool(side_losses_of(run.chunks[0].config))
                is_plain = layout == job.layouts[0]
                for number, case in enumerate(job.cases):
                    is_exact = not has_side or number == 0
                    if is_exact and (is_plain or number < 3):
                        wanted = expected(case, reference, run.facts.assignment)
                        prints(run, case, wanted, per_token)
                        if number < 3 and is_plain:
                            prints(run, case, wanted, per_token, total=50)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
