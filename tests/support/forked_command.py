"""``lossagg`` in a process forked from one that has imported torch, with any standard output."""

import re
from typing import NamedTuple

from conftest import fork_server, new_folder
from fork_server import WITHOUT_MEGATRON

OUTPUTS = {
    "read": "",
    "full": "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)",
    "without a reader": "reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1)",
    "closed": "os.close(1); sys.stdout = None",
}
"""How a process makes its standard output such."""
PROGRAM = """
import os, sys
from megatron_lossagg.cli.main import main
{output}
status = main()
if sys.stdout is not None:
    sys.stdout.flush()  # as an interpreter does at its end
sys.exit(status)
"""


class Done(NamedTuple):
    """How the process ended, and what it printed."""

    returncode: int
    """Negative: the signal that ended it."""
    stdout: str
    stderr: str


def lossagg(*arguments, output="read"):
    """Run the command, as a console script does but for the interpreter's teardown."""
    script = new_folder() / "script.py"
    script.write_text(PROGRAM.format(output=OUTPUTS[output]))
    command = [str(script), *map(str, arguments)]
    done = fork_server(WITHOUT_MEGATRON).launch(command, processes=1, timeout=300)
    stderr, status = re.fullmatch(
        r"(.*?)(?:rank 0 exitcode : (-?\d+).*\n)?", done.stderr, re.DOTALL
    ).groups()
    return Done(int(status or 0), done.stdout, stderr)
