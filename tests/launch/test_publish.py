"""A release of this checkout's last commit, and every command of publish.yml, on a local index.

The index is pypiserver's. Not tried here: the actions that pass ``dist`` between the jobs, and the
package index's trusted publisher, for which the upload has a password here.
"""

import contextlib
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from launching import ROOT, free_ports
from own_environment import make_environment

yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")
REPOSITORY = "https://code.example/o/megatron_lossagg"
VERSION = "1.2.3"
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "publish.yml").read_text())
COMMANDS = [
    pytest.param(step["run"], id=f"{name}-{index}")
    for name, job in WORKFLOW["jobs"].items()
    for index, step in enumerate(step for step in job["steps"] if "run" in step)
]

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout of git")


def run(*command, cwd, env, timeout=900):
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def env(launches, tmp_path_factory):
    """An environment that finds torch and Megatron-Core, and git's identity."""
    folder = tmp_path_factory.mktemp("environment")
    make_environment(folder)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("GIT_", "PYTHON"))}
    names = {f"GIT_{who}_{what}": "a@example.com" for who in ("AUTHOR", "COMMITTER")
             for what in ("NAME", "EMAIL")}  # fmt: skip
    return {
        **inherited,
        **names,
        "PATH": f"{folder}/bin{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GITHUB_REF_NAME": f"v{VERSION}",
        "GITHUB_SERVER_URL": "https://code.example",
        "GITHUB_REPOSITORY": "o/megatron_lossagg",
    }


@pytest.fixture(scope="module")
def released(env, tmp_path_factory):
    """Clone the last commit, give it an address, and type ``make release``."""
    checkout = tmp_path_factory.mktemp("clone") / "megatron_lossagg"
    run("git", "clone", "--quiet", ROOT, checkout, cwd=ROOT, env=env)
    settings, changelog = checkout / "pyproject.toml", checkout / "CHANGELOG.md"
    address = f'repository = "{REPOSITORY}"'
    settings.write_text(re.sub(r'(?m)^repository = "[^"]*"', address, settings.read_text()))
    head = f"## {VERSION} (unreleased)"
    changelog.write_text(re.sub(r"(?m)^## .*", head, changelog.read_text(), count=1))
    run("git", "commit", "--quiet", "--all", "--message", "an address", cwd=checkout, env=env)
    prepared = subprocess.run(
        ["make", ".venv-release/installed"], cwd=checkout, env=env, capture_output=True, text=True
    )
    if prepared.returncode:
        pytest.skip(f"pip cannot install build and twine: {prepared.stderr[-300:]}")
    printed = run("make", "release", f"VERSION={VERSION}", cwd=checkout, env=env)
    return checkout, printed


@pytest.fixture(scope="module")
def index(env, released, tmp_path_factory):
    """Serve an empty package index over loopback, in an environment of its own."""
    folder, packages = tmp_path_factory.mktemp("index"), tmp_path_factory.mktemp("packages")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    run(
        f"{folder}/bin/python", "-m", "pip", "install", "--quiet", "pypiserver", cwd=folder, env=env
    )
    (port,) = free_ports(1)
    server = subprocess.Popen(
        [f"{folder}/bin/pypi-server", "run", "--interface", "127.0.0.1", "--port", str(port),
         "--passwords", ".", "--authenticate", ".", packages],
        env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        for _ in range(100):
            with contextlib.suppress(urllib.error.URLError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/simple/", timeout=5).close()
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.terminate()
        server.wait()


def test_a_release_is_one_commit_with_its_tag_and_its_files(released, env):
    checkout, printed = released

    def git(*arguments):
        return run("git", *arguments, cwd=checkout, env=env)

    assert git("status", "--porcelain") == ""
    assert git("describe", "--exact-match").strip() == f"v{VERSION}"
    changed = set(git("show", "--name-only", "--format=", "HEAD").split())
    assert changed == {"CHANGELOG.md", "README.md", "docs/start.md", "megatron_lossagg/__init__.py"}
    assert re.search(
        rf"(?m)^## {VERSION} \(\d{{4}}-\d\d-\d\d\)$", (checkout / "CHANGELOG.md").read_text()
    )
    assert f"git clone {REPOSITORY}" in (checkout / "README.md").read_text()
    assert sorted(path.name for path in (checkout / "dist").iterdir()) == [
        f"megatron_lossagg-{VERSION}-py3-none-any.whl", f"megatron_lossagg-{VERSION}.tar.gz",
    ]  # fmt: skip
    assert f"git push origin v{VERSION}" in printed
    assert printed.count("PASSED") == 2  # twine's word for a file


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_publish_works_on_what_was_released(command, released, index, env):
    """In the workflow's order: build, install and verify, upload."""
    checkout, _ = released
    local = {"TWINE_REPOSITORY_URL": index, "TWINE_USERNAME": "a", "TWINE_PASSWORD": "a"}
    run("bash", "-eo", "pipefail", "-c", command, cwd=checkout, env=env | local)


def test_pip_installs_what_was_uploaded(index, env, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)
    run(f"{tmp_path}/bin/python", "-m", "pip", "install", "--quiet", "--no-deps", "--index-url",
        f"{index}simple/", f"megatron-lossagg=={VERSION}", cwd=tmp_path, env=env)  # fmt: skip
    says = run(f"{tmp_path}/bin/lossagg", "--version", cwd=tmp_path, env=env)
    assert says == f"megatron_lossagg {VERSION}\n"
