"""Each ``check_`` of ``microbatch_costs_worker.py`` passes at CP 1 and at CP 2."""

from conftest import each_check

output, test_a_microbatch_costs_little = each_check("loop/microbatch_costs_worker.py", processes=1)
output_at_cp_2, test_a_microbatch_costs_little_at_cp_2 = each_check(
    "loop/microbatch_costs_worker.py", processes=2
)
