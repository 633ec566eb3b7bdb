"""A Ray cluster of two nodes on loopback, whose files and ports are its own.

``python ray_cluster.py COMMAND ...`` runs a command while the cluster is up; its ``RAY_ADDRESS``
is where jobs are submitted. Needs ``ray[default]`` on the PATH.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from launching import free_ports, running

CPUS = 2
"""Of each node."""
GPUS = (4, 3)
"""What the nodes claim to have; no device is behind them."""


def ray():
    """Return the path of Ray's command, None where it is not installed."""
    return shutil.which("ray")


@contextlib.contextmanager
def loopback_cluster():
    """Start two nodes; yield the environment in which jobs reach them."""
    port, dashboard, *others = free_ports(6)
    with tempfile.TemporaryDirectory(prefix="ray") as name, contextlib.ExitStack() as nodes:
        head = [
            *("--head", f"--port={port}", f"--dashboard-port={dashboard}", f"--temp-dir={name}"),
            *("--dashboard-host=127.0.0.1", f"--ray-client-server-port={others.pop()}"),
        ]
        environment = {
            **os.environ,
            "RAY_ADDRESS": f"http://127.0.0.1:{dashboard}",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        for index, arguments in enumerate([head, [f"--address=127.0.0.1:{port}"]]):
            arguments += ["--node-ip-address=127.0.0.1", f"--num-cpus={CPUS}"]
            arguments += [f"--num-gpus={GPUS[index]}"]
            arguments += [f"--dashboard-agent-listen-port={others.pop()}"]
            arguments += ["--object-store-memory=100000000"]
            nodes.enter_context(node(arguments, Path(name) / f"node{index}.out", environment))
            if index == 0:
                wait_for_jobs(environment["RAY_ADDRESS"], Path(name) / "node0.out")
        yield environment


def node(arguments, log, environment):
    """Keep a node running."""
    # Ray's address is for jobs; a node that finds the variable would join another cluster. Workers
    # are to find the package where a job's runtime environment puts it.
    ours = ("RAY_ADDRESS", "PYTHONPATH")
    variables = {name: value for name, value in environment.items() if name not in ours}
    # Its folder is that of the jobs' drivers, where workers look for modules too.
    return running([ray(), "start", "--block", *arguments], log, variables, folder=log.parent)


def wait_for_jobs(address, log, seconds=180):
    """Wait until jobs can be submitted."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(f"{address}/api/version", timeout=5):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{address}: {error}\n{log.read_text()[-3000:]}") from None
            time.sleep(0.5)


if __name__ == "__main__":
    with loopback_cluster() as cluster:
        sys.exit(subprocess.run(sys.argv[1:], env=cluster).returncode)
