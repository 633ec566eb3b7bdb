"""Programs whose step is refused while it runs or when it finishes, by Megatron's own schedule."""

import contextlib
import functools
from dataclasses import replace

import pytest
import stock_step  # noqa: F401  installs the stand-ins
import torch
import torch.distributed as dist
from custom_reducer import custom
from faults import caught_by
from faults_before_a_step import an_aggregator
from faults_of_deferred_steps import REDUCER_OF_THE_PLAN, with_reducer_of_the_plan, with_term
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import (
    RerunMode,
    RerunState,
    destroy_rerun_state_machine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)
from training_steps import Training, changing, microbatch, returning, right, set_finalize

from megatron_lossagg import Layout
from megatron_lossagg.contract.engine import engine_of
from megatron_lossagg.errors import ContractError

COEFFICIENT = "arrived in the backward pass with the coefficient {}, expected 1"
UNREDUCED = "mb.reduce was not called under the step's aggregation in this microbatch"
GRAPHLESS = "requires no gradient in a training step.*forward_only=True"
LATE = "losses of sequences .* were reduced after loss_func had returned for them"
FINALIZED = "finalize_model_grads_func did not run in the step"
NONZERO = r"chunk 0 were not zero .*zero_grad_buffer\(\)"
IDS_DIFFER = "ranks 0 and 1 give the same sequences different weights.* they differ under "
SCHEDULE = "the schedule got {} tokens of this rank to divide by, mb.outputs returned"


@caught_by(
    "Split",
    "a local layout of CP 2",
    "CP rank 0 of 2, this rank is 0 of 1.*cu_seqlens=",
    "DP 2",
    "local",
)
@caught_by(
    "Split",
    "a zigzag layout of CP 2",
    "CP rank 1 of 2, this rank is 0 of 1.*cu_seqlens=",
    "DP 2",
    "zigzag",
)
def layout_of_cp_2(training, kind):
    with training.aggregator.step([4, 4], num_microbatches=1) as step:
        layout = Layout.thd_zigzag([0, 4, 8], cp_size=2, cp_rank=1)
        if kind == "local":
            layout = Layout.local([4, 4], cp_size=2, cp_rank=0)
        step.microbatch([0, 1], torch.ones(layout.num_tokens), layout=layout)


@caught_by("Split", "contiguous slices", "cp_partition_mode is zigzag", "CP 2")
def contiguous_layout(training):
    rank = training.aggregator.cp_rank
    with training.aggregator.step([4, 4], num_microbatches=1) as step:
        layout = Layout.thd_contiguous([0, 4, 8], cp_size=2, cp_rank=rank)
        step.microbatch([0, 1], torch.ones(8), layout=layout)


@caught_by("GradientAudit", "a loss of nothing reduced", UNREDUCED)
def unreduced(training):
    training.step(returning(lambda mb, x: x.mean()))


@caught_by("GradientAudit", "a reducer made without the step", UNREDUCED)
def own_reducer(training):
    def loss_func(step, batch, x):
        mb = microbatch(step, batch)
        layout = training.aggregator.thd(batch.offsets)
        return mb.outputs(step.plan.reducer(batch.sequences, batch.mask, layout)(x))

    training.step(loss_func)


@caught_by("GradientAudit", "another aggregation only", UNREDUCED)
def other_aggregation(training):
    training.step(returning(lambda mb, x: mb.reduce(x, "token_sum")))


@caught_by(
    "GradientAudit", "a microbatch of an earlier call", UNREDUCED + ".*anew for each microbatch"
)
def cached_microbatch(training):
    made = []

    def loss_func(step, batch, x):
        made.append((microbatch(step, batch), x))
        mb, _ = made[-1]
        first, losses = made[0]
        return mb.outputs(first.reduce(losses))

    training.step(loss_func)


@caught_by("GradientAudit", "reduced in call {}", LATE, "CP 2, M 3", each=(1, 2))
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


@caught_by("GradientAudit", "losses without a graph", GRAPHLESS, "DP 2", "detached")
@caught_by("GradientAudit", "reduced under no_grad", GRAPHLESS, "DP 2", "no_grad")
@caught_by("GradientAudit", "reduced in inference mode", GRAPHLESS, "DP 2", "inference")
def graphless(training, how):
    contexts = {"no_grad": torch.no_grad, "inference": torch.inference_mode}

    def loss(mb, x):
        with contexts.get(how, contextlib.nullcontext)():
            return mb.reduce(x.detach() if how == "detached" else x)

    training.step(returning(loss))


@caught_by(
    "GradientAudit",
    "a custom reducer through numpy",
    "requires no gradient.*let a custom reducer keep its graph",
)
def through_numpy(training):
    def factory(context):
        return lambda x: torch.tensor(float(x.detach().numpy().mean()))

    training.aggregator = an_aggregator(training, custom(factory))
    training.step(right)


@caught_by(
    "GradientAudit", "an empty step's loss detached", "requires no gradient in a training step"
)
def empty_and_detached(training):
    with training.aggregator.step([0, 0], num_microbatches=1) as step:
        mb = step.microbatch([0, 1], torch.zeros(8), cu_seqlens=[0, 4, 8])
        mb.outputs(mb.reduce(torch.ones(8, requires_grad=True)).detach())


@caught_by(
    "GradientAudit",
    "an evaluation that trains",
    "the schedule trains in a step with forward_only=True, which detached its losses",
)
def trained_evaluation(training):
    training.step(right, forward_only=True)


@caught_by(
    "GradientAudit",
    "a mean, reduced for the report",
    "no gradient reached the step's own partial loss in call 0",
)
def reported_only(training):
    def loss_func(step, batch, x):
        mb = microbatch(step, batch)
        return mb.outputs(x.mean(), report={"loss": mb.reduce(x)})

    training.step(loss_func)


@caught_by("GradientAudit", "backward twice", "were trained twice in call 0")
def backward_twice(training):
    """As a loop that runs a backward pass in loss_func, after ``outputs``."""

    def loss_func(step, batch, x):
        made = right(step, batch, x)
        (made[0] * step.scaling.schedule_factor).backward(retain_graph=True)
        return made

    training.step(loss_func)


@caught_by("GradientAudit", "all-reduced over CP with autograd", COEFFICIENT.format(2), "CP 2")
def all_reduced(training):
    from torch.distributed.nn.functional import all_reduce

    group = training.aggregator.groups.cp_group
    training.step(returning(lambda mb, x: all_reduce(mb.reduce(x), group=group)))


@caught_by("GradientAudit", "a factor on one rank", COEFFICIENT.format(2), ranks=(1,))
def factor_of_rank_1(training):
    training.step(returning(lambda mb, x: (1 + dist.get_rank()) * mb.reduce(x)))


@caught_by(
    "GradientAudit", "a factor in the last microbatch", "partial loss of call 1 .* coefficient 2"
)
def factor_of_last(training):
    factors = iter((1, 2))
    training.step(returning(lambda mb, x: next(factors) * mb.reduce(x)))


@caught_by("GradientAudit", "a loss scale that changes", r"coefficient 0\.5")
def changed_scale(training):
    """The scale that the schedule applies is half of what the config has in the forward pass."""

    def loss_func(step, batch, x):
        training.config.grad_scale_func = lambda loss: loss * 2
        made = right(step, batch, x)
        training.config.grad_scale_func = None
        return made

    training.step(loss_func)


@caught_by("GradientAudit", "a loss scaled after outputs", COEFFICIENT.format(2), "CP 2, M 3")
@caught_by(
    "GradientAudit",
    "a loss scaled after outputs",
    COEFFICIENT.format(2),
    "CP 2, M 3",
    per_token=True,
)
def scaled_after(training):
    training.step(changing(lambda loss, num_tokens, report: (loss * 2, num_tokens, report)))


@caught_by("GradientAudit", "num_tokens dropped", COEFFICIENT.format(2), "CP 2, M 3")
@caught_by(
    "Finalized",
    "num_tokens dropped",
    SCHEDULE.format(0) + "|" + COEFFICIENT.format(".*"),
    "CP 2, M 3",
    per_token=True,
)
def dropped_tokens(training):
    training.step(changing(lambda loss, num_tokens, report: (loss, report)))


@caught_by("Finalized", "num_tokens dropped at M 1", SCHEDULE.format(0), per_token=True)
def dropped_at_m_1(training):
    training = Training(replace(training.layout, microbatches=1), per_token=True)
    dropped_tokens(training)


@caught_by(
    "Finalized", "tokens of each rank's own", SCHEDULE.format("\\d+"), "CP 2", per_token=True
)
def own_tokens(training):
    training.step(changing(lambda loss, n, report: (loss, torch.full_like(n, 7), report)))


@caught_by(
    "Finalized", "at least one token", SCHEDULE.format(2), "CP 2", per_token=True, ranks=(1,)
)
def at_least_one(training):
    training.step(changing(lambda loss, n, report: (loss, n.clamp_(min=1), report)))


@caught_by(
    "GradientAudit", "no schedule", COEFFICIENT.format(2) + ": .* let Megatron's schedule run"
)
def no_schedule(training):
    """As a loop that divides by M nowhere."""
    with training.aggregator.step([8, 8], num_microbatches=2) as step:
        for number in (0, 1):
            mb = step.microbatch([number], torch.ones(8), cu_seqlens=[0, 8])
            mb.outputs(mb.reduce(torch.ones(8, requires_grad=True)))[0].backward()


@caught_by("GradientAudit", "two schedule calls", COEFFICIENT.format(2))
@caught_by("Finalized", "two schedule calls", "after 1 of the 2 microbatches", per_token=True)
def two_calls(training):
    with training.plan() as step:
        for batch in training.batches:
            training.run(functools.partial(right, step), [batch])


@caught_by("Finalized", "another model's schedule", FINALIZED)
def schedule_of_another_model(training):
    other = Training(training.layout, per_token=training.per_token)
    with training.plan() as step:
        other.run(functools.partial(right, step))


@caught_by("Finalized", "a function set inside", FINALIZED)
def finalize_set_inside(training):
    training.step(changing(functools.partial(set_finalize, training.config)))


@caught_by(
    "Terms", "weights that no loss counts", "token_weight_sums.*no loss of the step counts them"
)
def uncounted_weights(training):
    weights = torch.full((8,), 0.5)
    with training.aggregator.step([8], num_microbatches=1, token_weight_sums=[4.0]) as step:
        mb = step.microbatch([0], torch.ones(8), cu_seqlens=[0, 8], token_weights=weights)
        mb.outputs(mb.reduce(torch.ones(8, requires_grad=True)))[0].backward()


@caught_by(
    "Terms",
    "a sum of a term's means",
    "accumulates=True with sample_mean.*accumulates=2, which trains their mean",
    "DP 2",
    "sample_mean",
)
def accumulating_term(training, mode):
    training.aggregator = an_aggregator(training, "token_sum")
    training.step(with_term(mode), accumulates=True)


@caught_by(
    "Terms", "a reducer of the plan that one of two calls was begun with", REDUCER_OF_THE_PLAN
)
def accumulating_by_own_plan(training):
    with_reducer_of_the_plan(training, "token_mean", accumulates=2)


def fill(training, value):
    """Set this rank's gradients."""
    next(engine_of(training.chunks[0]).gradients()).fill_(value)


@caught_by("GradientBuffers", "gradients of 1", NONZERO, "DP 2", 1.0)
@caught_by("GradientBuffers", "gradients of NaN", NONZERO, "DP 2", float("nan"))
def filled_buffers(training, value):
    def loss_func(step, batch, x):
        if batch is training.batches[0]:
            fill(training, value)
        return right(step, batch, x)

    training.step(loss_func)


@caught_by("GradientBuffers", "a step that is repeated", NONZERO)
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


@caught_by("Ownership", "a token that no rank trains", "train 1 tokens fewer of sequence", "CP 2")
def lost_token(training):
    with training.aggregator.step([5, 2], num_microbatches=1) as step:
        mask = torch.tensor(([1, 1, 1, 0, 1, 0], [0, 0, 0, 1, 0, 1])[training.aggregator.cp_rank])
        mb = step.microbatch([0, 1], mask, lengths=[4, 2])
        mb.outputs(mb.reduce(torch.ones(6, requires_grad=True)))[0].backward()


@caught_by(
    "Ownership",
    "a rank that failed by itself",
    "context-parallel rank 1 ended the step with an error",
    "CP 2",
    ranks=(0,),
)
def failed_alone(training):
    """Rank 1 finds a coefficient when the step finishes, which rank 0 learns of."""

    def loss(mb, x):
        own = mb.reduce(x)
        return own if training.aggregator.cp_rank == 0 else own.detach() + x.mean()

    own = pytest.raises(ContractError, match="no gradient reached the step's own partial loss")
    with own if training.aggregator.cp_rank == 1 else contextlib.nullcontext():
        training.step(returning(loss))


@caught_by(
    "Ownership",
    "{} ids of each rank, read by a term under {}",
    IDS_DIFFER + "{1}",
    "CP 2",
    False,
    each=(
        ("sample", "sample_mean"),
        ("prompt", "prompt_mean"),
        ("group", "balanced"),
        ("sample", "sample_sum"),
    ),
)
@caught_by(
    "Ownership",
    "sample ids of each rank, read by a term under row_mean",
    IDS_DIFFER + "row_mean",
    "CP 2",
    *(False, "sample", "row_mean"),
    per_token=True,
)
@caught_by(
    "Ownership",
    "prompt ids of each rank, read by a shadow under prompt_mean",
    IDS_DIFFER + "prompt_mean",
    "CP 2",
    *(True, "prompt", "prompt_mean"),
)
def ids_of_each_rank(training, is_shadow, kind, mode):
    """On rank 0 two sequences have one id, on rank 1 each has its own."""
    training.aggregator = an_aggregator(training, "token_mean", shadow=(mode,) if is_shadow else ())
    ids = list(range(len(training.counts)))
    given = {kind: [0, 0, *ids[2:]] if training.aggregator.cp_rank == 0 else ids}
    training.step(right if is_shadow else with_term(mode), **given)


def replica(training, mask, sequences, *, trains=True, second=0):
    """Train a step by hand, as one of two tensor-parallel ranks.

    ``second``: the coefficient of a second term.
    """
    with training.aggregator.step([2, 1], num_microbatches=1) as step:
        offsets = [0, 4 if sequences == [0, 1] else 2, 6]
        mb = step.microbatch(sequences, torch.tensor(mask), cu_seqlens=offsets)
        x = torch.ones(6, requires_grad=True)
        loss = mb.reduce(x)
        other = mb.reduce(x, "token_mean")
        loss = loss + second * other if second else loss
        mb.outputs(loss if trains else loss.detach() + x.mean())[0].backward()


@caught_by("Replicas", "masks of each rank", "the loss masks of .* ranks 0 and 1, which", "TP 2")
def masks_of_each_rank(training):
    """With the same counts, as of tokens that each rank drops at random."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    replica(training, ([1, 1, 0, 0, 1, 0], [0, 1, 0, 1, 1, 0])[rank], [0, 1])


@caught_by("Replicas", "mirrored masks", "the loss masks of .* ranks 0 and 1, which", "TP 2")
def masks_of_equal_sums(training):
    """Their positions have one sum."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    replica(training, ([1, 0, 0, 1, 1, 0], [0, 1, 1, 0, 1, 0])[rank], [0, 1])


@caught_by(
    "Replicas",
    "a coefficient of each rank, {}",
    "the weights of .* 0 and 1, which.*pass the same .*coefficients",
    "TP 2",
    each=(1, -2),
)
@caught_by(
    "Replicas",
    "a term that one rank leaves out",
    "the loss masks of .* ranks 0 and 1, which",
    "TP 2",
    0,
)
def second_term_of_each_rank(training, second):
    """Of losses that no model returned; on rank 0 its coefficient is 2."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    replica(training, [1, 1, 0, 0, 1, 0], [0, 1], second=(2, second)[rank])


@caught_by("Replicas", "sequences of each rank", "the weights of .* ranks 0 and 1, which", "TP 2")
def sequences_of_each_rank(training):
    """The same positions are trained, with the weights of other sequences."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    replica(training, [1, 0, 0, 1, 0, 1], ([0, 1], [1, 0])[rank])


@caught_by(
    "Replicas",
    "a rank that failed by itself",
    "tensor-parallel rank 1 ended the step with an error",
    "TP 2",
    ranks=(0,),
)
def replica_failed_alone(training):
    """Rank 1 finds a missing gradient when the step finishes, which rank 0 learns of."""
    is_first = parallel_state.get_tensor_model_parallel_rank() == 0
    own = pytest.raises(ContractError, match="no gradient reached the step's own partial loss")
    with contextlib.nullcontext() if is_first else own:
        replica(training, [1, 1, 0, 0, 1, 0], [0, 1], trains=is_first)


@caught_by(
    "Replicas",
    "a rank that failed by itself, where guards warn",
    "tensor-parallel rank 1 ended the step with an error",
    "TP 2",
    ranks=(0,),
)
def replica_failed_where_guards_warn(training):
    """It cannot train on without the other."""
    training.aggregator = an_aggregator(training, guards="warn")
    is_first = parallel_state.get_tensor_model_parallel_rank() == 0
    own = pytest.raises(ContractError, match="loss_func ran for 0 microbatches, 1 were planned")
    if is_first:
        replica(training, [1, 1, 0, 0, 1, 0], [0, 1])
        return
    with own, training.aggregator.step([2, 1], num_microbatches=1):
        pass


@caught_by("GradientBuffers", "more calls than declared", NONZERO)
def one_call_too_many(training):
    training.step(right, accumulates=2)
    training.kept_step(right, accumulates=2)
    training.kept_step(right, accumulates=2)


@caught_by("GradientBuffers", "one call, gradients kept", NONZERO)
def one_call_declared(training):
    training.step(right, accumulates=1)
    training.kept_step(right, accumulates=1)


@caught_by(
    "GradientBuffers",
    "a first call that does not declare the calls",
    NONZERO + ".*accumulates=\\) with their number",
)
def declared_late(training):
    training.step(right)
    training.kept_step(right, accumulates=2)
