"""Megatron-Bridge's own ``pretrain`` with the recipe's one call, on the CPU.

``FRAMEWORKS_DIR=... pytest tests/integrations/test_bridge.py``: the checkout in
``$FRAMEWORKS_DIR/Megatron-Bridge`` with its ``3rdparty/Megatron-LM``, by
``tools/fetch_frameworks.sh``, after ``make test-frameworks``, which installs what it imports
but pybind11; without, it skips. Bridge's data is tried in ``test_schedule.py`` too.
"""

import json
import os
import platform
from itertools import count

import pytest
from conftest import TESTS, worker_path
from fork_server import ForkServer
from frameworks import INSTALLED, checkout_of, needs
from laws import Comparison, PretrainingLaws, Run, Tolerance, close

from megatron_lossagg import Aggregation
from megatron_lossagg.verify.frameworks.run_checks import FrameworkJob
from megatron_lossagg.verify.job import write_job

pytestmark = [
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


@pytest.fixture(scope="module")
def bridge(launches, tmp_path_factory):
    """Return a function that trains with Bridge and returns what its worker wrote."""
    folder = tmp_path_factory.mktemp("bridge")
    frameworks = TESTS / "integrations"
    own = [checkout_of(f"Megatron-Bridge/{path}") for path in ("src", "3rdparty/Megatron-LM")]
    paths = [*own, frameworks, *worker_path().split(os.pathsep), INSTALLED]
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
        worker = [str(frameworks / "bridge_worker.py")]
        numbers = json.loads(launch(processes, worker, aggregation, cp, loss_scaling, **more))
        print(aggregation, processes, cp, loss_scaling, numbers["steps"])
        return numbers

    train.launch = launch
    yield train
    server.close()


@pytest.fixture(scope="module")
def alone(bridge):
    """Return the run on one process, with each step computed by the reference too."""
    return bridge("sample_mean", 1, 1, "average")


@pytest.fixture(scope="module")
def stock_numbers(bridge):
    """Return Bridge's own runs, without the recipe's call."""
    return {name: bridge("stock", *LAYOUTS[name]) for name in ("DP 2", "CP 2")}


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


@pytest.fixture
def on_one_process(alone):
    assert {wanted["sequences"] for wanted in alone["reference"]} == {9}
    for step in alone["steps"]:
        assert close(step["lossagg/weight_sum"], 8 / 9)  # of nine conversations one is masked
    assert [step for step, _ in alone["record"]] == [1, 2, 3]
    return run_of(alone)


@pytest.fixture(params=LAYOUTS)
def in_layout(bridge, alone, request):
    numbers = bridge("sample_mean", *LAYOUTS[request.param])
    return Comparison(run=run_of(numbers), wanted=run_of(alone), tolerance=BETWEEN_LAYOUTS)


@pytest.fixture(scope="module")
def stock(stock_numbers):
    return {name: run_of(numbers) for name, numbers in stock_numbers.items()}


@pytest.fixture(params=["DP 2", "CP 2", "CP 2, per-token"])
def in_two_stages(bridge, tmp_path, request):
    found = []
    for stage, aggregation in enumerate(["token_mean", "sample_mean"]):
        start = {"START": str(tmp_path / "alone")} if stage else {}
        hand = bridge(aggregation, 1, 1, "average", KEEP=str(tmp_path / "alone"), **start)
        start = {"START": str(tmp_path / "here")} if stage else {}
        layout = LAYOUTS[request.param]
        numbers = bridge(aggregation, *layout, KEEP=str(tmp_path / "here"), **start)
        pair = {"run": run_of(numbers), "wanted": run_of(hand)}
        found.append(Comparison(**pair, tolerance=BETWEEN_LAYOUTS))
    return found


class TestMegatronBridge(PretrainingLaws):
    """Bridge's ``pretrain``."""


def test_stocks_loss_is_what_the_hook_reports_as_stocks(stock, alone):
    assert close(stock["DP 2"].losses[0], alone["steps"][0]["stock/lm_loss"])


@pytest.mark.parametrize("layout", ["DP 2", "CP 2"])
def test_under_a_shadow_bridge_trains_its_own_numbers_and_logs_what_modes_would_give(
    bridge, stock_numbers, alone, layout
):
    shadowed = bridge("stock+sample_mean,token_mean", *LAYOUTS[layout])
    for kind in ("steps", "evaluated"):
        for one, other in zip(stock_numbers[layout][kind], shadowed[kind], strict=True):
            assert one.items() <= other.items()
            assert other.keys() - one.keys() == {
                f"lossagg/shadow/{name}" for name in ("sample_mean", "token_mean", "stock")
            }
    first = shadowed["steps"][0]
    assert close(first["lossagg/shadow/sample_mean"], alone["steps"][0]["lm loss"])
    assert close(first["lossagg/shadow/token_mean"], first["lm loss"])


def test_another_cp_for_evaluation_is_refused_by_every_rank_before_the_first_step(bridge):
    worker = [str(TESTS / "integrations" / "bridge_worker.py")]
    printed = bridge.launch(2, worker, "sample_mean", 2, "average", 1)
    assert printed.count("REFUSED eval_context_parallel_size is 1, which is not supported") == 2
    assert "Change: leave dist.eval_context_parallel_size unset." in printed
    assert "loss aggregation sample_mean" not in printed


def test_verify_binds_the_hook_in_bridges_own_modules(bridge, tmp_path):
    write_job(FrameworkJob("bridge", Aggregation("sample_mean")), tmp_path / "job")
    written = bridge.launch(1, ["-m", "megatron_lossagg.verify", str(tmp_path / "job")])
    outcomes = {found["check"]: found["state"] for found in map(json.loads, written.splitlines())}
    assert outcomes == {
        "train is hooked, sample_mean": "PASS",
        "eval is hooked, sample_mean": "PASS",
        "the training loop": "NOT RUN",
    }
