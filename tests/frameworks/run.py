"""Run released frameworks' own code against our aliases and integrations: ``make test-frameworks``.

The frameworks are installed without their dependencies, and what of those their loss functions
need, into a folder of its own; torch and Megatron-Core are this environment's. What is imported
and never called has a stand-in (``stand_ins.py``). SkyRL's checks run on a second release too.
Exit status 1 if a check fails.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))

from framework_folders import INSTALLED as FOLDER  # noqa: E402
from framework_folders import PATH, ROOT  # noqa: E402

REQUIREMENTS = HERE / "requirements.txt"
SKYRL = "skyrl==0.4.0"
"""The second release of SkyRL; it declares Python 3.12, and what is used of it runs on 3.11."""
SECOND = FOLDER / "skyrl-0.4.0"
OF_TWO_RELEASES = "skyrl"
ALONE = "ms_swift"
"""Its folder's checks, in a process of their own: what it imports without calling it is real for
the others.
"""


def main() -> int:
    """Install where it is not done yet, and run the files named, all by default.

    Other arguments go to pytest.
    """
    installed = FOLDER / "installed.txt"
    wanted = f"{REQUIREMENTS.read_text()}{SKYRL}\n"
    if not installed.exists() or installed.read_text() != wanted:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        released = ["--target", str(FOLDER), "--requirement", str(REQUIREMENTS)]
        subprocess.run([*pip, *released], check=True)
        second = ["--target", str(SECOND), "--ignore-requires-python", SKYRL]
        subprocess.run([*pip, *second], check=True)
        installed.write_text(wanted)
    # The entry points of this checkout, which need not be the environment's.
    setup = [sys.executable, "setup.py", "--quiet"]
    subprocess.run([*setup, "egg_info", "--egg-base", str(FOLDER)], cwd=ROOT, check=True)
    options = [one for one in sys.argv[1:] if "_checks.py" not in one]
    files = [one for one in sys.argv[1:] if "_checks.py" in one]
    files = files or sorted(map(str, HERE.glob("*/*_checks.py")))
    # Frameworks warn at import; warnings of this package stay errors.
    ignored = [f"-Wignore::{kind}Warning" for kind in ("User", "Deprecation", "Future", "Syntax")]
    plugins = ["-p", "no:cacheprovider", "-p", "no:hydra_pytest"]
    command = [sys.executable, "-m", "pytest", *plugins, *ignored, *options]
    failed = False
    for named, more, folders in processes(files):
        failed |= run([*command, *more, *named], folders)
    return int(failed)


def processes(files: list[str]) -> Iterator[tuple[list[str], list[str], list[Path]]]:
    """Yield what runs in a process of its own: files, options of pytest, folders for its path."""
    alone = [file for file in files if folder_of(file) == ALONE]
    others = [file for file in files if file not in alone]
    again = [file for file in files if folder_of(file) == OF_TWO_RELEASES]
    stand_ins = ["-p", "stand_ins_first"]
    if alone:
        yield alone, [], [FOLDER]
    if others:
        yield others, stand_ins, [FOLDER]
    if again:
        yield again, stand_ins, [SECOND, FOLDER]


def folder_of(file: str) -> str:
    """Return the folder's name of a file that may be followed by ``::`` and a test."""
    return Path(file.partition("::")[0]).resolve().parent.name


def run(command: list[str], frameworks: list[Path]) -> bool:
    """Run checks with the frameworks of some folders; returns whether one failed."""
    paths = [*PATH, *frameworks]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(command, cwd=ROOT, env=environment).returncode != 0


if __name__ == "__main__":
    sys.exit(main())
