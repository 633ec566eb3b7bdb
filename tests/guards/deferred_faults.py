"""The rows of ``fault_table`` of deferred steps."""

from fault_row import Row

from megatron_lossagg import Aggregation

DEFERRED = [
    Row(
        "deferred",
        "a mode without a total",
        "deferred_by_microbatch",
        "deferred step under microbatch_token_mean, whose .* no one total.*train token_mean, ",
    ),
    Row(
        "deferred",
        "two aggregations",
        "deferred_under_two",
        "a schedule call under token_mean.*in a deferred step under sample_mean",
    ),
    Row(
        "deferred",
        "accumulates=",
        "deferred_and_accumulated",
        "accumulates=2 in a deferred step.*leave it out",
    ),
    Row(
        "deferred",
        "a call that failed",
        "deferred_after_an_error",
        "a schedule call of the deferred step failed",
    ),
    Row(
        "deferred",
        "a schedule call without a step",
        "deferred_without_a_step",
        "finalized 2 times in 1 steps of the deferred step",
    ),
    Row(
        "deferred",
        "a no_sync_func set inside",
        "deferred_with_no_sync",
        r"config\.no_sync_func was set inside the deferred step",
    ),
    Row(
        "deferred",
        "a finalize function set inside",
        "deferred_with_finalize",
        r"config\.finalize_model_grads_func was set inside the deferred step",
    ),
    Row(
        "deferred",
        "side losses",
        "deferred_by_one",
        r"side losses \(MoE\), which .* by M of each call: train token_mean",
        "MoE",
        ("token_mean",),
    ),
    Row(
        "deferred",
        "side losses under sample_mean",
        "deferred_by_one",
        r"side losses \(MoE\)",
        "MoE",
        ("sample_mean",),
        per_token=True,
    ),
    Row(
        "Terms",
        "a term with another total",
        "deferred_with_other_term",
        "a term under token_mean.* in a deferred step under sample_mean.*one number divides",
        "DP 2",
        ("sample_mean", "token_mean"),
    ),
    Row(
        "deferred",
        "a total in place of C, and a term with another",
        "deferred_with_total",
        "the total 9 in place of C in a deferred step that reduces with C = 6 and 30: leave total=",
        "DP 2",
        (Aggregation("token_sum", divisor=6), Aggregation("token_sum", divisor=30), 9),
    ),
    Row(
        "Terms",
        "a term with another exponent",
        "deferred_with_other_term",
        r"a term under length_power: .*n_b\^0\.25 Z\) in a deferred step under .*n_b\^0\.5 Z",
        "DP 2",
        tuple(Aggregation("length_power", exponent=a) for a in (0.5, 0.25)),
        per_token=True,
    ),
    Row(
        "Terms",
        "a term that counts what is left out",
        "deferred_with_left_out",
        "a term under token_mean: w_s = 1/N, which counts sequences that are left out in a defer",
    ),
    Row(
        "Terms",
        "a reducer of the plan that a call was begun with",
        "deferred_by_own_plan",
        r"got a reducer of the plan that a schedule call was begun with.*step\.plan\.under",
    ),
    *(
        Row(
            "deferred",
            f"a {kind} in two calls, read by a term under {term}",
            "in_two_calls",
            f"the same {kind} has sequences in two .*, which reduces under {term}, whose weights",
            "DP 2",
            (term, kind, 3),
        )
        for kind, term in (
            ("sample", "sample_mean"),
            ("sample", "row_mean"),
            ("sample", "balanced"),
            ("group", "balanced"),
        )
    ),
    Row(
        "deferred",
        "a sample in two calls, read by a term on CP ranks",
        "in_two_calls",
        "the same sample has sequences in two .*, which reduces under sample_mean, whose weights",
        "CP 2",
        ("sample_mean", "sample", 3),
        per_token=True,
    ),
    Row(
        "deferred",
        "a sample in two calls, read by a shadow",
        "in_two_calls",
        "the same sample has sequences in two .*, which reduces under row_mean, whose weights",
        "DP 2",
        (None, "sample", 3, "row_mean"),
    ),
    Row(
        "deferred",
        "a shadow with another total",
        "deferred_with_shadow",
        "got a shadow under token_mean: w_s = 1/N in a deferred step under sample_mean",
        "DP 2",
        ("sample_mean", "constant:9,token_mean"),
    ),
    Row(
        "GradientBuffers",
        "gradients before a deferred step",
        "deferred_on_gradients",
        "gradients of chunk 0 were not zero",
    ),
    Row(
        "GradientBuffers",
        "gradients zeroed in a deferred step",
        "deferred_and_zeroed",
        "gradients were zeroed after 1 schedule calls of a deferred step",
    ),
    Row(
        "GradientBuffers",
        "a call after the division",
        "deferred_and_one_more",
        "gradients of chunk 0 were not zero",
    ),
]
"""Of deferred steps."""
