"""NeMo-RL's integration without NeMo-RL; with its own loss, trainer and worker in a checkout."""

import ast
import inspect
import pickle
import re
import textwrap
import types
import warnings
from functools import partial

import left_out
import nemo_rl_page
import pytest
import torch
from conftest import launched
from device_double import DeviceDouble
from drawn_step import Step
from frameworks import PATCHES, assert_live, checkout_of, copy_of, in_float64, needs
from nemo_rl_functions import compared, losses_of
from nemo_rl_written import (
    ClippedPGLossFn,
    DistillationLossFn,
    LossType,
    MetricNormalizer,
    MseValueLossFn,
    NLLLossFn,
)

from megatron_lossagg import Aggregation, Sequences, plan_step
from megatron_lossagg.errors import AggregationError, ContractError, PlanError
from megatron_lossagg.integrations import _shared
from megatron_lossagg.integrations.nemo_rl import AggregatedLoss, aggregated
from megatron_lossagg.reduction import faults

L = 12
SAMPLE_MEAN = Aggregation("sample_mean")
CONSTANT = Aggregation("constant", divisor=L)
SPLIT = ("token_mean", "sample_mean", "constant", "sample_sum")
OWN = {
    "token": ClippedPGLossFn,
    "sequence": partial(ClippedPGLossFn, token_level=False),
    "nll": NLLLossFn,
    "value": MseValueLossFn,
    "distillation": DistillationLossFn,
}
COUNTS = {"global_valid_seqs": torch.tensor(8.0), "global_valid_toks": torch.tensor(24.0)}


def eight_sequences(**changes):
    """Return a batch of eight sequences of three tokens, as the trainer has it."""
    names = ("advantages", "prev_logprobs", "reference_policy_logprobs", "token_mask")
    fields = {name: torch.ones(8, 4, dtype=torch.float64) for name in names}
    return {**fields, "sample_mask": torch.ones(8, dtype=torch.float64), **changes}


def of_mode(mode):
    return Aggregation(mode, divisor=L if mode == "constant" else None)


def log_probs():
    return torch.linspace(-2, -1, 24, dtype=torch.float64).view(8, 3).requires_grad_()


@pytest.mark.parametrize("token_level", [True, False])
def test_the_loss_written_here_is_that_of_its_alias(token_level):
    alias = Aggregation(f"nemo-rl:token_level_loss={token_level}")
    found = compared(partial(ClippedPGLossFn, token_level=token_level), alias)
    assert max(found.loss_error, found.gradient_error) < 1e-7


@pytest.mark.parametrize("mode", [*SPLIT, "token_sum"])
@pytest.mark.parametrize("make", OWN.values(), ids=OWN)
def test_in_the_integration_it_is_the_references(make, mode):
    found = compared(make, of_mode(mode), is_wrapped=True)
    assert max(found.loss_error, found.gradient_error) < 1e-7


@pytest.mark.parametrize("rank", [0, 1])
def test_one_line_on_rank_0_says_that_it_is_on(rank, capsys, monkeypatch):
    ranks = types.SimpleNamespace(is_initialized=lambda: True, get_rank=lambda: rank)
    monkeypatch.setattr(_shared, "dist", ranks)
    _shared.announce.cache_clear()
    made = aggregated(ClippedPGLossFn(), CONSTANT)
    assert capsys.readouterr().err == ""  # the driver, which trains nothing
    losses_of(made, Step())
    line = f"lossagg: NeMo-RL trains {CONSTANT}\n"
    assert (line in capsys.readouterr().err) == (rank == 0)


@pytest.mark.parametrize("make", [ClippedPGLossFn, NLLLossFn, MseValueLossFn, DistillationLossFn])
def test_the_loss_and_the_kl_follow_the_aggregation_and_other_metrics_stay(make):
    theirs = losses_of(make(), Step())
    ours = losses_of(aggregated(make(), CONSTANT), Step())
    for (loss, metrics), (_, stock) in zip(ours, theirs, strict=True):
        ratio = loss.item() / stock["loss"]
        assert ratio != pytest.approx(1)
        assert metrics.keys() == stock.keys()
        for name in stock:
            follows = name in ("loss", "kl_penalty")
            assert metrics[name] == pytest.approx(stock[name] * ratio if follows else stock[name])


@pytest.mark.parametrize("num_empty", [1, 7, 8])
def test_an_extremum_is_of_tokens_and_there_if_a_microbatch_has_none(num_empty):
    mask = torch.ones(8, 4, dtype=torch.float64)
    mask[:num_empty] = 0
    data = eight_sequences(token_mask=mask)
    _, stock = ClippedPGLossFn()(log_probs(), data=data, **COUNTS)
    _, ours = aggregated(ClippedPGLossFn(), SAMPLE_MEAN)(log_probs(), data=data, **COUNTS)
    assert ours.keys() == stock.keys()
    assert ours["probs_ratio_min"] == stock["probs_ratio_min"]
    assert (stock["probs_ratio_min"] == torch.inf) == (num_empty == 8)


@pytest.mark.parametrize(
    "name",
    ["loss_type", "input_type", "metric_normalizations", "reference_policy_kl_penalty"],
)
def test_what_nemo_rl_asks_of_the_loss_before_it_is_called_is_the_wrapped_losss(name):
    # Under top-k or top-p sampling, KL is computed on log-probabilities without the filter.
    loss_fn = ClippedPGLossFn()
    made = pickle.loads(pickle.dumps(aggregated(loss_fn, CONSTANT)))  # as Ray hands it over
    assert getattr(made, name) == getattr(loss_fn, name)
    assert not hasattr(made, "use_fused_linear_logprobs")


def test_sequences_without_sample_mask_count_where_the_step_is_given_whole():
    step = Step()
    few = losses_of(aggregated(ClippedPGLossFn(), CONSTANT), step, num_excluded=1)
    whole = aggregated(ClippedPGLossFn(), CONSTANT, samples_per_step=12)
    for (one, _), (other, _) in zip(losses_of(whole, step, num_excluded=1), few, strict=True):
        assert one.item() == pytest.approx(other.item() * 11 / 12, rel=1e-9)


def test_empty_samples_that_nemo_rl_counts_cannot_be_left_out_here():
    made = aggregated(ClippedPGLossFn(), Aggregation("sample_mean", count_empty=False))
    with pytest.raises(PlanError, match="1 sequences have sample_mask 1 and no active tokens"):
        losses_of(made, Step([[(3, 4, 5)]]))


def test_a_value_of_a_first_token_that_nemo_rl_trains_and_does_not_count_is_refused():
    data = eight_sequences(returns=torch.ones(8, 4))
    with pytest.raises(PlanError, match=r"1 at a sequence's first token.*set token_loss_mask to 0"):
        aggregated(MseValueLossFn(), SAMPLE_MEAN)(logits=torch.ones(8, 4), data=data, **COUNTS)


@pytest.mark.parametrize("mode", SPLIT)
@pytest.mark.parametrize("make", [OWN[name] for name in ("token", "sequence", "nll")])
def test_a_split_steps_gradient_is_divided_by_what_the_mode_counts(make, mode):
    """By ``finish_train_step``: losses of counts of 1, times 1 / N or 1 / B in the end."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = aggregated(make(), of_mode(mode), split_steps=True)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == (mode != "token_mean")
    assert all("a split step divides the losses that a model adds" in one for one in messages)
    made = pickle.loads(pickle.dumps(made))
    level = LossType.TOKEN_LEVEL if mode == "token_mean" else LossType.SEQUENCE_LEVEL
    assert made.loss_type is level
    follows = MetricNormalizer.TOKENS if mode == "token_mean" else MetricNormalizer.SEQUENCES
    kinds = dict(make().metric_normalizations)
    assert made.metric_normalizations == {
        name: follows if name in ("loss", "kl_penalty") else kind for name, kind in kinds.items()
    }
    found = compared(make, of_mode(mode), is_wrapped=True, split_steps=True)
    assert max(found.loss_error, found.gradient_error) < 1e-6
    with pytest.raises(ContractError, match="passes a step's counts, 8 and 24: drop it"):
        made(log_probs(), data=eight_sequences(), **COUNTS)


@pytest.mark.parametrize(
    ("loss_fn", "mode", "more", "message"),
    [
        (ClippedPGLossFn(), "token_sum", {}, "choose one of token_mean, sample_mean, constant, s"),
        (MseValueLossFn(), "token_mean", {}, "split_steps=True with token_mean.* and MseValueLoss"),
        (DistillationLossFn(), "token_mean", {}, "with token_mean.* and DistillationLossFn"),
        (ClippedPGLossFn(), "token_mean", {"weights_in_data": True}, "drop them"),
        (ClippedPGLossFn(), "sample_mean", {"samples_per_step": 8}, "drop them"),
    ],
)
def test_what_a_split_step_cannot_divide_by_is_refused_at_startup(loss_fn, mode, more, message):
    with pytest.raises(AggregationError, match=message):
        aggregated(loss_fn, Aggregation(mode), split_steps=True, **more)


@pytest.mark.parametrize(
    ("policy", "mode", "kept"),
    [
        ({"megatron_cfg": {"mtp_num_layers": 1}}, "sample_mean", "MTP"),
        ({"draft": {"enabled": True}, "megatron_cfg": None}, "sample_mean", "draft"),
        ({"draft": {"enabled": True}}, "token_mean", None),
        ({"draft": {"enabled": False}, "megatron_cfg": {}}, "sample_mean", None),
    ],
)
def test_a_loss_of_the_policy_that_stays_nemo_rls_is_warned_of(policy, mode, kept, recwarn):
    aggregated(ClippedPGLossFn(), Aggregation(mode), policy=policy)
    messages = [str(warning.message) for warning in recwarn]
    assert len(messages) == (kept is not None)
    assert all(f"the {kept} loss stays NeMo-RL's mean over the step's" in one for one in messages)


def test_split_steps_which_pass_1_for_the_steps_counts_are_refused():
    one = torch.ones(())
    with pytest.raises(ContractError, match=r"split training steps pass 1.*pass split_steps=True"):
        aggregated(ClippedPGLossFn(), SAMPLE_MEAN)(
            log_probs(), data=eight_sequences(), global_valid_seqs=one, global_valid_toks=one
        )


def by_length_power(*lengths):
    """Return the weights of a step under ``length_power`` with a = 0.5."""
    z = sum(n**0.5 for n in lengths)
    return [1 / (n**0.5 * z) if n else 0 for n in lengths]


@pytest.mark.parametrize(
    ("mode", "exponent", "wanted"),
    [
        ("prompt_mean", None, [1 / 8, 1 / 8, 0, 1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ("length_power", 0.5, [*by_length_power(3, 1, 0, 2), *by_length_power(1, 1, 2)]),
    ],
)
def test_weights_from_the_trainer_make_the_loss(mode, exponent, wanted):
    """Of prompts (0, 1), (2, 3), ... and steps of four sequences; the last one is in no count."""
    aggregation = Aggregation(mode, exponent=exponent)
    made = aggregated(ClippedPGLossFn(), aggregation, weights_in_data=True)
    lengths = (3, 1, 0, 2, 1, 1, 2, 2)
    mask = torch.tensor([[1.0, *[1] * n, *[0] * (3 - n)] for n in lengths])
    data = eight_sequences(token_mask=mask, sample_mask=torch.tensor([1.0] * 7 + [0]))
    weights = made.weights_of(data, sequences_per_step=4, samples_per_prompt=2)
    assert weights.tolist() == pytest.approx([*wanted, 0])
    with pytest.raises(
        ContractError, match=r"apply docs/integrations/patches/nemo-rl-prompt-mean\.patch"
    ):
        made(log_probs(), data=data, **COUNTS)
    x = log_probs()
    loss, _ = made(x, data={**data, "loss_weights": weights}, **COUNTS)
    ratio = (x - 1).exp()
    losses = -torch.minimum(ratio, ratio.clamp(0.8, 1.2)) * mask[:, 1:]
    assert loss.item() == pytest.approx((losses.sum(-1) * weights).sum().item())


@pytest.mark.parametrize(
    ("sequences_per_step", "samples_per_prompt", "is_whole"),
    [
        *((6, 4, False), (8, 3, False), (4, 3, False), (16, 3, False), (2, 4, False)),
        *((4, 2, True), (8, 4, True), (6, 2, True), (100, 4, True), (4, 4, True)),
    ],
)
def test_prompt_mean_takes_prompts_that_are_whole_in_their_step(
    sequences_per_step, samples_per_prompt, is_whole
):
    sizes = {"sequences_per_step": sequences_per_step, "samples_per_prompt": samples_per_prompt}
    made = aggregated(ClippedPGLossFn(), Aggregation("prompt_mean"), weights_in_data=True)
    if is_whole:
        steps = made.weights_of(eight_sequences(), **sizes).split(sequences_per_step)
        assert [step.sum().item() * 3 for step in steps] == pytest.approx([1.0] * len(steps))
        return
    with pytest.raises(
        PlanError, match=r"got 8 sequences in optimizer steps of .* whole prompts in ea"
    ):
        made.weights_of(eight_sequences(), **sizes)
    made = aggregated(ClippedPGLossFn(), SAMPLE_MEAN, weights_in_data=True)  # knows no prompts
    assert made.weights_of(eight_sequences(), **sizes).gt(0).all()


@pytest.mark.parametrize("name", ["sample_mask", "token_mask"])
def test_a_mask_that_is_not_0_or_1_is_refused(name):
    half = eight_sequences(**{name: eight_sequences()[name] * 0.5})
    of_batch = aggregated(ClippedPGLossFn(), SAMPLE_MEAN, weights_in_data=True)
    for call in (
        partial(of_batch.weights_of, half, sequences_per_step=8, samples_per_prompt=4),
        partial(aggregated(ClippedPGLossFn(), SAMPLE_MEAN), log_probs(), data=half, **COUNTS),
    ):
        with pytest.raises(PlanError, match=f"got {name} with values other than 0 and 1.*make "):
            call()


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_of_the_step_that_is_no_integer_is_refused(name):
    made = aggregated(ClippedPGLossFn(), Aggregation("token_mean"))
    with pytest.raises(PlanError, match=f"got {name} .*5, expected an integer, the sum of 0/1"):
        made(log_probs(), data=eight_sequences(), **{**COUNTS, name: COUNTS[name] + 0.5})


@pytest.mark.parametrize("is_carried", [False, True])
def test_loss_and_gradient_are_the_same_with_the_batch_on_a_device(is_carried):
    made = aggregated(ClippedPGLossFn(), SAMPLE_MEAN, weights_in_data=is_carried)

    def run(place):
        x = log_probs().detach().to(place).requires_grad_()
        data = {name: value.to(place) for name, value in eight_sequences().items()}
        if is_carried:
            sizes = {"sequences_per_step": 4, "samples_per_prompt": 2}
            data["loss_weights"] = made.weights_of(data, **sizes).to(x)
        loss, metrics = made(x, data=data, **{name: n.to(place) for name, n in COUNTS.items()})
        (gradient,) = torch.autograd.grad(loss, x)
        assert loss.device == gradient.device == x.device
        return loss.item(), gradient.tolist(), metrics["loss"]

    want = run(torch.device("cpu"))
    with DeviceDouble() as double:
        assert run(double.device) == want
    assert want[0] == pytest.approx(want[2])


@pytest.mark.parametrize(
    "aggregation",
    [
        Aggregation("prompt_mean"),
        Aggregation("length_power", exponent=0.5),
        Aggregation("microbatch_token_mean"),
    ],
    ids=str,
)
def test_a_mode_that_nemo_rl_has_no_counts_for_is_refused_at_startup(aggregation):
    with pytest.raises(AggregationError, match="no prompts, no lengths of other samples and no"):
        aggregated(ClippedPGLossFn(), aggregation)
    if aggregation.mode == "microbatch_token_mean":
        with pytest.raises(AggregationError, match="for prompt_mean and length_power apply"):
            aggregated(ClippedPGLossFn(), aggregation, weights_in_data=True)


def test_wrong_wrapping_is_refused_at_startup():
    with pytest.raises(AggregationError, match="got a loss function object, expected NeMo-RL's Cl"):
        aggregated(object(), SAMPLE_MEAN)
    with pytest.raises(AggregationError, match="got weights_in_data=True with NLLLossFn"):
        aggregated(NLLLossFn(), SAMPLE_MEAN, weights_in_data=True)
    loss_fn = ClippedPGLossFn()
    with pytest.raises(AggregationError, match="expected an integer"):
        aggregated(loss_fn, SAMPLE_MEAN, samples_per_step=0)
    with pytest.raises(PlanError, match=r"give policy\.train_global_batch_size"):
        losses_of(aggregated(loss_fn, SAMPLE_MEAN, samples_per_step=5), Step())
    loss_fn.positive_example_nll_weight = 0.1
    with pytest.raises(AggregationError, match=r"set loss_fn\.positive_example_nll_weight to 0"):
        aggregated(loss_fn, SAMPLE_MEAN)


@pytest.mark.launches
def test_on_live_megatron_nemo_rls_own_scaling_makes_it_the_configured_loss():
    assert_live("nemo_rl", cases=3)


def loss_of_nemo_rl(mode, log_probs, sample_mask, token_mask):
    names = ("advantages", "prev_logprobs", "reference_policy_logprobs")
    fields = {name: torch.ones(8, 4, dtype=torch.float64) for name in names}
    n_b = token_mask[:, 1:].sum(-1) * sample_mask
    loss, _ = aggregated(NLLLossFn(), left_out.of_mode(mode))(
        log_probs,
        data={**fields, "sample_mask": sample_mask, "token_mask": token_mask},
        global_valid_seqs=sample_mask.sum(),
        global_valid_toks=n_b.sum(),
    )
    return loss


@pytest.mark.parametrize("mode", ["token_mean", "sample_mean", "constant", "sample_sum"])
def test_a_sample_of_nemo_rls_loss_multiplier_0_is_left_out(mode):
    is_left_out = torch.arange(8) % 3 == 0
    log_probs = torch.linspace(-2, -1, 24, dtype=torch.float64).view(8, 3).requires_grad_()
    whole = torch.ones(8, 4, dtype=torch.float64)
    loss = loss_of_nemo_rl(mode, log_probs, (~is_left_out).to(torch.float64), whole)
    sequences = Sequences(active_tokens=[3] * 8, left_out=is_left_out.tolist())
    weights = plan_step(left_out.of_mode(mode), sequences).weights
    wanted = torch.zeros((), dtype=torch.float64)
    for sequence in range(8):
        for token in range(3):
            wanted = wanted - weights[sequence] * log_probs[sequence, token]
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-7)
    (got,), (want,) = (torch.autograd.grad(one, log_probs) for one in (loss, wanted))
    assert torch.allclose(got, want, rtol=1e-7, atol=0)


@pytest.mark.parametrize("mode", ["token_mean", "sample_mean", "constant"])
def test_nemo_rl_names_the_setting_once(mode, capsys, monkeypatch):
    monkeypatch.setattr(faults, "_warned", set())
    log_probs = torch.ones(8, 3, dtype=torch.float64, requires_grad=True)
    token_mask = torch.ones(8, 4, dtype=torch.float64)
    token_mask[5] = 0
    for _ in range(2):
        loss_of_nemo_rl(mode, log_probs, torch.ones(8, dtype=torch.float64), token_mask)
    left_out.assert_said(capsys.readouterr().err, mode, "their loss_multiplier 0")


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
