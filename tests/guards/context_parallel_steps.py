"""Steps of two sequences on two context-parallel ranks, and what is raised on each."""

import tiny_gpt
import torch
from check_runner import run_checks
from ranks import of_ranks

from megatron_lossagg import Aggregation, LossAggregator, Sequences, plan_step
from megatron_lossagg.errors import ContractError, ReducerError
from megatron_lossagg.reduction.aggregation import Options

MODE = Aggregation("sample_mean")
# Two sequences of 8 and 4 tokens, of which 5 and 2 are active; the slices that ranks 0 and 1 hold.
MASKS = ([1, 1, 1, 0, 1, 0], [1, 0, 0, 1, 0, 1])
LENGTHS = [4, 2]
ACTIVE = [5, 2]
WEIGHTS = ([0.5, 0.25, 2.0, 0.0, 0.1, 0.0], [0.5, 0.0, 0.0, 1.5, 0.0, 0.7])
WEIGHT_SUMS = [4.75, 0.8]
WHOLE = [1, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 1]
"""The mask of both sequences, which each rank has of gathered losses."""
WEIGHING = Aggregation("sample_mean", count="weights")


def step_of(aggregator, mask, active=ACTIVE, *, mode=MODE, lengths=LENGTHS, **options):
    """Train one step as a framework does that slices the mask itself, or gathers the losses of
    sequences at ``gathered``; return what was raised."""
    gathered = options.pop("gathered", None)
    held = {"lengths": lengths}
    if gathered is not None:
        held = {"layout": aggregator.thd(gathered).gathered()}
    forward_only = options.pop("forward_only", False)
    weights = options.pop("weights", None)
    sums = None if weights is None else WEIGHT_SUMS
    sequences = Sequences(active_tokens=list(active), token_weight_sums=sums)
    raised = ""
    try:
        plan = plan_step(mode, sequences, group=aggregator.dp_group, options=Options(**options))
        with aggregator.begin(plan, num_microbatches=1, forward_only=forward_only) as step:
            mb = step.microbatch(
                range(len(active)),
                torch.tensor(mask),
                **held,
                token_weights=None if weights is None else torch.tensor(weights),
            )
            with torch.set_grad_enabled(not forward_only):
                loss = mb.outputs(mb.reduce(torch.ones(len(mask), requires_grad=True)))[0]
            if not forward_only:
                loss.backward()
    except (ReducerError, ContractError) as error:
        raised = str(error)
    return of_ranks(raised)


def a_plan(aggregator, active=ACTIVE):
    return plan_step(MODE, Sequences(active_tokens=active), group=aggregator.dp_group)


def start(checks):
    """Run a worker's checks with an aggregator of its own."""
    tiny_gpt.start(cp=2)
    chunk = tiny_gpt.wrapped(tiny_gpt.config_of())
    run_checks(checks, LossAggregator(chunk, MODE, options=Options(probe=False)))
