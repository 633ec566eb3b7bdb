"""Runs ``lossagg verify --framework`` and a framework's functions, on a release or a checkout."""

import json
import os
import subprocess
import sys
from pathlib import Path

from frameworks import checkout_of

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


def assert_runs_its_own_step(folder, framework):
    """The command runs a framework's own step, prints it and writes it."""
    done, report, summary = lossagg_verify(folder, framework)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{framework}: 1 of 1 check of its own code passes" in done.stdout
    assert "1 of 1 check of its own code passes" in summary
    assert report["passed"]
    (check,) = report["framework"]["checks"]
    assert (check["check"], check["state"]) == ("token_mean", "PASS")
    assert check["loss_error"] < 1e-5
    assert check["gradient_error"] < 1e-5


def assert_trains_every_mode(framework, *, cp=1):
    """The step of a framework has the weights of each mode that it can train."""
    checks = run_framework(framework, layout=layout_of(2, cp))["checks"]
    found = [(check["check"], check["state"], check["explanation"]) for check in checks]
    trains = driver_of(framework).trains
    assert found == [(name, "PASS", "") for name, one in aggregations().items() if trains(one)]


def assert_release_trains_every_mode(folder, monkeypatch, framework):
    """As above, of what is installed, with stand-ins in each process."""
    (folder / "sitecustomize.py").write_text("import stand_ins_first\n")
    monkeypatch.setenv("PYTHONPATH", path_with(folder))
    assert_trains_every_mode(framework)


def assert_functions_pass(folder, framework, checkout, stand_ins, number):
    """Each function of a checkout, by ``NAME_functions.py``, is the reference's."""
    (folder / "sitecustomize.py").write_text(f"import {stand_ins}\n")
    script = Path(__file__).with_name("run_functions.py")
    done = subprocess.run(
        [sys.executable, script, f"{framework}_functions"],
        env={**os.environ, "PYTHONPATH": path_with(folder, checkout_of(checkout))},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("PASSED ") == number
