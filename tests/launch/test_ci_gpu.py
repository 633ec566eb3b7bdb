"""``make gpu``: refused without a GPU, its CPU form run by the workflow's script, its reports.

What needs a GPU is in ``test_gpu.py`` and was not run where there is none.
"""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from conftest import TESTS, early, new_folder

from benchmarks import gpu, gpu_parts, gpu_result

ROOT = TESTS.parent
CUDA = torch.cuda.is_available()  # now: another test of this process may put stand-ins in place
without_cuda = pytest.mark.skipif(CUDA, reason="this machine has CUDA")

MACHINE = {"devices": "8 x A <GPU>", "driver": "570.1", "torch": "2.13.0", "NCCL": "2.27.3"}
ROW = {
    "tokens": "4M",
    "dtype": "float32",
    "build_seconds": 1e-3,
    "call_seconds": 2e-4,
    "floor_seconds": 1e-4,
    "call_seconds_with_launches": 3e-4,
    "floor_seconds_with_launches": 2e-4,
    "of_copy_bandwidth": 0.85,
    "sync": "",
}


def ran(command, output, **environment):
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OUT": str(output), "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.launches
@without_cuda
def test_without_a_gpu_it_says_so_and_fails_before_it_writes(tmp_path):
    """The workflow's script runs `make gpu`, which runs `benchmarks.gpu`."""
    summary = tmp_path / "summary.md"
    done = ran(["launch/ci/gpu.sh"], tmp_path / "out", GITHUB_STEP_SUMMARY=str(summary))
    assert done.returncode == gpu.NO_CUDA
    assert "sees no CUDA device: run this on a machine with a GPU" in done.stderr
    assert not (tmp_path / "out").exists()
    assert "ended with status 2 before it had a result" in summary.read_text()


@early
def cpu_form():
    folder = new_folder()
    summary = folder / "summary.md"
    done = ran(["launch/ci/gpu.sh"], folder, DEVICE="cpu", GITHUB_STEP_SUMMARY=f"{summary}.github")
    return folder, done


def test_its_cpu_form_verifies_on_gloo_and_says_that_no_gpu_took_part(cpu_form):
    folder, done = cpu_form
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    result = json.loads((folder / "gpu.json").read_text())
    assert result["on_cpu"]
    verdicts = {name: part["verdict"] for name, part in result["parts"].items()}
    passed = ("verify TP 2", "packed")
    assert verdicts == {name: "passed" if name in passed else "not run" for name in gpu.PARTS}
    reasons = {name: part["reason"] for name, part in result["parts"].items()}
    assert re.match(r"TP 2, M 3, sequence parallel: (\d+) of \1 cases", reasons["verify TP 2"])
    assert "MEGATRON_LM names no checkout" in reasons["megatron_lm"]
    report = json.loads((folder / result["parts"]["verify TP 2"]["files"][0]).read_text())
    assert report["passed"]
    packed = result["parts"]["packed"]["apart"]
    assert packed["mode"] < packed["stock"]
    assert packed["by hand"] < packed["rounding"]
    machine = result["machine"]
    assert machine["torch"] == torch.__version__
    assert {"devices", "driver", "CUDA of torch", "NCCL", "megatron-core"} <= machine.keys()
    summary = (folder / "summary.md").read_text()
    assert "no GPU took part, nothing was measured" in summary
    assert (folder / "summary.md.github").read_text() == summary


def junit_of(tmp_path, *cases):
    file = tmp_path / "tests.xml"
    file.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return file


NAME = "test_transformer_engine_slices_packed_sequences_like_thd_zigzag"
PARTITION = f'<testcase name="{NAME}[2]">'


@pytest.mark.parametrize(
    ("case", "passed", "verdict", "partition"),
    [
        (f"{PARTITION}</testcase>", True, gpu_parts.PASSED, "equal to Layout.thd_zigzag"),
        (
            f'{PARTITION}<failure message="differ"/></testcase>',
            False,
            gpu_parts.FAILED,
            "differs from Layout.thd_zigzag",
        ),
        (
            f'{PARTITION}<skipped message="no CUDA kernel"/></testcase>',
            True,
            gpu_parts.NOT_RUN,
            "not compared: no CUDA kernel",
        ),
        (
            '<testcase name="test_other"/>',
            True,
            gpu_parts.PASSED,
            "not compared: the test was not found",
        ),
    ],
)
def test_the_partition_is_judged_by_its_own_tests(tmp_path, case, passed, verdict, partition):
    assert f"def {NAME}(" in (TESTS / "megatron" / "test_stock.py").read_text()
    found = gpu_parts.tests_of(junit_of(tmp_path, case), passed=passed)
    assert (found["verdict"], found["partition"]) == (verdict, partition)


def test_pytest_without_results_is_a_failure(tmp_path):
    assert gpu_parts.tests_of(tmp_path / "none.xml", passed=True)["verdict"] == gpu_parts.FAILED


@pytest.mark.parametrize(
    ("verdicts", "on_cpu", "expected"),
    [
        (("passed", "passed", "passed"), False, "passed"),
        (("passed", "FAILED", "not run"), False, "FAILED"),
        (("not run", "passed", "passed"), False, "not run"),
        (("not run", "passed", "not run"), True, "passed"),
        (("not run", "FAILED", "not run"), True, "FAILED"),
        (("not run",), True, "not run"),
    ],
)
def test_on_a_gpu_a_part_that_did_not_run_is_not_a_pass(verdicts, on_cpu, expected):
    parts = {str(number): gpu_parts.part(verdict) for number, verdict in enumerate(verdicts)}
    assert gpu.overall(parts, on_cpu=on_cpu) == expected


def gradients(mode_cp2=1.0, stock_cp2=1.3, rounded=1.01, mode=1.0):
    """Return what ``gpu_packed`` writes at CP 1 and CP 2, of one parameter."""

    def of(**values):
        return {
            "gradients": {name: torch.tensor([value]) for name, value in values.items()},
            "costs": {"stock": {"loss_func_ms": 0.2}, "sample_mean": {"loss_func_ms": 2.0}},
            "attention": "an attention",
        }

    hand = {"hand": 1.0, "rounded": rounded}
    two = of(**hand, sample_mean=mode_cp2, stock=stock_cp2)
    return {1: of(**hand, sample_mean=mode, stock=1.0), 2: two}


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "passed"),
        ({"mode_cp2": 1.5, "mode": 1.5}, "FAILED"),  # not the loss by hand
        ({"mode_cp2": 1.04}, "FAILED"),
        ({"stock_cp2": 1.0}, "FAILED"),  # then the comparison would see nothing
        ({"rounded": 1.2}, "FAILED"),
    ],
)
def test_packed_gradients_agree_under_the_mode_within_the_measured_rounding(changes, verdict):
    found = gpu_parts.judged(gradients(**changes))
    assert found["verdict"] == verdict
    assert "bf16 rounds by" in found["reason"]


@pytest.mark.launches
def test_a_part_that_passes_its_limit_is_ended_with_what_it_started(tmp_path, monkeypatch):
    monkeypatch.setitem(gpu_parts.LIMITS, "rows", 3)
    code = "import subprocess, time; subprocess.Popen(['sleep', '1234.5']); time.sleep(99)"
    ended = gpu_parts.logged(["-c", code], tmp_path / "rows.txt", "rows")
    assert ended == "no result in 3 s: rows.txt"
    left = subprocess.run(["pgrep", "-f", "sleep 1234.5"], capture_output=True, text=True)
    assert not left.stdout


@pytest.mark.launches
def test_a_command_that_fails_says_its_status_and_its_log(tmp_path):
    ended = gpu_parts.logged(["-c", "raise SystemExit(3)"], tmp_path / "rows.txt", "rows")
    assert ended == "exit status 3: rows.txt"


def test_the_summary_states_device_driver_and_versions_and_every_number():
    cases = [
        {"test": "test_a", "outcome": "skipped", "reason": "no <kernel>\nhere"},
        {"test": "test_b", "outcome": "passed", "reason": ""},
    ]
    tests = gpu_parts.part("passed", "1 passed") | {"cases": cases, "partition": "equal to ours"}
    rows = gpu_parts.part("passed") | {"copy_bytes_per_second": 4e12, "rows": [ROW]}
    verify = gpu_parts.part("passed", "DP 8: 22 of 22 cases") | {"ranks": 8, "layouts": []}
    result = {
        "verdict": "passed",
        "on_cpu": False,
        "written": "2026-11-22",
        "machine": MACHINE,
        "parts": {"tests": tests, "verify": verify, "rows": rows},
    }
    summary = gpu_result.markdown(result)
    for name, value in MACHINE.items():
        assert f"| {name} | {value} |" in summary
    assert "| verify | passed | DP 8: 22 of 22 cases |" in summary
    assert "equal to ours" in summary
    assert "| test_a | skipped | no &lt;kernel&gt; here |" in summary
    assert "test_b" not in summary
    assert "4000 GB/s" in summary
    assert "| 4M | float32 | 1000 | 200 | 100 | 300 | 200 | 85% | none |" in summary
