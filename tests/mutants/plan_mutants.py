"""What mutants of plan.py run against over ranks; only for ``run.py``."""

import contextlib
import io
import json

import plan_worker
from mutant_forks import on_two_ranks


def test_the_checks_of_the_plan_worker_hold():
    def work():
        with contextlib.redirect_stdout(io.StringIO()) as out:
            plan_worker.main()
        results = [json.loads(line[6:]) for line in out.getvalue().splitlines()]
        for name, faults in results:
            assert not any(faults), (name, faults)

    on_two_ranks(work)
