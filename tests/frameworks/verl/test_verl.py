"""verl's integration without verl, and what a batch of verl's counts.

``make test-frameworks`` runs verl's own code.
"""

import re
import sys
import types
import warnings
from functools import partial
from unittest.mock import patch

import pytest
import torch
from device_double import DeviceDouble
from framework_folders import ROOT
from frameworks import assert_live
from recorded import columns, json_lines, read

from megatron_lossagg import Aggregation
from megatron_lossagg.errors import AggregationError, ContractError, PlanError
from megatron_lossagg.integrations import verl
from megatron_lossagg.reduction import faults

MASK = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0]])
UIDS = ["a", "b", "a", f"pad{'0' * 32}"]


def planned(name, mask=MASK, uids=UIDS, sessions=None, **more):
    columns = {"loss_mask": mask, "uid": uids, "session_id": sessions, **more}
    data = {column: values for column, values in columns.items() if values is not None}
    read = verl.LossMode.named(name)
    return verl.plan_batch(read.aggregation(4), data, None, counts_zero=read.count_zero)


@pytest.mark.launches
def test_on_live_megatron_verls_own_scaling_makes_it_the_configured_loss():
    assert_live("verl", cases=3, refused=2)


@pytest.mark.parametrize(
    ("name", "mode", "count_empty", "loss"),
    [
        ("lossagg_constant", "constant", True, "vanilla"),
        ("lossagg_prompt_mean_no_count_empty", "prompt_mean", False, "vanilla"),
        ("lossagg_sample_mean_no_count_empty+gspo", "sample_mean", False, "gspo"),
        ("lossagg_token_mean+dppo_tv", "token_mean", True, "dppo_tv"),
        ("lossagg_token_mean_no_count_zero", "token_mean", True, "vanilla"),
        ("lossagg_row_mean_no_count_empty_no_count_zero+gspo", "row_mean", False, "gspo"),
    ],
)
def test_a_loss_mode_names_mode_empty_samples_and_verls_own_loss(name, mode, count_empty, loss):
    read = verl.LossMode.named(name)
    assert (read.mode, read.count_empty, read.loss) == (mode, count_empty, loss)
    assert read.name == name


def test_a_loss_mode_of_verls_own_is_left_alone():
    assert verl.LossMode.named("vanilla") is None


def test_the_divisor_is_verls_loss_scale_factor():
    constant = verl.LossMode.named("lossagg_constant")
    assert constant.aggregation(8) == Aggregation("constant", divisor=8)
    with pytest.raises(AggregationError, match=r"set actor_rollout_ref\.actor\.loss_scale_factor"):
        constant.aggregation(None)
    assert verl.LossMode.named("lossagg_token_sum").aggregation(None).divisor is None
    assert verl.LossMode.named("lossagg_sample_mean").aggregation(8).divisor is None


@pytest.mark.parametrize(
    "mode", ["length_power", "microbatch_token_mean", "own_weights", "custom", "tokenmean"]
)
def test_a_mode_that_is_not_registered_is_refused_by_its_name(mode):
    with pytest.raises(AggregationError, match=f"got loss_mode=lossagg_{mode}, expected lossagg_"):
        verl.LossMode.named(f"lossagg_{mode}").aggregation(8)


def test_a_registration_that_fails_is_not_silent(monkeypatch):
    monkeypatch.setitem(sys.modules, "verl", types.ModuleType("verl"))
    verl._register.cache_clear()
    with (
        pytest.warns(UserWarning, match="not registered with verl: ModuleNotFoundError"),
        pytest.raises(ModuleNotFoundError),
    ):
        verl.plugin  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'plugins'"):
        verl.plugins  # noqa: B018


def test_verls_own_loss_does_not_see_a_loss_weight_that_the_plan_has():
    class Data(dict):
        def exclude(self, name):
            return Data({key: value for key, value in self.items() if key != name})

    plan, sequences = planned("lossagg_token_mean", loss_weight=[0.5, 3.0, 2.0, 7.0])
    data = Data({verl.SEQUENCE: sequences, "loss_weight": torch.ones(4), "advantages": 1})
    seen = verl.with_plan(lambda data: [*data], plan, 1, data=data)
    assert seen == [verl.SEQUENCE, "advantages"]
    assert "loss_weight" in data


def test_an_argument_of_agg_loss_that_would_be_dropped_is_refused():
    plan, sequences = planned("lossagg_token_mean")
    microbatch = verl._Microbatch(plan, sequences.numpy(), 1)
    with pytest.raises(ContractError, match="verl passes loss_weight to agg_loss"):
        microbatch.agg_loss(MASK.double(), MASK, loss_agg_mode="token-mean", loss_weight=1)


# What verl's engines do first: they move a batch to the device.

ADVANTAGES = torch.tensor([[0.5, -1.0, torch.nan], [torch.inf] * 3, [2.0, torch.nan, 1.0], [3] * 3])


def squared(log_prob, advantages, response_mask, loss_agg_mode, **_):
    """A policy loss of verl's form; its modules have one aggregation function."""
    core = sys.modules["verl.trainer.ppo.core_algos"]
    return core.agg_loss(log_prob**2 + advantages, response_mask, loss_agg_mode), {}


@pytest.fixture
def core(monkeypatch):
    """Put a module where verl has its aggregation function."""
    module = types.ModuleType("verl.trainer.ppo.core_algos")
    module.agg_loss = None
    monkeypatch.setitem(sys.modules, module.__name__, module)


def called(name, *, is_on_device):
    """Return a planned microbatch's policy loss, its gradient, and its host syncs."""
    leaf = torch.arange(12.0, dtype=torch.float64).view(4, 3).requires_grad_()
    plan, sequences = planned(name)
    with DeviceDouble() as double:
        place = double.device if is_on_device else torch.device("cpu")
        tensors = {
            "log_prob": leaf.to(place),
            "advantages": ADVANTAGES.double().to(place),
            "response_mask": MASK.bool().to(place),
            "loss_agg_mode": "token-mean",
        }
        double.syncs.clear()
        call = partial(verl._policy_loss, verl.LossMode.named(name), squared)
        data = {verl.SEQUENCE: sequences.to(place, non_blocking=True)}
        loss, _ = verl.with_plan(lambda data: call(**tensors), plan, 2, data=data)
        plan.check()
        num_syncs = sum(double.syncs.values())
        loss.backward()
        assert loss.device == place
        return loss.item(), leaf.grad, num_syncs


MODES = ("token_mean", "sample_mean", "constant", "sample_sum", "token_sum")


def test_a_registered_loss_on_another_engine_is_refused(core):
    name = verl.LossMode.named("lossagg_token_mean")
    with pytest.raises(ContractError, match="set VERL_ENGINE_VENDOR=lossagg in the environment"):
        verl._policy_loss(name, squared, log_prob=None)


@pytest.mark.parametrize("mode", [*MODES, "prompt_mean", "prompt_mean_no_count_empty"])
def test_a_planned_microbatch_on_a_device_is_that_of_the_cpu(core, mode):
    name = f"lossagg_{mode}"
    on_cpu, wanted, _ = called(name, is_on_device=False)
    on_device, got, syncs = called(name, is_on_device=True)
    assert on_device == pytest.approx(on_cpu, rel=1e-12)
    assert torch.allclose(got, wanted, rtol=1e-12, atol=0)
    assert got.abs().max() > 0 == got[MASK == 0].abs().max()
    assert syncs <= 2


def test_padding_sequences_of_verl_are_in_no_count():
    plan, sequences = planned("lossagg_prompt_mean")
    assert sequences.tolist() == [0, 1, 2, -1]
    assert plan.weights.tolist() == [1 / 6, 0, 1 / 6]
    plan, _ = planned("lossagg_sample_mean")
    assert plan.totals.samples == 3


def test_a_loop_that_pads_by_itself_says_it_by_a_column(caplog):
    mask = torch.zeros(3, 20, dtype=torch.int64)
    mask[0, :10] = mask[1] = 1
    uids = ["a", "b", "pad_0"]
    plan, sequences = planned("lossagg_sample_mean", mask, uids, is_padding=[False, False, True])
    assert sequences.tolist() == [0, 1, -1]
    assert plan.weights.tolist() == [1 / 20, 1 / 40]
    assert not caplog.records


def test_a_column_of_another_name_tells_samples_if_it_is_named(monkeypatch, capsys):
    """As agent-lightning's ``rollout_ids``: one rollout has several sequences."""
    monkeypatch.setattr(faults, "_warned", set())
    rollouts = {"rollout_ids": ["r1", "r1", "r1", "r2"]}
    assert planned("lossagg_sample_mean", ROWS, [*"pppp"], **rollouts)[0].totals.samples == 4
    monkeypatch.setattr(faults, "_warned", set())
    monkeypatch.setenv(verl.SAMPLE_COLUMN, "rollout_ids")
    capsys.readouterr()
    plan, _ = planned("lossagg_sample_mean", ROWS, [*"pppp"], **rollouts)
    assert plan.totals.samples == 2
    assert plan.weights.tolist() == [1 / 60] * 4
    (line,) = capsys.readouterr().err.splitlines()
    assert "60 active tokens, 4 sequences, 2 samples, 0 of padding" in line
    assert line.endswith("a sample is (uid, rollout_ids)")


def test_a_named_column_that_the_batch_lacks_is_refused(monkeypatch):
    monkeypatch.setenv(verl.SAMPLE_COLUMN, "rollout_ids")
    with pytest.raises(PlanError, match="a batch without this column"):
        planned("lossagg_sample_mean", ROWS, [*"pppp"])
    planned("lossagg_token_mean", ROWS, [*"pppp"])
    planned("lossagg_prompt_mean", ROWS, [*"pppp"])


def test_a_fully_masked_sequence_that_is_no_padding_is_counted_and_said_once(capsys, monkeypatch):
    monkeypatch.setattr(faults, "_warned", set())
    mask = torch.zeros(3, 20, dtype=torch.int64)
    mask[0, :10] = mask[1] = 1
    for _ in range(2):
        plan, sequences = planned("lossagg_sample_mean", mask, ["a", "b", "pad_0"])
        assert sequences.tolist() == [0, 1, 2]
        assert plan.totals.samples == 3
    _, line = capsys.readouterr().err.splitlines()
    assert "sample_mean: w_s = 1/(B n_b) counts samples without an active token, 1 here; " in line
    assert "loss_mode=lossagg_sample_mean_no_count_empty" in line
    planned("lossagg_sample_mean_no_count_empty", mask, ["a", "b", "pad_0"])
    assert "without an active token" not in capsys.readouterr().err


ROWS = torch.zeros(4, 30, dtype=torch.int64)
ROWS[:3, :10] = ROWS[3] = 1


@pytest.mark.parametrize("as_column", [list, torch.tensor], ids=["objects", "tensor"])
def test_a_sample_is_a_session_of_a_prompt_if_the_batch_has_sessions(as_column):
    # Trajectory A has three sequences of 10 tokens, B one of 30: each has half of the weight.
    sessions = as_column([0, 0, 0, 1])
    plan, _ = planned("lossagg_sample_mean", ROWS, ["p"] * 4, sessions)
    assert plan.weights.tolist() == [1 / 60] * 4
    for name in ("constant", "sample_sum"):
        plan, _ = planned(f"lossagg_{name}", ROWS, ["p"] * 4, sessions)
        assert plan.totals.samples == 2


def test_the_rows_of_a_session_are_averaged_by_row_mean():
    # Session 0 has rows of 1 and 3 tokens, session 1 one of 2; the last is fully masked.
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [1, 1, 0], [0, 0, 0]])
    for end, rows, samples in (("", 2, 2), ("_no_count_empty", 1, 2)):
        plan, _ = planned(f"lossagg_row_mean{end}", mask, ["p"] * 4, [0, 0, 1, 1])
        wanted = [1 / 4, 1 / 12, 1 / (samples * rows * 2), 0]
        assert plan.weights.tolist() == pytest.approx(wanted, rel=1e-15)


# Prompt p: samples of 1 and 3 tokens with positive advantages, one of 2 with a negative one, one of
# 1 without any; a fully masked one. Then padding.
GROUPED = {
    "mask": torch.tensor([[1, 0, 0], [1, 1, 1], [1, 1, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]]),
    "uids": [*"ppppp", f"pad{'0' * 32}"],
    "advantages": torch.tensor(
        [[2, -9, 9], [1, 3, 1], [-1, -0.5, 0], [torch.nan, 0, 4], [1, 1, 1], [torch.nan] * 3]
    ),
}


@pytest.mark.parametrize(("end", "num_samples", "k_0"), [("", 5, 2), ("_no_count_empty", 4, 1)])
@pytest.mark.parametrize("is_jagged", [False, True], ids=["padded", "jagged"])
def test_a_group_is_a_prompts_samples_of_one_sign(end, num_samples, k_0, is_jagged):
    given = dict(GROUPED)
    if is_jagged:
        for name in ("mask", "advantages"):
            given[name] = torch.nested.as_nested_tensor([*given[name]], layout=torch.jagged)
    plan, _ = planned(f"lossagg_balanced{end}", **given)
    assert plan.totals.samples == 5
    wanted = [2 / 4, 2 / 4, 1 / 2, k_0 / 1, 0]
    assert plan.weights.tolist() == pytest.approx([w / num_samples for w in wanted], rel=1e-15)
    plan, _ = planned(f"lossagg_balanced{end}", **{**given, "uids": [*"pqpqp", given["uids"][5]]})
    assert plan.weights[0].item() == pytest.approx(1 / num_samples)  # another prompt's has its own


def test_the_rows_of_a_session_have_one_sign():
    mask = torch.tensor([[1, 1], [0, 1], [1, 0]])
    given = {"mask": mask, "uids": [*"ppp"], "sessions": [0, 0, 1]}
    plan, _ = planned("lossagg_balanced", advantages=mask.double(), **given)
    assert plan.weights.tolist() == pytest.approx([1 / 4] * 3)
    with pytest.raises(PlanError, match="a sample belongs to one group"):
        planned("lossagg_balanced", advantages=torch.tensor([[1, 1], [0, -1], [1, 1]]), **given)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"advantages": torch.tensor([[1.0, -1, 0]] * 6)}, "signs .* in sequence 1, expected one"),
        ({"advantages": torch.tensor([[torch.nan, 1, 0]] * 6)}, "signs .*nan.* in sequence 0"),
        ({"advantages": None}, "got a batch without advantages, by whose sign balanced"),
        ({"uids": None}, r"balanced tells the group of each sequence, \(uid, sign of its adv"),
        ({"advantages": torch.ones(5, 3)}, "ValueError"),
    ],
    ids=["two signs", "NaN", "no advantages", "no uid", "one too few"],
)
def test_a_batch_whose_groups_are_not_known_is_refused(changes, reason):
    with pytest.raises(PlanError, match=reason):
        planned("lossagg_balanced", **{**GROUPED, **changes})


@pytest.mark.parametrize("as_column", [list, torch.tensor, lambda w: torch.tensor(w)[:, None]])
@pytest.mark.parametrize("mode", ["token_mean", "sample_mean", "constant", "row_mean"])
def test_the_loss_weight_of_a_sequence_multiplies_its_weight(mode, as_column):
    without, _ = planned(f"lossagg_{mode}")
    plan, _ = planned(f"lossagg_{mode}", loss_weight=as_column([0.5, 3.0, 2.0, 7.0]))
    factors = torch.tensor([0.5, 3.0, 2.0], dtype=torch.float64)
    assert torch.equal(plan.weights, without.weights * factors)  # nothing is renormalized
    assert plan.totals.samples == 3


@pytest.mark.parametrize(
    "mode", ["token_mean", "sample_mean", "prompt_mean", "constant", "sample_sum", "row_mean"]
)
def test_a_loss_weight_of_0_leaves_the_counts_if_the_loss_mode_says_so(mode):
    """The first three rows and the padding; the second prompt's row has a token."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]])
    uids = ["p", "q", "p", "pad" + "0" * 32]
    plan, _ = planned(f"lossagg_{mode}_no_count_zero", mask, uids, loss_weight=[2.0, 0.0, 1.0, 0])
    kept, _ = planned(f"lossagg_{mode}", mask[[0, 2]], ["p", "p"], loss_weight=[2.0, 1.0])
    assert plan.weights.tolist() == [kept.weights[0], 0, kept.weights[1]]
    stays, _ = planned(f"lossagg_{mode}", mask, uids, loss_weight=[2.0, 0.0, 1.0, 0])
    assert stays.weights.tolist() != plan.weights.tolist()


def test_a_loss_mode_that_leaves_zeros_out_needs_the_column():
    with pytest.raises(PlanError, match="_no_count_zero and a batch without loss_weight"):
        planned("lossagg_token_mean_no_count_zero")


@pytest.mark.parametrize(
    "column",
    [
        [1.0, -1.0, 1.0, 1.0],
        [1.0, float("nan"), 1.0, 1.0],
        [1.0, None, 1.0, 1.0],
        torch.ones(4, 3),
    ],
    ids=["negative", "NaN", "none", "one per token"],
)
def test_a_loss_weight_that_is_no_number_per_sequence_is_refused(column):
    with pytest.raises(PlanError, match=r"sequence_weight: got .*, expected .*numbers"):
        planned("lossagg_token_mean", loss_weight=column)


def test_a_session_is_one_of_its_prompt_and_padding_has_none():
    plan, sequences = planned("lossagg_sample_mean", sessions=[0, 0, 0, 0])
    assert plan.totals.samples == 2  # of prompts a and b
    assert sequences.tolist() == [0, 1, 2, -1]
    plan, _ = planned("lossagg_sample_sum", uids=["a_1", "a", "a", "a"], sessions=[2, "1_2", 1, 2])
    assert plan.totals.samples == 4


@pytest.mark.parametrize("end", ["", "_no_count_empty"])
@pytest.mark.parametrize(
    ("uids", "sessions", "reason"),
    [
        (None, [0, 0, 1, 1], r"tells the sample of each sequence, \(uid, session_id\): keep uid"),
        (UIDS, [0, None, 1, 1], "got sequences without a session_id in a batch that has the col"),
    ],
    ids=["no uid", "a session that is None"],
)
def test_sequences_of_an_unknown_sample_are_refused(end, uids, sessions, reason):
    with pytest.raises(PlanError, match=reason):
        planned(f"lossagg_sample_mean{end}", uids=uids, sessions=sessions)
    for mode in ("token_mean", "token_sum"):
        planned(f"lossagg_{mode}", uids=uids, sessions=sessions)


@pytest.mark.parametrize("uids", [None, ["a", "b", "", "c"]], ids=["no uid", "an empty uid"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lossagg_prompt_mean", "tells the prompt of each sequence: keep uid"),
        ("lossagg_prompt_mean_no_count_empty", "tells the prompt of each sequence: keep uid"),
        ("lossagg_sample_mean", "or choose loss_mode=lossagg_sample_mean_no_count_empty"),
        (
            "lossagg_constant",
            "tells padding sequences apart from empty ones: keep uid in the batch",
        ),
        ("lossagg_sample_sum", "got sequences without a uid"),
    ],
)
def test_sequences_without_a_uid_are_refused_where_padding_sequences_would_be_counted(
    name, reason, uids
):
    with pytest.raises(PlanError, match=reason):
        planned(name, uids=uids)


@pytest.mark.parametrize("mode", ["token_mean", "token_sum", "sample_mean_no_count_empty"])
def test_sequences_without_a_uid_are_planned_where_padding_sequences_make_no_difference(mode):
    with_uids, _ = planned(f"lossagg_{mode}")
    without, sequences = planned(f"lossagg_{mode}", uids=None)
    assert sequences.tolist() == [0, 1, 2, 3]
    assert with_uids.weights.tolist() == without.weights.tolist()[:3]


def warned_of_split(*steps, mode="prompt_mean", is_last=False):
    """Whether optimizer steps warn of a prompt, or a sample, in several.

    A step has a list of one id per token: a uid, or a session of one prompt.
    """
    seen, warnings_seen = {}, 0
    kind = {"prompt_mean": "prompt", "balanced": "group"}.get(mode, "sample")
    for ids in steps:
        mask = torch.ones(len(ids), 1, dtype=torch.int64)
        columns = {"uid": ["p"] * len(ids), "session_id": ids} if kind == "sample" else {"uid": ids}
        columns["advantages"] = mask
        given = {name: column for name, column in columns.items() if name != "uid"}
        given["sessions"] = given.pop("session_id", None)
        plan, _ = planned(f"lossagg_{mode}", mask, columns["uid"], **given)
        data = {"loss_mask": mask, **columns, "update_lr_scheduler": is_last}
        with warnings.catch_warnings(record=True) as caught, patch.object(faults, "_warned", set()):
            warnings.simplefilter("always")
            verl.warn_of_split(data, plan, seen)
        warnings_seen += len(caught)
        assert all(f"a {kind} has sequences in several steps" in str(w.message) for w in caught)
    return warnings_seen > 0


@pytest.mark.parametrize("mode", [*verl.COUNT_SAMPLES])
def test_a_prompt_or_a_sample_over_several_optimizer_steps_of_a_batch_is_warned_of(mode):
    assert warned_of_split(["a", "a", "b"], ["b", "b", "c"], mode=mode)


@pytest.mark.parametrize("mode", ["prompt_mean", "sample_mean", "row_mean", "balanced"])
def test_a_prompt_or_a_sample_that_is_trained_again_as_a_whole_is_not_warned_of(mode):
    assert not warned_of_split(["a", "a", "b"], ["c"], ["b", "a", "a"], mode=mode)
    assert not warned_of_split(["a", "a"], ["a"], mode=mode, is_last=True)  # another batch


def test_token_means_may_have_a_session_in_several_steps():
    assert not warned_of_split(["a", "a", "b"], ["b", "b", "c"], mode="token_mean")


@pytest.mark.parametrize("is_jagged", [False, True], ids=["padded", "jagged"])
def test_a_batch_that_is_on_a_device_is_counted(is_jagged):
    with DeviceDouble() as double:
        mask = MASK
        if is_jagged:
            mask = torch.nested.as_nested_tensor([*MASK], layout=torch.jagged)
        plan, sequences = planned("lossagg_sample_mean", mask.to(double.device))
    assert plan.active_tokens.tolist() == [2, 0, 1]
    assert sequences.tolist() == [0, 1, 2, -1]


def test_the_modes_of_verl_are_those_of_its_page():
    page = (ROOT / "docs/integrations/verl.md").read_text()
    assert "Every other mode is refused." in page
    assert set(re.findall(r"\| `lossagg_(\w+)`", page)) == set(verl._MODES)


def test_the_file_that_verl_dumps_has_its_lengths_and_prompts(tmp_path):
    """As verl 0.9.1 writes it; ``verl_checks.py`` runs its own code."""
    pytest.importorskip("pandas", reason="pandas is not installed")
    records = [
        {"input": "q1", "output": "abc", "gts": None, "score": 0.0, "step": 7, "acc": 1},
        {"input": "q1", "output": "de", "gts": None, "score": 1.0, "step": 7, "acc": 2},
        {"input": "q2", "output": "", "gts": None, "score": 0.0, "step": 7, "acc": 3},
    ]
    rollouts = read(json_lines(tmp_path / "r.jsonl", records), flags=["--characters"])
    assert columns(rollouts.steps[0]) == [[3, 2, 0], [0, 0, 1], None]
    assert rollouts.notes[0] == "Read from r.jsonl: text from output, prompt from input, step."
    assert rollouts.unit == "character"
    assert any("Lengths are char" in note for note in rollouts.notes)
