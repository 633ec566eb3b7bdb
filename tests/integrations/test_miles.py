"""miles: weights carried by its conversion hook; its reducer is slime's, with the tests there."""

from argparse import Namespace

import pytest
from conftest import launched
from frameworks import CASES, LAYOUTS, check_reducer, flags, needs, recorded, trained, wanted

from megatron_lossagg.errors import AggregationError, ContractError, LayoutError, PlanError
from megatron_lossagg.integrations import _pg_loss_reducer, _rollout_mask_sums, miles

CARRY = "megatron_lossagg.integrations.miles.carry_weights"
REDUCER = "custom_pg_loss_reducer_function_path"


@pytest.fixture
def references(launches, tmp_path_factory):
    """Return a function from a dtype to the file of its reference."""

    def reference(dtype):
        file = tmp_path_factory.getbasetemp() / f"miles_{dtype}.pt"
        if not file.exists():
            launched("integrations/miles_worker.py", "reference", dtype, file, processes=1)
        return file

    return reference


@needs("miles")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("dp", "cp"), LAYOUTS)
def test_miles_own_training_step_trains_the_configured_loss(references, dtype, dp, cp):
    arguments = ("compare", dtype, cp, references(dtype))
    out = launched("integrations/miles_worker.py", *arguments, processes=dp * cp)
    assert "MILES equals the reference" in out
    assert out.count("miles DP ") == 2 * 12


@pytest.mark.launches
@needs("miles")
def test_miles_own_loader_parser_and_schedule_take_the_hooks():
    out = launched("integrations/miles_worker.py", "wiring", processes=1)
    assert "WIRING of miles holds" in out


def stock(**given):
    """Return miles' arguments, as far as the hooks read them."""
    defaults = {
        "allow_partial_train_step": False,
        "balance_data": False,
        "calculate_per_token_loss": False,
        "custom_convert_samples_to_train_data_path": None,
        "custom_megatron_init_path": None,
        REDUCER: None,
        "custom_reward_post_process_path": None,
        "delay_split_train_data_by_dp": False,
        "global_batch_size": 4,
        "indep_dp": False,
        "multi_lora": False,
        "object_store_backend": "ray",
        "train_backend": "megatron",
        "use_dynamic_batch_size": True,
        "use_dynamic_global_batch_size": False,
    }
    return Namespace(**{**defaults, **given})


def carrying(mode="token_mean", **given):
    """Return miles' arguments with weights carried."""
    hook = {"custom_convert_samples_to_train_data_path": CARRY}
    return stock(**{**flags(mode), **hook, **given})


@pytest.fixture
def data():
    """Return converted data as miles' own code made it, and what its reducer returned."""
    return recorded("miles")


@pytest.fixture
def samples(data):
    """Return what the hook reads of the samples."""
    return [Namespace(group_index=prompt) for prompt in data["prompts"]]


@pytest.mark.parametrize(("name", "keywords"), CASES, ids=[name for name, _ in CASES])
def test_recorded_sums_over_carried_denominators_are_the_configured_loss(
    data, samples, name, keywords
):
    converted = miles.with_weights(carrying(**flags(**keywords)), samples, data)
    assert converted is data
    assert all(isinstance(value, float) for value in data["rollout_mask_sums"])
    steps = list(zip(data["steps"], data["num_rollouts"], strict=True))
    assert [len(sequences) for sequences, _ in steps] == [6, 6]
    for sequences, rollouts in steps:
        got = trained(data, data["rollout_mask_sums"], sequences, rollouts)
        assert got == pytest.approx(wanted(data, sequences, keywords), rel=1e-12)


def test_sample_mean_is_what_miles_carries_by_default(data, samples):
    before = [max(count, 1) for count in data["rollout_mask_sums"]]
    after = miles.with_weights(carrying("sample_mean"), samples, data)["rollout_mask_sums"]
    assert after == pytest.approx(before, rel=1e-15)


def test_miles_still_clamps_and_scales_as_it_was_recorded(data):
    assert data["first sequence with a denominator of 0.5"] == data["sums"]["1"][0][0]
    factor = data["factor"]
    assert factor["loss"] == factor["M"] * factor["DP CP"] / factor["G"]
    assert data["num_tokens"] == 1


def test_the_reducer_is_miles_own_token_sum_over_the_constant(data, monkeypatch):
    def at(size, rank):
        monkeypatch.setattr(_pg_loss_reducer, "_context_parallel", lambda: (size, rank))

    check_reducer(miles.constant_40, data, at)


def test_dropped_rollouts_keep_what_they_have(data, samples):
    before = list(data["rollout_mask_sums"])
    data = miles.with_weights(carrying(global_batch_size=5), samples, data)
    first = range(7)  # rollouts 0 to 4
    active = sum(sum(data["loss_masks"][sequence]) for sequence in first)
    for sequence, value in enumerate(data["rollout_mask_sums"]):
        is_active = any(data["loss_masks"][sequence])
        want = (active / 5 if is_active else 1) if sequence in first else before[sequence]
        assert value == pytest.approx(want)


def test_a_conversion_without_denominators_gets_them(data, samples):
    of_framework = miles.with_weights(carrying(), samples, dict(data))["rollout_mask_sums"]
    del data["rollout_mask_sums"]
    assert miles.with_weights(carrying(), samples, data)["rollout_mask_sums"] == of_framework


def test_a_smaller_last_step_has_its_own_size(data, samples):
    args = carrying(global_batch_size=5, allow_partial_train_step=True)
    data = miles.with_weights(args, samples, data)
    last = range(7, 12)  # rollouts 5 to 7
    active = sum(sum(data["loss_masks"][sequence]) for sequence in last)
    assert data["rollout_mask_sums"][8] == pytest.approx(active / 3)


@pytest.mark.parametrize("size", [3, 5])
def test_a_prompt_in_two_steps_or_dropped_in_part_is_refused(data, samples, size):
    for sequence in data["loss_masks"]:
        sequence[:] = [1] * len(sequence)
    with pytest.raises(PlanError, match="make --global-batch-size a multiple of --n-samples-per"):
        miles.with_weights(carrying("prompt_mean", global_batch_size=size), samples, data)


def test_a_sample_without_a_prompt_is_refused_for_prompt_mean(data, samples):
    samples[3].group_index = None
    with pytest.raises(PlanError, match=r"no group_index for sample 3.*set Sample\.group_index"):
        miles.with_weights(carrying("prompt_mean"), samples, data)
    with pytest.raises(PlanError, match="got 11 samples converted to 12 sequences"):
        miles.with_weights(carrying("prompt_mean"), samples[1:], data)


def test_a_denominator_that_miles_would_clamp_is_refused(data, samples):
    args = carrying("sample_sum", loss_aggregation_count_empty=False)
    with pytest.raises(PlanError, match="raises a denominator below 1 to 1"):
        miles.with_weights(args, samples, data)


def test_fewer_rollouts_than_a_step_are_refused(data, samples):
    with pytest.raises(PlanError, match="got 8 rollouts, expected at least the 9 of a step"):
        miles.with_weights(carrying(global_batch_size=9), samples, data)


def test_a_mask_that_is_not_0_or_1_is_refused(data, samples):
    data["loss_masks"][2][0] = 3
    with pytest.raises(PlanError, match=r"loss_mask of sample 2 with values \[0, 1, 3\]"):
        miles.with_weights(carrying(), samples, data)


@pytest.mark.parametrize(
    "legacy", [{"multimodal_train_inputs": []}, {"delay_split_train_data_by_dp": True}]
)
def test_a_split_by_samples_is_right_or_refused(data, samples, legacy):
    data.update({key: value for key, value in legacy.items() if key.startswith("multi")})
    given = {key: value for key, value in legacy.items() if key.startswith("delay")}
    with pytest.raises(ContractError, match="12 samples of 8 rollouts in 2 steps of 4"):
        miles.with_weights(carrying(**given), samples, data)
    data["rollout_ids"] = list(range(12))
    with pytest.raises(ContractError, match="drop --balance-data"):
        miles.with_weights(carrying(balance_data=True, **given), samples, data)
    data = miles.with_weights(carrying(global_batch_size=6, **given), samples, data)
    active = sum(sum(data["loss_masks"][sequence]) for sequence in range(6))
    assert data["rollout_mask_sums"][0] == pytest.approx(active / 6)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"loss_aggregation": None}, AggregationError, "no loss_aggregation"),
        ({"calculate_per_token_loss": True}, ContractError, "Drop that flag"),
        ({REDUCER: "mine.reducer"}, ContractError, "expected one of them"),
        ({"train_backend": "fsdp"}, ContractError, "does not hand rollout_mask_sums to the loss"),
        ({"object_store_backend": "mooncake"}, ContractError, "as int64.*backend ray"),
        ({"use_dynamic_global_batch_size": True}, ContractError, "set --global-batch-size"),
        ({"multi_lora": True}, ContractError, "of each LoRA adapter"),
        ({"indep_dp": True}, ContractError, "was not run with carried weights"),
        ({"loss_aggregation": "microbatch_token_mean"}, ContractError, "Choose token_mean"),
        ({"loss_agregation": "constant"}, AggregationError, "expected one of loss_aggregation, "),
    ],
)
def test_a_wrong_set_up_is_refused_at_startup_and_before_the_first_step(
    data, samples, arguments, kind, message
):
    args = carrying(**arguments)
    calls = (
        lambda: miles.check(args),
        lambda: miles.with_weights(args, samples, data),
        lambda: miles.carry_weights(args, samples),  # before the framework's own conversion
    )
    for call in calls:
        with pytest.raises(kind, match=f"^got.*{message}"):
            call()


def test_a_wrong_reducer_is_refused_at_startup():
    with pytest.raises(ContractError, match="nothing that reads it: set custom_convert_samples"):
        miles.check(stock(**flags("token_mean")))
    reducer = {REDUCER: "megatron_lossagg.integrations.miles.constant_4"}
    miles.check(stock(**reducer))
    miles.check(stock(**reducer, train_backend="fsdp"))
    with pytest.raises(ContractError, match="Drop that flag"):
        miles.check(stock(**reducer, calculate_per_token_loss=True))
    with pytest.raises(LayoutError, match=r"max_seq_len.*--qkv-format thd"):
        miles.check(stock(**reducer, qkv_format="bshd", context_parallel_size=2))
    miles.check(carrying(qkv_format="bshd", context_parallel_size=2))
    for loss_type in ("sft_loss", "custom_loss"):
        with pytest.raises(ContractError, match=f"--loss-type {loss_type}, expected policy_loss"):
            miles.check(stock(**reducer, loss_type=loss_type))
        miles.check(carrying(loss_type=loss_type))
    with pytest.raises(AttributeError, match="no attribute 'constant_no'"):
        miles.check(stock(**{REDUCER: "megatron_lossagg.integrations.miles.constant_no"}))


def test_only_carrying_says_that_weights_are_carried(data, samples, caplog):
    _rollout_mask_sums.log_carried.cache_clear()
    caplog.set_level("INFO")
    miles.check(carrying())
    own = {"custom_convert_samples_to_train_data_path": "mine.convert"}
    miles.check(stock(**own, **flags("token_mean")))
    levels = [record.levelname for record in caplog.records]
    assert levels == ["INFO", "INFO", "WARNING"]
    starts = [record.message.startswith("megatron_lossagg trains") for record in caplog.records]
    assert not any(starts)
    assert "mine.convert runs in miles' rollout manager" in caplog.records[-1].message
    caplog.clear()
    miles.with_weights(carrying(), samples, data)
    (record,) = caplog.records
    assert record.message.startswith("megatron_lossagg trains token_mean: w_s = 1/N, carried")
