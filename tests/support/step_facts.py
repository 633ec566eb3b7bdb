"""What a step knows of a run, for tests without Megatron-Core: one process, and no groups."""

from types import SimpleNamespace

from megatron_lossagg.contract.model import LiveGroups
from megatron_lossagg.contract.scaling import Scaling
from megatron_lossagg.guards.guard import ScheduleCalls, SequenceTracker, StepFacts
from megatron_lossagg.reduction.step_state import StepLog


def groups_of(*, dp=1, cp=1, cp_rank=0):
    """Return the groups of one of DP * CP ranks, of which none exists."""
    return LiveGroups(
        dp_cp_group=None,
        dp_group=None,
        dp_size=dp,
        dp_cp_size=dp * cp,
        cp_group=None,
        cp_size=cp,
        cp_rank=cp_rank,
        tp_group=None,
        pp_group=None,
        is_last_stage=True,
        split="zigzag",
    )


def a_chunk(*buffers):
    """Return a chunk with gradient buffers, no loss scale, and no ranks to reduce over."""
    return SimpleNamespace(
        config=SimpleNamespace(
            grad_scale_func=None,
            finalize_model_grads_func=lambda model, num_tokens: None,
            tensor_model_parallel_size=1,
            pipeline_model_parallel_size=1,
        ),
        ddp_config=SimpleNamespace(),
        buffers=list(buffers),
        expert_parallel_buffers=[],
    )


def facts_of(plan, *, cp=1, num_microbatches=1, loss_scaling="average"):
    """Return the facts of a training step over ``plan`` on context-parallel rank 0."""
    return StepFacts(
        chunks=[a_chunk()],
        groups=groups_of(cp=cp),
        scaling=Scaling(
            loss_scaling=loss_scaling,
            num_microbatches=num_microbatches,
            dp_cp_size=cp,
            active_tokens=plan.totals.active_tokens,
        ),
        plan=plan,
        tracker=SequenceTracker(
            num_sequences=len(plan.active_tokens),
            num_microbatches=num_microbatches,
            is_rerunning=lambda: False,
        ),
        log=StepLog(plan.aggregation),
        forward_only=False,
        accumulates=False,
        calls=ScheduleCalls(),
    )
