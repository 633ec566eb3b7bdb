"""Each ``check_`` of the workers passes on live Megatron-Core, on one, two or four ranks."""

import re
from importlib.metadata import version

from conftest import each_check

output, test_the_aggregator = each_check("loop/aggregator_worker.py", processes=2)
output_of_steps, test_a_step = each_check("loop/step_worker.py", processes=2)
output_of_counts, test_the_counts_of_a_step = each_check("loop/step_counts_worker.py", processes=4)
costs, test_a_microbatch_costs_little = each_check("loop/microbatch_costs_worker.py", processes=1)
costs_at_cp_2, test_a_microbatch_costs_little_at_cp_2 = each_check(
    "loop/microbatch_costs_worker.py", processes=2
)


def test_the_ranks_ran_the_megatron_core_that_this_process_has(output_of_aggregator_worker_2):
    """``versions.py`` puts another release before the installed one."""
    printed = output_of_aggregator_worker_2.stdout
    (ran,) = re.findall(r"^RAN megatron-core ([\w.]+)", printed, re.MULTILINE)
    assert ran == version("megatron-core")
