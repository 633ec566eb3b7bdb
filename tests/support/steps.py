"""A step without Megatron-Core: its sequences, plans, reducers, and :class:`Step`, in one process.

A sequence is a dict as the reference takes it: counted and trained mask, sample, prompt, group.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

from megatron_lossagg import Aggregation, Layout, Sequences, plan_step
from megatron_lossagg.contract.model import LiveGroups
from megatron_lossagg.contract.scaling import Scaling
from megatron_lossagg.guards.guard import ScheduleCalls, SequenceTracker, StepFacts
from megatron_lossagg.loop.step import Step
from megatron_lossagg.reduction.aggregation import Options
from megatron_lossagg.reduction.exchange import Exchange
from megatron_lossagg.reduction.sequences import ID_KINDS
from megatron_lossagg.reduction.step_state import StepLog
from megatron_lossagg.verify import step_data as verification
from megatron_lossagg.verify.cases import MASK_CASES

AGGREGATIONS = {str(case): case.aggregation for case in MASK_CASES if case.second is None}
"""Every mode with both ways to count empty ones, named as ``sample_mean, count_empty=False``."""
ANY_LAYOUT = {n: a for n, a in AGGREGATIONS.items() if a.mode != "microbatch_token_mean"}
"""Those that do not depend on the layout."""
TOKEN_MEAN = Aggregation("token_mean")
MASK = [1, 0, 1, 1, 1, 1]


def make_sequences():
    """Make fourteen uneven sequences with every degenerate case, those of ``lossagg verify``."""
    names = ("counted", "trained", "sample", "prompt", "group")
    return [{n: getattr(one, n) for n in names} for one in verification.make_sequences()]


def assign(sequences, microbatches):
    """Assign sequences to ``(rank, microbatch)``; returns one key per sequence, in their order.

    ``microbatches``: M of each rank.
    """
    counted = [SimpleNamespace(counted=sequence["counted"]) for sequence in sequences]
    return verification.assign_sequences(counted, microbatches).keys


def sequences_of(sequences, **more):
    """Return the ``Sequences`` of some: what each counts, its ids, and more columns."""
    ids = {kind: [sequence[kind] for sequence in sequences] for kind in ID_KINDS}
    counts = [sum(sequence["counted"]) for sequence in sequences]
    return Sequences(active_tokens=counts, **{**ids, **more})


def a_plan(
    active=(3, 2), mode="token_sum", microbatch=None, rejects_tokens=True, sums=None, **options
):
    sequences = Sequences(active_tokens=list(active), microbatch=microbatch, token_weight_sums=sums)
    return plan_step(
        Aggregation(mode, **options), sequences, options=Options(rejects_tokens=rejects_tokens)
    )


def labelled(label):
    """Read a mode with its number, and V if empty samples and prompts do not count."""
    mode, *number = label.removesuffix(", V").split()
    name = "exponent" if mode == "length_power" else "divisor"
    numbers = {name: float(number[0])} if number else {}
    return Aggregation(mode, **numbers, count_empty=not label.endswith(", V"))


def weights_of(label, **sequences):
    return plan_step(labelled(label), Sequences(**sequences)).weights.tolist()


def thd(*lengths, cp_size=1, cp_rank=0):
    return Layout.thd_zigzag(np.cumsum([0, *lengths]), cp_size=cp_size, cp_rank=cp_rank)


def a_reducer(mask, active=(3, 2), sequences=(0, 1), lengths=(4, 2), **options):
    return a_plan(active, **options).reducer(list(sequences), torch.tensor(mask), thd(*lengths))


# Over ranks: of a launch, and threads of this process.


def planned(aggregation=TOKEN_MEAN, **sequences):
    """Plan this rank's sequences over all ranks."""
    return plan_step(aggregation, Sequences(**sequences), group=dist.group.WORLD)


class Threads(Exchange):
    """All-gathers between threads; the group is ``(rank, barrier, slots)``."""

    @property
    def size(self):
        return 1 if self.group is None else len(self.group[2])

    @property
    def rank(self):
        return 0 if self.group is None else self.group[0]

    @property
    def ranks(self):
        return None if self.group is None else tuple(range(self.size))

    def integers(self, own):
        if self.group is None:
            return own[None]
        rank, barrier, slots = self.group
        slots[rank] = own.copy()
        barrier.wait(10)
        gathered = np.stack(slots)
        barrier.wait(10)
        return gathered


def in_threads(work, size):
    """Return ``work(rank, group)`` of each of some ranks, at once; ``plan.Exchange`` is Threads."""
    barrier, slots = threading.Barrier(size), [None] * size
    with ThreadPoolExecutor(size) as ranks:
        return [*ranks.map(lambda rank: work(rank, (rank, barrier, slots)), range(size))]


# What a step knows of a run: one process, and no groups.


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


def a_step(plan, m, *, dp=1, cp=1, cp_rank=0, loss_scaling="average", chunks=None, **options):
    """Begin a step of a rank without Megatron-Core; without chunks it has no gradients."""
    return Step(
        chunks=chunks or [a_chunk()],
        groups=groups_of(dp=dp, cp=cp, cp_rank=cp_rank),
        loss_scaling=loss_scaling,
        plan=plan,
        num_microbatches=m,
        **options,
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
