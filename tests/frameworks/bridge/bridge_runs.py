"""Runs of ``bridge_worker.py``: Megatron-Bridge's own ``pretrain``, for several test modules.

The checkout in ``$FRAMEWORKS_DIR/Megatron-Bridge`` with its ``3rdparty/Megatron-LM``, by
``tools/fetch_frameworks.sh``, after ``make test-frameworks``, which installs what it imports but
pybind11; without, a test skips.
"""

import json
import os
import platform
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from conftest import worker_path
from fork_server import ForkServer
from frameworks import INSTALLED, checkout_of, needs
from laws import Run, Tolerance

WORKER = Path(__file__).with_name("bridge_worker.py")
NEEDS = [
    needs("Megatron-Bridge/src", installed=True),
    needs("Megatron-Bridge/3rdparty/Megatron-LM/megatron"),
]
LAYOUTS = {
    "DP 2": (2, 1, "average"),
    "CP 2": (2, 2, "average"),
    "CP 2, per-token": (2, 2, "per_token"),
    "DP 2 x CP 2, per-token": (4, 2, "per_token"),
}
"""Processes, CP and the loss scaling."""
BETWEEN_LAYOUTS = Tolerance(gradient=3e-6)


@contextmanager
def runs_of(folder, *more):
    """Give a function that trains with Bridge and returns what its worker wrote.

    ``more``: folders of a different framework that starts Bridge.
    """
    own = [checkout_of(f"Megatron-Bridge/{path}") for path in ("src", "3rdparty/Megatron-LM")]
    paths = [*own, *more, *worker_path().split(os.pathsep), INSTALLED]
    path = os.pathsep.join(map(str, paths))
    server = ForkServer(["imports_bridge"], path=path)
    files = (folder / f"{number}.json" for number in count())

    def launch(processes, program, *arguments, **more):
        file = next(files)
        command = [*program, str(file), *map(str, arguments)]
        # make builds the checkout's helpers for this Python, whatever pyenv would choose.
        env = {"PYENV_VERSION": platform.python_version(), **more}
        done = server.launch(command, processes=processes, timeout=300, env=env)
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return file.read_text() if file.exists() else done.stdout

    def train(aggregation, processes, cp, loss_scaling, **more):
        worker = [str(WORKER)]
        numbers = json.loads(launch(processes, worker, aggregation, cp, loss_scaling, **more))
        print(aggregation, processes, cp, loss_scaling, numbers["steps"])
        return numbers

    train.launch = launch
    yield train
    server.close()


def run_of(numbers):
    """Return what was logged of a run, and the reference's steps if it has them."""
    logged = [*numbers["steps"], *numbers["evaluated"]]
    return Run(
        losses=[one["lm loss"] for one in logged],
        gradients=[step["grad_norm"] for step in numbers["steps"]],
        by_hand=[(hand["wanted"], hand["grad_norm"]) for hand in numbers["reference"]],
        record=numbers["record"],
        hooked=numbers["hooked"],
    )
