"""``lossagg verify``, as a user runs it: this machine, a launcher of two nodes, wrong usage."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from wrong_factors.run import apply

from megatron_lossagg.cli.main import main
from megatron_lossagg.verify.cases import CASES
from megatron_lossagg.verify.environment import environment
from megatron_lossagg.verify.job import Job
from megatron_lossagg.verify.parallelism import Parallelism, standard

ROOT = Path(__file__).parent.parent
ONE = ["--loss-aggregation", "constant", "--loss-aggregation-divisor", "40"]


def lossagg(*arguments, path=ROOT, launcher=(), **environment):
    """Run the command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "megatron_lossagg", *map(str, arguments)],
        cwd=path,
        env={**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process, timeout=300):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def test_one_layout_passes_and_says_so_in_text_json_and_html(tmp_path):
    report, page = tmp_path / "report.json", tmp_path / "report.html"
    process = lossagg(
        "verify", "--dp", 2, "--moe", "--ep", 2, "--json", report, "--html", page, *ONE
    )
    status, out, err = ended(process)
    assert status == 0, out + err
    assert "2 of 2 rows pass on 1 layout" in out
    told = json.loads(report.read_text())
    assert told["passed"]
    assert [row["layout"] for row in told["verdicts"]] == ["DP 2 x EP 2, M 3, MoE"] * 2
    assert {row["regime"] for row in told["verdicts"]} == {"average", "per-token"}
    assert all(0 < row["gradient_error"] < 1e-6 for row in told["verdicts"])
    assert "DP 2 x EP 2, M 3, MoE" in page.read_text()


def test_a_wrong_factor_fails_with_status_1_and_its_cause(tmp_path):
    shutil.copytree(ROOT / "megatron_lossagg", tmp_path / "megatron_lossagg")
    apply(ROOT / "tests/wrong_factors/num_tokens_on_every_cp_rank.txt", tmp_path)
    status, out, err = ended(lossagg("verify", "--cp", 2, *ONE, path=tmp_path))
    assert status == 1, out + err
    assert "1 of 2 rows pass" in out
    assert "gradient measured 0.5 = 1/CP, wanted 1" in out
    assert "every CP rank returns the whole count" in out


def test_two_nodes_of_a_launcher_pass_and_rank_0_alone_reports(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    report = tmp_path / "report.json"
    processes = []
    for node in range(2):
        launcher = [
            "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}",
            "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}",
        ]  # fmt: skip
        arguments = ["verify", "--cp", 2, "--pp", 2, "--json", report, *ONE]
        process = lossagg(*arguments, launcher=launcher, GLOO_SOCKET_IFNAME="lo")
        processes.append(process)
    results = [ended(process) for process in processes]
    assert [status for status, *_ in results] == [0, 0], results
    assert ["2 of 2 rows pass" in out for _, out, _ in results] == [True, False]
    assert json.loads(report.read_text())["layouts"] == ["PP 2 x CP 2, M 3"]


def test_a_launcher_with_another_number_of_ranks_is_told():
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = lossagg("verify", "--dp", 3, *ONE, launcher=launcher, GLOO_SOCKET_IFNAME="lo")
    status, _, err = ended(process)
    assert status != 0
    assert "DP 3, M 3 is for 3 ranks, the launcher started 2" in err
    assert "change --dp" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dp", "0"], "dp is at least 1, got 0"),
        (["--pp", "1", "--vpp", "2"], "vpp 2 needs pp above 1"),
        (["--ep", "2"], "ep 2 needs experts: add --moe"),
        (["--moe", "--ep", "3", "--dp", "2"], "ep 3 does not divide dp * cp * tp = 2"),
        (["--pp", "2", "--vpp", "2", "--microbatches", "3"], "a multiple of pp 2"),
        (["--dp", "2", "--mtp"], "add --float32"),
        (["--dp", "2", "--optimizer-instances", "2"], "need --distributed-optimizer"),
        (["--loss-aggregation", "constant"], "--loss-aggregation-divisor"),
        (["--loss-aggregation", "tokenmean"], "did you mean 'token_mean'?"),
        (["--loss-aggregation-reducer-path", "a.b:c"], "a custom reducer has no formula"),
        (["--json", "/nowhere/at/all.json"], "cannot be written: name a file"),
        (["--html", "/"], "cannot be written: name a file"),
        (["--tp", "-1"], "tp is at least 1, got -1"),
        (["--tp", "3"], "tp 3 does not divide the proof model's 32 token ids"),
        (["--dp", "2", "--sequence-parallel"], "give tp above 1"),
        (["--moe", "--tp", "2"], "experts with tp above 1 under sequence_parallel"),
        (["--float32"], "float32 without a size"),
        (
            ["--dp", "2", "--average-in-collective", "--regime", "per-token"],
            "refuses average_in_collective in the per-token regime",
        ),
    ],
)
def test_wrong_usage_ends_with_status_2_and_says_what_to_change(capsys, arguments, message):
    assert main(["verify", *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert "Traceback" not in out + err


def test_the_standard_set_splits_in_every_way_on_one_number_of_ranks():
    layouts = standard()
    assert {layout.world_size for layout in layouts} == {4}
    for size in ("dp", "tp", "pp", "vpp", "cp"):
        assert any(getattr(layout, size) > 1 for layout in layouts), size
    job = Job(layouts=layouts, cases=CASES)
    assert job.num_rows == 7 * 11 * 2
    assert Job.from_json(job.to_json()) == job


def test_a_job_keeps_different_numbers_of_microbatches():
    job = Job(layouts=[Parallelism(dp=2, microbatches=(3, 5))], cases=CASES[:1])
    assert Job.from_json(job.to_json()).layouts[0].m_of_ranks == [3, 5]


def test_transformer_engine_that_cannot_load_is_said_plainly(tmp_path):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '2.9'\nraise OSError('no libcudart')\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    status, out, err = ended(lossagg("verify", "--dp", 2, PYTHONPATH=path))
    assert status == 2, out + err
    assert "transformer-engine broken" in out
    assert "no libcudart" in out
    assert "uninstall it on a machine without CUDA" in out
    assert "nothing to verify: megatron-core is broken" in err


def test_ended_by_a_signal_it_leaves_no_rank_behind():
    process = lossagg("verify", "--dp", 2, *ONE)
    deadline = time.monotonic() + 60
    while not (ranks := ranks_of(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert ranks
    process.terminate()
    assert ended(process)[0] == 128 + signal.SIGTERM
    assert not ranks_of(process.pid, known=ranks)


def ranks_of(parent, known=()):
    """Processes of a verification's ranks that a launcher under ``parent`` started."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = status.read_text().rsplit(")", 1)[1].split()
            command = (status.parent / "cmdline").read_bytes()
            if b"megatron_lossagg.verify\0" in command:
                found[int(status.parent.name)] = int(fields[1])
    if known:
        return {pid for pid in found if pid in known}
    under = {pid for pid, up in found.items() if up == parent}  # the launcher itself
    return {pid for pid, up in found.items() if up in under} | under


def test_the_environment_names_what_is_there_and_what_is_not():
    facts = {fact.name: fact for fact in environment()}
    assert facts["torch"].state == "found"
    assert facts["megatron-core"].state == "found"
    assert facts["megatron-core"].version[0].isdigit()
    assert set(facts) == {"python", "torch", "megatron-core", "transformer-engine", "apex"}
