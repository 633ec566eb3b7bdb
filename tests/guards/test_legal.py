"""Each ``check_`` of the workers of legal uses passes on two ranks.

What runs may be is in ``test_legal_runs.py``.
"""

from conftest import each_check

output, test_a_loop_may = each_check("guards/legal_worker.py", processes=2)
output_of_inputs, test_a_loop_may_pass = each_check("guards/legal_inputs_worker.py", processes=2)
output_of_steps, test_a_loop_may_begin = each_check("guards/legal_steps_worker.py", processes=2)
output_of_hooks, test_a_loader_may = each_check("loop/legal_hook_worker.py", processes=2)
