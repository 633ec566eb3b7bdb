"""torchrun.sh on several nodes of a Ray cluster; the entry point of ``ray_job.sh torchrun``.

``python -m launch.ray_nodes NUM_NODES ARGUMENTS``: one agent per node, rank 0 on the first one. The
job ends where the cluster does not have the nodes within ``RENDEZVOUS_TIMEOUT`` seconds, by default
300, and where an agent is still there a minute after another one has ended.
With ``DEVICE=cuda`` an agent holds ``PROCESSES_PER_NODE`` of its node's GPUs, by default as many as
the node of the cluster with the fewest has; nodes without GPUs do not count.
"""

import contextlib
import importlib.util
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

LEFT_ALONE = 60
"""Seconds that an agent may run after another one has ended."""


def number(name, given):
    """Read an integer from 1; end where it is none."""
    if not given.isdecimal() or int(given) < 1:
        sys.exit(f"{name}: got {given}, expected an integer from 1: correct it")
    return int(given)


def wait_for_nodes(nodes, num_nodes, node):
    """Wait until the cluster has given the nodes; end where it does not in time."""
    seconds = number("RENDEZVOUS_TIMEOUT", os.environ.get("RENDEZVOUS_TIMEOUT") or "300")
    print(f"waiting for {num_nodes} nodes with {node}, {seconds} s at most", flush=True)
    try:
        ray.get(nodes.ready(), timeout=seconds)
    except ray.exceptions.GetTimeoutError:
        alive = [one["Resources"] for one in ray.nodes() if one["Alive"]]
        enough = sum(all(has.get(k, 0) >= v for k, v in node.items()) for has in alive)
        sys.exit(
            f"NUM_NODES: got {num_nodes}, and a Ray cluster of {len(alive)} nodes, {enough} of "
            f"them with {node}, in {seconds} s, expected {num_nodes} such nodes that are free: "
            "start Ray on more nodes, end other jobs, or raise RENDEZVOUS_TIMEOUT"
        )


def gpus_per_node():
    """Return the number of GPUs that an agent holds; end where no node has them."""
    counts = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
    if not any(counts):
        sys.exit(
            "got no node with a GPU, expected one: start Ray where GPUs are, or set DEVICE=cpu"
        )
    given = os.environ.get("PROCESSES_PER_NODE") or str(min(filter(None, counts)))
    if not given.isdecimal() or not 1 <= int(given) <= max(counts):
        sys.exit(
            f"PROCESSES_PER_NODE: got {given}, expected an integer from 1 to {max(counts)}, "
            "the most GPUs of a node: correct it, or unset it for the fewest"
        )
    return int(given)


def rendezvous():
    """Return this node's address and a free port of it."""
    # Above those of Ray's workers, below those that Linux gives to outgoing connections: Ray opens
    # many of them before the agent listens.
    for port in random.sample(range(20000, 32000), 100):
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("", port))
            return ray.util.get_node_ip_address(), port
    raise OSError("got 100 ports in use, expected a free one from 20000 to 31999: free some")


def agent(arguments, variables):
    """Run torchrun.sh on this node until it ends; return its exit status."""
    module = importlib.util.find_spec("launch.ray_nodes")  # where this node has it
    script = Path(module.origin).with_name("torchrun.sh")
    return subprocess.run(["bash", script, *arguments], env={**os.environ, **variables}).returncode


def main():
    """Place the agents, wait for them, and end with the first failure's status."""
    num_nodes, arguments = number("NUM_NODES", sys.argv[1]), sys.argv[2:]
    on_gpus = os.environ.get("DEVICE", "cuda") == "cuda"
    ray.init()
    gpus = gpus_per_node() if on_gpus else 0
    node = {"CPU": 1, **({"GPU": gpus} if gpus else {})}
    nodes = placement_group([node] * num_nodes, strategy="STRICT_SPREAD")
    wait_for_nodes(nodes, num_nodes, node)

    def start(function, rank, *given):
        place = PlacementGroupSchedulingStrategy(nodes, placement_group_bundle_index=rank)
        options = {"num_cpus": 1, "num_gpus": gpus, "max_retries": 0, "scheduling_strategy": place}
        return ray.remote(function).options(**options).remote(*given)

    address, port = ray.get(start(rendezvous, 0))
    print(f"rank 0 at {address}:{port}", flush=True)
    shared = {"NUM_NODES": str(num_nodes), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    running = [
        start(agent, rank, arguments, {**shared, "NODE_RANK": str(rank)})
        for rank in range(num_nodes)
    ]
    patience = None
    while running:
        done, running = ray.wait(running, timeout=patience)
        if not done:
            sys.exit(
                f"got {len(running)} of {num_nodes} nodes that still run {LEFT_ALONE} s after "
                "another one has ended, expected them to end together: see that one's log"
            )
        status = ray.get(done[0])
        if status:  # the other agents would wait for this one: they end with the job
            sys.exit(status)
        patience = LEFT_ALONE


if __name__ == "__main__":
    main()
