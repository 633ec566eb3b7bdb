"""What mutants of plan.py run against over ranks; only for ``run.py``."""

import plan_worker
from mutant_forks import on_two_ranks


def test_the_checks_of_the_plan_worker_hold():
    on_two_ranks(plan_worker.main)
