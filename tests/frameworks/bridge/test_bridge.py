"""Megatron-Bridge's own ``pretrain`` with the recipe's one call, on the CPU.

``FRAMEWORKS_DIR=... pytest tests/frameworks/bridge/test_bridge.py``, with what ``bridge_runs.py``
names. Bridge's data is tried in ``test_schedule.py`` too.
"""

import bridge_page
import pytest
from bridge_runs import BETWEEN_LAYOUTS, LAYOUTS, NEEDS, WORKER, run_of, runs_of
from laws import Comparison, Laws, PretrainingLaws, assert_same, close

pytestmark = NEEDS


@pytest.fixture(scope="module")
def bridge(launches, tmp_path_factory):
    """Return a function that trains with Bridge and returns what its worker wrote."""
    with runs_of(tmp_path_factory.mktemp("bridge")) as train:
        yield train


@pytest.fixture(scope="module")
def alone(bridge):
    """Return the run on one process, with each step computed by the reference too."""
    return bridge("sample_mean", 1, 1, "average")


@pytest.fixture(scope="module")
def stock_numbers(bridge):
    """Return Bridge's own runs, without the recipe's call."""
    return {name: bridge("stock", *LAYOUTS[name]) for name in ("DP 2", "CP 2")}


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


@pytest.mark.parametrize("layout", ["DP 2", "CP 2, per-token"])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_on_megatron_fsdp_bridge_trains_and_evaluates_the_same_loss(
    bridge, alone, strategy, layout
):
    numbers = bridge("sample_mean", *LAYOUTS[layout], FSDP=strategy)
    assert_same(run_of(numbers), run_of(alone), BETWEEN_LAYOUTS)


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
    worker = [str(WORKER)]
    printed = bridge.launch(2, worker, "sample_mean", 2, "average", 1)
    assert printed.count("REFUSED eval_context_parallel_size is 1, which is not supported") == 2
    assert "Change: leave dist.eval_context_parallel_size unset." in printed
    assert "loss aggregation sample_mean" not in printed


@pytest.fixture(scope="module")
def pictures_alone(bridge):
    return run_of(bridge("sample_mean", 1, 1, "average", PICTURES="inside"))


class TestVisionLanguage(Laws):
    """Bridge's ``vlm_step``, whose model slices itself and returns its losses and their mask."""

    @pytest.fixture
    def on_one_process(self, pictures_alone):
        return pictures_alone

    @pytest.fixture(params=LAYOUTS)
    def in_layout(self, bridge, pictures_alone, request):
        numbers = bridge("sample_mean", *LAYOUTS[request.param], PICTURES="inside")
        return Comparison(run=run_of(numbers), wanted=pictures_alone, tolerance=BETWEEN_LAYOUTS)


def test_a_model_that_lengthens_the_sequence_is_refused_in_the_first_microbatch(bridge):
    worker = [str(WORKER)]
    printed = bridge.launch(1, worker, "sample_mean", 1, "average", PICTURES="in front")
    assert "REFUSED got a mask of 40 tokens, the layout local has 32" in printed


@pytest.mark.launches
def test_bridges_finetune_has_the_mode_by_the_pages_call(tmp_path):
    found, done = bridge_page.start(tmp_path)
    assert found == {"aggregation": "sample_mean: w_s = 1/(B n_b)"}, done.stderr
