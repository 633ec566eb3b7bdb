"""``newest.py`` sees a name that a framework has renamed, and no other; and the newest mains do.

``make test-newest`` runs what is marked ``newest``, for each framework.
"""

import ast
import os
import subprocess

import newest
import pytest
import ran

from megatron_lossagg.verify.drivers.table import FRAMEWORKS


@pytest.fixture
def source(tmp_path):
    """A framework: a package, a module with names of every kind, and one that computes them."""
    package = tmp_path / "frame"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("from frame.loss import total\n")
    (package / "deep" / "__init__.py").write_text("from frame.loss import *\n")
    (package / "loss.py").write_text(
        "import os.path\nLIMIT: int = 3\ndef total(): inner = 1\n"
        "try:\n    import fast\nexcept ImportError:\n    def fast(): ...\n"
        "class Loss:\n    size = 1\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("path", "is_there"),
    [
        ("frame.loss", True),
        ("frame.loss.total", True),
        ("frame.total", True),
        ("frame.loss.LIMIT", True),
        ("frame.loss.fast", True),
        ("frame.loss.Loss.size", True),
        ("frame.deep.whatever", True),
        ("frame.loss.inner", False),
        ("frame.loss.renamed", False),
        ("frame.losses", False),
        ("other.loss", False),
    ],
)
def test_a_name_is_found_where_the_framework_defines_it(source, path, is_there):
    assert newest.has(source, path) == is_there


def test_the_names_are_those_that_are_imported_or_written_but_not_told_about():
    code = (
        '"""See frame.told.about."""\nfrom frame.loss import total, Loss as L\nimport frame.deep\n'
        'rebind("frame.loss.step")\nlog("see frame.loss.text now")\nfrom frame_b import other\n'
    )
    found = {*newest.paths_of(ast.parse(code), ("frame",))}
    assert found == {"frame.loss.total", "frame.loss.Loss", "frame.deep", "frame.loss.step"}


def test_every_framework_that_verify_runs_is_tried():
    tried = tuple(f"{name}." for one in newest.NEWEST.values() for name in one.packages)
    assert [
        name for name, one in FRAMEWORKS.items() if not f"{one.package}.".startswith(tried)
    ] == []
    assert newest.names_of(("megatron.training",)) >= {"megatron.training.get_args"}
    assert newest.names_of(("open_instruct",)) >= {"open_instruct.grpo_fast"}


def test_the_addresses_are_those_of_the_list_that_the_script_clones(tmp_path):
    wanted = {one.folder for one in newest.NEWEST.values()}
    assert wanted | {"Megatron-LM", "Megatron-LM-dev"} == newest.addresses().keys()
    done = subprocess.run(
        [newest.ROOT / "tools" / "fetch_frameworks.sh", "absent"],
        env={**os.environ, "FRAMEWORKS_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    named = done.stderr.partition("expected one of:")[2].split()
    assert {*named} < newest.addresses().keys()  # of the others a release is installed


def test_the_workflow_tries_each():
    workflow = (newest.ROOT / ".github/workflows/newest.yml").read_text()
    assert f"framework: [{', '.join(newest.NEWEST)}]" in workflow


CHECK = {"check": "a", "explanation": "b"}
RAN = {"framework": {"checks": [{**CHECK, "state": "PASS"}]}}
FAILED = {"framework": {"checks": [{**CHECK, "state": "FAIL"}]}}
WRONG_CASE = {"verdicts": [{"passed": False, "case": "a", "explanation": "b"}]}


@pytest.mark.parametrize(
    ("report", "is_good"),
    [
        ({"status": 0, **RAN}, True),
        ({"status": 2}, True),
        ({"status": 1}, False),
        ({"status": -1}, False),
        ({"status": 1, **FAILED}, False),
        ({"status": 1, **RAN, **WRONG_CASE}, False),
    ],
)
def test_only_a_verification_that_could_not_run_may_say_nothing(monkeypatch, report, is_good):
    monkeypatch.setattr(newest, "verify", lambda *_: {"line": "", **report})
    failed, _ = newest.verified("open-instruct", newest.ROOT)
    assert (not failed) == is_good


@pytest.fixture
def checkout(name):
    found = newest.checkout_of(newest.NEWEST[name])
    if found is None:
        pytest.skip(f"no {newest.NEWEST[name].folder} in CHECKOUTS")
    return found


def names_in(name, checkout):
    """Return the names that are used of a framework, and those that its checkout lacks."""
    of = newest.NEWEST[name]
    wanted = sorted(newest.names_of(of.packages) - newest.ELSEWHERE.keys())
    return wanted, [path for path in wanted if not newest.has(checkout / of.source, path)]


@pytest.mark.newest
@pytest.mark.parametrize("name", newest.NEWEST)
def test_the_newest_main_has_every_name_that_is_used(name, checkout):
    wanted, missing = names_in(name, checkout)
    assert wanted
    assert {path: newest.where(path) for path in missing} == {}


@pytest.mark.newest
@pytest.mark.parametrize("name", [name for name in newest.NEWEST if name in FRAMEWORKS])
def test_the_newest_main_trains_the_configured_loss(name, checkout):
    failed, line = newest.verified(name, checkout)
    if commit := newest.commit_of(checkout):
        wanted, missing = names_in(name, checkout)
        names = f"{len(wanted) - len(missing)} of {len(wanted)}"
        ran.write("newest", name, commit, names, line)
    assert not failed, line
