"""NeMo-RL's integration against what NeMo-RL's own loss function returned, and in its own worker.

``recorded/nemo_rl.json`` holds the inputs and outputs of ``ClippedPGLossFn`` at 7ea279ab, by
``record_nemo_rl.py``. Its trainer and Megatron worker run where ``FRAMEWORKS_DIR`` has a checkout.
Live on Megatron-Core without NeMo-RL: ``test_verl.py``.
"""

import ast
import inspect
import json
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import launched
from device_double import DeviceDouble
from frameworks import PATCHES, copy_of, in_float64, needs_checkout

from megatron_lossagg import Aggregation
from megatron_lossagg.errors import AggregationError, ContractError, PlanError
from megatron_lossagg.integrations.nemo_rl import AggregatedLoss, aggregated

RECORDED = json.loads((Path(__file__).parent / "recorded/nemo_rl.json").read_text())
RUNS = {run["name"]: run for run in RECORDED["runs"]}
L = 12
B, V, N = 7, 6, 18  # of 8 sequences one has sample_mask 0, and one is fully masked


def microbatches():
    return [
        {name: torch.tensor(value, dtype=torch.float64) for name, value in mb.items()}
        for mb in RECORDED["microbatches"]
    ]


MULTIPLIED = {"sampling_importance_ratio"}

COUNTS = {
    "global_valid_seqs": torch.tensor(float(B), dtype=torch.float64),
    "global_valid_toks": torch.tensor(float(N), dtype=torch.float64),
}


class ClippedPG:
    """PPO's clip and k3, reduced as NeMo-RL does: written from its source."""

    input_type = "logprob"
    positive_example_nll_weight = 0.0

    def __init__(self, loss_type):
        self.loss_type = SimpleNamespace(value=loss_type)
        self.metric_normalizations = {"loss": loss_type}

    def __call__(self, x, data, global_valid_seqs, global_valid_toks):
        a = data["advantages"][:, 1:]
        ratio = (x - data["prev_logprobs"][:, 1:]).exp()
        pg = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
        log_ratio = (data["reference_policy_logprobs"][:, 1:] - x).clamp(-20, 20)
        kl = (log_ratio.exp() - 1 - log_ratio).clamp(-10, 10) * (x - x.detach()).exp()
        token_mask, sample_mask = data["token_mask"][:, 1:], data["sample_mask"]

        def reduce(values):
            if self.loss_type.value == "token_level":
                return (values * token_mask * sample_mask[:, None]).sum() / (
                    global_valid_toks + 1e-8
                )
            means = (values * token_mask).sum(-1) / (token_mask.sum(-1) + 1e-8)
            return (means * sample_mask).sum() / (global_valid_seqs + 1e-8)

        loss = reduce(pg) + reduce(0.01 * kl)
        return loss, {"loss": loss.item(), "kl_penalty": reduce(kl).item()}


def run(loss_fn):
    results = []
    for mb in microbatches():
        x = mb.pop("next_token_logprobs").requires_grad_()
        loss, metrics = loss_fn(x, data=mb, **COUNTS)
        (gradient,) = torch.autograd.grad(loss, x)
        results.append({"loss": loss.item(), "gradient": gradient.tolist(), "metrics": metrics})
    return results


def assert_same(got, want, metrics=("loss", "kl_penalty")):
    for one, other in zip(got, want, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-7)
        gradients = [torch.tensor(each["gradient"]) for each in (one, other)]
        assert torch.allclose(*gradients, rtol=1e-6, atol=1e-10)
        assert gradients[1].norm() > 1e-3
        for name in metrics:
            assert float(one["metrics"][name]) == pytest.approx(
                float(other["metrics"][name]), rel=1e-6
            ), name


@pytest.mark.parametrize("name", ["token", "sequence"])
def test_the_loss_written_here_is_nemo_rls(name):
    assert_same(run(ClippedPG(RUNS[name]["loss_type"])), RUNS[name]["theirs"])


@pytest.mark.parametrize("mode", ["token_mean", "sample_mean", "constant", "sample_sum"])
@pytest.mark.parametrize("name", ["token", "sequence"])
def test_the_integration_gives_what_it_gave_around_nemo_rls_own_loss(name, mode):
    aggregation = Aggregation(mode, divisor=L if mode == "constant" else None)
    ours = run(aggregated(ClippedPG(RUNS[name]["loss_type"]), aggregation))
    assert_same(ours, RUNS[name]["ours"][mode])


@pytest.mark.parametrize(
    ("name", "alias"),
    [
        ("token", "nemo-rl:token_level_loss=True"),
        ("token, KL, dual clip, TIS", "nemo-rl:token_level_loss=True"),
        ("sequence", "nemo-rl:token_level_loss=False"),
        ("GSPO", "nemo-rl:token_level_loss=False"),
    ],
)
def test_under_its_alias_nemo_rls_loss_gradient_and_every_metric_stay(name, alias):
    recorded = RUNS[name]
    ours = recorded["ours"][Aggregation(alias).mode]
    metrics = set(recorded["theirs"][0]["metrics"]) - (MULTIPLIED if name == "GSPO" else set())
    assert_same(ours, recorded["theirs"], metrics=metrics)


def test_nemo_rl_multiplies_a_metric_of_gspo_by_the_microbatchs_sequences():
    # [b, 1] weights times a [b] mask make [b, b]; sequence by sequence, as for packed sequences, b
    # is 1.
    (name,) = MULTIPLIED
    recorded = RUNS["GSPO"]
    theirs, ours = (
        runs[0]["metrics"] for runs in (recorded["theirs"], recorded["ours"]["constant"])
    )
    assert theirs[name] / ours[name] == pytest.approx(4, rel=1e-6)


def test_nemo_rl_counts_a_fully_masked_sequence_whose_sample_mask_is_1():
    aggregation = Aggregation("nemo-rl:token_level_loss=False")
    assert aggregation == Aggregation("sample_mean", count_empty=True)
    # The sum of the sequences' means is that of B w_s, and would be V / B of it without the empty
    # sequence.
    total = sum(each["loss"] for each in RUNS["sequence"]["theirs"])
    by_sum = RUNS["sequence"]["ours"]["sample_mean"]
    assert total == pytest.approx(sum(each["loss"] for each in by_sum), rel=1e-7)
    assert total * B / V != pytest.approx(total)


def test_constant_divides_by_valid_samples_and_the_divisor():
    theirs, ours = RUNS["token"]["theirs"], RUNS["token"]["ours"]["constant"]
    for one, other in zip(ours, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"] * N / (B * L), rel=1e-7)


def test_metrics_other_than_the_loss_keep_nemo_rls_normalizers():
    for name, recorded in RUNS.items():
        multiplied = MULTIPLIED if name == "GSPO" else set()
        for mode in recorded["ours"].values():
            for one, other in zip(mode, recorded["theirs"], strict=True):
                kept = set(other["metrics"]) - {"loss", "kl_penalty"} - multiplied
                assert len(kept) >= 13
                for name in kept:
                    same = pytest.approx(float(other["metrics"][name]), rel=1e-7, abs=1e-12)
                    assert float(one["metrics"][name]) == same, name
    loss_fn = ClippedPG("token_level")
    made = aggregated(loss_fn, Aggregation("constant", divisor=L))
    assert made.metric_normalizations is loss_fn.metric_normalizations
    assert (made.loss_type, made.input_type) == (loss_fn.loss_type, "logprob")
    assert made.use_fused_linear_logprobs is False


def test_what_nemo_rl_asks_of_the_loss_before_it_is_called_is_the_wrapped_losss():
    # Under top-k or top-p sampling, KL is computed on log-probabilities without the filter.
    loss_fn = ClippedPG("token_level")
    loss_fn.reference_policy_kl_penalty = 0.01
    made = aggregated(loss_fn, Aggregation("constant", divisor=L))
    assert made.reference_policy_kl_penalty == 0.01


def test_sequences_without_sample_mask_count_where_the_step_is_given_whole():
    few = run(aggregated(ClippedPG("token_level"), Aggregation("constant", divisor=L)))
    whole = aggregated(
        ClippedPG("token_level"), Aggregation("constant", divisor=L), samples_per_step=8
    )
    for one, other in zip(run(whole), few, strict=True):
        assert one["loss"] == pytest.approx(other["loss"] * B / 8, rel=1e-9)


def test_empty_samples_that_nemo_rl_counts_cannot_be_left_out_here():
    made = aggregated(ClippedPG("token_level"), Aggregation("sample_mean", count_empty=False))
    with pytest.raises(PlanError, match="1 sequences have sample_mask 1 and no active tokens"):
        run(made)


def test_split_steps_which_pass_1_for_the_steps_counts_are_refused():
    made = aggregated(ClippedPG("token_level"), Aggregation("sample_mean"))
    mb = microbatches()[0]
    x, one = mb.pop("next_token_logprobs"), torch.ones(())
    with pytest.raises(ContractError, match="NeMo-RL's split training steps pass 1"):
        made(x, data=mb, global_valid_seqs=one, global_valid_toks=one)


def test_weights_from_the_trainer_make_prompt_mean():
    made = aggregated(ClippedPG("token_level"), Aggregation("prompt_mean"), weights_in_data=True)
    # Prompts (0, 1), (2, 3), ... and steps of four sequences; the last sequence is in no count.
    data = {
        "token_mask": torch.tensor(
            [[1, *[1] * n, *[0] * (3 - n)] for n in (3, 1, 0, 2, 1, 1, 2, 2)]
        ),
        "sample_mask": torch.tensor([1, 1, 1, 1, 1, 1, 1, 0]),
    }
    weights = made.weights_of(data, sequences_per_step=4, samples_per_prompt=2)
    want = [1 / 8, 1 / 8, 0, 1 / 4, 1 / 4, 1 / 4, 1 / 4, 0]
    assert weights.tolist() == pytest.approx(want)
    mb = microbatches()[0]
    x = mb.pop("next_token_logprobs")
    with pytest.raises(
        ContractError, match=r"apply docs/integrations/patches/nemo-rl-prompt-mean\.patch"
    ):
        made(x, data=mb, **COUNTS)
    with_weights = {**mb, "loss_weights": torch.tensor([0.5, 0.0, 0.25, 1.0])}
    loss, _ = made(x, data=with_weights, **COUNTS)
    sequences = [
        ClippedPG("token_level")(x[n : n + 1], {k: v[n : n + 1] for k, v in mb.items()}, **COUNTS)
        for n in range(4)
    ]
    want = sum(
        w * sequence[0] * N for w, sequence in zip((0.5, 0, 0.25, 1), sequences, strict=True)
    )
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)


def eight_sequences(**changes):
    """Return a batch of eight equal sequences, as the trainer has it."""
    masks = {"token_mask": torch.ones(8, 4), "sample_mask": torch.ones(8)}
    return {**masks, **changes}


@pytest.mark.parametrize(
    ("sequences_per_step", "samples_per_prompt"), [(6, 4), (8, 3), (4, 3), (16, 3), (2, 4)]
)
def test_a_prompt_that_is_not_whole_in_its_step_is_refused_for_prompt_mean(
    sequences_per_step, samples_per_prompt
):
    sizes = {"sequences_per_step": sequences_per_step, "samples_per_prompt": samples_per_prompt}
    made = aggregated(ClippedPG("token_level"), Aggregation("prompt_mean"), weights_in_data=True)
    with pytest.raises(
        PlanError, match=r"got 8 sequences in optimizer steps of .* whole prompts in ea"
    ):
        made.weights_of(eight_sequences(), **sizes)
    of_samples = Aggregation("sample_mean")  # knows no prompts
    made = aggregated(ClippedPG("token_level"), of_samples, weights_in_data=True)
    assert made.weights_of(eight_sequences(), **sizes).gt(0).all()


def test_whole_prompts_are_taken_whatever_the_steps():
    made = aggregated(ClippedPG("token_level"), Aggregation("prompt_mean"), weights_in_data=True)
    for sequences_per_step, samples in ((4, 2), (8, 4), (6, 2), (100, 4), (4, 4)):
        sizes = {"sequences_per_step": sequences_per_step, "samples_per_prompt": samples}
        steps = made.weights_of(eight_sequences(), **sizes).split(sequences_per_step)
        assert [step.sum().item() * 3 for step in steps] == pytest.approx([1.0] * len(steps))


@pytest.mark.parametrize("name", ["sample_mask", "token_mask"])
def test_a_mask_that_is_not_0_or_1_is_refused(name):
    half = eight_sequences(**{name: eight_sequences()[name] * 0.5})
    made = aggregated(ClippedPG("token_level"), Aggregation("sample_mean"), weights_in_data=True)
    with pytest.raises(PlanError, match=f"got {name} with values other than 0 and 1.*Make "):
        made.weights_of(half, sequences_per_step=8, samples_per_prompt=4)
    mb = microbatches()[0]
    mb[name] = mb[name] * 0.5
    made = aggregated(ClippedPG("token_level"), Aggregation("sample_mean"))
    with pytest.raises(PlanError, match=f"got {name} with values other than 0 and 1.*Make "):
        made(mb.pop("next_token_logprobs"), data=mb, **COUNTS)


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_of_the_step_that_is_no_integer_is_refused(name):
    mb = microbatches()[0]
    made = aggregated(ClippedPG("token_level"), Aggregation("token_mean"))
    with pytest.raises(PlanError, match=f"got {name} .*5, expected an integer, the sum of 0/1"):
        made(mb.pop("next_token_logprobs"), data=mb, **{**COUNTS, name: COUNTS[name] + 0.5})


@pytest.mark.parametrize("is_carried", [False, True])
def test_loss_and_gradient_are_the_same_with_the_batch_on_a_device(is_carried):
    made = aggregated(
        ClippedPG("token_level"), Aggregation("sample_mean"), weights_in_data=is_carried
    )

    def run(mb, counts):
        x = mb.pop("next_token_logprobs").requires_grad_()
        if is_carried:
            sizes = {"sequences_per_step": 4, "samples_per_prompt": 2}
            mb["loss_weights"] = made.weights_of(mb, **sizes).to(x)
        loss, metrics = made(x, data=mb, **counts)
        (gradient,) = torch.autograd.grad(loss, x)
        assert loss.device == gradient.device == x.device
        return loss.item(), gradient.tolist(), metrics["loss"]

    want = run(microbatches()[0], COUNTS)
    with DeviceDouble() as double:
        mb = {name: value.to(double.device) for name, value in microbatches()[0].items()}
        got = run(mb, {name: value.to(double.device) for name, value in COUNTS.items()})
    assert got[0] == want[0] == pytest.approx(want[2])
    assert got[1:] == want[1:]


@pytest.mark.parametrize("mode", ["prompt_mean", "microbatch_token_mean"])
def test_a_mode_that_nemo_rl_has_no_counts_for_is_refused_at_startup(mode):
    with pytest.raises(AggregationError, match="no prompts and no microbatches"):
        aggregated(ClippedPG("token_level"), Aggregation(mode))


def test_wrong_wrapping_is_refused_at_startup():
    mode = Aggregation("sample_mean")
    with pytest.raises(AggregationError, match="expected NeMo-RL's ClippedPGLossFn"):
        aggregated(object(), mode)
    loss_fn = ClippedPG("token_level")
    with pytest.raises(AggregationError, match="expected an integer"):
        aggregated(loss_fn, mode, samples_per_step=0)
    loss_fn.positive_example_nll_weight = 0.1
    with pytest.raises(AggregationError, match=r"set loss_fn\.positive_example_nll_weight to 0"):
        aggregated(loss_fn, mode)
    with pytest.raises(PlanError, match=r"give policy\.train_global_batch_size"):
        run(aggregated(ClippedPG("token_level"), mode, samples_per_step=5))


PATCH = "nemo-rl-prompt-mean.patch"
IN_FLOAT32 = "nemo_rl/distributed/model_utils.py"
"""Where NeMo-RL computes log-probabilities in float32."""
TOKEN, SEQUENCE = "token/all prompts/{}", "sequence/prompts with tokens/{}"
MICROBATCHES = {
    "M = 1": (1, 2, "padded", 6, 1),
    "M = 3": (1, 2, "padded", 2, 3),
    "by tokens": (1, 2, "dynamic", 24, None),
    "packed": (1, 2, "packed", 24, None),
    "packed, CP 2": (2, 4, "packed", 24, None),
}
"""CP, processes, how sequences are put together, sequences or tokens of a microbatch, M."""


def planned(checkout, file):
    """Run NeMo-RL's trainer until it trains."""
    launched("integrations/nemo_rl_worker.py", "plan", checkout, file, processes=1)
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
    out = launched("integrations/nemo_rl_worker.py", *arguments, processes=processes)
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


@needs_checkout("NeMo-RL")
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
@needs_checkout("NeMo-RL")
def test_the_patch_keeps_the_weights_in_nemo_rls_own_precision(tmp_path):
    checkout = copy_of("NeMo-RL", "nemo_rl", tmp_path, patch=PATCH)
    steps = planned(checkout, tmp_path / "steps.pt")
    ((error, _),) = errors_of(steps, 1, 2, "packed", TOKEN.format(24))
    assert error < 1e-5


@pytest.mark.launches
@needs_checkout("NeMo-RL")
def test_without_the_patch_nemo_rl_stops_in_the_first_step(tmp_path):
    steps = planned(copy_of("NeMo-RL", "nemo_rl", tmp_path), tmp_path / "steps.pt")
    with pytest.raises(AssertionError, match="apply docs/integrations/patches/nemo-rl-prompt-mean"):
        errors_of(steps, 1, 2, "padded", TOKEN.format(6))
