"""The commands for a user who has little: no rights, a home that cannot be written, umask 077, no
compiler, no locale, 60 columns, a full disk.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from step_record import STEP

from megatron_lossagg.cli.explain import _NARROWEST

ROOT = Path(__file__).parents[2]
NOBODY = 65534
pytestmark = pytest.mark.launches


AS_NOBODY = [
    *("--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups", "--no-new-privs"),
    *("--bounding-set", "-all,+dac_read_search", "--inh-caps", "-all,+dac_read_search"),
    *("--ambient-caps", "+dac_read_search"),
]
"""Of ``setpriv``. One right stays, to read: root's home may hold this checkout and its Python."""
WIDTH = 60


def program(*command):
    """Return a command of this Python; for root one that runs without root's rights."""
    python = [sys.executable, *command]
    return python if os.geteuid() else [shutil.which("setpriv"), *AS_NOBODY, *python]


@pytest.fixture
def poor():
    """Return the options of such a user's processes; ``cwd`` has rollouts and a record."""
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root can write everywhere, and there is no setpriv to give that up")
    top = Path(tempfile.mkdtemp())
    home, work, empty = top / "home", top / "a folder", top / "empty"
    for folder in (home, work, empty):
        folder.mkdir()
    (work / "rollouts.jsonl").write_text('{"response_length": 3}\n{"response_length": 5}\n')
    (work / "record.jsonl").write_text(STEP.line())
    top.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(work, NOBODY, NOBODY)
    for folder in (home, empty):
        folder.chmod(0o555)
    options = {
        "cwd": work,
        "umask": 0o077,
        "env": {
            "HOME": str(home),
            "PATH": str(empty),
            "PYTHONPATH": str(ROOT),
            "LANG": "C",
            "LC_ALL": "C",
            "COLUMNS": str(WIDTH),
        },
    }
    tried = subprocess.run(
        program("-c", f"open({str(home / 'file')!r}, 'w')"),
        text=True, stderr=subprocess.PIPE, **options,
    )  # fmt: skip
    if "setpriv:" in tried.stderr:
        pytest.skip(f"root cannot give up its rights here: {tried.stderr}")
    assert "PermissionError" in tried.stderr
    yield options
    shutil.rmtree(top)


def lossagg(command, poor, **options):
    whole = program("-m", "megatron_lossagg", *command.split())
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(whole, text=True, timeout=300, **poor, **streams)


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ("--version", "megatron_lossagg 0"),
        ("explain sample_mean --lengths 2000,500/3000,0", "mean over samples"),
        ("diff record.jsonl record.jsonl", "the same loss"),
        ("verify --dp 1 --loss-aggregation token_mean --loss-scaling average", "PASS: 1 of 1 case"),
    ],
)
def test_a_command_needs_neither_rights_nor_a_home_nor_a_locale(poor, command, printed):
    done = lossagg(command, poor)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout
    assert done.stdout.replace(sys.prefix, "").replace(str(ROOT), "").isascii()


@pytest.mark.parametrize(
    ("command", "widest"),
    [("--help", WIDTH), ("explain sample_mean --lengths 2000,500/3000,0", _NARROWEST)],
)
def test_a_command_folds_its_lines_in_a_narrow_terminal(poor, command, widest):
    done = lossagg(command, poor)
    assert max(map(len, done.stdout.splitlines())) <= widest


def test_a_plot_is_written_for_its_user_only(poor):
    pytest.importorskip("pandas", reason="not installed")
    pytest.importorskip("matplotlib", reason="not installed")
    done = lossagg("plot rollouts.jsonl --png r.png --html r.html", poor)
    assert done.returncode == 0, done.stderr
    for name in ("r.png", "r.html"):
        file = poor["cwd"] / name
        assert file.stat().st_size > 1000
        assert file.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_is_one_line(poor):
    with Path("/dev/full").open("w") as full:
        done = lossagg("explain token_mean", poor, stdout=full)
    assert done.returncode == 1
    assert "cannot be written (No space left on device)" in done.stderr
    assert len(done.stderr.splitlines()) == 1
