"""What the tests of ``launch/`` share: the scripts, their environment, small things to launch."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
TORCHRUN = LAUNCH / "torchrun.sh"
TIMEOUT = 900

VERIFY_ONE_CASE = (
    *("-m", "megatron_lossagg", "verify", "--cp", "2"),
    *("--loss-aggregation", "sample_mean", "--loss-scaling", "average"),
)
PASSED = "PASS: 1 of 1 case passes on 1 layout of 2 ranks"

EXAMPLE = ROOT / "examples" / "drgrpo" / "train.py"
WARM = ROOT / "examples" / "drgrpo" / "data" / "warmup_weights.pt"
STEPS = 60
SMALL_EXAMPLE = (
    *("--warmup-steps", "0", "--start-from", str(WARM), "--num-microbatches", "2"),
    *("--prompts-per-step", "4", "--samples-per-prompt", "4", "--steps", str(STEPS)),
    *("--eval-interval", "20", "--save-interval", "10"),
)
"""Starts from weights that are right now and then, so that every term of the loss is at work."""


def environment(**more):
    """Return an environment in which the scripts find this checkout, on CPU, over loopback."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ours = {
        "DEVICE": "cpu",
        "PYTHON": sys.executable,
        "PYTHONPATH": path,
        "PYTHONWARNINGS": "ignore",
    }
    return {**os.environ, **ours, **more}


def report_of(fault, *options, processes):
    """Verify a copy of the package with a fault of tests/wrong_factors; return the report."""
    from conftest import launched, new_folder  # not where a cluster is started by hand
    from wrong_factors import run

    folder = new_folder()
    shutil.copytree(ROOT / "megatron_lossagg", folder / "megatron_lossagg")
    if fault is not None:
        run.apply(run.HERE / f"{fault}.txt", folder)
    report = folder / "report.json"
    arguments = [folder, *options, "--json", report]
    launched("verify/verify_copy_worker.py", *arguments, processes=processes)
    return report


def our_names(node, port):
    """Return what torchrun.sh reads on a node of two."""
    return {
        "NUM_NODES": "2",
        "NODE_RANK": str(node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PROCESSES_PER_NODE": "1",
    }


def on_two_nodes(arguments, *, folder, command=(TORCHRUN,), names=our_names, **more):
    """Run torchrun.sh as two nodes would, at once; return how each ended and what it printed."""
    agents = []
    (port,) = free_ports(1)
    with contextlib.ExitStack() as files:
        for node in range(2):
            out = files.enter_context((folder / f"node{node}.out").open("w+"))
            agents.append(
                subprocess.Popen(
                    [*command, *map(str, arguments)],
                    cwd=folder,
                    env=environment(**{**names(node, port), **more}),
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            )
        ended = [agent.wait(timeout=TIMEOUT) for agent in agents]
    return [(status, (folder / f"node{n}.out").read_text()) for n, status in enumerate(ended)]


@contextlib.contextmanager
def running(command, log, environment, *, folder=None):
    """Keep a process running, with what it starts; ``log`` is what it prints."""
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_until(condition, *logs, seconds=TIMEOUT):
    """Wait until a condition holds; if it does not in time, raise with the ends of the logs.

    A log that is a folder stands for its files ``*.log`` and ``*.out``.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            files = [file for log in logs for file in ([log] if log.is_file() else outputs_in(log))]
            ends = [f"{file.name}:\n{file.read_text()[-4000:]}" for file in files]
            raise TimeoutError("\n".join([f"it did not happen in {seconds} s", *ends]))
        time.sleep(0.2)


def outputs_in(folder):
    """List the log files in a folder; none if the folder does not exist."""
    return sorted([*folder.glob("*.log"), *folder.glob("*.out")])


def free_ports(count):
    """Return free ports that Linux gives to no outgoing connection in the meantime."""
    ports = []
    drawn = iter(random.SystemRandom().sample(range(21000, 32000), 1000))
    while len(ports) < count:
        port = next(drawn)
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            ports.append(port)
    return ports


def metrics_without_time(folder):
    """Read what the example logged, without the one field that no run repeats."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    return [json.dumps({k: v for k, v in line.items() if k != "seconds"}) for line in logged]
