"""Each ``check_`` of ``finalized_worker.py`` passes on two data-parallel ranks."""

from conftest import each_check

output, test_the_finalize_function_ran = each_check("guards/finalized_worker.py", processes=2)
