"""``lossagg verify --framework``: a framework's own functions run, or why they do not.

They run in ``tests/frameworks``.
"""

import contextlib
import importlib
import json
import os
import re
from pathlib import Path

import pytest
from conftest import fork_server
from framework_folders import ROOT
from frameworks import INSTALLED, checkout_of, copy_of, needs

from megatron_lossagg.cli.main import main
from megatron_lossagg.verify import job
from megatron_lossagg.verify.drivers.runs import outcome_of, run_framework
from megatron_lossagg.verify.drivers.table import FRAMEWORKS, driver_of


def write_framework(folder, init):
    """Write a package ``open_instruct`` that does ``init`` when it is imported."""
    (folder / "open_instruct").mkdir(parents=True, exist_ok=True)
    (folder / "open_instruct" / "__init__.py").write_text(init)


@pytest.fixture
def framework_that(launches, tmp_path, monkeypatch):
    """Return a function that writes one into the current folder, where processes find it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return lambda init: write_framework(tmp_path, init)


@pytest.fixture
def forked(monkeypatch):
    """Fork a driver's ranks from a process that has imported torch."""

    monkeypatch.setattr(job, "launch", fork_server().launch)


@pytest.mark.launches
def test_an_import_that_fails_is_not_run_with_the_reason_and_what_to_install(tmp_path, monkeypatch):
    """In the ranks that users get, which have their path."""
    init = "import ray_of_tests.core\nimport json\nfrom yaml_of_tests import a, b\n"
    init += (
        "class C(a.B, extra=1): pass\n@b(1)\ndef f(x: a | None): pass\nimport ray_of_tests.more\n"
    )
    write_framework(tmp_path / "on_the_path", init)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "on_the_path"), str(ROOT)]))
    state, reason = only_outcome()
    assert state == "NOT RUN"
    assert reason.startswith(
        "got no ray_of_tests, yaml_of_tests: pip install ray-of-tests yaml-of-tests, or run where "
        "open-instruct trains"
    )


def only_outcome(timeout=100.0):
    """Run a driver, which does not pass; return state and explanation of the only outcome."""
    framework = run_framework("open-instruct", timeout=timeout)
    assert not framework["passed"]
    (check,) = framework["checks"]
    return check["state"], check["explanation"]


@pytest.mark.parametrize(
    ("init", "state", "words"),
    [
        (
            "raise RuntimeError('no GPU')",
            "NOT RUN",
            r"^RuntimeError: no GPU\. Run where python can",
        ),
        (
            "import sys; sys.exit('bye')",
            "NOT RUN",
            r"^SystemExit: bye\. Run where python can import",
        ),
        # lacks all
        (
            "",
            "FAIL",
            r"Use a release of open-instruct that the integration was written for: e6c3044a",
        ),
    ],
)
def test_whatever_an_import_raises_or_lacks_is_a_reason(framework_that, forked, init, state, words):
    framework_that(init)
    found, reason = only_outcome()
    assert found == state
    assert re.search(words, reason)


@pytest.mark.parametrize("status", [0, 3])
def test_an_import_that_ends_the_process_is_a_reason(framework_that, forked, status):
    framework_that(f"import os; print('last words', flush=True); os._exit({status})")
    state, reason = only_outcome()
    assert state == "NOT RUN"
    assert reason.endswith("Import open_instruct by itself")


def test_an_import_that_a_signal_ends_is_a_reason_with_its_name(framework_that):
    framework_that("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    state, reason = only_outcome()
    assert state == "NOT RUN"
    assert "was killed (SIGKILL) and raised no error" in reason


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="reads /proc")
def test_an_import_that_does_not_end_is_ended(framework_that):
    framework_that("import time; time.sleep(100)")
    reason = "it did not end within 2 s: give it more by --timeout"
    assert only_outcome(timeout=2.0) == ("NOT RUN", reason)
    assert not any(b"-m\0megatron_lossagg.verify" in command for command in commands_of_children())


def commands_of_children():
    """List the command lines of the processes that this one has started and not waited for."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            _, parent, *_ = file.read_text().rpartition(")")[2].split()
            if int(parent) == os.getpid():
                yield file.with_name("cmdline").read_bytes()


METRIC = {"verdict": "", "weighed": {"tokens": 0}, "follows": None, "error": None}


def a_step(*, error=0.0, got=1.0, missing=(), **terms):
    """Return what a driver's step writes: a policy loss, and other terms by name."""
    known = {"verdict": "v", "weighed": {"tokens": 4}, "follows": True, "error": error}
    return {
        "trained": "token_mean",
        "function": "f",
        "tolerance": 1e-5,
        "terms": {"pg_loss": known, **terms},
        "missing": missing,
        "logged": {"loss": [got, 1.0]},
    }


@pytest.mark.parametrize(
    ("step", "state"),
    [
        (a_step(), "PASS"),
        (a_step(ppo_kl=METRIC), "PASS"),
        (a_step(kl_loss={**METRIC, "weighed": {"tokens": 4}}), "FAIL"),
        (a_step(kl_loss={**METRIC, "weighed": {"tokens": 4}, "follows": False}), "PASS"),
        (a_step(error=1e-4), "FAIL"),
        (a_step(got=1.1), "FAIL"),
        (a_step(missing=["kl_loss"]), "FAIL"),
        ({**a_step(missing=["pg_loss"]), "terms": {}}, "FAIL"),
    ],
    ids=[
        *("right", "a metric", "a term too many", "a term of its own", "weights", "logged"),
        *("lacks", "nothing heard"),
    ],
)
def test_a_step_passes_if_its_terms_have_the_modes_weights_and_it_logs_their_loss(step, state):
    assert outcome_of(step, "open-instruct").state == state


@pytest.mark.launches
@needs("Megatron-LM", installed=True)
@pytest.mark.parametrize(
    ("instead", "words"),
    [
        ('[{"lm loss": torch.ones(2)}]', "FAIL the default: got no term of which a token has a"),
        ("exit(0)", "FAIL the steps that follow: its process ended itself after 0 of 1 steps"),
    ],
    ids=["calls no schedule", "ends itself"],
)
def test_a_step_of_which_nothing_is_heard_fails_and_is_said(
    tmp_path, monkeypatch, capfd, instead, words
):
    copy = copy_of("Megatron-LM", "megatron", tmp_path)
    for script in checkout_of("Megatron-LM").glob("*.py"):
        (copy / script.name).symlink_to(script)
    loop = copy / "megatron" / "training" / "training.py"
    text, call = loop.read_text(), "losses_reduced = forward_backward_func("
    assert call in text
    loop.write_text(text.replace(call, f"losses_reduced = {instead}; dict(", 1))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [copy, INSTALLED, ROOT])))
    monkeypatch.syspath_prepend(copy)
    assert main(["weigh", "--framework", "megatron-lm"]) == 1
    assert words in capfd.readouterr().err


def test_framework_under_a_launcher_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["verify", "--framework", "open-instruct"]) == 2
    assert (
        "run lossagg verify --framework open-instruct without the launcher"
        in capsys.readouterr().err
    )


@pytest.mark.launches
def test_a_framework_of_which_nothing_ran_is_no_pass_in_text_json_markdown_and_status(
    framework_that, forked, tmp_path, monkeypatch, capsys
):
    framework_that("import ray_of_tests")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    monkeypatch.setattr(job, "launch", fork_server().launch)
    report, summary = tmp_path / "report.json", tmp_path / "summary.md"
    one = ["--dp", "1", "--loss-aggregation", "token_mean", "--loss-scaling", "average"]
    files = ["--json", str(report), "--markdown", str(summary)]
    assert main(["verify", "--framework", "open-instruct", *one, *files]) == 2
    out, err = capsys.readouterr()
    written = json.loads(report.read_text())
    assert not written["passed"]
    assert [check["state"] for check in written["framework"]["checks"]] == ["NOT RUN"]
    first, *_ = out.splitlines()
    assert first == "NOT RUN: open-instruct: 0 of 1 check of its own code passes, 1 not run"
    assert written["verdicts"] == written["layouts"] == []
    assert "case" not in out
    assert summary.read_text().startswith(f"**lossagg verify: NOT RUN.** {first[9:]}\n")
    begins, reasons, counts = err.splitlines()
    assert begins == "lossagg: open-instruct: its own functions first, for at most 600 s"
    assert (
        "open-instruct: NOT RUN import of open-instruct: got no ray_of_tests: pip install"
        in reasons
    )
    assert counts.endswith("1 not run; no cases either")
    reason = written["framework"]["checks"][0]["explanation"]
    assert "pip install ray-of-tests, or run where open-instruct trains" in reason
    for text in (out, summary.read_text()):
        assert "NOT RUN" in text
        assert "0 of 1 check of its own code passes, 1 not run" in text
        assert reason in text


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_framework_has_a_driver(name):
    assert driver_of(name).settings
