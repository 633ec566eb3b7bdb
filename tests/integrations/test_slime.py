"""slime and miles: weights carried with the data, and the reducer of the policy loss."""

import sys
import types
from argparse import Namespace
from dataclasses import dataclass

import pytest
import torch
from conftest import launched
from device_double import DeviceDouble
from frameworks import LAYOUTS, SERVING, needs, reference

from megatron_lossagg import Aggregation
from megatron_lossagg.errors import (
    AggregationError,
    ContractError,
    LayoutError,
    PlanError,
    ReducerError,
)
from megatron_lossagg.integrations import _rollout_mask_sums, miles, slime
from megatron_lossagg.integrations._rollout_mask_sums import REDUCER
from megatron_lossagg.reduction import faults
from megatron_lossagg.verify import reference_loss
from megatron_lossagg.verify.cases import reference_options
from megatron_lossagg.verify.frameworks.carried import carrying
from megatron_lossagg.verify.frameworks.step import aggregations, draw


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
    # token j sits on logit prompt - 1 + j.
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


CHECKOUTS = [pytest.param(name, marks=needs(name, *SERVING)) for name in ("slime", "miles")]


@pytest.mark.launches
@pytest.mark.parametrize("name", CHECKOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("dp", "cp"), LAYOUTS)
def test_the_frameworks_own_training_step_trains_the_configured_loss(name, dtype, dp, cp):
    arguments = (name, dtype, cp, reference(dtype))
    out = launched("integrations/carried_worker.py", *arguments, processes=dp * cp)
    assert out.count("CASE ") == 2 * {"slime": 13, "miles": 12}[name]


@pytest.mark.launches
@pytest.mark.parametrize("name", CHECKOUTS)
def test_the_frameworks_own_loader_parser_and_schedule_take_the_hooks(name):
    processes = {"slime": 2, "miles": 1}[name]  # miles carries in its rollout manager
    out = launched("integrations/carried_worker.py", name, "wiring", processes=processes)
    assert f"WIRING of {name} holds" in out


MODULES = {"slime": slime, "miles": miles}
CASES = aggregations()
SAMPLES = [Namespace(group_index=one.prompt) for one in draw()]
"""What the hook of miles reads of its samples."""


@dataclass
class Carrying:
    """A framework's rollout batch of the drawn step, in two steps of four rollouts."""

    module: types.ModuleType
    data: dict

    @property
    def prefix(self):
        return f"{self.module.HOOKS.module}."

    def arguments(self, aggregation="token_mean", **given):
        """Return arguments that carry an aggregation's weights, as far as the hooks read them."""
        if isinstance(aggregation, str):
            aggregation = CASES.get(aggregation) or Aggregation(aggregation)
        return Namespace(**{**STOCK, **carrying(self.module.HOOKS, aggregation), **given})

    def carry(self, args, samples=SAMPLES):
        """Carry the weights; returns the denominators of the sequences."""
        if self.module is miles:
            assert miles.with_weights(args, samples, self.data) is self.data
            return self.data["rollout_mask_sums"]
        slime.carry_weights(args, 0, self.data)
        return self.data["rollout_mask_sums"].tolist()


NO_MODE = {"loss_aggregation": None, "loss_aggregation_count_empty": None}
STOCK = {
    "calculate_per_token_loss": False,
    "custom_megatron_init_path": None,
    "custom_reward_post_process_path": None,
    REDUCER: None,
    "data_source_path": "slime.rollout.data_source.RolloutDataSourceWithBuffer",
    "global_batch_size": 4,
    "n_samples_per_prompt": 2,
    "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
    "use_dynamic_batch_size": True,
}


def make_data(name):
    """Return the drawn step as a framework has it when its hook is called."""
    drawn, lists = draw(), {}
    active = [0] * 8
    for one in drawn:
        active[one.sample] += sum(one.mask)
    lists["loss_masks"] = [list(one.mask) for one in drawn]
    lists["rollout_ids"] = [one.sample for one in drawn]
    lists["rollout_mask_sums"] = [float(active[one.sample]) for one in drawn]
    if name == "miles":
        return lists
    return {
        "loss_masks": [torch.tensor(mask, dtype=torch.int32) for mask in lists["loss_masks"]],
        "rollout_ids": lists["rollout_ids"],
        "rollout_mask_sums": torch.tensor(lists["rollout_mask_sums"]),
        "micro_batch_indices": [[0, 1, 3], [2], [4, 5], [6, 7, 8, 9], [10, 11]],
        "num_microbatches": [3, 2],
        "global_batch_sizes": [4, 4],
    }


@pytest.fixture(params=["slime", "miles"])
def framework(request, monkeypatch):
    """Return a framework's rollout batch; this process is its data-parallel group."""
    monkeypatch.setattr(slime, "_data_parallel_group", lambda: None)
    return Carrying(MODULES[request.param], make_data(request.param))


of_slime = pytest.mark.parametrize("framework", ["slime"], indirect=True)
of_miles = pytest.mark.parametrize("framework", ["miles"], indirect=True)


def assert_configured(denominators, aggregation):
    """Compare masked sums over the denominators, clamped and over G, with the reference."""
    drawn = draw()
    of_mode = aggregation.mode == "microbatch_token_mean"
    microbatch = {0: 0, 1: 0, 3: 0, 2: 1, 4: 2, 5: 2, 6: 0, 7: 0, 8: 0, 9: 0, 10: 1, 11: 1}
    for members, m in ((range(6), 3), (range(6, 12), 2)):
        got = 0.0
        sequences = []
        for number in members:
            one = drawn[number]
            masked = (one.advantages * torch.tensor(one.mask)).sum().item()
            got += masked / max(denominators[number], 1) / 4
            sequences.append(
                {
                    "x": list(one.advantages.unbind()),
                    "counted": one.mask,
                    "trained": one.mask,
                    "sample": one.sample,
                    "prompt": one.prompt,
                    "microbatch": (0, microbatch[number]),
                }
            )
        options = reference_options(aggregation, [m] if of_mode else [])
        want = reference_loss.step_loss(aggregation.mode, sequences, **options)
        assert got == pytest.approx(want.item(), rel=1e-6)  # slime's are float32


@pytest.mark.parametrize("name", CASES)
def test_masked_sums_over_carried_denominators_are_the_configured_loss(framework, name):
    assert_configured(framework.carry(framework.arguments(name)), CASES[name])


@of_slime
def test_microbatch_token_mean_is_carried_with_the_microbatch_of_each_sequence(framework):
    mode = "microbatch_token_mean"
    assert_configured(framework.carry(framework.arguments(mode)), Aggregation(mode))


def test_sample_mean_is_what_the_framework_carries_by_default(framework):
    before = torch.as_tensor(framework.data["rollout_mask_sums"]).clamp(min=1)  # as frameworks do
    after = framework.carry(framework.arguments("sample_mean"))
    assert after == pytest.approx(before.tolist(), rel=1e-15)


def test_carrying_twice_changes_nothing(framework):
    once = list(framework.carry(framework.arguments()))
    assert framework.carry(framework.arguments()) == once


@pytest.mark.parametrize("mode", ["token_mean", "prompt_mean"])
@of_slime
def test_weights_are_carried_where_slime_has_its_masks_on_a_device(framework, mode):
    on_cpu = framework.carry(framework.arguments(mode))
    data = framework.data
    with DeviceDouble() as double:
        data["loss_masks"] = [mask.to(double.device) for mask in data["loss_masks"]]
        data["rollout_mask_sums"] = data["rollout_mask_sums"].to(double.device)
        double.syncs.clear()
        slime.carry_weights(framework.arguments(mode), 0, data)
        assert double.syncs == {"_to_copy": 1}  # the counts of the masks
        assert data["rollout_mask_sums"].device == double.device
        assert data["rollout_mask_sums"].cpu().tolist() == on_cpu


def test_both_frameworks_have_one_reducer():
    assert miles.constant_40 is slime.constant_40 is slime.constant_4e1


@of_slime
def test_given_prompt_ids_are_taken_and_taken_out(framework):
    data = framework.data
    ids = data["prompt"] = [f"prompt {one.prompt}" for one in draw()]
    given = framework.carry(framework.arguments("prompt_mean", data_source_path="mine.Source"))
    assert "prompt" not in data
    assert framework.carry(framework.arguments("prompt_mean")) == given
    data["prompt"] = ids
    framework.carry(framework.arguments("token_mean"))
    assert data["prompt"] is ids


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data_source_path": "mine.Source"}, "expected slime's own data source.*'prompt'"),
        ({"rollout_function_path": "mine.rollout"}, "expected slime's own data source"),
        ({"load_debug_rollout_data_subsample": 0.5}, "expected slime's own data source"),
        ({"n_samples_per_prompt": 3}, "samples_per_prompt"),
    ],
)
@of_slime
def test_prompts_are_not_guessed_from_another_data_source_or_size(framework, arguments, message):
    with pytest.raises(PlanError, match=message):
        framework.carry(framework.arguments("prompt_mean", **arguments))


@of_slime
def test_a_given_prompt_in_two_steps_is_refused(framework):
    framework.data["prompt"] = [0] * 12
    with pytest.raises(PlanError, match=r"got 1 prompts in 2 steps, 1 of which.*--global-batch"):
        framework.carry(framework.arguments("prompt_mean"))


@pytest.mark.parametrize("size", [3, 5])
@of_miles
def test_a_prompt_in_two_steps_or_dropped_in_part_is_refused(framework, size):
    for mask in framework.data["loss_masks"]:
        mask[:] = [1] * len(mask)
    with pytest.raises(PlanError, match="make --global-batch-size a multiple of --n-samples-per"):
        framework.carry(framework.arguments("prompt_mean", global_batch_size=size))


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("prompt_mean", r"sequence 0 .* with 1 active tokens.*2 times too small. Drop prompts"),
        ("token_mean", r"weight of 0.5.* Choose another mode"),
    ],
)
def test_a_denominator_that_the_framework_would_clamp_is_refused(framework, mode, message):
    masks = framework.data["loss_masks"]
    for mask in masks:
        mask[:] = mask * 0 if isinstance(mask, torch.Tensor) else [0] * len(mask)
    masks[0][0] = 1
    if mode == "token_mean":
        masks[5][0] = 1
    with pytest.raises(PlanError, match=f"(?s){message}"):
        framework.carry(framework.arguments(mode))


def test_a_mask_that_is_not_0_or_1_is_refused(framework):
    framework.data["loss_masks"][3][0] = 2
    with pytest.raises(PlanError, match=r"loss_masks? .*values"):
        framework.carry(framework.arguments())


@of_miles
def test_dropped_rollouts_keep_what_they_have(framework):
    want = list(framework.data["rollout_mask_sums"])
    masks = framework.data["loss_masks"]
    active = sum(sum(mask) for mask in masks[:7])  # rollouts 0 to 4
    want[:7] = [active / 5 if any(mask) else 1 for mask in masks[:7]]
    got = framework.carry(framework.arguments(global_batch_size=5))
    assert got == pytest.approx(want)
    args = framework.arguments(global_batch_size=5, allow_partial_train_step=True)
    active = sum(sum(mask) for mask in masks[7:])  # a smaller last step has its own size
    assert framework.carry(args)[8] == pytest.approx(active / 3)


@of_miles
def test_a_conversion_without_denominators_gets_them(framework):
    before = framework.carry(framework.arguments())
    del framework.data["rollout_mask_sums"]
    assert framework.carry(framework.arguments()) == before


@of_miles
def test_a_sample_without_a_prompt_is_refused_for_prompt_mean(framework):
    args = framework.arguments("prompt_mean")
    lacking = [*SAMPLES[:3], Namespace(group_index=None), *SAMPLES[4:]]
    with pytest.raises(PlanError, match=r"no group_index for sample 3.*set Sample\.group_index"):
        framework.carry(args, lacking)
    with pytest.raises(PlanError, match="got 11 samples converted to 12 sequences"):
        framework.carry(args, SAMPLES[1:])


@of_miles
def test_fewer_rollouts_than_a_step_are_refused(framework):
    with pytest.raises(PlanError, match="got 8 rollouts, expected at least the 9 of a step"):
        framework.carry(framework.arguments(global_batch_size=9))


@pytest.mark.parametrize("is_late", [False, True])
@of_miles
def test_a_split_by_samples_is_right_or_refused(framework, is_late):
    given = {"delay_split_train_data_by_dp": is_late}
    if not is_late:
        framework.data["multimodal_train_inputs"] = []
    with pytest.raises(ContractError, match="12 samples of 8 rollouts in 2 steps of 4"):
        framework.carry(framework.arguments(**given))
    framework.data["rollout_ids"] = list(range(12))
    with pytest.raises(ContractError, match="drop --balance-data"):
        framework.carry(framework.arguments(balance_data=True, **given))
    active = sum(sum(mask) for mask in framework.data["loss_masks"][:6])
    got = framework.carry(framework.arguments(global_batch_size=6, **given))
    assert got[0] == pytest.approx(active / 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (NO_MODE, "no loss_aggregation"),
        ({"calculate_per_token_loss": True}, "Drop that flag"),
        ({REDUCER: "mine.reducer"}, "expected one of them.*Drop custom_pg_loss_reducer"),
        ({**NO_MODE, "loss_aggregation_reducer_path": "math:sqrt"}, "a custom reducer knows none"),
        ({"loss_aggregation_probe": True}, "nothing is measured. Drop it"),
        ({"loss_aggregation_shadow": "token_mean"}, "no place for, expected neither: drop it"),
        ({"loss_aggregation_record": "a.jsonl"}, "no place for, expected neither: drop it"),
        ({"loss_agregation": "constant"}, "expected one of loss_aggregation, "),
        ({"loss_aggregation_count_emtpy": False}, "count_emtpy: False, which nothing reads"),
        ({"loss-aggregation": "constant"}, "loss-aggregation: 'constant'"),
        ({"lossagg_mode": "constant"}, "lossagg_mode: 'constant'"),
        (
            {"custom_megatron_init_pth": "megatron_lossagg.integrations.slime.check"},
            "custom_megatron_init_pth .*does not call",
        ),
    ],
)
def test_a_wrong_set_up_is_refused_at_startup_and_before_the_first_step(
    framework, arguments, message
):
    args = framework.arguments(**arguments)
    for call in (framework.module.check, framework.carry):
        with pytest.raises((AggregationError, ContractError), match=f"^got.*{message}"):
            call(args)


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


def test_a_wrong_reducer_is_refused_at_startup(framework, monkeypatch):
    hooks, check = framework.module.HOOKS, framework.module.check

    def stock(**given):
        return framework.arguments(**{**NO_MODE, hooks.carry_argument: None}, **given)

    for reducer in (None, f"{framework.prefix}constant_4"):
        args = framework.arguments(**{hooks.carry_argument: None, REDUCER: reducer})
        with pytest.raises(
            ContractError, match=f"nothing that reads it: set {hooks.carry_argument}"
        ):
            check(args)
    reducer = {REDUCER: f"{framework.prefix}constant_4"}
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
    _rollout_mask_sums.log_carried.cache_clear()
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
    assert f"the constant of {framework.prefix}constant_40" in line
    assert f"KL, entropy and the logged metrics keep {hooks.name}'s mean" in line
    args = framework.arguments("sample_sum")
    check(args)
    ((_, line),) = logged()
    by = f"{hooks.carry_argument} {hooks.carry_path}"
    assert f"is to train sample_sum: w_s = 1/B by {by}" in line
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
        (forgets_carry_weights, "returned without carry_weights.*as its last line"),
        (goes_on_after_carry_weights, "changed rollout_mask_sums after carry_weights"),
    ],
)
@of_slime
def test_a_postprocess_of_the_users_own_that_does_not_carry_is_refused_in_its_first_batch(
    framework, own, message
):
    path = f"{__name__}.{own.__name__}"
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
