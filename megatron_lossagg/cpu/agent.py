"""torch's launcher for one machine, with nothing that listens on an address other than loopback.

``python agent.py PROCESSES FOLDER COMMAND ...``; FOLDER gets what torch's launcher leaves behind.
torch's own rendezvous for one node binds its store to all interfaces; this one's store takes a
socket that is bound to 127.0.0.1.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.run import main as torchrun

_ADDRESS = "127.0.0.1"
_TIED = Path(__file__).with_name("tied.py")


class Loopback(RendezvousHandler):
    """One node, whose ranks meet in a store on loopback that this process serves."""

    use_agent_store = True

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        with socket.create_server((_ADDRESS, 0)) as server:
            port = server.getsockname()[1]
            store = TCPStore(
                _ADDRESS,
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=server.detach(),
            )
        self._info = RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_ADDRESS, port))

    def get_backend(self) -> str:
        """Return the name that ``--rdzv-backend`` has."""
        return "loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store, and that this node is the first of one."""
        return self._info

    def is_closed(self) -> bool:
        """Nobody else can close it."""
        return False

    def set_closed(self) -> None:
        """Do nothing: no other node waits."""

    def num_nodes_waiting(self) -> int:
        """No other node waits."""
        return 0

    def get_run_id(self) -> str:
        """Return torchrun's name of the job."""
        return self._run_id

    def shutdown(self) -> bool:
        """The store ends with this process."""
        return True


def main(processes: str, folder: str, *command: str) -> None:
    """Run ``command`` on the ranks, which end when this process does.

    A rank that wakes, as each message makes one, does not interrupt another that computes.
    """
    with suppress(AttributeError, OSError):  # not Linux, or not allowed
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    rendezvous_handler_registry.register("loopback", Loopback)
    tied = [sys.executable, "-IS", str(_TIED), str(os.getpid()), *command]
    options = ["--rdzv-backend=loopback", "--rdzv-endpoint=unused", f"--local-addr={_ADDRESS}"]
    options += [f"--log-dir={folder}"]
    torchrun(["--no-python", f"--nproc-per-node={processes}", *options, *tied])


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules have common names
    main(*sys.argv[1:])
