"""What holds for every script of ``launch/``, without a scheduler."""

import re
import shutil
import subprocess

import pytest
from launching import LAUNCH

SCRIPTS = sorted([*LAUNCH.rglob("*.sh"), *LAUNCH.rglob("*.sbatch")])
TAKES_NO_ARGUMENTS = {"gpu.sh"}
ENDS_ITS_OWN = 'scancel --name "$JOB_NAME"'
"""multinode.sh: the job that it submitted."""


@pytest.mark.launches
@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_shellcheck_passes(script):
    done = subprocess.run(["shellcheck", "--shell=bash", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_stops_at_its_first_error_passes_its_arguments_on_and_kills_nothing(script):
    text = script.read_text()
    assert "set -euo pipefail" in text
    assert ('"$@"' in text) == (script.name not in TAKES_NO_ARGUMENTS)
    ends = re.search(r"\b(pkill|killall|ray stop|scancel)\b", text.replace(ENDS_ITS_OWN, ""))
    assert not ends
