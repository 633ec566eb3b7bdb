"""Runs of ms-swift's trainers, each launched once for all tests of a module."""

import json
import os
from contextlib import contextmanager
from pathlib import Path

import laws
from fork_server import ForkServer

LAYOUTS = {
    "DP 2": (2, 1, "average"),
    "DP 2, per-token": (2, 1, "per_token"),
    "CP 2": (2, 2, "average"),
    "CP 2, per-token": (2, 2, "per_token"),
}
"""Processes, CP and the loss scaling."""
OTHERS = ("lossagg/weight_sum", "stock/loss")
CLOSE = {"rel": 2e-6, "abs": 0}
"""Tolerance of a loss, as arguments of ``pytest.approx``."""


@contextmanager
def runs_of(worker, folder):
    """Return a function that trains with ms-swift and returns what its worker wrote."""
    ran = {}
    server = ForkServer(["imports_swift"], path=os.environ["PYTHONPATH"])
    worker = str(Path(__file__).with_name(worker))

    def run(*arguments):
        if arguments not in ran:
            aggregation, processes, cp, loss_scaling, data, *more = arguments
            file = folder / f"{len(ran)}.json"
            options = map(str, (file, aggregation, cp, loss_scaling, data, *more))
            done = server.launch([worker, *options], processes=processes, timeout=300)
            assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
            ran[arguments] = json.loads(file.read_text()) if file.exists() else done.stdout
            if file.exists():
                print(*arguments, ran[arguments]["steps"][0])
        return ran[arguments]

    yield run
    server.close()


def run_of(numbers):
    """Return what was logged of a run, and the loops' steps if it has them.

    Gradients are whole if the worker wrote them, else their norms.
    """
    steps = numbers["steps"]
    evaluated = [one["eval_loss"] for one in numbers["evaluated"]]
    of_hand = "gradient" if numbers["gradients"] else "grad_norm"
    return laws.Run(
        losses=[*(step["loss"] for step in steps), *evaluated],
        gradients=numbers["gradients"] or [step["grad_norm"] for step in steps],
        by_hand=[(hand["loss"], hand[of_hand]) for hand in numbers["by_hand"]],
        others={name: [step[name] for step in steps] for name in OTHERS},
        hooked=numbers["hooked"],
    )


def close(got, wanted, tolerance=2e-6):
    return laws.close(got, wanted, tolerance)
