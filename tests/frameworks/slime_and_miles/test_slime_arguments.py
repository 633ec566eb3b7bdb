"""slime and miles: which arguments are refused, what is logged, and that weights are carried."""

import sys

import pytest
from slime_miles_batch import NO_MODE, SAMPLES, batch_of, of_miles, of_slime

from megatron_lossagg.errors import AggregationError, ContractError, LayoutError
from megatron_lossagg.integrations import _rollouts, miles, slime
from megatron_lossagg.integrations._rollouts import REDUCER
from megatron_lossagg.reduction import faults


@pytest.fixture(params=["slime", "miles"])
def framework(request, monkeypatch):
    return batch_of(request.param, monkeypatch)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"calculate_per_token_loss": True}, "Drop that flag"),
        ({REDUCER: "mine.reducer"}, "expected one of them.*Drop one"),
        ({**NO_MODE, "loss_aggregation_reducer_path": "math:sqrt"}, "a custom reducer knows none"),
        ({"loss_aggregation_probe": True}, "probe: True, which nothing reads.*or drop it"),
        ({"loss_aggregation_shadow": "token_mean"}, "shadow: 'token_mean', which nothing reads"),
        ({"loss_aggregation_record": "a.jsonl"}, "record: 'a.jsonl', which nothing reads"),
        ({"loss_aggregation_empty_step": "none"}, "expected zero or error"),
        ({"loss_agregation": "constant"}, "expected one of loss_aggregation, "),
        ({"loss_aggregation_count_emtpy": False}, "count_emtpy: False, which nothing reads"),
        ({"loss-aggregation": "constant"}, "loss-aggregation: 'constant'"),
        ({"lossagg": "constant"}, "lossagg: 'constant', which nothing reads"),
    ],
)
def test_what_would_train_another_loss_is_refused_at_startup_and_before_the_first_step(
    framework, arguments, message
):
    args = framework.arguments(**arguments)
    for call in (framework.module.check, framework.carry):
        with pytest.raises((AggregationError, ContractError), match=f"^got.*{message}"):
            call(args)


def test_weights_are_not_carried_without_a_mode(framework):
    args = framework.arguments(**NO_MODE)
    framework.module.check(args)
    with pytest.raises(AggregationError, match=r"^got .* and no loss_aggregation, expected the mo"):
        framework.carry(args)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train_backend": "fsdp"}, "does not hand rollout_mask_sums to the loss"),
        ({"object_store_backend": "mooncake"}, "as int64.*backend ray"),
        ({"use_dynamic_global_batch_size": True}, "set --global-batch-size"),
        ({"multi_lora": True}, "of each LoRA adapter"),
        ({"indep_dp": True}, "was not run with carried weights"),
        ({"loss_aggregation": "microbatch_token_mean"}, "Choose token_mean"),
    ],
)
@of_miles
def test_what_the_denominators_of_miles_do_not_reach_is_refused(framework, arguments, message):
    args = framework.arguments(**arguments)
    # carry_weights refuses it before the framework's own conversion
    for call in (miles.check, framework.carry, lambda args: miles.carry_weights(args, SAMPLES)):
        with pytest.raises(ContractError, match=f"^got.*{message}"):
            call(args)


def test_a_mode_that_needs_group_ids_is_refused_at_startup(framework):
    with pytest.raises(AggregationError, match=r"^got loss_aggregation balanced.*has none: choose"):
        framework.module.check(framework.arguments(loss_aggregation="balanced"))


def test_a_wrong_reducer_is_refused_at_startup(framework, monkeypatch):
    hooks, check = framework.module.HOOKS, framework.module.check

    def stock(**given):
        return framework.arguments(**{**NO_MODE, hooks.carry_argument: None}, **given)

    reducer = {REDUCER: f"{framework.prefix}constant_4"}
    with pytest.raises(ContractError, match="expected one of them"):
        check(framework.arguments(**{hooks.carry_argument: None}, **reducer))
    check(stock(**reducer))
    with pytest.raises(ContractError, match="Drop that flag"):
        check(stock(**reducer, calculate_per_token_loss=True))
    for loss_type in ("sft_loss", "custom_loss"):
        with pytest.raises(ContractError, match=f"{loss_type}, expected policy_loss.*Carry the we"):
            check(stock(**reducer, loss_type=loss_type))
    check(framework.arguments(loss_type="sft_loss"))
    monkeypatch.setattr(faults, "_warned", set())
    with pytest.warns(RuntimeWarning, match="custom_loss trains the configured loss only in what"):
        check(framework.arguments(loss_type="custom_loss"))
    with pytest.raises(AttributeError, match="no attribute 'constant_0'"):
        check(stock(**{REDUCER: f"{framework.prefix}constant_0"}))
    if framework.module is miles:
        check(stock(**reducer, train_backend="fsdp"))
        bshd = {"qkv_format": "bshd", "context_parallel_size": 2}
        with pytest.raises(LayoutError, match=r"max_seq_len.*--qkv-format thd"):
            check(stock(**reducer, **bshd))
        check(framework.arguments(**bshd))


@pytest.fixture
def logged(caplog):
    """Return the level and the text of what was logged since the last call."""
    _rollouts.log_carried.cache_clear()
    caplog.set_level("INFO")

    def lines():
        messages = [(record.levelname, record.message) for record in caplog.records]
        caplog.clear()
        return messages

    return lines


def test_the_start_says_what_it_saw_and_only_carrying_says_that_weights_are_carried(
    framework, logged
):
    hooks, check = framework.module.HOOKS, framework.module.check
    nothing = {**NO_MODE, hooks.carry_argument: None}
    check(framework.arguments(**nothing))
    assert logged() == []
    check(framework.arguments(**nothing, **{REDUCER: f"{framework.prefix}constant_40"}))
    ((_, line),) = logged()
    assert f"is to be divided by {framework.prefix}constant_40" in line
    assert f"KL, entropy and the logged metrics keep {hooks.name}'s mean" in line
    args = framework.arguments("sample_sum")
    check(args)
    ((_, line),) = logged()
    assert f"{hooks.name} is to train sample_sum: w_s = 1/B" in line
    masks = framework.data.pop("loss_masks")
    with pytest.raises(KeyError, match="loss_masks"):
        framework.carry(args)
    assert logged() == []
    framework.data["loss_masks"] = masks
    for _ in range(2):
        framework.carry(args)
    ((level, line),) = logged()
    assert level == "INFO"
    assert line.startswith(
        f"megatron_lossagg trains sample_sum: w_s = 1/B, carried to {hooks.name}"
    )


@pytest.mark.parametrize(
    ("argument", "loss"),
    [("enable_mtp_training", "the loss of MTP layers"), ("use_critic", "the critic's value loss")],
)
def test_what_the_weights_do_not_reach_is_warned_of_at_startup(framework, argument, loss, logged):
    framework.module.check(framework.arguments(**{argument: True}))
    warned = [line for level, line in logged() if level == "WARNING"]
    if framework.module is miles and argument == "use_critic":  # its value loss has the weights
        assert warned == []
    else:
        name = framework.module.HOOKS.name
        (line,) = warned
        assert f"does not cover {loss} ({argument}): it keeps {name}'s own scale" in line
    framework.module.check(
        framework.arguments(**NO_MODE, **{argument: True, framework.module.HOOKS.carry_argument: 0})
    )
    assert logged() == []


@of_miles
def test_miles_refuses_at_startup_a_mode_that_no_conversion_carries(framework):
    args = framework.arguments(custom_convert_samples_to_train_data_path=None)
    with pytest.raises(ContractError, match=r"^got loss_aggregation .*: set it to .*carry_weights"):
        miles.check(args)


@of_miles
def test_a_conversion_of_the_users_own_is_warned_of(framework, logged):
    miles.check(framework.arguments(custom_convert_samples_to_train_data_path="mine.convert"))
    _, (level, line) = logged()
    assert level == "WARNING"
    assert "mine.convert runs in miles' rollout manager" in line


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
        (forgets_carry_weights, "did not call carry_weights.*as its last line"),
        (goes_on_after_carry_weights, "changed rollout_mask_sums after carry_weights"),
        (None, r"did not call carry_weights.*: set it to megatron_lossagg\.integrations\.slime\.c"),
    ],
)
@of_slime
def test_slime_trains_no_batch_without_the_weights(framework, own, message):
    path = None if own is None else f"{__name__}.{own.__name__}"
    args = framework.arguments(rollout_data_postprocess_path=path)
    slime.check(args)
    module, _, name = args.rollout_data_postprocess_path.rpartition(".")  # as slime loads it
    postprocess = getattr(sys.modules[module], name)
    for rollout_id in (3, 4):
        if message is None:
            postprocess(args, rollout_id, framework.data)
            assert framework.data["seen"] == rollout_id
        else:
            with pytest.raises(ContractError, match=f"{path} {message}"):
                postprocess(args, rollout_id, framework.data)
    assert args.rollout_data_postprocess_path == path
    got = framework.data["rollout_mask_sums"].tolist()
    assert (framework.carry(framework.arguments()) == got) == (message is None)


def test_a_colon_path_is_answered_with_the_dotted_one():
    import megatron_lossagg.integrations as integrations

    with pytest.raises(
        AttributeError, match=r"last dot, write megatron_lossagg\.integrations\.slime\.f$"
    ):
        getattr(integrations, "slime:f")
    with pytest.raises(AttributeError, match=r"no attribute 'absent'$"):
        integrations.absent  # noqa: B018
