"""Programs whose step is refused while it runs or when it finishes, by Megatron's own schedule.

Each has one fault; ``fault_table.py`` says which.
"""

import contextlib
import functools
from dataclasses import replace

import pytest
import stock_step  # noqa: F401  installs the stand-ins
import torch
import torch.distributed as dist
from custom_reducer import custom
from fault_programs import an_aggregator
from megatron.core.rerun_state_machine import (
    RerunMode,
    RerunState,
    destroy_rerun_state_machine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)
from training_steps import Training, changing, microbatch, returning, right, set_finalize

from megatron_lossagg import Layout, LossAggregator
from megatron_lossagg.contract.engine import engine_of
from megatron_lossagg.errors import ContractError


def layout_of_cp_2(training, kind):
    with training.aggregator.step([4, 4], num_microbatches=1) as step:
        layout = Layout.thd_zigzag([0, 4, 8], cp_size=2, cp_rank=1)
        if kind == "local":
            layout = Layout.local([4, 4], cp_size=2, cp_rank=0)
        step.microbatch([0, 1], torch.ones(layout.num_tokens), layout=layout)


def contiguous_layout(training):
    rank = training.aggregator.cp_rank
    with training.aggregator.step([4, 4], num_microbatches=1) as step:
        layout = Layout.thd_contiguous([0, 4, 8], cp_size=2, cp_rank=rank)
        step.microbatch([0, 1], torch.ones(8), layout=layout)


def unreduced(training):
    training.step(returning(lambda mb, x: x.mean()))


def own_reducer(training):
    def loss_func(step, batch, x):
        mb = microbatch(step, batch)
        layout = training.aggregator.thd(batch.offsets)
        return mb.outputs(step.plan.reducer(batch.sequences, batch.mask, layout)(x))

    training.step(loss_func)


def other_aggregation(training):
    training.step(returning(lambda mb, x: mb.reduce(x, "token_sum")))


def cached_microbatch(training):
    made = []

    def loss_func(step, batch, x):
        made.append((microbatch(step, batch), x))
        mb, _ = made[-1]
        first, losses = made[0]
        return mb.outputs(first.reduce(losses))

    training.step(loss_func)


def late(training, calls):
    made = []

    def loss_func(step, batch, x):
        mb = microbatch(step, batch)
        loss = mb.reduce(x)
        if len(made) == calls:
            first, losses = made[0]
            loss = loss + first.reduce(losses.detach().requires_grad_())
        made.append((mb, x))
        return mb.outputs(loss)

    training.step(loss_func)


def graphless(training, how):
    contexts = {"no_grad": torch.no_grad, "inference": torch.inference_mode}

    def loss(mb, x):
        with contexts.get(how, contextlib.nullcontext)():
            return mb.reduce(x.detach() if how == "detached" else x)

    training.step(returning(loss))


def through_numpy(training):
    def factory(context):
        return lambda x: torch.tensor(float(x.detach().numpy().mean()))

    training.aggregator = an_aggregator(training, custom(factory))
    training.step(right)


def empty_and_detached(training):
    with training.aggregator.step([0, 0], num_microbatches=1) as step:
        mb = step.microbatch([0, 1], torch.zeros(8), cu_seqlens=[0, 4, 8])
        mb.outputs(mb.reduce(torch.ones(8, requires_grad=True)).detach())


def trained_evaluation(training):
    training.step(right, forward_only=True)


def reported_only(training):
    def loss_func(step, batch, x):
        mb = microbatch(step, batch)
        return mb.outputs(x.mean(), report={"loss": mb.reduce(x)})

    training.step(loss_func)


def backward_twice(training):
    """As a loop that runs a backward pass in loss_func, after ``outputs``."""

    def loss_func(step, batch, x):
        made = right(step, batch, x)
        (made[0] * step.scaling.schedule_factor).backward(retain_graph=True)
        return made

    training.step(loss_func)


def all_reduced(training):
    from torch.distributed.nn.functional import all_reduce

    group = training.aggregator.groups.cp_group
    training.step(returning(lambda mb, x: all_reduce(mb.reduce(x), group=group)))


def factor_of_rank_1(training):
    training.step(returning(lambda mb, x: (1 + dist.get_rank()) * mb.reduce(x)))


def factor_of_last(training):
    factors = iter((1, 2))
    training.step(returning(lambda mb, x: next(factors) * mb.reduce(x)))


def changed_scale(training):
    """The scale that the schedule applies is half of what the config has in the forward pass."""

    def loss_func(step, batch, x):
        training.config.grad_scale_func = lambda loss: loss * 2
        made = right(step, batch, x)
        training.config.grad_scale_func = None
        return made

    training.step(loss_func)


def scaled_after(training):
    training.step(changing(lambda loss, num_tokens, report: (loss * 2, num_tokens, report)))


def dropped_tokens(training):
    training.step(changing(lambda loss, num_tokens, report: (loss, report)))


def dropped_at_m_1(training):
    training = Training(replace(training.layout, microbatches=1), per_token=True)
    dropped_tokens(training)


def own_tokens(training):
    training.step(changing(lambda loss, n, report: (loss, torch.full_like(n, 7), report)))


def at_least_one(training):
    training.step(changing(lambda loss, n, report: (loss, n.clamp_(min=1), report)))


def no_schedule(training):
    """As a loop that divides by M nowhere."""
    with training.aggregator.step([8, 8], num_microbatches=2) as step:
        for number in (0, 1):
            mb = step.microbatch([number], torch.ones(8), cu_seqlens=[0, 8])
            mb.outputs(mb.reduce(torch.ones(8, requires_grad=True)))[0].backward()


def two_calls(training):
    with training.plan() as step:
        for batch in training.batches:
            training.run(functools.partial(right, step), [batch])


def schedule_of_another_model(training):
    other = Training(training.layout, per_token=training.per_token)
    with training.plan() as step:
        other.run(functools.partial(right, step))


def finalize_set_inside(training):
    training.step(changing(functools.partial(set_finalize, training.config)))


def uncounted_weights(training):
    weights = torch.full((8,), 0.5)
    with training.aggregator.step([8], num_microbatches=1, token_weight_sums=[4.0]) as step:
        mb = step.microbatch([0], torch.ones(8), cu_seqlens=[0, 8], token_weights=weights)
        mb.outputs(mb.reduce(torch.ones(8, requires_grad=True)))[0].backward()


def fill(training, value):
    """Set this rank's gradients."""
    next(engine_of(training.chunks[0]).gradients()).fill_(value)


def filled_buffers(training, value):
    def loss_func(step, batch, x):
        if batch is training.batches[0]:
            fill(training, value)
        return right(step, batch, x)

    training.step(loss_func)


def repeated_step(training):
    """The rerun machine repeats it, and nothing zeroes the gradients of the first pass."""
    destroy_rerun_state_machine()
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    with training.plan() as step:
        training.run(functools.partial(right, step))

        def again(batch, x):
            fill(training, 1)
            return right(step, batch, x)

        get_rerun_state_machine().state = RerunState.RERUNNING_IN_PLACE
        training.run(again)
        destroy_rerun_state_machine()


def lost_token(training):
    with training.aggregator.step([5, 2], num_microbatches=1) as step:
        mask = torch.tensor(([1, 1, 1, 0, 1, 0], [0, 0, 0, 1, 0, 1])[training.aggregator.cp_rank])
        mb = step.microbatch([0, 1], mask, lengths=[4, 2])
        mb.outputs(mb.reduce(torch.ones(6, requires_grad=True)))[0].backward()


def failed_alone(training):
    """Rank 1 finds a coefficient when the step finishes, which rank 0 learns of."""

    def loss(mb, x):
        own = mb.reduce(x)
        return own if training.aggregator.cp_rank == 0 else own.detach() + x.mean()

    own = pytest.raises(ContractError, match="no gradient reached the step's own partial loss")
    with own if training.aggregator.cp_rank == 1 else contextlib.nullcontext():
        training.step(returning(loss))


def ids_of_each_rank(training, kind, mode, is_shadow):
    """On rank 0 two sequences have one id, on rank 1 each has its own."""
    shadow = (mode,) if is_shadow else ()
    options = replace(training.aggregator.options, shadow=shadow)
    training.aggregator = LossAggregator(training.chunks, "token_mean", options=options)
    ids = list(range(len(training.counts)))
    given = {kind: [0, 0, *ids[2:]] if training.aggregator.cp_rank == 0 else ids}
    term = returning(lambda mb, x: mb.reduce(x) + mb.reduce(x * x, mode))
    training.step(right if is_shadow else term, **given)
