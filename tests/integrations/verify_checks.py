"""``lossagg verify --framework`` on released verl and SkyRL, and on a wrong ``agg_loss``
of verl.
"""

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

from megatron_lossagg.verify.frameworks.run_checks import run_framework

MCORE_ADAPTER = checkout_of("ROLL/mcore_adapter/src")
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


@pytest.mark.parametrize(("framework", "number"), [("verl", 69), ("skyrl", 37)])
def test_the_command_runs_a_frameworks_own_functions(tmp_path, framework, number):
    done, report, summary = lossagg_verify(tmp_path, framework)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{framework}: {number} of {number} checks of its own code pass" in done.stdout
    assert f"{number} of {number} checks of its own code pass" in summary
    assert report["passed"]
    assert {check["state"] for check in report["framework"]["checks"]} == {"PASS"}
    errors = [check["gradient_error"] for check in report["framework"]["checks"]]
    print(
        f"{framework}: largest gradient error {max(errors):.1e}, "
        f"{report['framework']['seconds']:.0f} s"
    )


@pytest.mark.parametrize(
    ("framework", "checkout", "stand_ins", "number"),
    [
        pytest.param("verl", "verl", "stand_ins_first", 69, marks=needs("verl")),
        pytest.param("nemo-rl", "NeMo-RL", "nemo_rl_first", 34, marks=needs("NeMo-RL")),
        pytest.param("areal", "AReaL", "areal_stand_ins_first", 23, marks=needs("AReaL")),
        pytest.param(
            "llama-factory",
            "LLaMA-Factory/src",
            "llama_factory_first",
            21,
            marks=[needs("LLaMA-Factory/src"), needs("ROLL/mcore_adapter/src")],
        ),
    ],
)
def test_every_check_of_a_checkout_passes(
    tmp_path, monkeypatch, framework, checkout, stand_ins, number
):
    (tmp_path / "sitecustomize.py").write_text(f"import {stand_ins}\n")
    monkeypatch.setenv("PYTHONPATH", path_with(tmp_path, checkout_of(checkout), MCORE_ADAPTER))
    checks = run_framework(framework)["checks"]
    ran = [check for check in checks if check["check"] != "the training loop"]
    assert [(check["state"], check["explanation"]) for check in ran] == [("PASS", "")] * number


def test_a_wrong_function_of_the_framework_fails_by_name(tmp_path):
    copy = tmp_path / "verl"
    shutil.copytree(Path(verl.__file__).parent, copy, ignore=shutil.ignore_patterns("*.pyc"))
    core = copy / "trainer" / "ppo" / "core_algos.py"
    text = core.read_text()
    body = text.index("    return loss\n", text.index("def agg_loss("))
    core.write_text(f"{text[:body]}    return loss * 2\n{text[body:]}")

    done, report, summary = lossagg_verify(tmp_path, "verl")

    assert done.returncode == 1
    assert done.stdout.startswith("FAIL: 1 of 1 case passes")
    check = check_of(report["framework"]["checks"], "verl:token-mean")
    assert check["state"] == "FAIL"
    assert check["got"] == pytest.approx(2 * check["wanted"])
    reason = f"verl.trainer.ppo.core_algos.agg_loss: got a loss of {check['got']:.9g}, expected"
    for text in (check["explanation"], done.stdout, summary):
        assert reason in text
        assert "got a gradient of 2 times the expected one" in text
    assert check_of(report["framework"]["checks"], "lossagg_token_mean")["state"] == "PASS"


def test_ctrl_c_ends_the_ranks_that_a_check_launched(tmp_path):
    """A verl that launches a rank when it is imported, as Megatron-LM's check does."""
    pid, rank = tmp_path / "pid", tmp_path / "rank.py"
    rank.write_text(f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid()))\n")
    rank.write_text(rank.read_text() + "time.sleep(100)\n")
    launches = f"cpu.launch([{str(rank)!r}], processes=1, timeout=100)"
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").write_text(f"from megatron_lossagg import cpu; {launches}")
    module = "megatron_lossagg.verify.frameworks.run_checks"
    command = f"from {module} import run_framework; run_framework('verl')"
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
