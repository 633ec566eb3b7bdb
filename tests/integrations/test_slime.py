"""slime: weights carried with the data, and the reducer of the policy loss of slime and miles."""

import os
import subprocess
import sys
import types
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from conftest import TESTS, launched
from device_double import DeviceDouble
from frameworks import (
    CASES,
    FRAMEWORKS_DIR,
    LAYOUTS,
    check_reducer,
    flags,
    needs,
    recorded,
    trained,
    wanted,
)

from megatron_lossagg import faults
from megatron_lossagg.errors import (
    AggregationError,
    ContractError,
    LayoutError,
    PlanError,
    ReducerError,
)
from megatron_lossagg.integrations import _rollout_mask_sums, slime
from megatron_lossagg.verify import reference_loss


@pytest.fixture
def miles_cp(monkeypatch):
    """Replace miles' parallel state, which needs no Megatron."""

    def at(size, rank):
        cp = types.SimpleNamespace(size=size, rank=rank)
        module = types.ModuleType("miles.backends.training_utils.parallel")
        module.get_parallel_state = lambda: types.SimpleNamespace(cp=cp)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    at(1, 0)
    return at


@pytest.fixture
def framework_args(monkeypatch):
    """Replace the place where Megatron-LM keeps the framework's arguments."""

    def these(**arguments):
        module = types.ModuleType("megatron.training.global_vars")
        module.get_args = lambda: types.SimpleNamespace(**arguments)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return these


MASKS = [torch.tensor([1, 0, 1], dtype=torch.int32), torch.tensor([1, 1], dtype=torch.int32)]


@pytest.mark.launches
def test_on_live_megatron_the_frameworks_own_scaling_makes_it_the_configured_loss(tmp_path):
    file = tmp_path / "reference.pt"
    launched("integrations/carry_worker.py", "reference", file, processes=1)
    out = launched("integrations/carry_worker.py", "compare", file, processes=4)
    assert "REDUCER equals the reference" in out
    assert out.count("CARRIED") == 10
    assert out.count("refused together") == 2 * 4


@pytest.mark.parametrize(
    ("name", "divisor"), [("constant_40960", 40960), ("constant_5e-1", 0.5), ("constant_0p5", 0.5)]
)
def test_the_divisor_is_encoded_in_the_name(miles_cp, name, divisor):
    reducer = getattr(slime, name)([5, 4], [3, 2], MASKS, False)
    x = torch.tensor([1.0, torch.nan, 2.0, 4.0, 8.0])
    assert reducer(x).item() == 15.0 / divisor


@pytest.mark.parametrize(
    "name",
    [
        *("constant_0", "constant_-3", "constant_nan", "constant_many", "constant_1_000"),
        *("constant_40p", "constant_p5", "constant_ 4", "constant_1e999", "constant_4\u0660"),
        "token_mean",
    ],
)
def test_a_name_without_a_valid_divisor_is_an_attribute_error_that_shows_a_valid_one(name):
    with pytest.raises(AttributeError, match=r"constant_<L>.*write constant_40960"):
        getattr(slime, name)


def test_partial_losses_of_the_context_parallel_ranks_add_up(miles_cp):
    # Sequence 0 of 5 tokens is split into chunks of 2, sequence 1 of 4 into chunks of 1; response
    # token j
    # sits on logit prompt - 1 + j.
    x = {0: [1.0, 2.0, 4.0], 1: [8.0, 16.0]}
    logits = {0: [1, 2, 3], 1: [1, 2]}
    total = 0
    for rank in (0, 1):
        miles_cp(2, rank)
        held = []
        for sequence, chunk in ((0, 2), (1, 1)):
            for k in (rank, 3 - rank):
                held += [
                    v for v, p in zip(x[sequence], logits[sequence], strict=True) if p // chunk == k
                ]
        total += slime.constant_10([5, 4], [3, 2], MASKS, False)(torch.tensor(held)).item()
    assert total == pytest.approx((1 + 4 + 8 + 16) / 10)


def test_per_token_is_refused_because_the_framework_would_divide_by_tokens(miles_cp):
    with pytest.raises(ContractError, match="Drop that flag"):
        slime.constant_10([5, 4], [3, 2], MASKS, True)


def test_bshd_with_context_parallelism_is_refused(miles_cp, framework_args):
    miles_cp(2, 0)
    framework_args(qkv_format="bshd")
    with pytest.raises(LayoutError, match=r"max_seq_len.*--qkv-format thd"):
        slime.constant_10([5, 4], [3, 2], MASKS, False)


def test_masks_sliced_beforehand_are_refused(miles_cp):
    with pytest.raises(LayoutError, match="one whole mask per sample"):
        slime.constant_10([5, 4], [3, 2], [MASKS[0][:1], MASKS[1]], False)


def test_losses_that_were_gathered_over_cp_are_refused(miles_cp):
    miles_cp(2, 0)
    reducer = slime.constant_10([5, 4], [3, 2], MASKS, False)
    with pytest.raises(ReducerError, match="pass the losses of this rank's slice"):
        reducer(torch.ones(5))


def test_a_divisor_below_a_response_warns_once(miles_cp, monkeypatch):
    monkeypatch.setattr(faults, "_warned", set())
    slime.constant_3([5, 4], [3, 2], MASKS, False)
    with pytest.warns(RuntimeWarning, match="divides by 2, and a sample has 3 tokens"):
        slime.constant_2([5, 4], [3, 2], MASKS, False)
    slime.constant_2([5, 4], [3, 2], MASKS, False)


def test_a_nan_on_a_device_is_raised_with_its_sequences_by_a_later_call(miles_cp):
    with DeviceDouble() as double:
        masks = [mask.to(double.device) for mask in MASKS]

        def reduce(values):
            return slime.constant_12345([5, 4], [3, 2], masks, False)(values.to(double.device))

        reduce(torch.tensor([1, 1, 1, torch.nan, 1]))
        with pytest.raises(ReducerError, match=r"with sequences 0, 1\) is nan at its token"):
            reduce(torch.ones(5))
        for _ in range(70):  # raised once
            reduce(torch.ones(5))


@pytest.mark.parametrize("cp_size", [1, 2])
def test_the_reducer_takes_masks_and_losses_on_a_device(miles_cp, cp_size):
    miles_cp(cp_size, cp_size - 1)
    held = 5 if cp_size == 1 else 4
    x = torch.arange(1.0, 1 + held)
    on_cpu = slime.constant_77([5, 4], [3, 2], MASKS, False)(x).item()
    with DeviceDouble() as double:
        masks = [mask.to(double.device) for mask in MASKS]
        x = x.to(double.device).requires_grad_()
        partial_losses = []
        for _ in range(4):  # calls 2 to 4 read what the earlier ones left on the device
            loss = slime.constant_77([5, 4], [3, 2], masks, False)(x)
            assert loss.device == double.device
            loss.backward()
            partial_losses.append(loss.item())
        gradient = x.grad.tolist()
    assert partial_losses == pytest.approx([on_cpu] * 4)
    assert gradient.count(0) == 1  # of the masked token


def test_a_microbatch_with_no_samples_gives_a_partial_loss_of_zero(miles_cp):
    x = torch.zeros(0, requires_grad=True)
    loss = slime.constant_10([], [], [], False)(x)
    assert loss.item() == 0
    assert loss.requires_grad


SLIME = "megatron_lossagg.integrations.slime"
CARRY = f"{SLIME}.carry_weights"
REDUCER = "custom_pg_loss_reducer_function_path"


@pytest.fixture
def references(launches, tmp_path_factory):
    """Return a function from a dtype to the file of its reference."""

    def reference(dtype):
        file = tmp_path_factory.getbasetemp() / f"slime_{dtype}.pt"
        if not file.exists():
            launched("integrations/slime_worker.py", "reference", dtype, file, processes=1)
        return file

    return reference


@needs("slime")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("dp", "cp"), LAYOUTS)
def test_slimes_own_training_step_trains_the_configured_loss(references, dtype, dp, cp):
    arguments = ("compare", dtype, cp, references(dtype))
    out = launched("integrations/slime_worker.py", *arguments, processes=dp * cp)
    assert "SLIME equals the reference" in out
    assert "slime logs rollout/log_probs" in out
    assert out.count("slime DP ") == 2 * 12


@pytest.mark.launches
@needs("slime")
def test_slimes_own_loader_parser_and_rebuilt_groups_take_the_hooks():
    out = launched("integrations/slime_worker.py", "wiring", processes=2)
    assert "WIRING of slime holds" in out


@pytest.mark.launches
@needs("slime")
@pytest.mark.parametrize(("divisor", "outcome"), [(8, "6 passed"), (4, "6 failed")])
def test_slimes_own_test_of_context_parallelism_passes_with_our_reducer_in_it(divisor, outcome):
    checkout = Path(FRAMEWORKS_DIR, "slime")
    folders = [TESTS.parent, TESTS / "integrations", checkout, os.environ.get("PYTHONPATH", "")]
    options = ["-q", "-p", "slime_cp_reducer", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "tests/test_loss_cp_invariance.py"],
        cwd=checkout,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "LOSSAGG_DIVISOR": str(divisor),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert outcome in done.stdout, done.stdout + done.stderr


def stock(**given):
    """Return slime's arguments, as far as the hooks read them."""
    defaults = {
        "calculate_per_token_loss": False,
        "custom_megatron_init_path": None,
        "custom_pg_loss_reducer_function_path": None,
        "data_source_path": "slime.rollout.data_source.RolloutDataSourceWithBuffer",
        "global_batch_size": 4,
        "load_debug_rollout_data_subsample": None,
        "n_samples_per_prompt": 2,
        "rollout_data_postprocess_path": None,
        "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
    }
    return Namespace(**{**defaults, **given})


def carrying(mode="token_mean", **given):
    """Return slime's arguments with weights carried."""
    return stock(**{**flags(mode), "rollout_data_postprocess_path": CARRY, **given})


@pytest.fixture
def data():
    """Return a rollout batch as slime's own code made it, and what its reducer returned."""
    data = recorded("slime")
    data["loss_masks"] = [torch.tensor(mask, dtype=torch.int32) for mask in data["loss_masks"]]
    assert data["dtype of rollout_mask_sums"] == "torch.float32"
    data["rollout_mask_sums"] = torch.tensor(data["rollout_mask_sums"], dtype=torch.float32)
    return data


@pytest.fixture
def alone(monkeypatch):
    """Take this process for the data-parallel group."""
    monkeypatch.setattr(slime, "_data_parallel_group", lambda: None)


def sequences_of_steps(data):
    microbatches = iter(data["micro_batch_indices"])
    for m, rollouts in zip(data["num_microbatches"], data["global_batch_sizes"], strict=True):
        yield [sequence for _ in range(m) for sequence in next(microbatches)], rollouts


@pytest.mark.parametrize(("name", "keywords"), CASES, ids=[name for name, _ in CASES])
def test_recorded_sums_over_carried_denominators_are_the_configured_loss(
    data, alone, name, keywords
):
    slime.carry_weights(carrying(**flags(**keywords)), 0, data)
    denominators = data["rollout_mask_sums"].tolist()
    recording = recorded("slime")
    steps = list(sequences_of_steps(data))
    assert [len(sequences) for sequences, _ in steps] == [6, 6]
    for sequences, rollouts in steps:
        got = trained(recording, denominators, sequences, rollouts)
        assert got == pytest.approx(wanted(recording, sequences, keywords), rel=1e-6)


def test_microbatch_token_mean_is_carried_with_the_microbatch_of_each_sequence(data, alone):
    data["micro_batch_indices"] = [[0, 1, 3], [2], [4, 5], [6, 7, 8, 9], [10, 11]]
    data["num_microbatches"] = [3, 2]
    slime.carry_weights(carrying("microbatch_token_mean"), 0, data)
    denominators = data["rollout_mask_sums"].tolist()
    recording, microbatches = recorded("slime"), iter(data["micro_batch_indices"])
    for m, rollouts in zip(data["num_microbatches"], data["global_batch_sizes"], strict=True):
        sequences = [
            {
                "x": [torch.tensor(x, dtype=torch.float64) for x in recording["x"][sequence]],
                "counted": recording["loss_masks"][sequence],
                "trained": recording["loss_masks"][sequence],
                "microbatch": (0, index),
                "sequence": sequence,
            }
            for index in range(m)
            for sequence in next(microbatches)
        ]
        got = trained(
            recording, denominators, [sequence["sequence"] for sequence in sequences], rollouts
        )
        want = reference_loss.step_loss("microbatch_token_mean", sequences, microbatches=[m])
        assert got == pytest.approx(float(want), rel=1e-6)


@pytest.mark.parametrize("mode", ["token_mean", "prompt_mean"])
def test_weights_are_carried_where_slime_has_its_masks_on_a_device(data, alone, mode):
    on_cpu = dict(data)
    slime.carry_weights(carrying(mode), 0, on_cpu)
    with DeviceDouble() as double:
        data["loss_masks"] = [mask.to(double.device) for mask in data["loss_masks"]]
        data["rollout_mask_sums"] = data["rollout_mask_sums"].to(double.device)
        double.syncs.clear()
        slime.carry_weights(carrying(mode), 0, data)
        assert double.syncs == {"_to_copy": 1}  # the counts of the masks
        carried = data["rollout_mask_sums"]
        assert carried.device == double.device
        assert torch.equal(carried.cpu(), on_cpu["rollout_mask_sums"])


def test_sample_mean_is_what_slime_carries_by_default(data, alone):
    before = data["rollout_mask_sums"]
    slime.carry_weights(carrying("sample_mean"), 0, data)
    after = data["rollout_mask_sums"]
    assert after.dtype == before.dtype
    assert torch.equal(after, before.clamp(min=1))  # the framework clamps a masked rollout's 0


def test_slime_still_clamps_scales_and_counts_as_it_was_recorded(data):
    assert data["first sequence with a denominator of 0.5"] == data["sums"]["1"][0][0]
    factor = data["factor"]
    assert factor["loss"] == factor["M"] * factor["DP CP"] / factor["G"]
    assert data["num_tokens"] == 1


def test_carrying_twice_changes_nothing(data, alone):
    slime.carry_weights(carrying(), 0, data)
    once = data["rollout_mask_sums"]
    slime.carry_weights(carrying(), 0, data)
    assert torch.equal(data["rollout_mask_sums"], once)


def test_the_reducer_is_slimes_own_token_sum_over_the_constant(miles_cp):
    check_reducer(slime.constant_40, recorded("slime"), miles_cp)


def test_given_prompt_ids_are_taken_and_taken_out(data, alone):
    ids = data["prompt"] = [f"prompt {prompt}" for prompt in data["prompts"]]
    slime.carry_weights(carrying("prompt_mean", data_source_path="mine.Source"), 0, data)
    given = data["rollout_mask_sums"]
    assert "prompt" not in data
    slime.carry_weights(carrying("prompt_mean"), 0, data)
    assert torch.equal(data["rollout_mask_sums"], given)
    data["prompt"] = ids
    slime.carry_weights(carrying("token_mean"), 0, data)
    assert data["prompt"] is ids


@pytest.mark.parametrize(
    "arguments",
    [
        {"data_source_path": "mine.Source"},
        {"rollout_function_path": "mine.rollout"},
        {"load_debug_rollout_data_subsample": 0.5},
    ],
)
def test_prompts_are_not_guessed_from_another_data_source(data, alone, arguments):
    with pytest.raises(PlanError, match=r"expected slime's own data source.*Return data\['prompt"):
        slime.carry_weights(carrying("prompt_mean", **arguments), 0, data)


def test_prompts_of_another_size_are_refused(data, alone):
    with pytest.raises(PlanError, match="samples_per_prompt"):
        slime.carry_weights(carrying("prompt_mean", n_samples_per_prompt=3), 0, data)


def test_a_given_prompt_in_two_steps_is_refused(data, alone):
    data["prompt"] = [0] * len(data["prompts"])
    with pytest.raises(PlanError, match=r"got 1 prompts in 2 steps, 1 of which.*--global-batch"):
        slime.carry_weights(carrying("prompt_mean"), 0, data)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("prompt_mean", r"sequence 0 .* with 1 active tokens.*2 times too small. Drop prompts"),
        ("token_mean", r"weight of 0.5.* Choose another mode"),
    ],
)
def test_a_denominator_that_slime_would_clamp_is_refused(data, alone, mode, message):
    for mask in data["loss_masks"]:
        mask.zero_()
    data["loss_masks"][0][0] = 1
    if mode == "token_mean":
        data["loss_masks"][5][0] = 1
    with pytest.raises(PlanError, match=message):
        slime.carry_weights(carrying(mode), 0, data)


def test_a_mask_that_is_not_0_or_1_is_refused(data, alone):
    data["loss_masks"][3][0] = 2
    with pytest.raises(PlanError, match="got loss_masks with 1 values other than 0 and 1"):
        slime.carry_weights(carrying(), 0, data)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"loss_aggregation": None}, AggregationError, "no loss_aggregation.*ignores command-line"),
        ({"calculate_per_token_loss": True}, ContractError, "Drop that flag"),
        (
            {REDUCER: f"{SLIME}.constant_4"},
            ContractError,
            "expected one of them.*Drop custom_pg_loss_reducer_function_path",
        ),
        (
            {REDUCER: "mine.reducer"},
            ContractError,
            "expected one of them",
        ),
        (
            {"loss_aggregation": None, "loss_aggregation_reducer_path": "math:sqrt"},
            AggregationError,
            "a custom reducer knows none",
        ),
        ({"loss_aggregation_probe": True}, AggregationError, "nothing is measured. Drop it"),
        ({"loss_agregation": "constant"}, AggregationError, "expected one of loss_aggregation, "),
        (
            {"loss_aggregation_count_emtpy": False},
            AggregationError,
            "loss_aggregation_count_emtpy: False, which nothing reads",
        ),
        ({"loss-aggregation": "constant"}, AggregationError, "loss-aggregation: 'constant'"),
        ({"lossagg_mode": "constant"}, AggregationError, "lossagg_mode: 'constant'"),
        (
            {"custom_megatron_init_pth": "megatron_lossagg.integrations.slime.check"},
            ContractError,
            "custom_megatron_init_pth .*, which slime does not call",
        ),
    ],
)
def test_a_wrong_set_up_is_refused_at_startup_and_before_the_first_step(
    data, alone, arguments, kind, message
):
    for call in (slime.check, lambda args: slime.carry_weights(args, 0, data)):
        with pytest.raises(kind, match=f"^got.*{message}"):
            call(carrying(**arguments))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (flags("token_mean"), ContractError, "nothing that reads it: set rollout_data_postprocess"),
        (
            {**flags("constant", 40), REDUCER: f"{SLIME}.constant_40"},
            ContractError,
            "nothing that reads it",
        ),
        ({REDUCER: f"{SLIME}.constant_0"}, AttributeError, "no attribute 'constant_0'"),
        (
            {REDUCER: f"{SLIME}.constant_4", "calculate_per_token_loss": True},
            ContractError,
            "Drop that flag",
        ),
        *(
            (
                {REDUCER: f"{SLIME}.constant_9", "loss_type": loss_type},
                ContractError,
                f"with --loss-type {loss_type}, expected policy_loss.*Carry the weights instead",
            )
            for loss_type in ("sft_loss", "custom_loss")
        ),
    ],
)
def test_a_wrong_reducer_is_refused_at_startup(arguments, kind, message):
    with pytest.raises(kind, match=message):
        slime.check(stock(**arguments))


@pytest.fixture
def logged(caplog):
    """Return the lines that were logged since the last call."""
    _rollout_mask_sums.log_carried.cache_clear()
    caplog.set_level("INFO")

    def lines():
        messages = [record.message for record in caplog.records]
        caplog.clear()
        return messages

    return lines


TRAINS = (
    "megatron_lossagg trains sample_sum: w_s = 1/B, carried to slime as rollout_mask_sums = "
    "1 / (w_s G): for the policy loss, entropy, KL and the logged metrics alike"
)


def test_the_start_says_what_it_saw_and_only_carrying_says_that_weights_are_carried(
    data, alone, logged
):
    slime.check(stock())
    assert logged() == []
    args = stock(rollout_data_postprocess_path="mine.f", **{REDUCER: f"{SLIME}.constant_40"})
    slime.check(args)
    (line,) = logged()
    assert f"the constant of {SLIME}.constant_40" in line
    assert "KL, entropy and the logged metrics keep slime's mean" in line
    assert args.rollout_data_postprocess_path == "mine.f"
    slime.check(carrying("sample_sum"))
    (line,) = logged()
    assert f"is to train sample_sum: w_s = 1/B by rollout_data_postprocess_path {CARRY}" in line
    with pytest.raises(KeyError, match="loss_masks"):
        slime.carry_weights(carrying("sample_sum"), 0, {})
    assert logged() == []
    for _ in range(2):
        slime.carry_weights(carrying("sample_sum"), 0, data)
    (line,) = logged()
    assert line == TRAINS


def ends_with_carry_weights(args, rollout_id, rollout_data):
    rollout_data["seen"] = rollout_id
    slime.carry_weights(args, rollout_id, rollout_data)


def forgets_carry_weights(args, rollout_id, rollout_data):
    rollout_data["seen"] = rollout_id


def goes_on_after_carry_weights(args, rollout_id, rollout_data):
    slime.carry_weights(args, rollout_id, rollout_data)
    rollout_data["rollout_mask_sums"] = rollout_data["rollout_mask_sums"] * 2


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (ends_with_carry_weights, None),
        (forgets_carry_weights, "returned without carry_weights.*as its last line"),
        (goes_on_after_carry_weights, "changed rollout_mask_sums after carry_weights"),
    ],
)
def test_a_postprocess_of_the_users_own_that_does_not_carry_is_refused_in_its_first_batch(
    data, alone, logged, own, message
):
    path = f"{__name__}.{own.__name__}"
    args = stock(rollout_data_postprocess_path=path, **flags("token_mean"))
    slime.check(args)
    assert not any("megatron_lossagg trains" in line for line in logged()[:-1])
    module, _, name = args.rollout_data_postprocess_path.rpartition(".")  # as slime loads it
    postprocess = getattr(sys.modules[module], name)
    for rollout_id in (3, 4):
        if message is None:
            postprocess(args, rollout_id, data)
            assert data["seen"] == rollout_id
        else:
            with pytest.raises(ContractError, match=f"{path} {message}"):
                postprocess(args, rollout_id, data)
    assert args.rollout_data_postprocess_path == path
    want = dict(recorded("slime"), loss_masks=data["loss_masks"])
    want["rollout_mask_sums"] = torch.ones(12)
    slime.carry_weights(carrying("token_mean"), 0, want)
    is_right = torch.equal(data["rollout_mask_sums"], want["rollout_mask_sums"])
    assert is_right == (message is None)


def test_a_colon_path_is_answered_with_the_dotted_one():
    import megatron_lossagg.integrations as integrations

    with pytest.raises(
        AttributeError, match=r"last dot, write megatron_lossagg\.integrations\.slime\.f$"
    ):
        getattr(integrations, "slime:f")
    with pytest.raises(AttributeError, match=r"no attribute 'absent'$"):
        integrations.absent  # noqa: B018
