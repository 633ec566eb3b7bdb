"""Two ranks forked from this process, for ``mutants_plan.py`` and ``mutants_contract.py``.

A launch per mutant would import torch and Megatron-Core anew each time.
"""

import json
import os
import signal
import socket
import time
import traceback

from mutmut.state import state

SECONDS = 90


def on_two_ranks(work):
    """Fork two ranks; when one fails, end the other. What they hit counts as hit here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    reads = {}
    for rank in range(2):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os._exit(_rank(work, rank, port, write))
        os.close(write)
        reads[pid] = read
    failed, running, end = [], set(reads), time.monotonic() + SECONDS
    while running and not failed and time.monotonic() < end:
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                running.remove(pid)
                failed += [status] * (status != 0)
        time.sleep(0.02)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for read in reads.values():
        with os.fdopen(read) as pipe:
            state()._stats |= set(json.loads(pipe.read() or "[]"))
    assert not failed
    assert not running


def _rank(work, rank, port, write):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    try:
        work()
        os.write(write, json.dumps(sorted(state()._stats)).encode())
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
