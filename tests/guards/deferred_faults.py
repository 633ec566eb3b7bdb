"""The rows of ``fault_table`` of deferred steps."""

from fault_row import Row

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
