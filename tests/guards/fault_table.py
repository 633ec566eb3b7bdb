"""What each guard and each refusal before a step catches: one row for a fault."""

from deferred_faults import DEFERRED
from fault_row import LAYOUTS, Row

__all__ = ["LAYOUTS", "ROWS", "Row"]

COEFFICIENT = "arrived in the backward pass with the coefficient {}, expected 1"
UNREDUCED = "mb.reduce was not called under the step's aggregation in this microbatch"
GRAPHLESS = "requires no gradient in a training step.*forward_only=True"
LATE = "losses of sequences .* were reduced after loss_func had returned for them"
NONE = "no gradient reached the step's own partial loss in call 0"
OPEN = r"the previous step was not finished.*with aggregator.step.*step\.finish\(\)"
INTEGER = "got {} {}, expected an integer from 1"
INTEGER_OF_CALLS = r"got accumulates=.*, expected a bool or an integer from 1"
ACCUMULATES = "accumulates=True with {}"
OTHERS = r"2 microbatches .* config\.no_sync_func is not theirs"
FINALIZED = "finalize_model_grads_func did not run in the step"
NONZERO = r"chunk 0 were not zero .*zero_grad_buffer\(\)"
SCHEDULE = "the schedule got {} tokens of this rank to divide by, mb.outputs returned"
SCALED = r"scales gradients by \[0\.25, 0\.5\].*frozen"

BEFORE = [
    Row("previous_step", "the previous step is open", "open_step", OPEN),
    Row("changed_config", "another scaling", "flipped_scaling", "wrapped in the average loss scal"),
    Row("changed_config", "a router's", "flipped_router", "router was built with .*=True", "MoE"),
    Row("changed_config", "a bucket's factor", "scaled_bucket", SCALED),
    Row("changed_config", "another CP size", "changed_cp", "eval_context_parallel_size of Meg"),
    Row(
        "changed_config",
        "an average in the collective",
        "averaging",
        "average_in_collective is True .* in the per-token loss scaling, which sum",
        per_token=True,
    ),
    Row("finalize_function", "none", "no_finalize", "finalize_model_grads_func is None"),
    Row("finalize_function", "replaced", "replaced_finalize", "doubled.*when the LossAggregator w"),
    Row("finalize_function", "replaced after a step", "replaced_later", "doubled.*when the LossAg"),
    Row("finalize_function", "other arguments", "other_partial", "a=2.* it was .*a=1"),
    Row("finalize_function", "set by training, replaced", "set_twice", "doubled"),
    Row(
        "finalize_function",
        "not what was probed",
        "not_probed",
        "was None when the",
        per_token=True,
    ),
    Row(
        "finalize_function",
        "two steps of a model",
        "two_steps",
        "a step of this model while another one runs",
        per_token=True,
    ),
    *(
        Row(
            "numbers",
            f"M is {m!r}",
            "with_m",
            INTEGER.format("num_microbatches", f"{m!r}"),
            "DP 2",
            (m,),
        )
        for m in ("2", 2.0, True, 0, -1, None)
    ),
    *(
        Row(
            "numbers",
            f"iteration {i!r}",
            "of_iteration",
            INTEGER.format("iteration", f"{i!r}"),
            "DP 2",
            (i,),
        )
        for i in ("2", 2.0, True, 0, -1)
    ),
    Row(
        "numbers", "M of rank 1 is 0", "m_of_rank_1", "^rank 1 of .* got num_microbatches 0, expec"
    ),
    Row(
        "missing_plan",
        "no plan on the last stage",
        "begun_with",
        "got no counts on the last",
        "DP 2",
        (None,),
    ),
    Row(
        "missing_plan",
        "no plan but 7",
        "begun_with",
        "got 7, expected what plan_step",
        "DP 2",
        (7,),
    ),
    Row("plan_of_another_step", "another M", "plan_of_three", "made for 3 microbatches.*runs 2"),
    Row(
        "plan_of_another_step",
        "other ranks",
        "plan_of_this_rank",
        r"counted over ranks \[\d\], .* is \[0, 1\].*group=aggregator\.dp_group",
    ),
    Row(
        "plan_of_another_step",
        "a plan that has trained",
        "plan_used_again",
        "has already begun to train a step.*plan_step for each.*forward_only=True",
    ),
    Row(
        "plan_of_another_step",
        "a copy of a plan that has trained",
        "copied_plan_used_again",
        "has already begun to train a step",
    ),
    Row(
        "aggregation_of_one_rank",
        "a mode of its own",
        "mode_of_one_rank",
        r"under token_sum.*not agreed on.*aggregator\.agree_on",
    ),
    Row("agree", "two modes", "modes_by_rank", "rank 0 has token_mean.*rank 1 has sample_mean"),
    Row(
        "unknown_divisor",
        "N is not known",
        "unknown_n",
        r"active tokens.*StepTotals\(active_to",
        per_token=True,
    ),
    Row("unknown_divisor", "N beyond int32", "n_beyond_int32", "2147483648.*int32", per_token=True),
    Row(
        "early_reduction",
        "no no_sync_func",
        "overlap_with",
        r"2 microbatches .* config\.no_sync_func is None",
        "DP 2",
        ("none",),
    ),
    *(
        Row("early_reduction", f"no_sync_func is {other}", "overlap_with", OTHERS, "DP 2", (other,))
        for other in ("another's", "a list of another's", "a null context")
    ),
    *(
        Row("numbers", f"accumulates={c!r}", "accumulating", INTEGER_OF_CALLS, "DP 2", (c,))
        for c in ("2", 2.0, 0, -1, None)
    ),
    Row(
        "accumulation",
        "a sum of means",
        "accumulating",
        "accumulates=True with sample_mean.*accumulates=2, which trains their mean",
        "DP 2",
        (True,),
    ),
    Row(
        "accumulation",
        "calls of a custom reducer",
        "accumulating_custom",
        "accumulates=2 with a custom reducer",
    ),
    Row("accumulation", "TP 2", "accumulated", ACCUMULATES.format("tensor parallelism"), "TP 2"),
    Row("accumulation", "PP 2", "accumulated", ACCUMULATES.format("pipeline parallelism"), "PP 2"),
    Row("accumulation", "EP 2", "accumulated", ACCUMULATES.format("expert parallelism"), "EP 2"),
    Row(
        "accumulation",
        "overlap",
        "accumulated",
        ACCUMULATES.format("overlap_grad_reduce"),
        "DP 2",
        ("overlap_grad_reduce",),
    ),
    Row(
        "accumulation",
        "sharded",
        "accumulated",
        ACCUMULATES.format("the distributed opt"),
        "DP 2",
        ("distributed_optimizer",),
    ),
    Row(
        "accumulation",
        "per-token",
        "accumulated",
        ACCUMULATES.format("--calculate-per-to"),
        per_token=True,
    ),
]
"""Of each function of ``BEFORE_A_STEP``."""

IN_A_STEP = [
    Row(
        "Split",
        "a local layout of CP 2",
        "layout_of_cp_2",
        "CP rank 0 of 2, this rank is 0 of 1.*cu_seqlens=",
        "DP 2",
        ("local",),
    ),
    Row(
        "Split",
        "a zigzag layout of CP 2",
        "layout_of_cp_2",
        "CP rank 1 of 2, this rank is 0 of 1.*cu_seqlens=",
        "DP 2",
        ("zigzag",),
    ),
    Row("Split", "contiguous slices", "contiguous_layout", "cp_partition_mode is zigzag", "CP 2"),
    Row("GradientAudit", "a loss of nothing reduced", "unreduced", UNREDUCED),
    Row("GradientAudit", "a reducer made without the step", "own_reducer", UNREDUCED),
    Row("GradientAudit", "another aggregation only", "other_aggregation", UNREDUCED),
    Row(
        "GradientAudit",
        "a microbatch of an earlier call",
        "cached_microbatch",
        UNREDUCED + ".*anew for each microbatch",
    ),
    *(
        Row("GradientAudit", f"reduced in call {calls}", "late", LATE, "CP 2, M 3", (calls,))
        for calls in (1, 2)
    ),
    Row("GradientAudit", "losses without a graph", "graphless", GRAPHLESS, "DP 2", ("detached",)),
    Row("GradientAudit", "reduced under no_grad", "graphless", GRAPHLESS, "DP 2", ("no_grad",)),
    Row(
        "GradientAudit", "reduced in inference mode", "graphless", GRAPHLESS, "DP 2", ("inference",)
    ),
    Row(
        "GradientAudit",
        "a custom reducer through numpy",
        "through_numpy",
        "requires no gradient.*let a custom reducer keep its graph",
    ),
    Row(
        "GradientAudit",
        "an empty step's loss detached",
        "empty_and_detached",
        "requires no gradient in a training step",
    ),
    Row(
        "GradientAudit",
        "an evaluation that trains",
        "trained_evaluation",
        "the schedule trains in a step with forward_only=True, which detached its losses",
    ),
    Row("GradientAudit", "a mean, reduced for the report", "reported_only", NONE),
    Row("GradientAudit", "backward twice", "backward_twice", "were trained twice in call 0"),
    Row(
        "GradientAudit",
        "all-reduced over CP with autograd",
        "all_reduced",
        COEFFICIENT.format(2),
        "CP 2",
    ),
    Row(
        "GradientAudit",
        "a factor on one rank",
        "factor_of_rank_1",
        COEFFICIENT.format(2),
        ranks=(1,),
    ),
    Row(
        "GradientAudit",
        "a factor in the last microbatch",
        "factor_of_last",
        "partial loss of call 1 .* coefficient 2",
    ),
    Row("GradientAudit", "a loss scale that changes", "changed_scale", r"coefficient 0\.5", "DP 2"),
    *(
        Row(
            "GradientAudit",
            "a loss scaled after outputs",
            "scaled_after",
            COEFFICIENT.format(2),
            "CP 2, M 3",
            (),
            per_token,
        )
        for per_token in (False, True)
    ),
    Row(
        "GradientAudit", "num_tokens dropped", "dropped_tokens", COEFFICIENT.format(2), "CP 2, M 3"
    ),
    Row(
        "GradientAudit",
        "no schedule",
        "no_schedule",
        COEFFICIENT.format(2) + ": .* let Megatron's schedule run",
    ),
    Row("GradientAudit", "two schedule calls", "two_calls", COEFFICIENT.format(2)),
    Row(
        "Terms",
        "weights that no loss counts",
        "uncounted_weights",
        "token_weight_sums.*no loss of the step counts them",
    ),
    Row(
        "Terms",
        "a sum of a term's means",
        "accumulating_term",
        "accumulates=True with sample_mean.*accumulates=2, which trains their mean",
        "DP 2",
        ("sample_mean",),
    ),
    Row(
        "Terms",
        "a reducer of the plan that one of two calls was begun with",
        "accumulating_by_own_plan",
        r"got a reducer of the plan that a schedule call was begun with.*step\.plan\.under",
    ),
    Row("GradientBuffers", "gradients of 1", "filled_buffers", NONZERO, "DP 2", (1.0,)),
    Row("GradientBuffers", "gradients of NaN", "filled_buffers", NONZERO, "DP 2", (float("nan"),)),
    Row(
        "GradientBuffers",
        "a first call that does not declare the calls",
        "declared_late",
        NONZERO + r".*accumulates=\) with their number",
    ),
    Row("GradientBuffers", "more calls than declared", "one_call_too_many", NONZERO, "DP 2"),
    Row("GradientBuffers", "one call, gradients kept", "one_call_declared", NONZERO, "DP 2"),
    Row("GradientBuffers", "a step that is repeated", "repeated_step", NONZERO),
    Row(
        "Finalized",
        "num_tokens dropped",
        "dropped_tokens",
        SCHEDULE.format(0) + "|" + COEFFICIENT.format(".*"),
        "CP 2, M 3",
        per_token=True,
    ),
    Row(
        "Finalized",
        "num_tokens dropped at M 1",
        "dropped_at_m_1",
        SCHEDULE.format(0),
        per_token=True,
    ),
    Row(
        "Finalized",
        "tokens of each rank's own",
        "own_tokens",
        SCHEDULE.format(r"\d+"),
        "CP 2",
        per_token=True,
    ),
    Row(
        "Finalized",
        "at least one token",
        "at_least_one",
        SCHEDULE.format(2),
        "CP 2",
        per_token=True,
        ranks=(1,),
    ),
    Row(
        "Finalized",
        "two schedule calls",
        "two_calls",
        "after 1 of the 2 microbatches",
        per_token=True,
    ),
    Row("Finalized", "another model's schedule", "schedule_of_another_model", FINALIZED),
    Row("Finalized", "a function set inside", "finalize_set_inside", FINALIZED, "DP 2"),
    Row(
        "Ownership",
        "a token that no rank trains",
        "lost_token",
        "train 1 tokens fewer of sequence",
        "CP 2",
    ),
    *(
        Row(
            "Ownership",
            f"{kind} ids of each rank, read by {'a shadow' if shadow else 'a term'} under {mode}",
            "ids_of_each_rank",
            f"ranks 0 and 1 give the same sequences different weights.* they differ under {mode}",
            "CP 2",
            (kind, mode, shadow),
            per_token,
        )
        for kind, mode, shadow, per_token in (
            ("sample", "sample_mean", False, False),
            ("sample", "row_mean", False, True),
            ("prompt", "prompt_mean", False, False),
            ("group", "balanced", False, False),
            ("sample", "sample_sum", False, False),
            ("prompt", "prompt_mean", True, False),
        )
    ),
    Row(
        "Ownership",
        "a rank that failed by itself",
        "failed_alone",
        "context-parallel rank 1 ended the step with an error",
        "CP 2",
        ranks=(0,),
    ),
]
"""Of each class of ``GUARDS``."""

ROWS = [*BEFORE, *IN_A_STEP, *DEFERRED]
