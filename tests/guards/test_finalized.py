"""Each ``check_`` of ``finalized_worker.py`` passes on two data-parallel ranks, and on one."""

from conftest import each_check

output, test_the_finalize_function_ran = each_check("guards/finalized_worker.py", processes=2)
output_of_one, test_it_ran_on_one_rank = each_check("guards/finalized_worker.py", processes=1)
