"""Each ``check_`` of ``legal_runs_worker.py`` passes on two ranks."""

from conftest import each_check

output, test_a_run_may = each_check("guards/legal_runs_worker.py", processes=2)
