"""verl as released: its agg_loss, its policy losses through our registry, its Megatron engine."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import verl
import verl_functions as verl_checks
import verl_page
from drawn_step import Step
from framework_folders import ROOT
from frameworks import checkout_of, needs
from processes import is_running
from shared import assert_same, check_of, launched, tree_of
from verified import (
    assert_functions_pass,
    assert_release_trains_every_mode,
    assert_runs_its_own_step,
    assert_trains_every_mode,
    lossagg_verify,
    path_with,
)
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos
from verl.workers.config import PolicyLossConfig
from verl.workers.engine.megatron import transformer_impl
from verl.workers.utils import losses as verl_losses
from verl_functions import (
    ALIASES,
    DIVISOR,
    actor_config,
    run_loss,
    run_microbatch,
)

from megatron_lossagg import Aggregation
from megatron_lossagg.errors import ContractError
from megatron_lossagg.integrations import verl as verl_plugin
from megatron_lossagg.integrations._shared import HOOK
from megatron_lossagg.integrations.verl import LossMode
from megatron_lossagg.verify import reference_loss

CHECKS = verl_checks.checks()
MODES = list(ALIASES)


LOSSES = sorted({check.name.partition("+")[2] or "vanilla" for check in CHECKS[len(MODES) :]})


def theirs(step, mode, **arguments):
    """Sum over the step as the Megatron engine does: * M, / M, mean over ranks."""
    losses = [
        core_algos.agg_loss(mb.log_probs, mb.mask, mode, **arguments) for mb in step.microbatches
    ]
    return torch.stack(losses).sum() / arguments.get("dp_size", 1)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_function_of_verl_is_the_references(check):
    check.passes()


def test_every_mode_and_policy_loss_of_verl_is_checked():
    losses = {name for name in core_algos.POLICY_LOSS_REGISTRY if not name.startswith("lossagg_")}
    assert {*LOSSES} == losses - {"geo_mean"}
    assert len(CHECKS) == len(MODES) + 14 + len(MODES) * (len(LOSSES) - 1)


def test_some_losses_of_verl_fix_their_mode_whatever_was_asked_for():
    step, fixed = Step(), {}
    for loss in LOSSES:
        with verl_checks.asked() as asked:
            run_loss(step, loss, actor_config(step), "token-sum")
        assert len(asked) == len(step.microbatches)
        if modes := {mode for _, mode in asked} - {"token-sum"}:
            fixed[loss] = modes
    assert fixed == {"sapo": {"seq-mean-token-mean"}}  # as docs/integrations/verl.md says


KEPT = 0.02
"""Threshold of verl's k2: half the square of the log ratio."""


@pytest.mark.parametrize("mode", MODES)
def test_tokens_that_bypass_mode_rejects_are_counted_and_not_trained(mode):
    """As everywhere in this package: weights are those before the rejection."""
    step = Step()
    correction = RolloutCorrectionConfig(
        rollout_is=None, rollout_rs="token_k2", rollout_rs_threshold=KEPT, bypass_mode=True
    )
    made = actor_config(step, policy_loss=PolicyLossConfig(rollout_correction=correction))
    name = LossMode(ALIASES[mode].mode, True, "bypass_mode")
    got = run_loss(step, name.name, made)
    sequences, num_rejected = [], 0
    for mb, losses in zip(step.microbatches, step.ppo_losses(clip=0.2, dual_clip=3.0), strict=True):
        is_kept = mb.mask & ((mb.log_probs - mb.old_log_probs).square() / 2 <= KEPT)
        num_rejected += int((mb.mask & ~is_kept).sum())
        for x, counted, trained in zip(losses, mb.mask.int(), is_kept.int(), strict=True):
            masks = {"counted": counted.tolist(), "trained": trained.tolist()}
            sequences.append({"x": list(x.unbind()), **masks, "sample": len(sequences)})
    assert 0 < num_rejected < sum(step.lengths)
    aggregation = name.aggregation(DIVISOR)
    wanted = reference_loss.step_loss(aggregation.mode, sequences, divisor=aggregation.divisor)
    assert_same(got, wanted, step.leaves)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.startswith("seq-mean")])
def test_without_global_batch_size_verl_leaves_masked_sequences_out_of_each_microbatch(mode):
    # As called for the logged entropy; its Megatron and FSDP engines pass global_batch_size.
    step = Step([[(8, 6, 9)]])  # one of them fully masked
    divisor = {"loss_scale_factor": DIVISOR}
    without_empty = Aggregation(
        ALIASES[mode].mode, divisor=ALIASES[mode].divisor, count_empty=False
    )
    got = theirs(step, mode, **divisor)
    assert_same(got, step.wanted(without_empty, step.leaves), step.leaves)
    counted = theirs(step, mode, **divisor, global_batch_size=3)
    assert (got / counted).item() == pytest.approx(3 / 2)


def test_without_loss_scale_factor_verl_divides_by_the_padded_width():
    step = Step([[(0, 1, 3), (7, 8, 9)]])
    given = {**actor_config(step).global_batch_info, "loss_scale_factor": None}
    widths = [mb.mask.shape[1] for mb in step.microbatches]
    assert widths[0] != widths[1]  # the same sequence weighs more in the narrower microbatch
    losses = [
        core_algos.agg_loss(
            torch.ones_like(mb.log_probs), mb.mask, "seq-mean-token-sum-norm", **given
        )
        for mb in step.microbatches
    ]
    per_token = [loss / mb.mask.sum() for loss, mb in zip(losses, step.microbatches, strict=True)]
    assert (per_token[0] / per_token[1]).item() == pytest.approx(widths[1] / widths[0])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("mode", MODES)
def test_a_registered_loss_has_verls_own_metrics(mode, loss, monkeypatch):
    step, metrics = Step(), []

    def kept(*given, **more):
        metrics.append(run_microbatch(*given, **more))
        return metrics[-1]

    monkeypatch.setattr(verl_checks, "run_microbatch", kept)
    run_loss(step, loss, actor_config(step), mode)
    run_loss(step, LossMode(ALIASES[mode].mode, True, loss).name, actor_config(step))
    theirs, ours = metrics[:4], metrics[4:]
    assert [found for _, found in ours] == [found for _, found in theirs]
    assert len(ours) == len(theirs) == 4


def test_a_loss_that_averages_by_itself_is_not_registered():
    # verl's geo_mean is a mean over each microbatch: it depends on how the step is split.
    with pytest.raises(ValueError, match="Unsupported loss mode: lossagg_token_mean\\+geo_mean"):
        core_algos.get_policy_loss_fn("lossagg_token_mean+geo_mean")


@pytest.mark.parametrize("vendor", ["", "lossagg"])
def test_a_registered_loss_on_an_engine_of_verls_own_is_an_error(monkeypatch, vendor):
    monkeypatch.setenv("VERL_ENGINE_VENDOR", vendor)
    step = Step()
    with pytest.raises(ContractError, match="set VERL_ENGINE_VENDOR=lossagg in the env"):
        run_microbatch(step.microbatches[0], "lossagg_token_mean", actor_config(step))


def test_agg_loss_is_verls_own_again_afterwards():
    own, step = core_algos.agg_loss, Step()
    run_loss(step, "lossagg_sample_mean", actor_config(step))
    assert core_algos.agg_loss is own
    with pytest.raises(AssertionError):  # verl's own loss asserts a configuration
        run_loss(step, "lossagg_sample_mean", None)
    assert core_algos.agg_loss is own


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    file = tmp_path_factory.mktemp("reference") / "reference.pt"
    launched("several/framework_step.py", "float64", file, 1, processes=1)
    return file


@pytest.mark.parametrize("per_token", [0, 1])
def test_on_verls_own_engine_policy_kl_and_entropy_have_our_weights(reference, per_token):
    out = launched("verl/verl_engine_worker.py", reference, per_token, processes=4)
    print(out)
    assert out.count(": the reference") == 14 + 2 * per_token
    # Of an odd number of tokens verl counts one less per microbatch, at CP 2: too large a loss.
    assert len(re.findall(r" 1\.0[0-9]*[1-9] times its alias", out)) == 2 * per_token


@pytest.mark.parametrize("per_token", [0, 1])
def test_each_token_of_verls_terms_weighs_what_loops_over_tokens_say(per_token):
    """Stock at an odd number of tokens too, where verl's count is one too low at CP 2."""
    out = launched("verl/verl_weigh_worker.py", per_token, processes=4)
    print(out)
    assert out.count(": the reference") == 14 + 6 * per_token


@pytest.mark.parametrize("weighs", ["", "1"])
def test_the_variable_lets_the_plugin_weigh(monkeypatch, weighs):
    monkeypatch.setenv("LOSSAGG_WEIGH", weighs)
    monkeypatch.setattr(transformer_impl, HOOK, getattr(transformer_impl, HOOK))
    for module in (core_algos, verl_losses):
        monkeypatch.setattr(module, "agg_loss", module.agg_loss)
    own = getattr(transformer_impl, HOOK), verl_losses.agg_loss
    verl_plugin._register.__wrapped__()
    assert [
        one is not two
        for one, two in zip(
            own, (getattr(transformer_impl, HOOK), verl_losses.agg_loss), strict=True
        )
    ] == [bool(weighs)] * 2


@pytest.mark.parametrize("per_token", [0, 1])
def test_a_trajectory_of_several_sequences_is_one_sample(tmp_path, per_token):
    reference = tmp_path / "reference.pt"
    launched("several/framework_step.py", "float64", reference, 1, "signed", processes=1)
    out = launched("verl/verl_sessions_worker.py", reference, per_token, processes=4)
    print(out)
    assert out.count("a sample is a trajectory: the reference") == 10
    assert out.count("a sample is a sequence: the reference") == 10
    assert out.count("times its loss_weight: the reference") == 10
    assert "a sequence with advantages of two signs is refused" in out


@needs("Megatron-LM-dev")
@pytest.mark.skipif(sys.version_info < (3, 12), reason="Megatron-LM-dev needs Python 3.12")
@pytest.mark.parametrize(("cp", "pp"), [(2, 1), (2, 2)])
def test_sequences_on_groups_of_ranks_of_their_own_size_have_our_weights(
    reference, monkeypatch, cp, pp
):
    path = os.pathsep.join([str(checkout_of("Megatron-LM-dev")), os.environ["PYTHONPATH"]])
    monkeypatch.setenv("PYTHONPATH", path)
    out = launched("verl/verl_dynamic_worker.py", reference, cp, pp, processes=4)
    print(out)
    assert out.count(": the reference") == 8 * (2 if pp == 1 else 1)
    assert "other batches and repeated sequences are refused" in out


def test_verl_starts_by_the_pages_line_and_its_task_in_ray_has_our_engine_and_the_mode(tmp_path):
    found = verl_page.start(tmp_path)
    assert found == {
        "engine": "megatron_lossagg.integrations.verl",
        "aggregation": "constant: w_s = 1/(B 40960)",
    }


READ = """
import argparse, sys
from pathlib import Path
from megatron_lossagg.cli.rollouts import add_reading_arguments, read_rollouts
parser = argparse.ArgumentParser()
add_reading_arguments(parser)
(step,) = read_rollouts([Path(sys.argv[1])], parser.parse_args(["--characters"])).steps
print(step.active_tokens.tolist())
print(step.prompt.tolist())
"""
"""In a process without the frameworks' stand-ins, in which pandas is itself."""


@pytest.mark.parametrize("file", ["ray_trainer.py", "v1/trainer_base.py"])
def test_what_verl_dumps_is_read(tmp_path, file):
    (writer,) = [
        node
        for node in ast.walk(tree_of("verl", "trainer", "ppo", *file.split("/")))
        if isinstance(node, ast.FunctionDef) and node.name == "_write_generations"
    ]
    names = {"os": os, "json": json, "json_encode_default": str}
    exec(compile(ast.Module([writer], []), file, "exec"), names)
    write = names["_write_generations"]
    rows = {"uid": ["x_0_0", "x_1_0", "y_0_0"]}  # what v1 adds: a name for each sequence, no prompt
    write(["q", "q", "p"], ["abc", "de", ""], [None] * 3, [0.0] * 3, rows, tmp_path, 7)
    command = [sys.executable, "-c", READ, str(tmp_path / "7.jsonl")]
    out = subprocess.check_output(command, text=True, cwd=ROOT)
    assert out.split("\n")[:2] == ["[3, 2, 0]", "[0, 0, 1]"]


def test_the_command_runs_a_frameworks_own_step(tmp_path):
    assert_runs_its_own_step(tmp_path, "verl")


def test_the_step_of_a_release_trains_every_mode(tmp_path, monkeypatch):
    assert_release_trains_every_mode(tmp_path, monkeypatch, "verl")


@needs("verl")
def test_the_step_of_a_checkout_trains_every_mode(monkeypatch):
    """As users run it: nothing of the tests stands in for what is not installed."""
    monkeypatch.setenv("PYTHONPATH", path_with(checkout_of("verl")))
    assert_trains_every_mode("verl")


@needs("verl")
def test_every_function_of_a_checkout_is_the_references(tmp_path):
    assert_functions_pass(tmp_path, "verl", "verl", "stand_ins_first", 69)


def test_a_wrong_function_of_the_framework_fails_by_name(tmp_path):
    copy = tmp_path / "verl"
    shutil.copytree(Path(verl.__file__).parent, copy, ignore=shutil.ignore_patterns("*.pyc"))
    engine = copy / "workers" / "engine" / "megatron" / "transformer_impl.py"
    text = engine.read_text()
    right = 'scaled_loss = loss * data["num_micro_batch"]'
    assert right in text
    engine.write_text(text.replace(right, f"{right} * 2"))

    done, report, summary = lossagg_verify(tmp_path, "verl")

    assert done.returncode == 1
    assert done.stdout.startswith("FAIL: 1 of 1 case passes")
    check = check_of(report["framework"]["checks"], "token_mean")
    assert check["state"] == "FAIL"
    assert check["gradient_error"] == pytest.approx(1)
    assert check["got"] == pytest.approx(check["wanted"], rel=1e-5)  # verl logs it before
    for text in (check["explanation"], done.stdout, summary):
        assert "pg_loss: trains 2 times token_mean" in text


def test_ctrl_c_ends_the_ranks_that_a_check_launched(tmp_path):
    """A verl that launches a rank when it is imported, as Megatron-LM's check does."""
    pid, rank = tmp_path / "pid", tmp_path / "rank.py"
    rank.write_text(f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid()))\n")
    rank.write_text(rank.read_text() + "time.sleep(100)\n")
    launches = f"cpu.launch([{str(rank)!r}], processes=1, timeout=100)"
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").write_text(f"from megatron_lossagg import cpu; {launches}")
    module = "megatron_lossagg.verify.drivers.runs"
    command = f"from {module} import layout_of, run_framework; run_framework('verl')"
    checked = subprocess.Popen(
        [sys.executable, "-c", command],
        env={**os.environ, "PYTHONPATH": path_with(tmp_path)},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # A shell's background job ignores it, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 100
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(checked.pid, signal.SIGINT)  # as a terminal does
    checked.wait(timeout=60)
    assert not is_running(int(pid.read_text()))
