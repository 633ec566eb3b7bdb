"""Run released hosts' own code against our aliases and adapters: ``make test-hosts``.

The hosts are installed without their dependencies, and what of those their loss functions need,
into a folder of its own; torch and Megatron-Core are this environment's. What is imported and
never called has a stand-in (``stand_ins.py``). Exit status 1 if a check fails.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / ".venv-hosts"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def main() -> int:
    """Install where it is not done yet, and run the checks; arguments go to pytest."""
    installed = FOLDER / "installed.txt"
    if not installed.exists() or installed.read_text() != REQUIREMENTS.read_text():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        wanted = ["--upgrade", "--target", str(FOLDER), "--requirement", str(REQUIREMENTS)]
        subprocess.run([*pip, *wanted], check=True)
        installed.write_text(REQUIREMENTS.read_text())
    # The entry points of this checkout, which need not be the environment's.
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(FOLDER)],
        cwd=ROOT,
        check=True,
    )
    paths = [ROOT, ROOT / "tests", Path(__file__).parent, FOLDER]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    checks = sorted(map(str, Path(__file__).parent.glob("*_checks.py")))
    # Hosts warn at import; warnings of this package stay errors.
    ignored = [f"-Wignore::{kind}Warning" for kind in ("User", "Deprecation", "Future", "Syntax")]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *ignored]
    command += ["-p", "stand_ins_first"]
    arguments = sys.argv[1:] or checks
    return subprocess.run([*command, *arguments], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
