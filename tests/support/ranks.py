"""What the ranks of a launched worker share: their group, what each found, and rows for the test.

A worker answers by lines. ``PASSED`` and ``FAILED``: of a check, by ``run_worker`` or
``check_runner``; or of a row of a table, by ``each_told``. ``ROW`` and JSON: what was found, by
``print_row``, which the test reads by ``rows_of``.
"""

import gc
import json
import os
import re
import sys
from pathlib import Path

import torch.distributed as dist
from check_runner import run_checks


def begin(**options):
    """Join the gloo group of a launch's ranks, from the environment."""
    dist.init_process_group("gloo", **options)


def run_worker(namespace, *arguments, **options):
    """Run a worker's checks over all ranks."""
    begin(**options)
    run_checks(namespace, *arguments)
    gc.collect()  # caught errors hold frames, and these the group, whose threads end with it
    dist.destroy_process_group()


def leave():
    """End a rank whose framework keeps its groups, without the interpreter's finalization.

    A thread of gloo that drops the last tensor of its group meanwhile aborts the process.
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def each_layout(job):
    """Join the ranks, and split them into each layout of a job that ``job_of`` has written."""
    from megatron_lossagg.verify.job import read_job
    from megatron_lossagg.verify.world import join_world, split_world

    join_world()
    for layout in read_job(Path(job)).layouts:
        with split_world(layout):
            yield layout
    dist.destroy_process_group()


def of_ranks(own, group=None):
    """Gather an object of every rank."""
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found


def raised_by_rank(call, *arguments, of=Exception, **options):
    """Call, and return the type and message of each rank's error; None where there is none."""
    raised = None
    try:
        call(*arguments, **options)
    except of as error:
        raised = type(error).__name__, str(error)
    return of_ranks(raised)


def messages_by_rank(call, *arguments, **options):
    """Call, and return the message of each rank's error; None where it raises none."""
    raised = raised_by_rank(call, *arguments, **options)
    return [one and one[1] for one in raised]


def raised_everywhere(message, call, *arguments, **options):
    """Assert that every rank raises the same PlanError; all compare before any of them fails."""
    raised = raised_by_rank(call, *arguments, **options)
    assert len(set(raised)) == 1, raised
    assert raised[0] is not None
    assert raised[0][0] == "PlanError", raised
    assert re.search(message, raised[0][1]), raised


def print_row(row, *, of_first=True):
    """Print a row, for ``rows_of``: on the first rank, or on each that calls."""
    if not (of_first and dist.is_initialized() and dist.get_rank()):
        print("ROW", json.dumps(row), flush=True)


def rows_of(printed):
    """Read the rows that a worker has printed, in a test."""
    return [json.loads(line[4:]) for line in printed.splitlines() if line.startswith("ROW ")]


def each_told(name, run):
    """Call ``run`` on every rank; the first prints whether it passed on all, for ``assert_told``.

    Unlike after a check, the launch goes on after one that failed.
    """
    fault = ""
    try:
        run()
    except BaseException as error:  # pytest's own are not Exceptions
        fault = f"{type(error).__name__}: {error}"
    faults = of_ranks(fault)
    if dist.get_rank() == 0:
        failed = " ".join(f"[rank {rank}] {one}" for rank, one in enumerate(faults) if one)
        print(f"FAILED {name}: {failed}" if failed else f"PASSED {name}", flush=True)


def assert_told(name, printed):
    """Fail with what a launch told of a name, or if it told nothing."""
    lines = printed.splitlines()
    assert not [line for line in lines if line.startswith(f"FAILED {name}:")]
    assert f"PASSED {name}" in lines
