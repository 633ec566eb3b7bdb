"""Every mode with both ways to count empty ones: the aggregations of the tests, in one list."""

from megatron_lossagg.verify.cases import MASK_CASES

AGGREGATIONS = {str(case): case.aggregation for case in MASK_CASES if case.second is None}
"""By name, such as ``sample_mean, count_empty=False``."""
ANY_LAYOUT = {n: a for n, a in AGGREGATIONS.items() if a.mode != "microbatch_token_mean"}
"""Those that do not depend on the layout."""
