"""``launch/k8s_pytorchjob.yaml``: against the operator's schema, and what its pods would run.

The schema is the operator's custom resource definition, as published at v1.9.0 (6f74c7f6) in
``manifests/base/crds/kubeflow.org_pytorchjobs.yaml`` of kubeflow/training-operator. Name a copy in
``PYTORCHJOB_CRD``. No test runs Kubernetes.
"""

import copy
import os
import re
from pathlib import Path

import pytest
from launching import LAUNCH, PASSED, ROOT, VERIFY_ONE_CASE, on_two_nodes

yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")
CRD = os.environ.get("PYTORCHJOB_CRD", "")
INSTALLED_AT = "/opt/megatron_lossagg"


@pytest.fixture
def job():
    """Read the file."""
    return yaml.safe_load((LAUNCH / "k8s_pytorchjob.yaml").read_text())


@pytest.fixture(scope="module")
def schema():
    """Return the published schema, in which a field that it does not name is refused."""
    pytest.importorskip("jsonschema")
    if not Path(CRD).is_file():
        pytest.skip("PYTORCHJOB_CRD names no copy of the operator's definition")
    (version,) = (
        version
        for version in yaml.safe_load(Path(CRD).read_text())["spec"]["versions"]
        if version["name"] == "v1"
    )
    return strict(version["schema"]["openAPIV3Schema"])


def strict(schema):
    """Close every object whose fields are listed, as the API server does under strict checks."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: strict(value) for name, value in schema.items()}
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    return closed


def errors(job, schema):
    """List where a job breaks the schema."""
    import jsonschema

    found = jsonschema.Draft202012Validator(schema).iter_errors(job)
    return ["/".join(map(str, error.absolute_path)) for error in found]


def test_the_file_is_valid_under_the_published_schema(job, schema):
    assert errors(job, schema) == []


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ((), "nprocPerNod", "8"),
        ((), "nprocPerNode", 8),
        (("pytorchReplicaSpecs", "Master"), "replica", 1),
        (("pytorchReplicaSpecs", "Master", "template", "spec", "containers", 0), "argz", []),
        (("pytorchReplicaSpecs", "Worker", "template", "spec", "containers", 0), "args", "a b"),
    ],
)
def test_a_misspelled_field_or_a_wrong_type_is_refused(job, schema, path, name, value):
    wrong = copy.deepcopy(job)
    place = wrong["spec"]
    for step in path:
        place = place[step]
    place[name] = value
    assert errors(wrong, schema) != []


def test_the_job_is_what_the_operators_webhook_asks_for(job):
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"}
    assert replicas["Master"]["replicas"] == 1
    for replica in replicas.values():
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert {"name": "pytorchjob-port", "containerPort": 23456} in container["ports"]
        volumes = {volume["name"] for volume in replica["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes


@pytest.mark.launches
def test_two_pods_verify_together_with_the_variables_that_the_operator_sets(job, tmp_path):
    """The pods' own command and arguments, as processes; variables as of the operator's v1.9.0."""
    replicas = job["spec"]["pytorchReplicaSpecs"]
    (container,) = replicas["Master"]["template"]["spec"]["containers"]
    assert replicas["Worker"]["template"]["spec"]["containers"] == [container]
    command = [word.replace(INSTALLED_AT, str(ROOT)) for word in container["command"]]
    args = [word.replace("/shared", str(tmp_path)) for word in container["args"]]
    less = VERIFY_ONE_CASE[VERIFY_ONE_CASE.index("verify") + 1 :]
    ended = on_two_nodes([*args, *less], folder=tmp_path, command=command, names=of_operator)
    assert [status for status, _ in ended] == [0, 0], ended
    assert [PASSED in output for _, output in ended] == [True, False]
    assert (tmp_path / "report.md").exists()


def of_operator(node, port):
    """Return what the operator sets in a pod of a job with one process per node."""
    return {
        "PYTHONUNBUFFERED": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "RANK": str(node),
        "PET_NODE_RANK": str(node),
        "PET_NPROC_PER_NODE": "1",
        "PET_NNODES": "2",
    }


def test_the_pods_pass_pod_security_restricted(job):
    """The controls of Kubernetes' Pod Security Standards at ``restricted`` that a pod may break."""
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] != 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    kinds = {next(iter(volume.keys() - {"name"})) for volume in pod["volumes"]}
    assert kinds <= {"persistentVolumeClaim", "emptyDir"}


@pytest.mark.parametrize(
    "setting",
    ["kueue.x-k8s.io/queue-name", "schedulingPolicy", "IPC_LOCK", "rdma/rdma_shared_device_a"],
)
def test_what_not_every_cluster_has_is_a_setting_that_uncommenting_makes_valid(setting, schema):
    """Each commented block, uncommented alone, is valid under the operator's schema."""
    lines = (LAUNCH / "k8s_pytorchjob.yaml").read_text().splitlines()
    blocks = re.compile(rf"^ *# .*{re.escape(setting)}")
    (at,) = (number for number, line in enumerate(lines) if blocks.match(line))
    first = last = at
    while re.match(r"^ *# +\S+:$", lines[first - 1]):
        first -= 1
    while re.match(r"^ *#   +\S+: ", lines[last + 1]):
        last += 1
    for number in range(first, last + 1):
        lines[number] = re.sub(r"^( *)# ", r"\1", lines[number])
    changed = yaml.safe_load("\n".join(lines))
    assert setting in yaml.safe_dump(changed)
    assert errors(changed, schema) == []
