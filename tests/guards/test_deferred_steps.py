"""Each ``check_`` of ``deferred_steps_worker.py`` passes on two ranks, in each layout."""

from conftest import each_check

output, test_a_deferred_step = each_check("guards/deferred_steps_worker.py", processes=2)
