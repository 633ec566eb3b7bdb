"""Runs the ``check_`` functions of a launched worker in order, and reads which of them passed."""

import re
import types

import pytest
import torch.distributed as dist


def run_checks(namespace, *arguments):
    """Call every ``check_`` function of a worker's globals on every rank.

    Rank 0 prints what is due, then what passed; a rank prints what failed on it, and ends.
    """
    is_first = dist.get_rank() == 0
    checks = {
        name: check
        for name, check in namespace.items()
        if name.startswith("check_") and isinstance(check, types.FunctionType)
    }
    if is_first:
        print(*(f"DUE {name}" for name in checks), sep="\n", flush=True)
    for name, check in checks.items():
        try:
            check(*arguments)
        except BaseException as error:
            print(f"FAILED {name}: {type(error).__name__}: {error}", flush=True)
            raise
        if is_first:
            print(f"PASSED {name}", flush=True)


def checks_of(worker):
    """Return the names of a worker's checks, without importing it."""
    return re.findall(r"^def check_(\w+)\(", worker.read_text(), re.MULTILINE)


def assert_passed(check, done):
    """Fail with a check's own error, or with what kept an ended launch from reaching it."""
    name = f"check_{check}"
    printed = done.stdout.splitlines()
    due, passed, failed = (
        [line.partition(" ")[2] for line in printed if line.startswith(f"{word} check_")]
        for word in ("DUE", "PASSED", "FAILED")
    )
    ended_in = [one for one in due if passed.count(one) < due.count(one)][:1]
    blamed = {line.partition(":")[0] for line in failed} or {*ended_in}
    if name not in blamed and blamed:
        if not 0 < passed.count(name) == due.count(name):
            pytest.fail(f"not reached: {(failed or ended_in)[0]}", pytrace=False)
    elif done.returncode or name in blamed or name not in passed:
        pytest.fail(f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}", pytrace=False)
