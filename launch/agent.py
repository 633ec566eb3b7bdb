"""torchrun on this node, once all nodes have met; torchrun.sh starts it.

``python agent.py ARGUMENTS``, with torchrun's arguments. Before torchrun starts a rank, every node
says to the others, over torchrun's own store at node 0, who it is and what it lacks. All nodes end
with one sentence and status 2 where

- a node does not come within ``RENDEZVOUS_TIMEOUT`` seconds, by default 300: its number is named,
- two nodes have one number, or nodes disagree on how many they are,
- a node lacks the devices that ``DEVICE`` promises: no GPU, or fewer than ranks.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta

# A node that Slurm ends because another one failed has a smaller status than that one: torchrun's
# handler is not there yet.
signal.signal(signal.SIGTERM, lambda *_: os._exit(1))

try:
    import torch
    from torch.distributed import PrefixStore, TCPStore, run
except ModuleNotFoundError as error:
    sys.exit(
        f"PYTHON: got {sys.executable} without {error.name}, expected the Python that you train "
        "with: set PYTHON or PATH on every node; sbatch --export=NONE passes neither on"
    )

WRONG = 2
POLL, NEWS = 0.2, 30
"""Seconds between two looks at the store, and between two lines about who is missing."""
FAREWELL = 10
"""Seconds that node 0 keeps the store for those who have not read why all end."""
HOST = socket.gethostname()
REMEDY = "start it, correct its NODE_RANK and MASTER_ADDR, or raise RENDEZVOUS_TIMEOUT"


class RefusedError(Exception):
    """Why no node starts a rank."""


def main(arguments):
    """Meet, then run torchrun in this process, which keeps the store that all met at."""
    args = run.parse_args(arguments)
    fault = missing_devices(args.nproc_per_node)
    try:
        if not args.standalone:
            kept = meet(args, fault)  # noqa: F841, torchrun's own store shares its server
        elif fault:
            raise RefusedError(fault)
    except RefusedError as refused:
        end(str(refused))
    run.main(arguments)


def missing_devices(ranks):
    """Say what this node lacks of the devices that it is to have; empty where nothing."""
    if os.environ["LOSSAGG_DEVICE"] == "cpu":
        return ""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = int(ranks) if ranks.isdecimal() else 1
    if found >= wanted:
        return ""
    return (
        f"DEVICE: got cuda with {found} CUDA devices that torch sees on {HOST}, expected at least "
        f"{wanted}: repair its driver or torch's build, lower PROCESSES_PER_NODE, or set DEVICE=cpu"
    )


def meet(args, fault):
    """Wait until every node is there and none has a fault; return the store of the meeting."""
    deadline = time.monotonic() + timeout()

    def give_up():
        """End a wait for node 0, or a call of the store that does not return."""
        who = "another node" if args.node_rank == 0 else "node 0"
        end(
            f"{name(args)}: got no answer at {place(args)} in {timeout():g} s, expected {who}: "
            f"{REMEDY}"
        )

    watch = threading.Timer(timeout() + FAREWELL, give_up)
    watch.daemon = True
    watch.start()
    if args.node_rank:
        wait_for_port(args, deadline, give_up)
    try:
        store = TCPStore(
            *(args.master_addr, args.master_port, None, args.node_rank == 0),
            timeout=timedelta(seconds=timeout()),
            wait_for_workers=False,
            multi_tenant=True,
        )
        of_all(PrefixStore("lossagg", store), args, fault, deadline)
    except RuntimeError as error:
        what = str(error).partition("\n")[0]
        raise RefusedError(
            f"{name(args)}: got {what!r} at {place(args)}, expected a free port of node 0, which "
            "stays until all have met: change MASTER_PORT, or look why node 0 ended"
        ) from None
    watch.cancel()
    return store


def wait_for_port(args, deadline, give_up):
    """Wait until node 0 listens."""
    news = time.monotonic() + NEWS / 3
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            give_up()
        with contextlib.suppress(OSError):
            wait = min(left, NEWS)
            socket.create_connection((args.master_addr, args.master_port), timeout=wait).close()
            return
        if time.monotonic() > news:
            news += NEWS
            say(args, "0", deadline)
        time.sleep(POLL)


def end(sentence):
    """End this node; no thread of a store holds the process."""
    print(sentence, file=sys.stderr, flush=True)
    os._exit(WRONG)


def of_all(store, args, fault, deadline):
    """Tell the others who this is, read who they are; return once all agree."""
    node, nodes = args.node_rank, int(args.nnodes)
    if store.add(f"{node} came", 1) == 1:
        store.set(f"{node} is", f"{nodes} {HOST}")
    else:
        other = store.get(f"{node} is").decode().partition(" ")[2]
        fault = (
            f"NODE_RANK: got {node} on {other} and on {HOST}, expected another number on each node "
            f"from 0 to {nodes - 1}: set it on each"
        )
    if fault:
        store.compare_set("fault", "", fault)
    wait_for_all(store, args, "is", deadline)
    for other in range(nodes):
        number, _, host = store.get(f"{other} is").decode().partition(" ")
        if int(number) != nodes:
            fault = (
                f"NUM_NODES: got {number} on {host} and {nodes} on {HOST}, expected one number: "
                "correct it"
            )
            store.compare_set("fault", "", fault)
    # No node starts a rank before all have looked at all.
    store.set(f"{node} agrees", "")
    wait_for_all(store, args, "agrees", deadline)


def wait_for_all(store, args, what, deadline):
    """Wait until every node has set a key; raise the first fault that any of them found."""
    nodes = int(args.nnodes)
    news = time.monotonic() + NEWS / 3
    while True:
        if store.check(["fault"]):
            raise_for_all(store, args)
        missing = [str(n) for n in range(nodes) if not store.check([f"{n} {what}"])]
        if not missing:
            return
        if time.monotonic() > deadline:
            fault = (
                f"got {nodes - len(missing)} of {nodes} nodes at {place(args)} in {timeout():g} s, "
                f"expected node {', '.join(missing)} too: {REMEDY}"
            )
            store.compare_set("fault", "", fault)
        elif time.monotonic() > news:
            news += NEWS
            say(args, ", ".join(missing), deadline)
        time.sleep(POLL)


def raise_for_all(store, args):
    """Raise the fault on every node; node 0 stays until those that came have read it."""
    fault = store.get("fault").decode()
    store.add("read", 1)
    end = time.monotonic() + FAREWELL
    while args.node_rank == 0 and time.monotonic() < end:
        came = sum(store.add(f"{n} came", 0) for n in range(int(args.nnodes)))
        if store.add("read", 0) >= came:
            break
        time.sleep(POLL)
    raise RefusedError(fault)


def say(args, missing, deadline):
    """Say who is missing, so that a wait is never silent."""
    left = max(deadline - time.monotonic(), 0)
    print(
        f"{name(args)} waits at {place(args)} for node {missing}, {left:.0f} s more",
        file=sys.stderr,
        flush=True,
    )


def name(args):
    """Return this node's number and name."""
    return f"node {args.node_rank} of {args.nnodes} ({HOST})"


def place(args):
    """Return where the nodes meet."""
    return f"{args.master_addr}:{args.master_port}"


def timeout():
    """Return the seconds in which all nodes have to meet."""
    return float(os.environ["RENDEZVOUS_TIMEOUT"])


if __name__ == "__main__":
    main(sys.argv[1:])
