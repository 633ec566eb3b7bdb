"""What mutants of ownership.py run against over ranks; only for ``run.py``."""

import ownership_worker
from mutant_forks import on_two_ranks


def test_the_checks_of_the_ownership_worker_hold():
    on_two_ranks(ownership_worker.main)
