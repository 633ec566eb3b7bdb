"""The aggregations that every layout is tried with, and their divisors."""

BETA = 0.3
"""Weight of the second term of ``constant + token_mean``."""

CASES = {
    "token_mean": {},
    "sample_mean": {},
    "sample_mean, count_empty=False": {"count_empty": False},
    "prompt_mean": {},
    "prompt_mean, count_empty=False": {"count_empty": False},
    "constant": {"divisor": 40.0},
    "constant, count_empty=False": {"divisor": 40.0, "count_empty": False},
    "constant + token_mean": {"divisor": 40.0},
    "sample_sum": {},
    "token_sum": {"divisor": 7.0},
    "microbatch_token_mean": {},
}
