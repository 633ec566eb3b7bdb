"""``launch/torchrun.sh``: what it runs, on one node and on two, and what it passes on."""

import os
import subprocess
import sys
import time

import pytest
from frameworks import checkout_of, needs
from launching import (
    TORCHRUN,
    environment,
    free_ports,
    on_two_nodes,
    our_names,
)

pytestmark = pytest.mark.launches

AGENT = TORCHRUN.with_name("agent.py")
SINGLE_NODE = "--nproc-per-node 2 --standalone --local-addr 127.0.0.1"
SAYS_RANK = "import os\nos.write(1, ('rank ' + os.environ['RANK'] + '\\n').encode())\n"
"""In one write, so that the lines of two ranks do not mix."""


def torchrun(*arguments, folder, **variables):
    """Run torchrun.sh with nothing set but what is given."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        [TORCHRUN, *arguments],
        cwd=folder,
        env={**kept, **variables},
        capture_output=True,
        text=True,
    )


def command(*arguments, folder, **variables):
    """Return what torchrun.sh would run on a CPU: with echo as its Python it prints that."""
    done = torchrun(*arguments, folder=folder, **{"PYTHON": "echo", "DEVICE": "cpu", **variables})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_arguments_are_passed_on_as_they_are(tmp_path):
    script = tmp_path / "arguments.py"
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    given = ["two words", "", "--flag", "*", "$HOME"]
    done = subprocess.run(
        [TORCHRUN, script, *given],
        env=environment(PROCESSES_PER_NODE="1"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{given}\n"


def test_a_failing_rank_fails_the_script(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(3)\n")
    done = subprocess.run(
        [TORCHRUN, script],
        env=environment(PROCESSES_PER_NODE="1"),
        cwd=tmp_path,
        capture_output=True,
    )
    assert done.returncode == 1  # torchrun's own, whatever the rank's


NODE_1 = "--nproc-per-node 2 --nnodes 2 --node-rank 1 --master-addr host0 --master-port 29500"
NODE_3 = "--nproc-per-node 8 --nnodes 4 --node-rank 3 --master-addr host0 --master-port 6000"
NAMES = ("NUM_NODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PROCESSES_PER_NODE")
OF_KUBEFLOW = tuple(
    f"PET_{name}"
    for name in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE")
)


def values_of(names, *values):
    return dict(zip(names, values, strict=True))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (values_of(NAMES, "4", "3", "host0", "6000", "8"), NODE_3),
        (values_of(OF_KUBEFLOW, "4", "3", "host0", "6000", "8"), NODE_3),
        ({"NUM_NODES": "2", "MASTER_ADDR": "host0", "SLURM_NODEID": "1"}, NODE_1),
        ({"SLURM_NNODES": "2", "MASTER_ADDR": "host0", "SLURM_NODEID": "1"}, NODE_1),
        (values_of(NAMES[:3], "1", "0", "host0"), SINGLE_NODE),
        ({"DEVICE": ""}, SINGLE_NODE.replace(" 2 ", " gpu ")),
    ],
    ids=["ours", "Kubeflow's", "a Slurm task", "a step of srun", "one node", "GPUs by default"],
)
def test_the_nodes_and_processes_are_those_that_the_variables_name(tmp_path, variables, expected):
    assert command("x.py", folder=tmp_path, **variables) == f"{AGENT} {expected} x.py"


def test_on_the_cpu_lossagg_run_is_told_so_and_other_commands_are_not_changed(tmp_path):
    run = ("-m", "megatron_lossagg", "run")
    printed = command(*run, "pretrain_gpt.py", "--lr", "1e-3", folder=tmp_path)
    assert printed.endswith("-m megatron_lossagg run --cpu pretrain_gpt.py --lr 1e-3")
    printed = command("-m", "megatron_lossagg", "verify", "--cp", "2", folder=tmp_path)
    assert printed.endswith("-m megatron_lossagg verify --cp 2")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NODE_RANK": "0", "MASTER_ADDR": "host0"}, "NUM_NODES: got none with MASTER_ADDR=host0"),
        ({"NODE_RANK": "1", "MASTER_ADDR": "host0"}, "NUM_NODES: got none with MASTER_ADDR=host0"),
        ({"NODE_RANK": "1"}, "NODE_RANK: got 1 with one node, expected 0"),
        ({"NODE_RANK": "1", "NUM_NODES": "1"}, "NODE_RANK: got 1 with one node, expected 0"),
        ({"NUM_NODES": "2"}, "MASTER_ADDR: got none with 2 nodes"),
        ({"SLURM_NNODES": "2", "SLURM_NODEID": "0"}, "MASTER_ADDR: got none with 2 nodes"),
        ({"NUM_NODES": "2", "MASTER_ADDR": "host0"}, "NODE_RANK: got none with 2 nodes"),
        (
            {"NUM_NODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "host0"},
            "NODE_RANK: got 2 with 2 nodes, expected a number from 0 to 1",
        ),
        (
            {"NUM_NODES": "2", "NODE_RANK": "one", "MASTER_ADDR": "host0"},
            "NODE_RANK: got one with 2 nodes, expected a number from 0 to 1",
        ),
        (
            {"NUM_NODES": "two", "NODE_RANK": "0", "MASTER_ADDR": "host0"},
            "NUM_NODES: got two, expected the number of nodes",
        ),
        ({"MASTER_PORT": "0x"}, "MASTER_PORT: got 0x, expected a port"),
        ({"PROCESSES_PER_NODE": "0"}, "PROCESSES_PER_NODE: got 0, expected a number from 1"),
        ({"RENDEZVOUS_TIMEOUT": "5m"}, "RENDEZVOUS_TIMEOUT: got 5m, expected a number of seconds"),
    ],
    ids=lambda given: " ".join(f"{k}={v}" for k, v in given.items()) if type(given) is dict else "",
)
def test_a_node_of_several_never_trains_alone(tmp_path, variables, message):
    done = torchrun("x.py", folder=tmp_path, PYTHON="echo", DEVICE="cpu", **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message)


def test_an_unknown_device_is_refused(tmp_path):
    done = torchrun("x.py", folder=tmp_path, DEVICE="tpu")
    assert done.returncode == 2
    assert done.stderr == "DEVICE: got tpu, expected cuda or cpu: correct it\n"


def test_a_node_without_cuda_is_refused_unless_the_device_is_the_cpu(tmp_path):
    (script := tmp_path / "x.py").write_text(SAYS_RANK)
    given = {"PROCESSES_PER_NODE": "2", "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    done = torchrun(script, folder=tmp_path, **given)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("DEVICE: got cuda with 0 CUDA devices that torch sees on ")
    done = torchrun(script, folder=tmp_path, DEVICE="cpu", **given)
    assert (done.returncode, sorted(done.stdout.split("\n"))) == (0, ["", "rank 0", "rank 1"])


def test_one_node_without_cuda_ends_all_before_a_rank_starts(tmp_path):
    (script := tmp_path / "x.py").write_text(SAYS_RANK)

    def names(node, port):
        device = "cuda" if node else "cpu"
        return {**our_names(node, port), "DEVICE": device, "CUDA_VISIBLE_DEVICES": ""}

    for status, output in on_two_nodes([script], folder=tmp_path, names=names):
        assert status == 2
        assert output.startswith("DEVICE: got cuda with 0 CUDA devices")
        assert "rank" not in output


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NODE_RANK": "0"}, "got 1 of 2 nodes at 127.0.0.1:{port} in 6 s, expected node 1 too"),
        ({"NODE_RANK": "1"}, "got no answer at 127.0.0.1:{port} in 6 s, expected node 0"),
        (
            {"NODE_RANK": "1", "MASTER_ADDR": "host.invalid"},
            "got no answer at host.invalid:{port} in 6 s, expected node 0",
        ),
    ],
    ids=["without node 1", "without node 0", "unknown name"],
)
def test_a_node_that_does_not_come_is_named_in_the_stated_time(tmp_path, variables, message):
    (port,) = free_ports(1)
    begun = time.monotonic()
    done = subprocess.run(
        [TORCHRUN, "x.py"],
        cwd=tmp_path,
        env=environment(**{**our_names(0, port), "RENDEZVOUS_TIMEOUT": "6", **variables}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert message.format(port=port) in done.stderr
    assert 6 <= time.monotonic() - begun < 60


def test_two_nodes_of_one_number_both_end_with_their_names(tmp_path):
    """Node 0 is there, so that both of number 1 reach it; of three nodes number 2 is missing."""
    (port,) = free_ports(1)
    agents = [
        subprocess.Popen(
            [TORCHRUN, "x.py"],
            cwd=tmp_path,
            env=environment(**{**our_names(rank, port), "NUM_NODES": "3"}),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1, 1)
    ]
    for agent in agents:
        _, error = agent.communicate(timeout=120)
        assert agent.returncode == 2
        assert "NODE_RANK: got 1 on " in error


def test_nodes_that_disagree_on_their_number_end_together(tmp_path):
    def names(node, port):
        return {**our_names(node, port), "NUM_NODES": str(2 + node)}

    for status, output in on_two_nodes(["x.py"], folder=tmp_path, names=names):
        assert status == 2
        assert output.startswith("NUM_NODES: got ")


@needs("Megatron-LM", "six", "regex", "yaml", "pydantic", "pybind11")
def test_megatron_lm_trains_over_two_nodes(tmp_path):
    flags = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 "
        "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4 --train-iters 2 "
        "--lr 1e-3 --split 90,5,5 --eval-iters 1 --eval-interval 2 --log-interval 1 "
        "--transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion "
        "--no-persist-layer-norm --no-masked-softmax-fusion --attention-dropout 0 "
        "--hidden-dropout 0 --num-workers 0 --tokenizer-type NullTokenizer "
        "--vocab-size 250 --mock-data"
    )
    checkout = checkout_of("Megatron-LM")
    arguments = ["-m", "megatron_lossagg", "run", checkout / "pretrain_gpt.py"]
    arguments += ["--loss-aggregation", "sample_mean", *flags.split()]
    path = os.pathsep.join([str(checkout), environment()["PYTHONPATH"]])
    ended = on_two_nodes(arguments, folder=tmp_path, PYTHONPATH=path)
    assert [status for status, _ in ended] == [0, 0], ended
    output = "\n".join(output for _, output in ended)
    assert "sample_mean" in output
    assert "iteration        2/       2" in output
