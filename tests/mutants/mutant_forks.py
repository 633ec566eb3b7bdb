"""Two ranks forked from this process, for ``plan_mutants.py`` and ``aggregator_mutants.py``.

A launch per mutant would import torch and Megatron-Core anew each time.
"""

import json
import os
import tempfile
from pathlib import Path

from fork_server import fork_ranks
from mutmut.state import state

SECONDS = 90


def on_two_ranks(work):
    """Fork two ranks; when one fails, end the other. What they hit counts as hit here."""
    with tempfile.TemporaryDirectory() as folder:

        def work_and_tell():
            work()
            hit = Path(folder, os.environ["RANK"])
            hit.write_text(json.dumps(sorted(state()._stats)))

        ended = fork_ranks(
            work_and_tell,
            processes=2,
            outputs=[(Path(folder, "printed"), Path(folder, "printed"))] * 2,
            environment={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            timeout=SECONDS,
        )
        for hit in Path(folder).glob("[01]"):
            state()._stats |= set(json.loads(hit.read_text()))
        assert not any(ended.statuses), Path(folder, "printed").read_text()[-8000:]
