"""Each ``check_`` of the schedule hook's workers passes.

Through it, a framework's loop that knows nothing of us trains the configured loss: the group
``hooked`` of ``megatron/layouts.py``.
"""

from conftest import each_check

output, test_the_hook = each_check("loop/schedule_worker.py", processes=2)
output_of_refusals, test_the_hook_refuses = each_check(
    "loop/schedule_refusals_worker.py", processes=2
)
output_of_comparison, test_the_hook_compares = each_check(
    "loop/schedule_comparison_worker.py", processes=2
)
