"""Which layouts train which cases on real Megatron-Core, and why those.

``GRADIENTS``: next to the reference of ``lossagg verify`` (``test_gradients.py``); ``DEFERRED``: in
several schedule calls (``test_deferred.py``); ``SIDE``, ``FOLLOWED``, ``SLICED``: next to stock
Megatron-Core (``test_stock.py``).
"""

from dataclasses import dataclass, replace
from importlib.util import find_spec

from conftest import RELEASE
from own_columns import mean_of_teachers, per_turn

from megatron_lossagg import Aggregation
from megatron_lossagg.contract.scaling import LOSS_SCALINGS
from megatron_lossagg.reduction.modes import MODES
from megatron_lossagg.verify.cases import CASES, Case
from megatron_lossagg.verify.parallelism import Parallelism as P


def cases_named(*names):
    """Return those of a verification that have these names."""
    return tuple(case for case in CASES if str(case) in names)


THREE = (
    Case(aggregation=Aggregation("token_mean")),
    Case(aggregation=Aggregation("prompt_mean")),
    Case(aggregation=Aggregation("constant", divisor=40.0)),
)
SOME = (*THREE, *(case for case in CASES if case.aggregation.count != "mask"))
REACHED = (
    *SOME,
    *cases_named("microbatch_token_mean", "own_weights", "sample_mean, sequence_weight"),
)
HOOKED = cases_named(
    "prompt_mean",
    "sample_mean, count_empty=False",
    "microbatch_token_mean",
    "token_mean, count=weights",
    "balanced",
    "own_weights",
    "sample_mean, sequence_weight",
)
"""`lossagg verify --hooked` runs all, on any layout."""
OWN_COUNTS = (
    *dict.fromkeys(replace(case, leaves_out=True) for case in CASES),
    Case(
        aggregation=Aggregation("prompt_mean"),
        second=Aggregation("sample_mean", count_left_out=True),
        leaves_out=True,
    ),
    Case(aggregation=Aggregation(weights=per_turn)),
    Case(aggregation=Aggregation(weights=mean_of_teachers, count_empty=False)),
)
"""Without some rows, an empty sequence and a whole prompt; and with columns of the caller's."""


@dataclass(frozen=True)
class Group:
    """Layouts that train the same cases, for one reason; each number of ranks is one launch."""

    why: str
    cases: tuple[Case, ...]
    layouts: tuple[P, ...]
    missing: str = ""
    """What it lacks here, if anything."""


def where(condition, *layouts):
    return layouts if condition else ()


def fsdp(strategy="optim_grads_params", **sizes):
    return P(megatron_fsdp=strategy, float32=True, **sizes)


HAS_EINOPS = find_spec("einops") is not None
"""Megatron-Core makes the groups of optimizer instances with it, and Megatron-FSDP."""
NO_FSDP = "" if RELEASE >= (0, 16) and HAS_EINOPS else "refused, or without einops"
GRADIENTS = {
    "splits": Group(
        "DP, CP and PP enter the contract: every case, at M = 3",
        CASES,
        (P(dp=2), P(dp=3), P(cp=2), P(dp=2, cp=2), P(pp=2, cp=2)),
    ),
    "M": Group(
        "M enters it too, and ranks may differ in it; DP 2 and CP 2 are parts of these layouts",
        REACHED,
        (
            *(P(dp=3, microbatches=m) for m in (1, 4)),
            *(P(dp=2, cp=2, microbatches=m) for m in (1, 4)),
            *(P(pp=2, cp=2, microbatches=m) for m in (1, 4)),
            P(dp=2, microbatches=(3, 5)),
        ),
    ),
    "tokens": Group(
        "who holds which: a mode reaches a layout through weights only, token weights through it",
        SOME,
        (
            P(cp=4, microbatches=5),
            P(pp=2),
            P(cp=2, packing="local"),
            P(cp=2, packing="gathered"),
            P(dp=2, cp=2, packing="gathered"),
            P(cp=2, cp_partition="contiguous"),
            P(cp=4, cp_partition="contiguous"),
            P(cp=2, cp_partition="contiguous", packing="gathered"),
            P(cp=2, cp_partition="contiguous", packing="local"),
        ),
    ),
    "unpacked": Group(
        "as `tokens`; the padding makes the reference three times as large",
        SOME,
        (
            P(cp=2, packing="bshd"),
            P(cp=2, cp_partition="contiguous", packing="bshd"),
            P(cp=4, cp_partition="contiguous", packing="bshd"),
        ),
    ),
    "around": Group(
        "what comes before or after the loss, which knows no mode: three stand for all",
        THREE,
        (
            P(tp=2),
            P(tp=2, sequence_parallel=True),
            P(pp=2, vpp=2, microbatches=4),
            P(cp=2, distributed_optimizer=True),
            P(dp=2, average_in_collective=True),
            P(dp=2, overlap_grad_reduce=True),
            P(cp=2, recompute=True),
            P(dp=2, cp=2, float32=True),
            P(tp=2, cp=2, sequence_parallel=True, float32=True),
        ),
    ),
    "combined": Group(
        "as `around`; splits combined as in a real run",
        THREE,
        (
            P(tp=2, cp=2, pp=2, sequence_parallel=True),
            P(dp=2, cp=2, pp=2),
            P(dp=2, cp=2, pp=2, vpp=2, microbatches=4),
            P(cp=2, tp=2, ep=2, sequence_parallel=True, moe=True),
            P(dp=2, cp=2, overlap_grad_reduce=True, distributed_optimizer=True),
            P(cp=2, tp=2, recompute=True),
            P(dp=2, cp=2, mtp=True, float32=True),
            P(pp=2, cp=2, mtp=True, float32=True),
            P(tp=2, cp=2, sequence_parallel=True, mtp=True, float32=True),
            *where(HAS_EINOPS, P(dp=4, distributed_optimizer=True, optimizer_instances=2)),
        ),
    ),
    "hooked": Group(
        "the schedule hook knows nothing of a mode: with ids, microbatches, neither, and weights",
        HOOKED,
        (
            P(dp=2, cp=2, hooked=True),
            P(pp=2, cp=2, microbatches=1, hooked=True),
            P(tp=2, sequence_parallel=True, hooked=True),
            P(pp=2, vpp=3, microbatches=4, hooked=True),
            P(cp=2, distributed_optimizer=True, hooked=True),
            P(cp=2, packing="local", hooked=True),
            # With the zigzag layout its gradient was off by 79 percent, silently.
            P(cp=2, cp_partition="contiguous", packing="local", hooked=True),
            P(dp=2, microbatches=(3, 5), hooked=True),
        ),
    ),
    "own counts": Group(
        "the caller's, against loops over tokens",
        OWN_COUNTS,
        (P(dp=2, cp=2), P(dp=2, cp=2, hooked=True), P(tp=2, pp=2)),
    ),
    "Megatron-FSDP": Group(
        "each sharding strategy and layout, as `around`",
        THREE,
        (
            fsdp("no_shard", dp=2),
            fsdp("optim", dp=2),
            fsdp("optim_grads", dp=2),
            fsdp(dp=2),
            fsdp("optim_grads", dp=2, microbatches=1),
            fsdp("no_shard", dp=2, microbatches=1),
            fsdp(cp=2),
            fsdp(cp=2, hooked=True),
            fsdp(dp=2, recompute=True),
            fsdp(dp=4),
            fsdp(dp=2, cp=2),
            fsdp("optim", dp=2, cp=2),
            fsdp(dp=4, optimizer_instances=2),
            fsdp("optim_grads", dp=2, cp=2, optimizer_instances=2),
            fsdp(dp=2, tp=2),
            fsdp("optim_grads", dp=2, tp=2, sequence_parallel=True),
            fsdp(dp=4, ep=2, moe=True),
            # Later stock does not build the first without experts, and the second is refused in
            # one loss scaling: hybrid_engine_worker.py.
            *where(
                RELEASE <= (0, 16),
                fsdp(dp=2, average_in_collective=True),
                fsdp(dp=4, optimizer_instances=2, outer_sharding=True),
            ),
        ),
        NO_FSDP,
    ),
}

FIRST = (
    Case(aggregation=Aggregation("token_mean")),
    Case(aggregation=Aggregation("sample_mean")),
    Case(aggregation=Aggregation("constant", divisor=40)),
)
OF_A_TOTAL = (
    *FIRST,
    *(
        case
        for case in CASES
        if MODES[case.aggregation.mode].total
        and case not in FIRST
        and (case.second is None or case.second.total == case.aggregation.total)
    ),
    Case(aggregation=Aggregation("sample_mean"), second=Aggregation("sample_sum")),
)
"""Of deferred steps: every mode that has a total."""
DEFERRED = {
    2: (
        P(dp=2, microbatches=2),  # trains OF_A_TOTAL; the others FIRST
        P(dp=2, microbatches=(1, 3)),
        P(dp=2, microbatches=2, overlap_grad_reduce=True),
        P(dp=2, microbatches=2, overlap_grad_reduce=True, distributed_optimizer=True),
        P(dp=2, microbatches=2, distributed_optimizer=True, average_in_collective=True),
        P(cp=2, microbatches=2),
        P(tp=2, sequence_parallel=True, microbatches=2),
        P(pp=2, microbatches=2),
        P(pp=2, vpp=2, microbatches=2, overlap_grad_reduce=True),
        P(dp=2, ep=2, moe=True, microbatches=2),
        P(dp=2, mtp=True, float32=True, microbatches=2),
    ),
    4: (
        P(
            dp=2,
            tp=2,
            sequence_parallel=True,
            microbatches=2,
            overlap_grad_reduce=True,
            distributed_optimizer=True,
        ),
        P(cp=2, pp=2, microbatches=2),
    ),
}
"""By number of ranks."""

# Megatron-Core trains no experts on TP 2 without sequence parallelism.
SIDE = (
    P(dp=2, moe=True),
    P(dp=2, ep=2, moe=True),
    P(cp=2, moe=True),
    P(tp=2, ep=2, sequence_parallel=True, moe=True),
    P(pp=2, moe=True),
    # Before 0.16 it packs no sequences under multi-token prediction.
    *where(RELEASE >= (0, 16), P(dp=2, mtp=True, float32=True), P(cp=2, mtp=True, float32=True)),
)
"""Losses that Megatron-Core adds to the main one."""
# Before 0.15 stock divides by a microbatch's tokens even where there are none, and is NaN.
SIDE_LOSS_SCALINGS = LOSS_SCALINGS if RELEASE >= (0, 15) else ("per_token",)
FOLLOWED = (
    P(dp=2, moe=True),
    P(pp=2, moe=True),
    P(cp=2, moe=True),
    P(tp=2, ep=2, sequence_parallel=True, moe=True),
    fsdp(dp=2, moe=True),
    fsdp("optim", cp=2, moe=True),
    P(dp=2, mtp=True, float32=True),
    P(cp=2, mtp=True, float32=True),
)
"""Those with side losses that follow the mode."""
SLICED = (P(dp=2, cp=2), P(cp=4))
"""Those whose unpacked batches Megatron-Core slices."""
