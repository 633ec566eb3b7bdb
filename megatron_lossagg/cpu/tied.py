"""Run a command that does not outlive the process that started it.

``python -IS tied.py PARENT COMMAND ...``: this process becomes the command, by exec. On Linux the
kernel kills it when the thread that started it ends, by whatever signal; elsewhere nothing does.
PARENT: process id of who started it. The standard library only, so that it takes milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: str, *command: str) -> None:
    """Ask the kernel, and become the command."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):  # it ended before the kernel was asked
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
