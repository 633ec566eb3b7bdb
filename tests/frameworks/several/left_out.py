"""Groups without a signal: what takes them out of the counts of a framework.

None of those here has a column for ``Sequences(left_out=...)``. Each masks such samples, and a
setting takes what is masked out of the counts: that setting trains the loss that leaves them out,
and the first step that counts an empty sample names it.
"""

from megatron_lossagg import Aggregation

COUNTS_EMPTY = ["sample_mean", "constant", "sample_sum", "prompt_mean", "row_mean"]
NAMED = {
    "prompt_mean": "prompts without an active token, ",
    **dict.fromkeys(["sample_mean", "constant"], "samples without an active token, "),
}


def of_mode(mode, **more):
    return Aggregation(mode, divisor=7 if mode == "constant" else None, **more)


def assert_said(printed, mode, leave_out):
    """The setting is named once if the mode counts empty samples or prompts, else never."""
    says = f"counts {NAMED[mode]}" if mode in NAMED else "without an active token"
    assert printed.count(says) == (mode in NAMED)
    assert printed.count(f" here; {leave_out} takes them out\n") == (mode in NAMED)
