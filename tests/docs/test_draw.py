"""What ``launch/ci/draw.py`` draws for a commit, and what ``check.sh`` runs and writes of it."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "launch" / "ci"))

import draw
from draw import ROOT

SEEDS = [f"commit {number}" for number in range(48)]
"""As many commits as a week has, and fewer."""


@pytest.mark.parametrize("target", draw.ONE_OF)
def test_a_few_dozen_draws_cover_all_parts(target):
    every = draw.parts(target)
    draws = [draw.drawn(target, seed, every) for seed in SEEDS]
    assert {part for drawn in draws for part in drawn} == {*every}
    most = 1 + len(every) / draw.ONE_OF[target] + len(draw.ALWAYS.get(target, []))
    assert all(0 < len(drawn) <= most for drawn in draws)


@pytest.mark.parametrize("target", draw.ONE_OF)
def test_a_seed_draws_the_same_again_and_another_seed_others(target):
    every = [f"part {number}" for number in range(20)]
    first = draw.drawn(target, "a", every)
    assert draw.drawn(target, "a", every[::-1]) == first[::-1]
    assert draw.drawn(target, "b", every) != first


def test_the_drawn_and_the_left_out_parts_are_all_and_named():
    command = [sys.executable, "launch/ci/draw.py", "wrong-factors", "a seed"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    told, left_out, again = done.stderr.splitlines()
    drawn = done.stdout.split()
    assert told.endswith(f"drawn by a seed: {' '.join(drawn)}")
    rest = left_out.removeprefix("left out: ").split()
    assert sorted([*drawn, *rest]) == sorted(draw.parts("wrong-factors"))
    assert again == f'again: make wrong-factors ONLY="{" ".join(drawn)}"'


def test_every_exhaustive_target_takes_its_parts_from_make():
    for target in draw.ONE_OF:
        command = ["make", "--dry-run", target, "ONLY=this that"]
        printed = subprocess.check_output(command, cwd=ROOT, text=True)
        assert "this that" in printed


def test_drawn_checks_that_need_no_stand_ins_run_alone_and_those_of_two_releases_twice():
    run = runpy.run_path(str(ROOT / "tests" / "frameworks" / "run.py"))
    processes, alone = run["processes"], run["ALONE"]
    drawn = draw.parts("test-frameworks")
    first, second, third = [files for files, _, _ in processes(drawn)]
    assert first == [file for file in drawn if f"/{alone}/" in file]
    assert sorted([*first, *second]) == drawn
    assert third == [file for file in drawn if f"/{run['OF_TWO_RELEASES']}/" in file]
    assert first
    assert third
    ((files, options, _),) = processes([f"{alone}/a_checks.py::test_one"])
    assert (files, options) == ([f"{alone}/a_checks.py::test_one"], [])


def checked(folder, *targets, **environment):
    """Run check.sh with a ``make`` that fails for lint; return what ended, calls and rows."""
    make = folder / "make"
    make.write_text(f'#!/bin/bash\necho "$*" >>{folder}/calls\n[[ $1 != lint ]]\n')
    make.chmod(0o755)
    given = {"PATH": f"{folder}:{os.environ['PATH']}", "RAN": f"{folder}/ran.tsv", **environment}
    kept = {name: value for name, value in os.environ.items() if name not in ("SEED", "FULL")}
    command = [str(ROOT / "launch" / "ci" / "check.sh"), *targets]
    done = subprocess.run(command, env={**kept, **given}, capture_output=True, text=True)
    rows = [line.split("\t") for line in (folder / "ran.tsv").read_text().splitlines()]
    return done, (folder / "calls").read_text().splitlines(), rows


def test_check_runs_what_the_seed_draws_and_writes_what_ran(tmp_path):
    done, calls, rows = checked(tmp_path, "lint", "wrong-factors", SEED="a seed")
    drawn = " ".join(draw.drawn("wrong-factors", "a seed", draw.parts("wrong-factors")))
    assert calls == ["lint ONLY=", f"wrong-factors ONLY={drawn}"]
    assert [row[2:4] for row in rows] == [["lint", "FAILED"], ["wrong-factors", "passed"]]
    assert [row[-1] for row in rows] == ["all", drawn]
    assert done.returncode == 1


COPIED = ("megatron_lossagg", "launch", "tests/support/own_environment.py", "tests/versions.py",
          "README.md", "pyproject.toml", "setup.py")  # fmt: skip
MAKE = """#!/bin/bash -e
if [[ $* == "--silent environment" ]]; then echo .venv; exit; fi
[[ $1 == --directory && ${*:3} == "test ONLY=" ]]
cd "$2"
pwd
echo left: ./*.txt .git*
cd /
"$2/.venv/bin/python" -c 'import megatron_lossagg as found; print(found.__file__)'
"""


@pytest.mark.launches
def test_the_tests_run_in_a_copy_of_the_tracked_files_that_lies_where_a_users_may(tmp_path):
    checkout = tmp_path / "checkout"
    for part in COPIED:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        (checkout / part).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / part, checkout / part)
    subprocess.run(["git", "init", "--quiet", checkout], check=True)
    subprocess.run(["git", "add", "."], cwd=checkout, check=True)
    (checkout / "untracked.txt").touch()
    (checkout / ".venv").symlink_to(sys.prefix)
    make = tmp_path / "make"
    make.write_text(MAKE)
    make.chmod(0o755)
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FULL": "1", "RAN": f"{tmp_path}/ran.tsv"}
    environment = {**os.environ, **given}
    environment.pop("PYTHONPATH", None)
    command = [checkout / "launch" / "ci" / "check.sh", "test"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    folder, left, package, *_ = done.stdout.splitlines()
    assert folder.endswith("/a plâce/torch/megatron_lossagg")
    assert left == "left: ./*.txt .git*"
    assert package == f"{folder}/megatron_lossagg/__init__.py"
    assert not Path(folder).exists()


def test_in_full_nothing_is_left_out(tmp_path):
    done, calls, rows = checked(tmp_path, *draw.ONE_OF, FULL="1")
    assert calls == [f"{target} ONLY=" for target in draw.ONE_OF]
    assert {row[-1] for row in rows} == {"all"}
    assert done.returncode == 0


def test_the_scheduled_workflows_run_every_exhaustive_target_in_full():
    yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")
    folder = ROOT / ".github" / "workflows"
    full = yaml.safe_load((folder / "full.yml").read_text())["jobs"]
    matrix = full["full"]["strategy"]["matrix"]
    targets = {*matrix["target"], *(one["target"] for one in matrix["include"])}
    (step,) = [step for step in full["full"]["steps"] if "check.sh" in step.get("run", "")]
    assert step["env"]["FULL"] == "1"
    assert full["launch"]["steps"][-1]["run"] == ".ci/launch"
    machine = yaml.safe_load((folder / "newest.yml").read_text())["jobs"]["machine"]["steps"]
    assert [step for step in machine if step.get("run", "").startswith("launch/ci/machine.sh")]
    assert draw.ONE_OF.keys() <= targets | {"test-launch", "test-machine"}
