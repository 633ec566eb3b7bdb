"""What lossagg weigh refuses before it runs a script, and the picture of a weighed step."""

import json
import sys
from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_lossagg.cli import run as run_command
from megatron_lossagg.cli import weigh_framework
from megatron_lossagg.cli.main import main
from megatron_lossagg.cli.weigh import _compared, _print_again, _printed, _unmet, drawn, figure_of
from megatron_lossagg.cli.weigh_framework import _text
from megatron_lossagg.errors import LossAggregationError
from megatron_lossagg.verify.drivers.runs import FAIL, NOT_RUN, Outcome
from megatron_lossagg.weigh.compare import RankWeights, compare, parts_of


@pytest.mark.parametrize("option", ["--at", "--steps"])
def test_a_step_that_cannot_be_is_wrong_usage(capsys, option):
    assert main(["weigh", option, "0", "pretrain_gpt.py"]) == 2
    assert "expected a step from 1 on" in capsys.readouterr().err


def test_a_constant_to_compare_with_is_a_divisor(capsys):
    assert main(["weigh", "--divisor", "-8", "pretrain_gpt.py"]) == 2
    assert "-8" in capsys.readouterr().err


def test_a_script_that_is_not_there_is_named(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lossagg"])
    assert main(["weigh", "no_such_script.py"]) == 2
    assert "no_such_script.py, which does not exist" in capsys.readouterr().err


def test_only_a_mode_that_weights_show_can_be_expected(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["weigh", "--expect", "token_mean,own_weights", "pretrain_gpt.py"])
    assert ended.value.code == 2
    assert "token_mean" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "named"), [("--picture", "--picture"), ("--pikture=x", "--picture")]
)
def test_an_option_after_the_script_is_named_before_anything_starts(option, named, capsys):
    assert main(["weigh", "pretrain_gpt.py", "--lr", "0.1", option, "x.svg"]) == 2
    assert f"lossagg weigh {named} ... pretrain_gpt.py" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--steps=2", "--stop", "--json"])
@pytest.mark.parametrize("is_of_script", [False, True])
def test_an_option_that_a_script_may_have_is_named_if_it_has_none(
    option, is_of_script, capsys, tmp_path, monkeypatch
):
    script, name = tmp_path / "pretrain_gpt.py", option.partition("=")[0]
    script.write_text(f"parser.add_argument('{name}')" if is_of_script else "print('--stopped')")
    (tmp_path / "utils.py").write_text("")
    started = []
    monkeypatch.setattr(run_command, "run", lambda args, before: started.append(args) or 1)
    assert main(["weigh", str(script), option, "x"]) == (1 if is_of_script else 2)
    assert (f"lossagg weigh {name} ... " in capsys.readouterr().err) == (not is_of_script)
    assert len(started) == is_of_script


def test_the_report_stands_below_what_training_prints_with_its_files(capsys, tmp_path):
    file = tmp_path / "report.json"
    file.write_text("{}")
    _print_again(weighed(1 / 6, 1 / 6), Namespace(json=file, picture=None), 3)
    out = capsys.readouterr().out
    assert out.startswith("weighed step 3: 6 tokens")
    assert out.splitlines()[-1] == f"written: {file}"


def weighed(*weights, num_empty=0, m=1, tokens=None):
    """Return a step of one rank whose sequences have 2, 4, 6, ... tokens of these weights.

    Or all of them ``tokens``, each in one of ``m`` microbatches.
    """
    w, number = np.array(weights), np.arange(len(weights))
    n = 2 * number + 2 if tokens is None else np.full(len(weights), tokens)
    ends = dict.fromkeys(("weight_min", "weight_max", "lowest", "highest"), w)
    columns = {"tokens": n, "n": n, "length": n, "weight_sum": n * w, **ends}
    parts = parts_of(
        len(weights), microbatch=number % m, sequence=number, sample=number.tolist(), **columns
    )
    number = np.arange(num_empty)
    empty = parts_of(num_empty, microbatch=1, sequence=number, sample=(-1 - number).tolist())
    parts = np.concatenate([parts, empty])
    sizes = {"M": m, "DP": 1, "CP": 1, "TP": 1, "PP": 1}
    place = {
        "sizes": sizes,
        "counts": True,
        "is_finalized": True,
        "tolerance": 1e-4,
    }
    return compare([RankWeights(**place, parts=parts, num_tokens=None)])


@pytest.fixture
def plotting():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")


@pytest.mark.usefixtures("plotting")
@pytest.mark.parametrize("weights", [(0.1, 0.2, 0.05), (-0.1, 0.2), (0.5,), ()])
def test_the_picture_has_a_dot_per_sequence_at_its_weight_times_n(weights):
    step = weighed(*weights)
    figure = figure_of(step, number=1)
    (dots,) = [c for c in figure.axes[0].collections if c.get_label() == "a sequence of this run"]
    wanted = [(2 * i + 2, step.tokens * w) for i, w in enumerate(weights)]
    assert dots.get_offsets().tolist() == [pytest.approx(one) for one in wanted]
    assert drawn(step, "svg", number=1).startswith(b"<?xml")
    figure.draw_without_rendering()
    assert figure.axes[0]._left_title.get_window_extent().x1 < figure.bbox.x1  # of a long verdict


@pytest.mark.usefixtures("plotting")
def test_a_picture_of_a_kind_that_cannot_be_drawn_is_refused():
    with pytest.raises(LossAggregationError, match=r"name a \.svg or a \.png file"):
        drawn(weighed(1.0), "doc", number=1)


def test_a_report_that_cannot_be_written_ends_no_training(tmp_path, capsys):
    missing, unwritten = tmp_path / "missing" / "report.json", []
    report = _printed(Namespace(json=missing, picture=None), unwritten)
    for number in (1, 2):
        report(weighed(0.5), number, "loss")
    out, err = capsys.readouterr()
    assert out.count("verdict: trains token_mean") == 2
    assert err.count(str(missing)) == len(unwritten) == 2


@pytest.mark.usefixtures("plotting")
@pytest.mark.parametrize("b", [2, 3])
def test_the_curve_of_a_sample_mean_counts_the_empty_sequences_that_it_trains(b):
    step = weighed(1 / (2 * b), 1 / (4 * b), num_empty=1)
    assert step.counted_empty == b - 2
    curves = {line.get_label(): line for line in figure_of(step, number=1).axes[0].lines}
    drawn_weights = curves["sample_mean"].get_ydata()
    assert [*drawn_weights][::50] == pytest.approx([6 / (2 * b), 6 / (4 * b)])


def step_of(*weights, is_measured=True, **how):
    return replace(weighed(*weights, **how), is_measured=is_measured)


FULL_PACKS = step_of(1 / 4, 1 / 4, m=2, tokens=2)


@pytest.mark.parametrize(
    ("step", "expected", "trust", "says"),
    [
        (step_of(1 / 6, 1 / 6), "token_mean", False, ""),
        (step_of(1 / 6, 1 / 6), "sample_mean", False, "the verdict is: trains token_mean"),
        (step_of(1 / 2), "token_mean", False, "does not tell token_mean from sample_mean"),
        (step_of(1 / 2), "token_mean,sample_mean", False, ""),
        (FULL_PACKS, "token_mean", False, "from sample_mean and microbatch_token_mean"),
        (FULL_PACKS, "token_mean,sample_mean", False, ""),
        (FULL_PACKS, "token_mean,token_sum", False, "does not tell token_mean from"),
        (step_of(1 / 6, 1 / 6), "prompt_mean", False, "prompt_mean needs prompt"),
        (step_of(1 / 6, 1 / 6), "prompt_mean,sample_mean", False, "the verdict is: trains token"),
        (step_of(1 / 6, 1 / 6, is_measured=False), "token_mean", False, "pass --trust"),
        (step_of(1 / 6, 1 / 6, is_measured=False), "token_mean", True, ""),
    ],
)
def test_what_is_expected_is_met_by_a_step_that_tells_it_from_other_modes(
    step, expected, trust, says
):
    unmet = _unmet(step, Namespace(expect=_compared(expected), trust=trust))
    assert says in unmet
    assert bool(unmet) == bool(says)


TOKEN_MEAN, SAMPLE_MEAN = step_of(1 / 6, 1 / 6), step_of(1 / 4, 1 / 8)


@pytest.fixture
def weigh(tmp_path, monkeypatch):
    """Return what runs the command on a script of some steps and an exit status."""
    script = tmp_path / "pretrain_gpt.py"
    script.touch()

    def run(*flags, steps, status=0, num_steps=0, meanwhile=lambda: None):
        def install(at, num, *, report, **options):
            meanwhile()
            for number, step in enumerate(steps, at):
                report(step, number, "loss")
            return SimpleNamespace(weighed=steps, num_steps=num_steps)

        monkeypatch.setattr("megatron_lossagg.integrations.weigh_script.install", install)
        monkeypatch.setattr(run_command, "run", lambda args, before: before() or status)
        return main(["weigh", *map(str, flags), str(script)])

    return run


@pytest.mark.parametrize(
    ("expected", "steps", "status", "wanted"),
    [
        ((), [SAMPLE_MEAN], 0, 0),
        (("--expect", "token_mean"), [SAMPLE_MEAN, TOKEN_MEAN], 0, 0),
        (("--expect", "token_mean"), [TOKEN_MEAN, SAMPLE_MEAN], 0, 1),
        (("--expect", "token_mean"), [TOKEN_MEAN], 3, 3),
        (("--expect", "token_mean"), [SAMPLE_MEAN], 3, 3),
    ],
)
def test_the_last_weighed_step_and_the_script_decide_the_exit_status(
    weigh, capsys, expected, steps, status, wanted
):
    assert weigh("--at", 3, "--steps", 2, *expected, steps=steps, status=status) == wanted
    out, err = capsys.readouterr()
    assert ("expected token_mean, and the verdict is: trains sample_mean" in err) == (wanted == 1)
    reports = [line.split(":")[0] for line in out.splitlines() if line.startswith("weighed step")]
    numbers = [f"weighed step {3 + place}" for place in range(len(steps))]
    assert reports == [*numbers, *([] if status else numbers[-1:])]


def test_the_file_has_the_sequences_of_every_weighed_step(weigh, tmp_path):
    file = tmp_path / "weighed.json"
    assert weigh("--steps", 2, "--json", file, steps=[TOKEN_MEAN, SAMPLE_MEAN]) == 0
    written = json.loads(file.read_text())
    assert [step["step"] for step in written["steps"]] == [1, 2]
    assert [sequence["step"] for sequence in written["sequences"]] == [1, 1, 2, 2]
    weights = [sequence["weight_min"] for sequence in written["sequences"]]
    assert weights == pytest.approx([1 / 6, 1 / 6, 1 / 4, 1 / 8])


def test_a_report_that_could_not_be_written_is_status_1_at_the_end(weigh, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    options = {"steps": [TOKEN_MEAN], "meanwhile": folder.rmdir}
    assert weigh("--json", folder / "weighed.json", **options) == 1


@pytest.mark.parametrize(
    ("num_steps", "said"),
    [(0, "without a training step of megatron.training"), (2, "after 2 steps, before step 5")],
)
def test_a_script_of_which_nothing_was_weighed_is_no_success(weigh, capsys, num_steps, said):
    assert weigh("--at", 5, steps=[], num_steps=num_steps) == 1
    assert said in capsys.readouterr().err


def test_a_framework_needs_no_script_and_takes_none(capsys):
    assert main(["weigh", "--framework", "primus"]) == 2
    assert "primus is not installed here" in capsys.readouterr().err
    assert main(["weigh", "--framework", "primus", "pretrain_gpt.py"]) == 2
    assert "got --framework with the script pretrain_gpt.py" in capsys.readouterr().err
    assert main(["weigh", "--framework", "primus", "--expect", "token_mean"]) == 2
    assert "got --framework with --expect, which is for a script" in capsys.readouterr().err
    assert main(["weigh", "--framework", "primus", "--dp", "5"]) == 2
    assert "a --dp that divides the 12 drawn sequences" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["weigh"])
    assert "required: script" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "states", "status"),
    [
        ([4], [], 0),
        ([4, 0], [], 0),
        ([0], [], 1),
        ([], [], 1),
        ([4], [FAIL], 1),
        ([4], [NOT_RUN], 2),
        ([4], [NOT_RUN, FAIL], 1),
    ],
)
def test_a_step_that_fails_or_is_not_heard_is_no_success(
    tokens, states, status, monkeypatch, capsys
):
    """``tokens``: of its terms; one without any is a metric."""
    terms = {
        f"term_{n}": {"report": "verdict", "weighed": {"tokens": n}, "coefficient": None}
        for n in tokens
    }
    step = {"trained": "stock", "is_ours": False, "wanted": "token_mean", "terms": terms}

    def run_job(job, *, timeout, take, report):
        take(step)
        for state in states:
            report(Outcome(check="stock", function="", state=state, explanation="because"))

    monkeypatch.setattr(weigh_framework, "run_job", run_job)
    monkeypatch.setattr(weigh_framework, "check_installed", lambda name: None)
    assert main(["weigh", "--framework", "primus"]) == status
    out, err = capsys.readouterr()
    assert [f"term term_{n}\n" in out for n in tokens] == [n > 0 for n in tokens]
    assert ("trained nothing" in err) == (not any(tokens))
    assert err.count("because") == len(states)


def test_a_term_of_a_framework_is_reported_with_its_coefficient():
    terms = {
        "kl_loss": {"report": "verdict", "weighed": {"tokens": 4}, "coefficient": 0.31},
        "pg_loss": {"report": "verdict", "weighed": {"tokens": 4}, "coefficient": 1.0},
    }
    setting = {"trained": "the default", "is_ours": False, "wanted": "token_mean", "terms": terms}
    printed = _text(setting)
    assert "setting the default, to be compared with token_mean" in printed
    assert "term kl_loss, times its coefficient 0.31\n" in printed
    assert "term pg_loss\n" in printed


def test_weights_of_ones_own_are_no_mode_of_a_frameworks_step(capsys):
    own = "megatron_lossagg.verify.cases:mean_of_prompts"
    options = ["--loss-aggregation-weights-path", own]
    assert main(["weigh", "--framework", "primus", *options]) == 2
    assert "expected a mode with a formula" in capsys.readouterr().err
