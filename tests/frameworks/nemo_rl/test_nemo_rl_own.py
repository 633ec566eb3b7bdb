"""NeMo-RL's own loss, trainer and worker in a checkout, with and without our patch."""

import ast
import inspect
import re
import textwrap

import nemo_rl_page
import pytest
from conftest import launched
from frameworks import PATCHES, checkout_of, copy_of, in_float64, needs

from megatron_lossagg.integrations.nemo_rl import AggregatedLoss

SPLIT = ("token_mean", "sample_mean", "constant", "sample_sum")
PATCH = "nemo-rl-prompt-mean.patch"
IN_FLOAT32 = "nemo_rl/distributed/model_utils.py"
"""Where NeMo-RL computes log-probabilities in float32."""
OF_PROMPTS = ("token/all prompts", "sequence/prompts with tokens")
TOKEN, SEQUENCE = (f"{case}/{{}}" for case in OF_PROMPTS)
OF_LOSSES = ("nll", "value", "split", "split nll", "KL")
OF_MODES = [f"{loss}/{mode}" for loss in OF_LOSSES for mode in SPLIT]
OF_MODES.append("KL with a rest/sample_mean")
STOCK_AND_OURS = ("token/stock", "sequence/stock", "token/sample_mean", "sequence/constant")
MICROBATCHES = {
    "M = 1": (1, 2, "padded", 6, 1),
    "M = 3": (1, 2, "padded", 2, 3),
    "by tokens": (1, 2, "dynamic", 24, None),
    "packed": (1, 2, "packed", 24, None),
    "packed, CP 2": (2, 4, "packed", 24, None),
}
"""CP, processes, how sequences are put together, sequences or tokens of a microbatch, M."""


def planned(checkout, file, cases=OF_PROMPTS):
    """Run NeMo-RL's trainer until it trains; compute the reference of each loss and mode."""
    launched("frameworks/nemo_rl/nemo_rl_worker.py", "plan", checkout, file, *cases, processes=1)
    return checkout, file


@pytest.fixture(scope="module")
def steps(launches, tmp_path_factory):
    """Plan two optimizer steps in NeMo-RL's patched trainer; compute the references."""
    folder = tmp_path_factory.mktemp("nemo_rl")
    checkout = copy_of("NeMo-RL", "nemo_rl", folder, patch=PATCH)
    in_float64([checkout / IN_FLOAT32])
    return planned(checkout, folder / "steps.pt")


def errors_of(steps, cp, processes, how, *cases):
    """Train the steps in NeMo-RL's worker; return each case's gradient error and microbatches."""
    arguments = ("train", *steps, cp, how, *cases)
    out = launched("frameworks/nemo_rl/nemo_rl_worker.py", *arguments, processes=processes)
    lines = re.findall(r"^(.*): (\S+), (\d+) microbatches$", out, re.MULTILINE)
    print(*lines, sep="\n")
    assert [case for case, _, _ in lines] == list(cases)
    return [(float(error), int(microbatches)) for _, error, microbatches in lines]


def test_the_patch_calls_weights_of_by_the_names_of_its_arguments():
    lines = (PATCHES / PATCH).read_text().splitlines()
    added = "\n".join(line[1:] for line in lines if line.startswith("+ "))
    call = ast.parse(textwrap.dedent(added)).body[0].value
    assert call.func.attr == AggregatedLoss.weights_of.__name__
    keywords = {keyword.arg: None for keyword in call.keywords}
    inspect.signature(AggregatedLoss.weights_of).bind(None, *call.args, **keywords)


@pytest.mark.launches
@needs("NeMo-RL", installed=True)
def test_under_its_alias_nemo_rls_loss_gradient_and_every_metric_stay():
    arguments = ("losses", checkout_of("NeMo-RL"), "")
    out = launched("frameworks/nemo_rl/nemo_rl_worker.py", *arguments, processes=1)
    assert out.count("are NeMo-RL's own") == 7


@pytest.fixture(scope="module")
def given(launches, tmp_path_factory):
    folder = tmp_path_factory.mktemp("nemo_rl_given")
    checkout = copy_of("NeMo-RL", "nemo_rl", folder)
    in_float64([checkout / IN_FLOAT32])
    return planned(checkout, folder / "given.pt", OF_MODES)


@needs("NeMo-RL", installed=True)
@pytest.mark.parametrize(
    ("cp", "processes", "how", "size"),
    [(1, 2, "padded", 2), (1, 2, "packed", 24), (2, 4, "packed", 24)],
)
def test_nemo_rl_trains_sft_values_distillation_and_split_steps_by_the_mode(
    given, cp, processes, how, size
):
    trained = errors_of(given, cp, processes, how, *[f"{case}/{size}" for case in OF_MODES])
    assert max(error for error, _ in trained) < 1e-12


@needs("NeMo-RL", installed=True)
@pytest.mark.parametrize("name", MICROBATCHES)
def test_each_token_of_nemo_rls_policy_loss_and_kl_weighs_what_loops_over_tokens_say(given, name):
    cp, processes, how, size, _ = MICROBATCHES[name]
    cases = [f"{case}/{size}" for case in STOCK_AND_OURS]
    arguments = ("weigh", *given, cp, how, *cases)
    out = launched("frameworks/nemo_rl/nemo_rl_worker.py", *arguments, processes=processes)
    assert re.findall(r"^(.*): weighed", out, re.MULTILINE) == cases


@needs("NeMo-RL", installed=True)
@pytest.mark.parametrize("name", MICROBATCHES)
def test_with_the_patch_nemo_rl_trains_prompt_mean(steps, name):
    cp, processes, how, size, num_microbatches = MICROBATCHES[name]
    token, sequence = errors_of(
        steps, cp, processes, how, TOKEN.format(size), SEQUENCE.format(size)
    )
    assert token[0] < 1e-12
    assert sequence[0] < 1e-7  # NeMo-RL adds 1e-8 to the counts that it divides by
    if num_microbatches is not None:
        assert token[1] == 2 * num_microbatches  # of two steps
    else:
        assert token[1] > 2


@pytest.mark.launches
@needs("NeMo-RL", installed=True)
def test_the_patch_keeps_the_weights_in_nemo_rls_own_precision(tmp_path):
    checkout = copy_of("NeMo-RL", "nemo_rl", tmp_path, patch=PATCH)
    steps = planned(checkout, tmp_path / "steps.pt")
    ((error, _),) = errors_of(steps, 1, 2, "packed", TOKEN.format(24))
    assert error < 1e-5


@pytest.mark.launches
@needs("NeMo-RL", installed=True)
def test_without_the_patch_nemo_rl_stops_in_the_first_step(tmp_path):
    steps = planned(copy_of("NeMo-RL", "nemo_rl", tmp_path), tmp_path / "steps.pt")
    with pytest.raises(AssertionError, match="apply docs/integrations/patches/nemo-rl-prompt-mean"):
        errors_of(steps, 1, 2, "padded", TOKEN.format(6))


@pytest.mark.launches
@needs("NeMo-RL", installed=True)
@pytest.mark.parametrize("weighed", [False, True])
def test_nemo_rls_script_gives_its_trainer_the_wrapped_loss_function(tmp_path, weighed):
    found, done = nemo_rl_page.start(tmp_path, weighed=weighed)
    mode = None if weighed else "constant: w_s = 1/(B 40960)"
    assert found == {"aggregation": mode, "of": "ClippedPGLossFn", "weighs": weighed}, done.stderr
