"""``lossagg verify --framework`` on released verl and SkyRL, on checkouts, and on a wrong verl."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import verl
from frameworks import checkout_of, needs
from processes import is_running
from shared import check_of

from megatron_lossagg.verify.drivers.driver import aggregations
from megatron_lossagg.verify.drivers.runs import layout_of, run_framework
from megatron_lossagg.verify.drivers.table import driver_of

ONE = ["--dp", "1", "--loss-aggregation", "token_mean", "--loss-scaling", "average"]


def lossagg_verify(folder, framework):
    """Run the command with ``folder`` first on the path; return it ended, and its report."""
    # Each process of the command has the stand-ins; on a user's machine the dependencies are there.
    (folder / "sitecustomize.py").write_text("import stand_ins_first\n")
    report, summary = folder / "report.json", folder / "summary.md"
    command = ["-m", "megatron_lossagg", "verify", "--framework", framework, *ONE]
    done = subprocess.run(
        [sys.executable, *command, "--json", str(report), "--markdown", str(summary)],
        env={**os.environ, "PYTHONPATH": path_with(folder)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done, json.loads(report.read_text()), summary.read_text()


def path_with(*folders):
    return os.pathsep.join([*map(str, folders), os.environ["PYTHONPATH"]])


@pytest.mark.parametrize("framework", ["verl", "skyrl"])
def test_the_command_runs_a_frameworks_own_step(tmp_path, framework):
    done, report, summary = lossagg_verify(tmp_path, framework)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{framework}: 1 of 1 check of its own code passes" in done.stdout
    assert "1 of 1 check of its own code passes" in summary
    assert report["passed"]
    (check,) = report["framework"]["checks"]
    assert (check["check"], check["state"]) == ("token_mean", "PASS")
    assert check["loss_error"] < 1e-5
    assert check["gradient_error"] < 1e-5


@pytest.mark.parametrize("framework", ["verl", "skyrl"])
def test_the_step_of_a_release_trains_every_mode(tmp_path, monkeypatch, framework):
    (tmp_path / "sitecustomize.py").write_text("import stand_ins_first\n")
    monkeypatch.setenv("PYTHONPATH", path_with(tmp_path))
    assert_trains_every_mode(framework)


@pytest.mark.parametrize(
    ("framework", "checkouts", "cp"),
    [
        pytest.param(name, folders, cp, marks=[needs(folder) for folder in folders], id=name)
        for name, folders, cp in [
            ("verl", ["verl"], 1),
            ("nemo-rl", ["NeMo-RL"], 1),
            ("areal", ["AReaL"], 1),
            ("megatron-lm", ["Megatron-LM"], 2),
            ("megatron-rl", ["Megatron-LM"], 1),
            ("bridge", ["Megatron-Bridge/src", "Megatron-Bridge/3rdparty/Megatron-LM"], 2),
            ("llama-factory", ["LLaMA-Factory/src", "ROLL/mcore_adapter/src"], 2),
            ("ms-swift", [], 2),
            ("ms-swift-grpo", [], 2),
        ]
    ],
)
def test_the_step_of_a_checkout_trains_every_mode(monkeypatch, framework, checkouts, cp):
    """Without stand-ins of the tests: what its step does not call is a placeholder of ours."""
    monkeypatch.setenv("PYTHONPATH", path_with(*map(checkout_of, checkouts)))
    assert_trains_every_mode(framework, cp=cp)


def assert_trains_every_mode(framework, *, cp=1):
    checks = run_framework(framework, layout=layout_of(2, cp))["checks"]
    found = [(check["check"], check["state"], check["explanation"]) for check in checks]
    trains = driver_of(framework).trains
    assert found == [(name, "PASS", "") for name, one in aggregations().items() if trains(one)]


@pytest.mark.parametrize(
    ("framework", "checkout", "stand_ins", "number"),
    [
        pytest.param("verl", "verl", "stand_ins_first", 69, marks=needs("verl")),
        pytest.param("nemo_rl", "NeMo-RL", "nemo_rl_first", 39, marks=needs("NeMo-RL")),
        pytest.param("areal", "AReaL", "areal_stand_ins_first", 23, marks=needs("AReaL")),
    ],
)
def test_every_function_of_a_checkout_is_the_references(
    tmp_path, framework, checkout, stand_ins, number
):
    (tmp_path / "sitecustomize.py").write_text(f"import {stand_ins}\n")
    script = Path(__file__).with_name("run_functions.py")
    done = subprocess.run(
        [sys.executable, script, f"{framework}_functions"],
        env={**os.environ, "PYTHONPATH": path_with(tmp_path, checkout_of(checkout))},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("PASSED ") == number


def test_a_wrong_function_of_the_framework_fails_by_name(tmp_path):
    copy = tmp_path / "verl"
    shutil.copytree(Path(verl.__file__).parent, copy, ignore=shutil.ignore_patterns("*.pyc"))
    engine = copy / "workers" / "engine" / "megatron" / "transformer_impl.py"
    text = engine.read_text()
    right = 'scaled_loss = loss * data["num_micro_batch"]'
    assert right in text
    engine.write_text(text.replace(right, f"{right} * 2"))

    done, report, summary = lossagg_verify(tmp_path, "verl")

    assert done.returncode == 1
    assert done.stdout.startswith("FAIL: 1 of 1 case passes")
    check = check_of(report["framework"]["checks"], "token_mean")
    assert check["state"] == "FAIL"
    assert check["gradient_error"] == pytest.approx(1)
    assert check["got"] == pytest.approx(check["wanted"], rel=1e-5)  # verl logs it before
    for text in (check["explanation"], done.stdout, summary):
        assert "pg_loss: trains 2 times token_mean" in text


def test_ctrl_c_ends_the_ranks_that_a_check_launched(tmp_path):
    """A verl that launches a rank when it is imported, as Megatron-LM's check does."""
    pid, rank = tmp_path / "pid", tmp_path / "rank.py"
    rank.write_text(f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid()))\n")
    rank.write_text(rank.read_text() + "time.sleep(100)\n")
    launches = f"cpu.launch([{str(rank)!r}], processes=1, timeout=100)"
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").write_text(f"from megatron_lossagg import cpu; {launches}")
    module = "megatron_lossagg.verify.drivers.runs"
    command = f"from {module} import layout_of, run_framework; run_framework('verl')"
    checked = subprocess.Popen(
        [sys.executable, "-c", command],
        env={**os.environ, "PYTHONPATH": path_with(tmp_path)},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # A shell's background job ignores it, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 100
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(checked.pid, signal.SIGINT)  # as a terminal does
    checked.wait(timeout=60)
    assert not is_running(int(pid.read_text()))
