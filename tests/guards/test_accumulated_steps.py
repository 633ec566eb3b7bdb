"""Each ``check_`` of ``accumulated_steps_worker.py`` passes on two ranks."""

from conftest import each_check

output, test_an_optimizer_step = each_check("guards/accumulated_steps_worker.py", processes=2)
