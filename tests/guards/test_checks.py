"""Each ``check_`` of a worker passes on its ranks.

Steps of several schedule calls, agreement, the finalize function, and programs near the faults that
are right: none is refused, and each trains what it says.
"""

from conftest import each_check

accumulated, test_an_optimizer_step = each_check("guards/accumulated_steps_worker.py", processes=2)
deferred, test_a_deferred_step = each_check("guards/deferred_steps_worker.py", processes=2)
agreement, test_the_agreement = each_check("guards/agreement_worker.py", processes=3)
finalized, test_the_finalize_function_ran = each_check("guards/finalized_worker.py", processes=2)
of_one, test_it_ran_on_one_rank = each_check("guards/finalized_worker.py", processes=1)
legal, test_a_loop_may = each_check("guards/legal_worker.py", processes=2)
inputs, test_a_loop_may_pass = each_check("guards/legal_inputs_worker.py", processes=2)
steps, test_a_loop_may_begin = each_check("guards/legal_steps_worker.py", processes=2)
hooks, test_a_loader_may = each_check("loop/legal_hook_worker.py", processes=2)
runs, test_a_run_may = each_check("guards/legal_runs_worker.py", processes=2)
