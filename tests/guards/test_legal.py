"""Each ``check_`` of ``legal_worker.py`` passes on two ranks."""

from conftest import each_check

output, test_a_loop_may = each_check("guards/legal_worker.py", processes=2)
