"""``lossagg run`` on scripts that are not Megatron-LM's: what reaches the script, what is refused.

On Megatron-LM itself: ``tests/frameworks/megatron_lm/test_megatron_lm.py``.
"""

import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from conftest import worker_path

from megatron_lossagg.cli.main import main

ECHO = "import sys; print('argv', sys.argv[1:]); sys.exit(int(sys.argv[-1]))\n"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Return a script that prints its arguments and exits with the last one.

    Without Megatron-LM, which some wheels of megatron-core contain.
    """
    for name in ("megatron.training", "megatron.training.training"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "echo.py"
    path.write_text(ECHO)
    return path


@pytest.mark.parametrize("status", [0, 3])
def test_without_a_flag_the_script_gets_its_arguments_and_gives_its_status(script, capsys, status):
    assert main(["run", str(script), "--lr", "1e-3", str(status)]) == status
    assert f"argv ['--lr', '1e-3', '{status}']" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "status"), [("'no disk'", 1), ("''", 1), ("None", 0)])
def test_a_script_that_ends_with_words_or_with_none_ends_as_under_python(
    script, capsys, text, status
):
    script.write_text(f"raise SystemExit({text})")
    assert main(["run", str(script)]) == status
    assert ("no disk" in capsys.readouterr().err) == ("disk" in text)


@pytest.mark.parametrize("name", ["--loss-aggregation", "--loss-aggregation-shadow"])
@pytest.mark.parametrize("place", ["before the script", "after it"])
def test_a_flag_is_never_ignored_wherever_it_stands(script, capsys, place, name):
    flag = [name, "token_mean"]
    before, after = (flag, []) if place == "before the script" else ([], flag)
    assert main(["run", *before, str(script), *after, "0"]) == 1
    out, err = capsys.readouterr()
    assert "megatron.training.training cannot be imported" in err  # no checkout is on the path
    assert "argv" not in out


def test_a_flag_given_twice_counts_as_it_was_given_last(script, capsys):
    flags = ["--loss-aggregation", "token_mean", str(script), "--loss-aggregation", "constant"]
    assert main(["run", *flags, "0"]) == 2
    assert "constant" in capsys.readouterr().err  # which needs a divisor


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--loss-aggregaton", "--loss-aggregation"),
        ("--loss-agregation", "--loss-aggregation"),
        ("--loss_aggregation", "--loss-aggregation"),
        ("--los-aggregation-record=a.jsonl", "--loss-aggregation-record"),
        ("--loss-aggregation-divisr", "--loss-aggregation-divisor"),
        ("--no-loss-aggregation-prob", "--no-loss-aggregation-probe"),
        ("--loss-aggregator", "those that lossagg run --help lists"),
    ],
)
def test_a_misspelled_flag_does_not_reach_the_script(script, capsys, flag, meant):
    assert main(["run", str(script), flag, "token_mean", "0"]) == 2
    out, err = capsys.readouterr()
    name = flag.partition("=")[0]
    assert f"got {name}, which is not an option of ours, expected {meant}: correct" in err
    assert "argv" not in out


def test_options_of_a_script_that_resemble_ours_reach_it(script, capsys):
    own = ["--loss-scale", "--log-loss-aggregation", "--calculate-per-token-loss", "--probe"]
    assert main(["run", str(script), *own, "0"]) == 0
    assert str(own)[:-1] in capsys.readouterr().out


@pytest.mark.parametrize("text", ["import absent_module", "1 / 0", "raise SystemExit(0)"])
def test_help_is_printed_also_where_the_script_cannot_print_its_own(script, capsys, text):
    script.write_text(text)
    assert main(["run", str(script), "--help"]) == 0
    out, err = capsys.readouterr()
    assert "--loss-aggregation-divisor" in out
    assert re.search(r"^ +token_mean +.*1/N", out, re.M), "a mode has a line of its own"
    assert ("could not print its own options" in err) == ("System" not in text)


def test_a_record_that_cannot_be_written_is_refused_before_the_script_runs(
    script, capsys, tmp_path, monkeypatch
):
    flags = ["--loss-aggregation", "token_mean", "--loss-aggregation-record"]
    text = tmp_path / "text"
    text.write_text("no record")
    for path, words in (
        (tmp_path, "cannot be written"),
        (tmp_path / "none" / "a.jsonl", "expected a file in a folder that exists"),
        (text, "is no record of steps"),
    ):
        assert main(["run", str(script), *flags, str(path), "0"]) == 2
        assert words in capsys.readouterr().err
        for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):  # of other ranks and nodes
            with monkeypatch.context() as other:
                other.setenv(name, value)
                assert main(["run", str(script), *flags, str(path), "0"]) == 1
            assert "megatron.training" in capsys.readouterr().err


def test_a_contradiction_is_refused_before_the_script_runs(script, capsys):
    assert main(["run", str(script), "--loss-aggregation-divisor", "8", "0"]) == 2
    out, err = capsys.readouterr()
    assert "without --loss-aggregation" in err
    assert "argv" not in out


def test_a_script_with_a_schedule_of_its_own_is_refused(script, capsys):
    script.write_text(f"from megatron.core import get_forward_backward_func\n{ECHO}")
    assert main(["run", str(script), "--loss-aggregation", "token_mean", "0"]) == 1
    assert "calls get_forward_backward_func itself" in capsys.readouterr().err


def test_a_script_may_be_written_in_another_encoding(script, capsys):
    script.write_bytes(b"# -*- coding: latin-1 -*-\n# caf\xe9\n" + ECHO.encode())
    assert main(["run", "--loss-aggregation", "token_mean", str(script), "0"]) == 1
    assert "megatron.training.training cannot be imported" in capsys.readouterr().err


def test_a_script_that_does_not_exist_is_wrong_usage(tmp_path, capsys):
    assert main(["run", str(tmp_path / "absent.py")]) == 2
    assert "absent.py, which does not exist" in capsys.readouterr().err


def test_cpu_may_stand_after_the_script(script, capsys):
    flag = ["--loss-aggregation", "token_mean"]
    assert main(["run", str(script), "--cpu", *flag, "0"]) == 1
    out, err = capsys.readouterr()
    assert "megatron.training" in err  # no checkout is on the path
    assert "argv" not in out


READS_AHEAD = """
from megatron_lossagg import Aggregation
from megatron_lossagg.loop.buffer import StepBuffer

def reads_a_file():
    yield [3]
    raise OSError("disk gone")

def counts(data):
    return [data["tokens"]]

StepBuffer({iterator}, 2).plan(Aggregation("token_mean"), {count})
"""


@pytest.mark.parametrize(
    ("iterator", "count", "function", "error"),
    [
        ("reads_a_file()", "lambda data: data", "reads_a_file", "OSError: disk gone"),
        ("iter([[1], [2]])", "counts", "counts", "TypeError: list indices must be"),
    ],
)
def test_an_error_of_a_data_set_keeps_its_traceback_and_is_no_wrong_usage(
    script, capsys, iterator, count, function, error
):
    script.write_text(READS_AHEAD.format(iterator=iterator, count=count))
    assert main(["run", str(script)]) == 1
    err = capsys.readouterr().err
    place = err.index(f'{script.name}", line ')
    assert place < err.index(f"in {function}") < err.index(error) < err.index("lossagg: rank 0")


NO_LOOP = "the process ended without the training loop of a loop, or the hook was installed after"
LOOKS_ITS_LOOP_UP = (  # a script that has the name in one piece is refused
    "import megatron.training.training as loop; getattr(loop, 'get_forward_' + 'backward_func')()"
)
ENDS = {
    "pass": (0, True, NO_LOOP),
    "a_loop.get_forward_backward_func()": (0, True, "training loop of a loop had no step left"),
    "sys.exit()": (0, True, NO_LOOP),
    "try: sys.exit(2)\nexcept SystemExit: pass": (0, True, NO_LOOP),
    "sys.exit(2)": (2, True, NO_LOOP),
    "lossagg_run('sys.exit(2)')": (2, False, ""),
    "lossagg_run('pass')": (1, False, "ended without a step that --loss-aggregation token_mean"),
    f"lossagg_run({LOOKS_ITS_LOOP_UP!r})": (0, False, "no step left to do, so nothing was trained"),
    "raise ValueError('MASTER_ADDR expected')": (1, False, "ValueError: MASTER_ADDR expected"),
}
"""Exit status, whether the process says at its end that no step came, and words in what it says."""


LOOP = """
import gc, os, sys
sys.path.insert(0, {folder!r})
from megatron_lossagg import Aggregation
from megatron_lossagg.integrations._shared import rebind
from megatron_lossagg.integrations.megatron_lm import PretrainIntegration
from megatron_lossagg.loop.schedule_hook import ScheduleHook

hook = ScheduleHook(Aggregation("token_mean"), PretrainIntegration())
rebind(hook, ["a_loop"], "a loop")
import a_loop

def lossagg_run(code):
    from megatron_lossagg.cli.main import main

    script = f"{folder}/{{os.getpid()}}.py"
    with open(script, "w") as file:
        file.write("import sys\\n" + code)
    sys.exit(main(["run", script, "--loss-aggregation", "token_mean"]))

gc.freeze()  # else each child walks all that was imported at its end
statuses = []
for number, ends in enumerate({ends!r}):
    if os.fork() == 0:  # one import for all; each child ends as a process does
        os.dup2(os.open(f"{folder}/{{number}}", os.O_WRONLY | os.O_CREAT), 2)
        break
    statuses.append(os.waitstatus_to_exitcode(os.wait()[1]))
else:
    print(statuses, flush=True)
    os._exit(0)
exec(ends)
"""


@pytest.mark.launches
def test_a_process_says_that_no_step_came_unless_an_exception_ends_it(tmp_path):
    for module in ("a_loop.py", "megatron/training/training.py"):
        (tmp_path / module).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / module).write_text(
            "def get_forward_backward_func():\n    return print\nevaluate = print\n"
        )
    (tmp_path / "megatron/training/__init__.py").touch()  # else a wheel's own comes first
    code = LOOP.format(folder=str(tmp_path), ends=list(ENDS))
    environment = {"PYTHONPATH": worker_path()}
    written = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    statuses = json.loads(written)
    for number, (status, says_so, words) in enumerate(ENDS.values()):
        err = (tmp_path / str(number)).read_text()
        assert statuses[number] == status, err
        assert err.count("lossagg: no step reached --loss-aggregation token_mean") == says_so, err
        assert words in err


def test_train_rl_of_an_unknown_release_is_refused_by_name_before_it_starts(
    script, capsys, monkeypatch
):
    later = types.ModuleType("megatron.rl.rl_utils")
    exec(  # as at d98e8a64, but for the name of what is prepared
        "def prepare_trajectories(packs, tokenizer, seq_length, skip_bos_token): ...\n"
        "def prepare_data_for_update(model, ref_state_dict, rollouts, tokenizer, sequence_packing,"
        " is_correction, request_ledger): ...",
        vars(later),
    )
    for name in ("megatron", "megatron.rl"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "megatron.rl.rl_utils", later)
    script = script.rename(script.parent / "train_rl.py")
    assert main(["run", str(script), "--loss-aggregation", "sample_mean", "0"]) == 1
    out, err = capsys.readouterr()
    assert "prepare_trajectories is prepare_trajectories(packs, tokenizer" in err
    assert "core_v0.16 to d98e8a64, with rollouts or rollout_turns or rows" in err
    assert "or train without --loss-aggregation" in err
    assert "argv" not in out


def test_a_required_package_that_is_missing_is_named_without_a_traceback(launches):
    root = Path(__file__).parents[2]
    code = f"import sys; sys.path.insert(0, {str(root)!r}); import megatron_lossagg.__main__"
    code += "; sys.exit(megatron_lossagg.__main__.main(['verify']))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("lossagg: numpy is not installed: pip install torch numpy rich")
    assert "Traceback" not in done.stderr
