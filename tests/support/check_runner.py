"""Runs the ``check_`` functions of a launched worker, in order, and prints each by its name."""

import re
import types

import torch.distributed as dist


def run_checks(namespace, *arguments):
    """Call every ``check_`` function of a worker's globals on every rank; rank 0 prints it."""
    is_first = dist.get_rank() == 0
    checks = {
        name: check
        for name, check in namespace.items()
        if name.startswith("check_") and isinstance(check, types.FunctionType)
    }
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
