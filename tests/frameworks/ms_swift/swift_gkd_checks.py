"""ms-swift as released: its ``MegatronGKDTrainer`` trains the configured loss on the CPU.

Runs are launched (``swift_gkd_worker.py``). The gradients compared are whole, not their norms.
"""

import imports_swift  # noqa: F401  first
import pytest
from laws import Comparison, Laws, Tolerance, difference
from swift_runs import CLOSE, LAYOUTS, close, run_of, runs_of


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    with runs_of("swift_gkd_worker.py", tmp_path_factory.mktemp("gkd")) as run:
        yield run


WITH_SFT = "sft_alpha=0.3"
BETWEEN_LAYOUTS = Tolerance(loss=CLOSE, others=CLOSE, gradient=1e-12)


@pytest.fixture(
    params=[
        ("sample_mean", "packed", WITH_SFT),
        ("sample_mean", "padded", "gkd_logits_topk=5"),
        ("token_mean", "packed", "beta=0"),
        ("sample_mean", "packed", "beta=1"),
    ],
    ids="-".join,
)
def on_one_process(train, request):
    mode, data, *arguments = request.param
    numbers = train(mode, 1, 1, "average", data, *arguments)
    assert numbers["hooked"] == 3
    return run_of(numbers)


@pytest.fixture(
    params=zip(LAYOUTS, ["packed", "padded", "packed", "padded"], strict=True), ids=LAYOUTS
)
def in_layout(train, request):
    layout, data = request.param
    more = WITH_SFT if data == "packed" else "beta=1"  # padded, SFT's part is rounded otherwise
    wanted = run_of(train("sample_mean", 1, 1, "average", "packed", more))
    run = run_of(train("sample_mean", *LAYOUTS[layout], data, more))
    return Comparison(run=run, wanted=wanted, tolerance=BETWEEN_LAYOUTS)


class TestMegatronGKDTrainer(Laws):
    """``megatron rlhf --rlhf_type gkd``."""

    to_hand = Tolerance(loss={"rel": 2e-7, "abs": 0}, gradient=2e-7)  # SFT's part is in float32
    num_steps = 2


def test_a_shadow_trains_ms_swifts_loss_and_logs_what_the_mode_would_give(train):
    stock = train("stock", 2, 2, "per_token", "padded", WITH_SFT)
    shadow = train("shadow", 2, 2, "per_token", "padded", WITH_SFT)
    ours = train("sample_mean", 1, 1, "average", "packed", WITH_SFT)
    assert close(shadow["steps"][0]["lossagg/shadow/sample_mean"], ours["steps"][0]["loss"])
    assert close(stock["steps"][0]["loss"], ours["steps"][0]["stock/loss"])
    for step, wanted in zip(shadow["steps"], stock["steps"], strict=True):
        assert {name: step[name] for name in wanted} == wanted
    assert shadow["gradients"] == stock["gradients"]
    assert difference(ours["gradients"][0], stock["gradients"][0]) > 0.01


def test_a_token_that_the_teacher_knows_nothing_of_stops_every_rank(train):
    printed = train("sample_mean", 2, 1, "average", "blind", "gkd_logits_topk=5")
    assert printed.count("REFUSED") == 2
    assert "the teacher gave no log-probabilities for the others" in printed


@pytest.mark.parametrize(
    ("how", "argument", "message"),
    [
        ("gradient", "beta=0", "and their gradients differ by"),
        ("factor", WITH_SFT, "it has terms or factors that 4.6.0 has not"),
    ],
)
def test_a_release_that_returns_another_loss_is_an_error(train, how, argument, message):
    printed = train("sample_mean", 1, 1, "average", how, argument)
    assert printed.count("REFUSED") == printed.count(message) == 1
