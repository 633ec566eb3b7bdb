"""Whether ``lossagg verify --framework`` finds a framework, and what it says is missing."""

import importlib
import os
import sys

import pytest

from megatron_lossagg.cli.main import main
from megatron_lossagg.errors import ProofError
from megatron_lossagg.verify.drivers import runs
from megatron_lossagg.verify.drivers.imports import install_line
from megatron_lossagg.verify.drivers.runs import ended_by
from megatron_lossagg.verify.drivers.table import FRAMEWORKS, Framework, check_installed


def test_a_framework_that_is_not_installed_is_wrong_usage(capsys):
    assert main(["verify", "--framework", "primus"]) == 2
    assert "nothing to run: primus is not installed here" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["verify", "weigh"])
def test_a_framework_is_found_in_the_current_folder_as_python_m_finds_it(
    tmp_path, monkeypatch, capsys, command
):
    """A console script has its own folder on the path, not the current one."""
    (tmp_path / "primus").mkdir()
    (tmp_path / "primus" / "__init__.py").write_text("import ray_of_tests")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert main([command, "--framework", "primus", "--json", "/nowhere/at/all"]) == 2
    assert capsys.readouterr().err == (  # what is looked at after the framework is found
        "lossagg: --json /nowhere/at/all cannot be written: name a file in a folder that exists\n"
    )


def test_a_checkout_whose_packages_lie_in_src_is_found(tmp_path, monkeypatch):
    package = tmp_path / "src" / "package_of_tests" / "inner"
    package.mkdir(parents=True)
    found = Framework(package="package_of_tests.inner", imports=(), written_for="")
    monkeypatch.setitem(FRAMEWORKS, "of tests", found)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "/before")
    with pytest.raises(ProofError, match="Run this in the checkout of of tests, put the folder"):
        check_installed("of tests")
    assert os.environ["PYTHONPATH"] == "/before"
    monkeypatch.chdir(tmp_path)
    check_installed("of tests")
    assert os.environ["PYTHONPATH"] == os.pathsep.join([str(tmp_path / "src"), "/before"])


@pytest.fixture
def swift(tmp_path, monkeypatch):
    """Return the folder of a package ``swift`` on the path, and forget what is imported of it."""

    def forget():
        for name in [*sys.modules]:
            if f"{name}.".startswith("swift.") or name.endswith("_of_tests"):
                del sys.modules[name]

    forget()
    (tmp_path / "swift" / "megatron").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "swift"
    forget()


@pytest.mark.parametrize(
    ("framework", "module", "state"),
    [
        ("ms-swift", "swift.absent", "FAIL"),  # its package is swift.megatron
        ("ms-swift", "megatron.absent", "NOT RUN"),
        ("megatron-rl", "megatron.rl.absent", "FAIL"),
        ("megatron-rl", "megatron.absent", "NOT RUN"),
        ("primus", "megatron.training.absent", "NOT RUN"),
    ],
)
def test_a_module_that_the_framework_itself_lacks_fails_and_one_of_others_is_not_run(
    swift, monkeypatch, framework, module, state
):
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(module)
    monkeypatch.setattr(runs, "_is_raised_here", lambda error: True)  # as in its driver
    found = ended_by(caught.value, framework)
    assert found.state == state, found.explanation


def test_a_framework_is_looked_for_without_running_its_code(swift):
    for package in (swift, swift / "megatron"):
        (package / "__init__.py").write_text("raise RuntimeError('it was imported')")
    check_installed("ms-swift")
    assert "swift" not in sys.modules


def test_what_a_framework_lacks_of_its_own_is_not_to_be_installed(swift):
    (swift / "__init__.py").write_text("import module_of_tests\nimport swift.absent")
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("swift.megatron")
    outcome = ended_by(caught.value, "ms-swift")
    line = "got no module_of_tests: pip install module-of-tests, or run where ms-swift trains"
    assert outcome.explanation == line


LAZY = """
class Lazy:
    def __getattr__(self, name):
        try:
            return __import__(name)
        except ModuleNotFoundError as error:
            raise {error}("Could not import") {cause}
lazy = Lazy()
for name in ("first_of_tests", "second_of_tests", "third_of_tests"):
    getattr(lazy, name)
import fourth_of_tests
"""
"""A package that imports on demand, as transformers does: its error has no name."""


@pytest.mark.parametrize(
    ("error", "cause"),
    [("ModuleNotFoundError", "from error"), ("ModuleNotFoundError", ""), ("OSError", "from error")],
)
def test_all_missing_modules_are_named_if_an_error_without_a_name_hides_them(swift, error, cause):
    (swift / "__init__.py").write_text(LAZY.format(error=error, cause=cause))
    with pytest.raises(Exception, match="Could not import") as caught:
        importlib.import_module("swift.megatron")
    outcome = ended_by(caught.value, "ms-swift")
    names = [f"{one}_of_tests" for one in ("first", "second", "third", "fourth")]
    packages = " ".join(names).replace("_", "-")
    line = f"got no {', '.join(names)}: pip install {packages}, or run where ms-swift trains"
    assert outcome.explanation == line


def test_a_missing_module_that_no_error_names_is_not_to_be_installed(swift):
    outcome = ended_by(ModuleNotFoundError("it needs more"), "ms-swift")
    assert outcome.state == "NOT RUN"
    wanted = "ModuleNotFoundError: it needs more. Run where ms-swift trains"
    assert outcome.explanation == wanted


def test_missing_modules_are_named_by_what_installs_them():
    names = ["zmq", "a_module", "megatron.training", "yaml"]
    assert install_line(names) == (
        "pip install pyzmq a-module pyyaml, and put the Megatron-LM that has megatron.training on "
        "PYTHONPATH"
    )
    assert install_line(["megatron.core"]) == "pip install megatron-core"
