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
def cluster():
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
    variables = {"NCCL_SOCKET_IFNAME": "eth9", "MEGATRON_PATH": "/opt/Megatron-LM"}
    done = submit(cluster, "python3", script, **variables)
    assert done.returncode == 0, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SEEN ")]
    seen = json.loads(line.removeprefix("SEEN "))
    assert len({node for node, _, _ in seen}) == 2
    for _, file, env in seen:
        assert "/py_modules_files/" in file
        assert not file.startswith(str(ROOT))
        assert env["NCCL_SOCKET_IFNAME"] == "eth9"
        assert env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
        assert "/opt/Megatron-LM" in env["PYTHONPATH"].split(":")
        assert "NCCL_IB_SL" not in env  # not set here, so not set there


def test_a_failing_node_fails_the_job(cluster, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import os\nif os.environ['RANK'] == '1': raise SystemExit(3)\n")
    done = submit(cluster, "torchrun", script, NUM_NODES="2")
    assert done.returncode != 0
