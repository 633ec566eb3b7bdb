"""A Slurm cluster of two nodes on loopback, whose daemons, files and ports are its own.

``python slurm_cluster.py COMMAND ...`` runs a command while the cluster is up, with ``sbatch`` and
the like bound to it; its end ends the cluster. Needs Debian's ``slurm-wlm`` and ``munge``.
"""

import contextlib
import getpass
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from launching import free_ports, running, wait_until

NODES = ("node0", "node1")
GPUS = 8
"""What each node claims to have, so that jobs can ask for them; no device is behind them."""
MEMORY = 512
"""MB of each node."""
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
"""Daemons are not on every user's PATH."""

CONFIGURATION = """\
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmUser={user}
SlurmdUser={user}
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/%n
# A requeued job waits until its credential has expired: two minutes by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
# What a job gets that does not ask: less than a node has.
DefMemPerNode=100
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
MinJobAge=3600
ReturnToService=2
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP
"""


def missing_programs():
    """List what a cluster needs and this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


@contextlib.contextmanager
def loopback_cluster():
    """Start the daemons; yield the environment in which Slurm's commands reach them."""
    with tempfile.TemporaryDirectory(prefix="slurm") as name, contextlib.ExitStack() as daemons:
        folder = Path(name)
        folder.chmod(0o755)  # munged wants nobody else to write above its socket
        configure(folder)
        environment = {**os.environ, "PATH": PATH, "SLURM_CONF": f"{folder}/slurm.conf"}
        munge = (
            *("--foreground", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"),
            *(f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/munge.seed", "--force"),
            f"--log-file={folder}/munge.log",
        )
        daemons.enter_context(daemon(["munged", *munge], folder, environment))
        wait_until((folder / "munge.socket").exists, folder, seconds=30)
        daemons.enter_context(daemon(["slurmctld", "-D"], folder, environment))
        for node in NODES:
            daemons.enter_context(daemon(["slurmd", "-D", "-N", node], folder, environment))
        wait_until(lambda: idle_nodes(environment) == len(NODES), folder, seconds=30)
        yield environment


def configure(folder):
    """Write what the daemons read."""
    user, host = getpass.getuser(), socket.gethostname().partition(".")[0]
    controller_port, *node_ports = free_ports(1 + len(NODES))
    nodes = [
        f"NodeName={node} NodeAddr=127.0.0.1 NodeHostname={host} Port={port} "
        f"CPUs={os.cpu_count()} RealMemory={MEMORY} Gres=gpu:{GPUS} State=UNKNOWN"
        for node, port in zip(NODES, node_ports, strict=True)
    ]
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(
            folder=folder,
            user=user,
            host=host,
            controller_port=controller_port,
            nodes="\n".join(nodes),
        )
    )
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n")
    for gpu in range(GPUS):
        (folder / f"gpu{gpu}").touch()
    (folder / "state").mkdir()
    for node in NODES:
        (folder / node).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)


def daemon(command, folder, environment):
    """Keep a daemon running; what it prints is in a file of its name."""
    name = command[-1] if command[-2] == "-N" else command[0]
    return running(command, folder / f"{name}.out", environment)


def idle_nodes(environment):
    """Count the nodes that wait for jobs."""
    command = ["sinfo", "--noheader", "--Node", "--format=%T"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.stdout.split().count("idle")


if __name__ == "__main__":
    with loopback_cluster() as cluster:
        sys.exit(subprocess.run(sys.argv[1:], env=cluster).returncode)
