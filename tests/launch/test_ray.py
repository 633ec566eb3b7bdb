"""``launch/ray_job.sh`` on a Ray cluster of two nodes that this file starts on loopback."""

import json
import subprocess

import pytest
from launching import LAUNCH, PASSED, ROOT, TIMEOUT, VERIFY_ONE_CASE, environment
from ray_cluster import loopback_cluster, ray

pytestmark = pytest.mark.skipif(ray() is None, reason="not installed: ray[default]")

WORKERS = """
import json, os
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

def seen():
    import megatron_lossagg
    node = ray.get_runtime_context().get_node_id()
    return [node, megatron_lossagg.__file__, dict(os.environ)]

ray.init()
nodes = placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
ray.get(nodes.ready())
tasks = [
    ray.remote(seen).options(scheduling_strategy=PlacementGroupSchedulingStrategy(nodes, rank))
    for rank in range(2)
]
print("SEEN", json.dumps(ray.get([task.remote() for task in tasks])))
"""


@pytest.fixture(scope="module")
def cluster(launches):
    """Return the environment in which jobs reach two nodes."""
    with loopback_cluster() as reached:
        yield environment(PROCESSES_PER_NODE="1", RAY_ADDRESS=reached["RAY_ADDRESS"])


def submit(cluster, *arguments, **variables):
    """Submit a job; return how it ended and what it printed."""
    # The job finds the package where ray_job.sh uploaded it, not where this shell has it.
    given = {name: value for name, value in cluster.items() if name != "PYTHONPATH"}
    del given["PYTHON"]  # Ray's own
    return subprocess.run(
        [LAUNCH / "ray_job.sh", *map(str, arguments)],
        env={**given, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
    )


def test_verify_passes_over_two_nodes(cluster):
    done = submit(cluster, "torchrun", *VERIFY_ONE_CASE, NUM_NODES="2")
    assert done.returncode == 0, done.stdout
    assert "waiting for 2 nodes" in done.stdout
    assert PASSED in done.stdout


def test_every_worker_gets_the_package_and_the_variables_that_are_set(cluster, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(WORKERS)
    settings = {
        "NCCL_SOCKET_IFNAME": "eth9",
        "NCCL_IB_HCA": "mlx5_0,mlx5_1",
        "TP_SOCKET_IFNAME": "eth9",
        "GLOO_SOCKET_IFNAME": "eth9",
        "NVTE_FUSED_ATTN": "0",
        "PYTHONUNBUFFERED": "2",
    }
    given = {**settings, "MEGATRON_PATH": "/opt/Megatron-LM", "NOT_NCCL_DEBUG": "1"}
    done = submit(cluster, "python3", script, **given)
    assert done.returncode == 0, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SEEN ")]
    seen = json.loads(line.removeprefix("SEEN "))
    assert len({node for node, _, _ in seen}) == 2
    for _, file, env in seen:
        assert "/py_modules_files/" in file
        assert not file.startswith(str(ROOT))
        assert settings.items() <= env.items()
        assert "NOT_NCCL_DEBUG" not in env
        assert env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
        assert "/opt/Megatron-LM" in env["PYTHONPATH"].split(":")
        assert "NCCL_IB_SL" not in env  # not set here, so not set there


def test_a_failing_node_fails_the_job(cluster, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import os\nif os.environ['RANK'] == '1': raise SystemExit(3)\n")
    done = submit(cluster, "torchrun", script, NUM_NODES="2")
    assert done.returncode != 0


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"NUM_NODES": "3", "RENDEZVOUS_TIMEOUT": "5"},
            "NUM_NODES: got 3, and a Ray cluster of 2 nodes, 2 of them with {'CPU': 1}",
        ),
        ({"NUM_NODES": "two"}, "NUM_NODES: got two, expected an integer from 1"),
    ],
    ids=["more than the cluster has", "no number"],
)
def test_a_cluster_without_the_nodes_ends_the_job_in_the_stated_time(cluster, variables, message):
    done = submit(cluster, "torchrun", "none.py", **variables)
    assert done.returncode != 0
    assert message in done.stdout


def test_agents_without_the_gpus_that_ray_claims_end_with_the_device(cluster):
    less = {name: value for name, value in cluster.items() if name != "PROCESSES_PER_NODE"}
    done = submit(less, "torchrun", "none.py", NUM_NODES="2", DEVICE="cuda")
    assert done.returncode != 0
    assert "DEVICE: got cuda with 0 CUDA devices that torch sees on" in done.stdout


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "waiting for 2 nodes with {'CPU': 1, 'GPU': 3}"),
        ({"PROCESSES_PER_NODE": "2"}, "waiting for 2 nodes with {'CPU': 1, 'GPU': 2}"),
        ({"PROCESSES_PER_NODE": "gpu"}, "got gpu, expected an integer from 1 to 4"),
        ({"PROCESSES_PER_NODE": "5"}, "got 5, expected an integer from 1 to 4"),
    ],
    ids=["default", "fewer", "no integer", "more than any node has"],
)
def test_on_gpus_an_agent_holds_what_every_node_has(cluster, given, message):
    """The nodes claim 4 and 3 GPUs; no device is behind them, so that torchrun then fails."""
    less = {name: value for name, value in cluster.items() if name != "PROCESSES_PER_NODE"}
    done = submit(less, "torchrun", "none.py", NUM_NODES="2", **{**given, "DEVICE": "cuda"})
    assert done.returncode != 0
    assert message in done.stdout
