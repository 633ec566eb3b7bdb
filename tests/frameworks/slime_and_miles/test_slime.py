"""slime and miles: what their hooks carry, and the loss that their own training step makes of it.

What they refuse: ``test_slime_arguments.py``. The reducer: ``test_slime_miles_reducer.py``.
"""

import functools
import io
import itertools
import os
import platform
import random
import sys
import types
from argparse import Namespace

import left_out
import numpy as np
import pytest
import slime_miles_page
import torch
from conftest import launched
from device_double import DeviceDouble
from framework_folders import PATH
from frameworks import LAYOUTS, assert_live, checkout_of, needs, reference
from slime_miles_batch import CASES, SAMPLES, batch_of, of_miles, of_slime

from megatron_lossagg import Aggregation, Sequences
from megatron_lossagg.errors import ContractError, PlanError
from megatron_lossagg.integrations import miles, slime
from megatron_lossagg.integrations._rollouts import (
    Denominators,
    FrameworkStep,
    keep_below_one,
    rollout_mask_sums,
)
from megatron_lossagg.reduction import faults
from megatron_lossagg.verify import reference_loss
from megatron_lossagg.verify.cases import mean_of_prompts, reference_options
from megatron_lossagg.verify.drivers.driver import aggregations, draw
from megatron_lossagg.verify.drivers.runs import FrameworkError, run_framework
from megatron_lossagg.verify.drivers.slime_and_miles import parsed

SERVING = ("ray", "transformers", "httpx", "psutil", "wandb", "six", "regex", "pydantic")
"""What slime and miles import."""
WORKER = "frameworks/slime_and_miles/slime_miles_worker.py"
CHECKOUTS = [pytest.param(name, marks=needs(name, *SERVING)) for name in ("slime", "miles")]


@pytest.mark.launches
@pytest.mark.parametrize("name", CHECKOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("dp", "cp"), LAYOUTS)
def test_the_frameworks_own_training_step_trains_the_configured_loss(name, dtype, dp, cp):
    arguments = (name, dtype, cp, reference(dtype))
    out = launched(WORKER, *arguments, processes=dp * cp)
    assert out.count("CASE ") == 2 * {"slime": 16, "miles": 15}[name]


@pytest.mark.launches
@pytest.mark.parametrize("name", CHECKOUTS)
def test_the_frameworks_own_loader_parser_and_schedule_take_the_hooks(name):
    processes = {"slime": 2, "miles": 1}[name]  # miles carries in its rollout manager
    out = launched(WORKER, name, "wiring", processes=processes)
    assert f"WIRING of {name} holds" in out


@pytest.fixture(params=["slime", "miles"])
def framework(request, monkeypatch):
    return batch_of(request.param, monkeypatch)


def assert_configured(denominators, aggregation):
    """Compare masked sums over the denominators, and over G, with the reference."""
    drawn = draw()
    of_mode = aggregation.mode == "microbatch_token_mean"
    microbatch = {0: 0, 1: 0, 3: 0, 2: 1, 4: 2, 5: 2, 6: 0, 7: 0, 8: 0, 9: 0, 10: 1, 11: 1}
    for members, m in ((range(6), 3), (range(6, 12), 2)):
        got = 0.0
        sequences = []
        for number in members:
            one = drawn[number]
            masked = (one.advantages * torch.tensor(one.mask)).sum().item()
            got += masked / denominators[number] / 4
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
        (counts_of_masks,) = double.syncs.elements()
        assert counts_of_masks.endswith(": _to_copy")
        assert data["rollout_mask_sums"].device == double.device
        assert data["rollout_mask_sums"].cpu().tolist() == on_cpu


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


@pytest.mark.parametrize("own", [["a", "a", "b", "b"], ["a", "a", "b", "c"]], ids=["whole", "cut"])
@of_slime
def test_a_given_prompt_that_dropped_rollouts_may_have_cut_is_refused(framework, own):
    data = framework.data
    data.update(
        loss_masks=[torch.ones(3, dtype=torch.int32)] * 4,
        rollout_ids=[0, 1, 2, 3],
        rollout_mask_sums=torch.ones(4),
        micro_batch_indices=[[0, 1, 2, 3]],
        num_microbatches=[1],
        global_batch_sizes=[4],
        prompt=own,
    )
    args = framework.arguments("prompt_mean")
    for rewards in ([0.0] * 4, None):  # nothing is dropped, or slime does not say
        framework.carry(args)
        data.update(prompt=own, raw_reward=rewards)
    data["raw_reward"] = [0.0] * 5  # the fifth rollout fills no step
    if own[2] == own[3]:
        framework.carry(args)
    else:
        with pytest.raises(PlanError, match="samples_per_prompt"):
            framework.carry(args)


@pytest.mark.parametrize("size", [3, 5])
@of_miles
def test_a_prompt_in_two_steps_or_dropped_in_part_is_refused(framework, size):
    for mask in framework.data["loss_masks"]:
        mask[:] = [1] * len(mask)
    with pytest.raises(PlanError, match="make --global-batch-size a multiple of --n-samples-per"):
        framework.carry(framework.arguments("prompt_mean", global_batch_size=size))


BELOW_ONE = [
    # Two tokens are active, one in each step; d_s = 1 / (w_s G) of the first.
    ("token_mean", Aggregation("token_mean"), 1 / 4),
    ("prompt_mean", Aggregation("prompt_mean", count_empty=True), 2 / 4),
    ("sample_sum", Aggregation("sample_sum", count_empty=False), 1 / 4),
]


def keep_two_tokens(framework):
    masks = framework.data["loss_masks"]
    for mask in masks:
        mask[:] = mask * 0 if isinstance(mask, torch.Tensor) else [0] * len(mask)
    masks[0][0] = masks[6][0] = 1


@pytest.mark.parametrize(("mode", "aggregation", "wanted"), BELOW_ONE)
def test_a_denominator_below_1_is_carried_and_not_raised_to_1(framework, mode, aggregation, wanted):
    keep_two_tokens(framework)
    denominators = framework.carry(framework.arguments(aggregation))
    assert denominators[0] == pytest.approx(wanted)
    if framework.module is slime:
        in_data = framework.data["rollout_mask_sums"]
        for of_one in [in_data, *in_data]:
            raised = [torch.clamp_min(of_one, 1), of_one.clamp(min=1), of_one.clamp_min(1)]
            assert {type(one) for one in raised} == {torch.Tensor}
            assert all(torch.equal(one, of_one.as_subclass(torch.Tensor)) for one in raised)
        framework.carry(framework.arguments(aggregation))
        assert in_data[0] == framework.data["rollout_mask_sums"][0]


def draw_rollouts(seed):
    """Draw six rollouts of one to three short responses; some of them, or all, fully masked."""
    draws = random.Random(seed)
    drawn = []
    for rollout in range(6):
        for _ in range(draws.choice([1, 1, 3])):
            length, share = draws.randint(1, 17), draws.choice([0.0, 0.1, 0.9])
            mask = [int(draws.random() < share) for _ in range(length)]
            x = [torch.tensor(draws.gauss(0, 1), dtype=torch.float64) for _ in mask]
            drawn.append({"x": x, "counted": mask, "trained": mask, "sample": rollout})
            drawn[-1] |= {"prompt": rollout // 2, "microbatch": (0, rollout // 3)}
    return drawn


LEGAL = {
    **CASES,
    "sample_sum without empty": Aggregation("sample_sum", count_empty=False),
    "microbatch_token_mean": Aggregation("microbatch_token_mean"),
}


@of_slime
def test_drawn_steps_train_whether_or_not_a_denominator_is_below_1(framework):
    num_below = dict.fromkeys(LEGAL, 0)
    for seed, (name, aggregation) in itertools.product(range(25), LEGAL.items()):
        drawn = draw_rollouts(seed)
        places = [[n for n, one in enumerate(drawn) if one["microbatch"][1] == m] for m in (0, 1)]
        framework.data.clear()
        framework.data.update(
            loss_masks=[torch.tensor(one["counted"], dtype=torch.int32) for one in drawn],
            rollout_ids=[one["sample"] for one in drawn],
            rollout_mask_sums=torch.ones(len(drawn), dtype=torch.float64),
            micro_batch_indices=places,
            num_microbatches=[2],
            global_batch_sizes=[6],
            prompt=[one["prompt"] for one in drawn],
        )
        d_S = framework.carry(framework.arguments(aggregation))
        num_below[name] += min(d_S) < 1
        got = 0.0
        for one, d_s in zip(drawn, framework.data["rollout_mask_sums"], strict=True):
            masked = (torch.stack(one["x"]) * torch.tensor(one["counted"])).sum()
            got += masked / torch.clamp_min(d_s, 1) / 6  # as slime's reducer, over G
        options = reference_options(aggregation, [2])
        wanted = reference_loss.step_loss(aggregation.mode, drawn, **options)
        assert got.item() == pytest.approx(float(wanted), rel=1e-12, abs=1e-14), (name, seed)
    print(num_below)  # of 25 steps each
    assert sum(num_below.values()) > 27


def test_only_denominators_of_0_are_raised_to_1():
    given = torch.tensor([0.0, 0.25, 3.0]).as_subclass(Denominators)
    assert torch.clamp_min(given, 1).tolist() == [1, 0.25, 3]
    assert torch.maximum(torch.ones(()), given).tolist() == [1, 0.25, 3]
    on_disk = io.BytesIO()
    torch.save(given, on_disk)  # as a framework's dumps
    on_disk.seek(0)
    assert type(torch.load(on_disk, weights_only=False)) is Denominators


def test_a_function_that_a_framework_decorates_itself_gets_denominators_once(monkeypatch):
    def get_sum_of_sample_mean(*, denominators):
        return [torch.clamp_min(one, 1).item() for one in denominators]

    decorated = functools.wraps(get_sum_of_sample_mean)(
        lambda **given: get_sum_of_sample_mean(**given)
    )
    module = types.ModuleType("loss_of_tests")
    module.get_sum_of_sample_mean = decorated
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for _ in range(2):
        keep_below_one([module.__name__])
    assert module.get_sum_of_sample_mean(denominators=[torch.tensor(0.5)]) == [0.5]
    assert module.get_sum_of_sample_mean.__wrapped__ is decorated


@pytest.mark.parametrize("init", [None, "mine.init"])
@of_miles
def test_a_denominator_that_miles_would_raise_to_1_is_refused(framework, init):
    keep_two_tokens(framework)
    args = framework.arguments("prompt_mean", custom_megatron_init_path=init)
    with pytest.raises(PlanError, match=r"2 times too small. Set custom_megatron_init_path to meg"):
        framework.carry(args)


@of_miles
def test_the_first_batch_says_that_miles_would_raise_a_denominator_of_a_later_one(
    framework, monkeypatch
):
    monkeypatch.setattr(faults, "_warned", set())
    with pytest.warns(RuntimeWarning, match=r"^got custom_megatron_init_path mine\.init: a later"):
        first = framework.carry(framework.arguments(custom_megatron_init_path="mine.init"))
    assert min(first) >= 1
    framework.carry(framework.arguments(custom_megatron_init_path="mine.init"))
    faults._warned.clear()
    framework.carry(framework.arguments(custom_megatron_init_path=miles.HOOKS.check_path))


@of_miles
@pytest.mark.parametrize("path", [miles.HOOKS.check_path, miles.HOOKS.weigh_path])
def test_a_denominator_below_1_is_carried_where_the_trainer_keeps_it(framework, path):
    keep_two_tokens(framework)
    carried = framework.carry(framework.arguments("prompt_mean", custom_megatron_init_path=path))
    assert min(carried) < 1


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


def test_a_weights_function_is_carried_and_a_weight_of_0_trains_nothing():
    batch = Sequences(active_tokens=[3, 5, 4], sample=[0, 0, 1], prompt=[0, 0, 1])
    steps = [FrameworkStep(sequences=[0, 1, 2], rollouts=2)]
    # w_s = 1 / (P k_p R_b n_s) = 1/12, 1/20, 1/8
    found = rollout_mask_sums(Aggregation(weights=mean_of_prompts), steps, batch)
    assert found.tolist() == pytest.approx([6, 10, 4], rel=1e-12)
    own = Aggregation(weights=lambda counts: (counts.n_s != 5) / counts.N)
    d_S = rollout_mask_sums(own, steps, batch)
    assert d_S.tolist() == [6.0, np.inf, 6.0]
    x = torch.tensor([2.0, 3.0, 4.0], dtype=torch.float64, requires_grad=True)
    denominators = torch.from_numpy(d_S).as_subclass(Denominators)
    (x / torch.clamp_min(denominators, 1)).sum().backward()  # as the framework divides
    assert x.grad.tolist() == [1 / 6, 0.0, 1 / 6]


@pytest.mark.launches
@needs("Megatron-LM", installed=True)
@pytest.mark.parametrize(
    "framework", [pytest.param(one, marks=needs(one)) for one in ("slime", "miles")]
)
def test_slime_and_miles_read_the_pages_file_and_say_what_they_are_to_train(tmp_path, framework):
    mode = {"slime": "token_mean: w_s = 1/N", "miles": "prompt_mean: w_s = 1/(P n_p)"}[framework]
    found, done = slime_miles_page.start(tmp_path, framework)
    assert found == {"aggregation": mode, "carries": "carry_weights"}, done.stderr
    assert f"megatron_lossagg: {framework} is to train {mode}" in done.stdout + done.stderr


@pytest.mark.launches
@needs("Megatron-LM", installed=True)
@pytest.mark.parametrize(
    "framework", [pytest.param(one, marks=needs(one)) for one in ("slime", "miles")]
)
def test_slime_and_miles_weigh_by_the_line_of_the_page_of_weighing(tmp_path, framework):
    found, done = slime_miles_page.start(tmp_path, framework, weighed=True)
    assert found == {"weighs": True}, done.stderr


@pytest.mark.launches
def test_on_live_megatron_slimes_own_scaling_makes_it_the_configured_loss():
    assert_live("slime", cases=7, refused=8)


def mask_as_removed(framework, removed):
    """Mask the samples of some prompts as ``Sample.remove_sample`` does, and no other token."""
    for mask, one in zip(framework.data["loss_masks"], draw(), strict=True):
        of_lists = [int(one.prompt not in removed)] * len(mask)
        mask[:] = of_lists if framework.module is miles else torch.tensor(of_lists).to(mask)


@pytest.mark.parametrize("mode", ["token_mean", *left_out.COUNTS_EMPTY])
def test_a_prompt_of_removed_samples_is_left_out_if_empty_samples_do_not_count(framework, mode):
    drawn = draw()
    removed = {drawn[0].prompt, drawn[-1].prompt}  # one prompt of each step
    mask_as_removed(framework, removed)
    denominators = framework.carry(framework.arguments(left_out.of_mode(mode, count_empty=False)))
    for step in (range(6), range(6, 12)):
        sequences = [
            {
                "x": list(drawn[n].advantages.unbind()),
                "counted": [1] * len(drawn[n].mask),
                "trained": [1] * len(drawn[n].mask),
                "sample": drawn[n].sample,
                "prompt": drawn[n].prompt,
                "left_out": drawn[n].prompt in removed,
            }
            for n in step
        ]
        want = reference_loss.step_loss(
            mode, sequences, **reference_options(left_out.of_mode(mode), [])
        )
        kept = [n for n in step if drawn[n].prompt not in removed]
        got = sum(drawn[n].advantages.sum().item() / denominators[n] / 4 for n in kept)
        assert got == pytest.approx(want.item(), rel=1e-6)  # slime's are float32


@pytest.mark.parametrize("mode", ["token_mean", *left_out.NAMED])
def test_slime_and_miles_name_the_setting_once(framework, mode, capsys, monkeypatch):
    monkeypatch.setattr(faults, "_warned", set())
    mask_as_removed(framework, {draw()[0].prompt})
    for _ in range(2):
        framework.carry(framework.arguments(left_out.of_mode(mode)))
    left_out.assert_said(capsys.readouterr().err, mode, "loss_aggregation_count_empty: false")
    framework.carry(framework.arguments(left_out.of_mode(mode, count_empty=False)))
    assert "without an active token" not in capsys.readouterr().err


def test_an_option_that_a_framework_no_longer_has_is_named(monkeypatch):
    training = types.ModuleType("megatron.training.arguments")
    training.parse_args = lambda provider, **_: provider(types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, training.__name__, training)
    monkeypatch.setitem(sys.modules, "megatron.training", types.ModuleType("megatron.training"))

    def provider(args):
        args.custom_config_path = args.custom_megatron_init_path = None
        args.rollout_data_postprocess_path = None
        return args

    with pytest.raises(FrameworkError, match=r"lack --custom-pg-loss-reducer-function-path$"):
        parsed(slime.HOOKS, provider)


@pytest.mark.launches
@pytest.mark.parametrize("name", CHECKOUTS)
def test_the_policy_loss_of_slime_and_miles_is_the_references(monkeypatch, tmp_path, name):
    """With stand-ins for what serves rollouts."""
    (tmp_path / "sitecustomize.py").write_text(
        "import stand_ins\nstand_ins.install(stand_ins.SERVING)\n"
    )
    own = [tmp_path, *PATH, checkout_of(name), checkout_of("Megatron-LM")]
    path = os.pathsep.join([*map(str, own), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("PYENV_VERSION", platform.python_version())  # for a checkout's make
    framework = run_framework(name)
    numbers = [check["gradient_error"] for check in framework["checks"]]
    print(f"{name}: {numbers}, {framework['seconds']:.0f} s")
    assert [(check["state"], check["explanation"]) for check in framework["checks"]] == [
        ("PASS", "")
    ] * len(numbers)
    assert [check["check"] for check in framework["checks"]] == [*aggregations()]
