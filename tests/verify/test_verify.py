"""``lossagg verify`` as a user runs it: this machine, a launcher of two nodes, wrong usage."""

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, early, fork_server, launched, new_folder
from fork_server import WITHOUT_MEGATRON
from wrong_factors.run import apply

from megatron_lossagg.cli import verify as command_module
from megatron_lossagg.cli.explanation import Split, explain, read_lengths
from megatron_lossagg.cli.main import _parser, main
from megatron_lossagg.cpu.launch import launch
from megatron_lossagg.errors import ProofError
from megatron_lossagg.reduction.modes import MODES
from megatron_lossagg.verify import environment as environment_module
from megatron_lossagg.verify import job as job_module
from megatron_lossagg.verify.cases import CASES
from megatron_lossagg.verify.drivers.table import FRAMEWORKS
from megatron_lossagg.verify.environment import crowding, environment
from megatron_lossagg.verify.job import Job, failure_of, read_job, write_job
from megatron_lossagg.verify.parallelism import Parallelism, standard
from megatron_lossagg.verify.step_data import make_sequences
from megatron_lossagg.verify.text import number_of

ROOT = Path(__file__).parents[2]
ONE = ["--loss-aggregation", "constant", "--loss-aggregation-divisor", "40"]


def lossagg(*arguments, path=ROOT, launcher=(), **environment):
    """Run the command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "megatron_lossagg", *map(str, arguments)],
        cwd=path,
        env={**ENVIRONMENT, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process, timeout=300):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


@early
def one_layout():
    """Return how the command ended, what it printed, and its reports."""
    report, summary = new_folder() / "report.json", new_folder() / "summary.md"
    process = lossagg(
        "verify", "--dp", 2, "--moe", "--ep", 2, "--json", report, "--markdown", summary, *ONE
    )
    return *ended(process), report, summary


def test_one_layout_passes_in_text_json_and_markdown(one_layout):
    status, out, err, report, summary = one_layout
    assert status == 0, out + err
    first, *lines = out.splitlines()
    assert first.startswith("PASS: 2 of 2 cases pass on 1 layout of 2 ranks, megatron-core ")
    layout = "lossagg: DP 2 x EP 2, M 3, MoE: "
    assert f"{layout}layout 1 of 1 runs\n" in err.partition(f"{layout}2 of 2 cases passed")[0]
    assert "cases pass" not in "".join(lines)  # the result of one layout is printed once
    assert [line.split()[:4] for line in lines if line.startswith("  constant")] == [
        ["constant", "1/(B", "40)", loss_scaling] for loss_scaling in ("average", "per_token")
    ]
    written = json.loads(report.read_text())
    verdicts = written["verdicts"]
    assert written["passed"]
    assert [v["layout"] for v in verdicts] == ["DP 2 x EP 2, M 3, MoE"] * 2
    assert [v["loss_scaling"] for v in verdicts] == ["average", "per_token"]
    assert [v["formula"] for v in verdicts] == ["1/(B 40)"] * 2
    assert all(0 < v["gradient_error"] < 1e-6 for v in verdicts)
    assert all(v["weights_error"] < 1e-6 for v in verdicts)
    (core,) = [fact for fact in written["environment"] if fact["name"] == "megatron-core"]
    assert (Path(core["path"]) / "megatron/core/__init__.py").is_file()
    assert f"megatron-core      {core['version']}" in out
    assert core["path"] in out
    assert "| DP 2 x EP 2, M 3, MoE | 2 of 2 |" in summary.read_text()
    assert core["path"] in summary.read_text()
    # K of explain is what the step multiplied by on the live Megatron-Core.
    for v in verdicts:
        explanation = explain(
            "constant",
            read_lengths(",".join(str(sum(s.counted)) for s in make_sequences())),
            Split(loss_scaling=v["loss_scaling"], microbatches=3, dp=2, cp=1),
            divisor=40.0,
        )
        assert explanation.k == v["k"]


@pytest.mark.launches
@pytest.mark.parametrize(
    ("fault", "passed", "said", "name"),
    [
        (
            "num_tokens_on_every_cp_rank",
            1,
            "gradient: measured factor 0.5 = 1/CP, expected 1: ",
            "num_tokens_on_every_cp_rank",
        ),
        (
            "report_without_m",
            0,
            "reported loss: measured factor 0.333333333333 = 1/M, expected 1: ",
            "report_without_m",
        ),
        (
            "forward_only",
            0,
            "reported loss: measured factor ",
            "only a forward-only step reports it, the training step is right",
        ),
        (
            "mask_by_multiplication",
            0,
            "not finite with inf at masked positions, right without (",
            "a masked token's inf or NaN reaches the loss",
        ),
    ],
)
def test_a_wrong_factor_fails_with_status_1_and_its_cause(tmp_path, fault, passed, said, name):
    shutil.copytree(ROOT / "megatron_lossagg", tmp_path / "megatron_lossagg")
    apply(ROOT / f"tests/wrong_factors/{fault}.txt", tmp_path)
    out = launched("verify/verify_copy_worker.py", tmp_path, "--cp", 2, *ONE, processes=2)
    assert out.count("ended with 1\n") == 2
    result = out.index(f"FAIL: {passed} of 2 cases pass on 1 layout of 2 ranks")
    cause = out.index(said)
    assert name in out[cause:]
    assert ("; or: " in out) == (fault == "num_tokens_on_every_cp_rank")  # here it is a mean too
    assert result < out.index("  constant") < cause < out.index("megatron-core   ")


@pytest.mark.launches
def test_a_step_that_is_right_and_raises_fails_with_what_it_raised(tmp_path):
    shutil.copytree(ROOT / "megatron_lossagg", tmp_path / "megatron_lossagg")
    step = tmp_path / "megatron_lossagg" / "loop" / "step.py"
    lines = "        record_first_step()\n"
    alarm = f"{lines}        raise _alarm('a false alarm')\n"
    assert step.read_text().count(lines) == 1
    named = "\nfrom megatron_lossagg.errors import ReducerError as _alarm\n"
    step.write_text(step.read_text().replace(lines, alarm) + named)
    out = launched("verify/verify_copy_worker.py", tmp_path, "--cp", 2, *ONE, processes=2)
    assert out.count("ended with 1\n") == 2
    assert "FAIL: 0 of 2 cases pass on 1 layout of 2 ranks" in out
    words = "gradient and reported loss are right, and the step raised (a false alarm)"
    assert words in " ".join(out.split())
    assert "masked positions" not in out


@pytest.mark.launches
def test_a_rank_that_fails_after_its_last_case_is_no_pass(tmp_path, monkeypatch, capsys):
    (tmp_path / "rank.py").write_text(
        "import sys\nfrom megatron_lossagg.verify.__main__ import main\n"
        "main(*sys.argv[1:])\nsys.exit('[rank0]: no disk at the end')\n"
    )

    def launch(command, **options):
        return fork_server().launch([str(tmp_path / "rank.py"), *command[2:]], **options)

    monkeypatch.setattr("megatron_lossagg.verify.job.launch", launch)
    report, summary = tmp_path / "report.json", tmp_path / "summary.md"
    one = ["--dp", "1", "--loss-aggregation", "token_mean", "--loss-scaling", "average"]
    assert main(["verify", *one, "--json", str(report), "--markdown", str(summary)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("FAIL: 1 of 1 case passes")
    written = json.loads(report.read_text())
    assert (written["state"], written["passed"]) == ("FAIL", False)
    for text in (out, written["failure"], summary.read_text()):
        assert "A rank failed\n" in text
        assert "[rank0]: no disk at the end" in text


@early
def two_nodes():
    """Return how the launcher of each node ended and what it printed, and the report."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    report = new_folder() / "report.json"
    processes = []
    for node in range(2):
        launcher = [
            "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}",
            "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}",
        ]  # fmt: skip
        arguments = ["verify", "--cp", 2, "--json", report, *ONE]
        processes.append(lossagg(*arguments, launcher=launcher, GLOO_SOCKET_IFNAME="lo"))
    return [(status, out + err) for status, out, err in map(ended, processes)], report


def test_two_nodes_of_a_launcher_pass_and_only_rank_0_reports(two_nodes):
    results, report = two_nodes
    assert [status for status, _ in results] == [0, 0], results
    assert ["2 of 2 cases pass" in printed for _, printed in results] == [True, False]
    assert json.loads(report.read_text())["layouts"] == ["CP 2, M 3"]


@pytest.mark.launches
def test_a_launcher_with_another_number_of_ranks_is_refused():
    command = ["-m", "megatron_lossagg", "verify", "--dp", "3", *ONE]
    done = fork_server().launch(command, processes=2, timeout=300)
    assert done.returncode != 0
    assert "DP 3, M 3: got 2 ranks from the launcher, expected 3. Change --dp" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dp", "0"], "dp: got 0, expected at least 1"),
        (["--pp", "1", "--vpp", "2"], "vpp 2 needs pp above 1"),
        (["--ep", "2"], "ep 2 needs experts: add --moe"),
        (["--moe", "--ep", "3", "--dp", "2"], "ep 3 does not divide dp * cp * tp = 2"),
        (["--pp", "2", "--vpp", "2", "--microbatches", "3"], "expected a multiple of pp 2"),
        (["--dp", "2", "--mtp"], "add --float32"),
        (["--pp", "2", "--megatron-fsdp", "optim", "--float32"], "no Megatron-FSDP with pp 2"),
        (["--dp", "2", "--optimizer-instances", "2"], "need --distributed-optimizer"),
        (
            ["--dp", "3", "--optimizer-instances", "2", "--distributed-optimizer"],
            "2 optimizer instances do not divide dp * cp = 3",
        ),
        (["--dp", "2", "--outer-sharding"], "outer_sharding needs --megatron-fsdp"),
        (["--dp", "2", "--megatron-fsdp", "optim"], "Megatron-FSDP has no float64 gradients"),
        (["--dp", "2", "--mtp", "--float32", "--packing", "local"], "got local with mtp"),
        (
            ["--cp", "2", "--mtp", "--float32", "--cp-partition", "contiguous"],
            "cp_partition: got contiguous with mtp, expected zigzag",
        ),
        (["--dp", "2", "--cp-partition", "contiguous"], "give cp above 1"),
        (["--loss-aggregation", "constant"], "--loss-aggregation-divisor"),
        (["--loss-aggregation", "tokenmean"], "did you mean 'token_mean'?"),
        (["--loss-aggregation-shadow", "token_mean"], "a verification, which trains no run"),
        (["--json", "/nowhere/at/all.json"], "cannot be written: name a file"),
        (["--markdown", "/"], "cannot be written: name a file"),
        (["--tp", "-1"], "tp: got -1, expected at least 1"),
        (["--tp", "3"], "tp 3 does not divide the model's 32 token ids"),
        (["--dp", "2", "--sequence-parallel"], "give tp above 1"),
        (["--moe", "--tp", "2"], "experts with tp above 1 under sequence_parallel"),
        (["--loss-aggregation-reducer-path", "math:nope"], "has no attribute 'nope'"),
        (["--loss-aggregation-weights-path", "no_such:weights"], "No module named 'no_such'"),
        (["--loss-func", "math:fsom"], "did you mean 'fsum'?"),
        (["--loss-func", "math:pi"], "is not callable"),
        (["--loss-func", "no_such:loss"], "No module named 'no_such'"),
        (["--loss-func", "math:fsum", "--batch", "math:nope"], "has no attribute 'nope'"),
        (["--loss-func", "math:fsum", "--batch", "math:fsum"], "raised TypeError("),
        (["--loss-func", "math:fsum", "--batch", "time:time"], "expected at least 7"),
        (["--dp", "2", "--float32", "--bf16"], "got float32 with bf16, expected one of them"),
        (["--float32"], "float32 without a size"),
        (
            ["--dp", "2", "--average-in-collective", "--loss-scaling", "per_token"],
            "refuses average_in_collective in the per-token loss scaling",
        ),
    ],
)
def test_wrong_usage_ends_with_status_2_and_what_to_change(capsys, monkeypatch, arguments, message):
    monkeypatch.delattr(job_module, "launch")  # no rank is started
    assert main(["verify", *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert "Traceback" not in out + err


@pytest.mark.parametrize("microbatches", [(1, 2, 3), (3,), (1, 0), 0])
def test_each_rank_has_a_number_of_microbatches(microbatches):
    with pytest.raises(ProofError, match=r"or one for each of the 2 data-parallel ranks"):
        Parallelism(dp=2, microbatches=microbatches)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 1e-12),
        ({"moe": True}, 1e-6),
        ({"float32": True, "moe": True}, 1e-5),
        ({"pp": 4, "bf16": True}, 0.2),
    ],
    ids=str,
)
def test_the_tolerance_of_a_layout_is_that_of_its_least_precise_part(options, tolerance):
    assert Parallelism(**options).tolerance == tolerance


def test_the_sequences_are_drawn_so_often_that_most_microbatches_get_one():
    drawn = {m: Parallelism(dp=2, microbatches=m).reference[1] for m in (1, 7, 8, 14, 15, 99)}
    assert drawn == {1: 1, 7: 1, 8: 2, 14: 2, 15: 3, 99: 4}


def test_the_help_offers_no_option_that_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    out = capsys.readouterr().out
    assert "--loss-aggregation-reducer-path" in out
    assert "--loss-aggregation-record" not in out
    assert "--loss-aggregation-shadow" not in out


def test_the_standard_set_splits_in_every_way_on_one_number_of_ranks(tmp_path):
    layouts = standard()
    assert {layout.world_size for layout in layouts} == {4}
    for size in ("dp", "tp", "pp", "vpp", "cp"):
        assert any(getattr(layout, size) > 1 for layout in layouts), size
    modes = {*MODES} - {"custom"}
    assert modes == {case.aggregation.mode for case in CASES if case.aggregation.count_empty}
    job = Job(layouts=layouts, cases=CASES)
    assert job.num_verdicts == 7 * len(CASES) * 2
    write_job(job, tmp_path / "job")
    assert read_job(tmp_path / "job") == job


WITHOUT_SECOND = [case for case in CASES if case.second is None]
HOOKED = [replace(layout, hooked=True) for layout in standard()]


@pytest.mark.parametrize(
    ("flags", "ranks", "layouts", "cases"),
    [
        ([], None, standard(), CASES),
        (["--hooked"], None, HOOKED, WITHOUT_SECOND),
        (["--moe"], None, standard(moe=True), CASES),
        (["--ep", "1"], None, [Parallelism()], CASES),
        (["--pp", "2", "--vpp", "2"], None, [Parallelism(pp=2, vpp=2, microbatches=4)], CASES),
        (["--dp", "2", "--hooked"], None, [Parallelism(dp=2, hooked=True)], WITHOUT_SECOND),
        (["--tp", "2", "--cp", "2"], 8, [Parallelism(dp=2, tp=2, cp=2)], CASES),
        (["--pp", "2"], 6, [Parallelism(dp=3, pp=2)], CASES),
        ([], 4, [Parallelism(dp=4)], CASES),
    ],
    ids=str,
)
def test_the_options_and_the_launcher_choose_the_layouts_and_cases(flags, ranks, layouts, cases):
    launcher = None if ranks is None else command_module._Launcher(0, ranks)
    job = command_module._job(_parser(["verify"]).parse_args(["verify", *flags]), launcher)
    assert [*job.layouts] == layouts
    assert [*job.cases] == [*cases]
    assert [*job.loss_scalings] == ["average", "per_token"]


@pytest.mark.parametrize("flags", [[], ["--hooked"]], ids=str)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_cases_of_a_framework_run_under_the_hook_if_its_steps_do(monkeypatch, name, flags):
    jobs = []

    def job(args, launcher):
        jobs.append(real(args, launcher))
        raise ProofError("no framework is needed any more")

    real = command_module._job
    monkeypatch.setattr(command_module, "_job", job)
    monkeypatch.setattr(command_module, "check_installed", lambda name: None)
    assert main(["verify", "--framework", name, *flags]) == 2
    hooked = {layout.hooked for layout in jobs[0].layouts}
    assert hooked == {FRAMEWORKS[name].is_hooked or bool(flags)}


@pytest.mark.parametrize(
    ("flags", "ranks", "gpus"),
    [([], 4, 0), (["--gpu"], 4, 2), (["--gpu"], 1, 1)],
)
def test_only_with_gpu_the_ranks_take_as_many_gpus_as_there_are(monkeypatch, flags, ranks, gpus):
    taken = []

    def launched(job, take, **options):
        taken.append((options["processes"], options["gpus"]))
        return subprocess.CompletedProcess([], 1, "", "[rank0]: ended")

    monkeypatch.setattr(command_module, "num_gpus", lambda: 2)
    monkeypatch.setattr(command_module, "launched", launched)
    assert main(["verify", "--dp", str(ranks), *flags, *ONE]) == 2
    assert taken == [(ranks, gpus)]


def test_ranks_that_a_split_does_not_divide_are_refused():
    args = _parser(["verify"]).parse_args(["verify", "--pp", "2"])
    with pytest.raises(ProofError, match=r"got 3 ranks from the launcher, .* tp \* pp \* cp = 2"):
        command_module._job(args, command_module._Launcher(0, 3))


@pytest.mark.launches
def test_transformer_engine_that_cannot_load_ends_the_run_and_is_named(
    tmp_path, monkeypatch, capsys
):
    fake(tmp_path / "transformer_engine", "__version__ = '2.9'\nraise OSError('no libcudart')\n")
    monkeypatch.chdir(tmp_path)  # where the ranks find it
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(job_module, "launch", fork_server(WITHOUT_MEGATRON).launch)
    assert main(["verify", "--dp", "2"]) == 2
    out, err = capsys.readouterr()
    assert "OSError: no libcudart" in out
    assert "if import transformer_engine fails here, uninstall it" in out
    assert "nothing was verified: no rank imported megatron-core and joined the others" in err


@pytest.mark.launches
def test_ranks_that_outlast_their_time_are_no_failed_rank(capsys):
    assert main(["verify", "--dp", "1", "--timeout", "0.1", *ONE]) == 2
    out, err = capsys.readouterr()
    assert "The run did not finish in 0.1 s (--timeout)" in out
    assert "A rank failed" not in out
    assert "nothing was verified: no rank imported megatron-core and joined the others" in err


def test_without_megatron_core_nothing_is_launched(monkeypatch, capsys):
    missing = environment_module._megatron_core(None)
    monkeypatch.setattr(command_module, "environment", lambda: [missing])
    assert main(["verify", "--dp", "1", *ONE]) == 2
    assert "nothing to verify: megatron-core is missing: pip install" in capsys.readouterr().err


@pytest.mark.launches
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ended_by_a_signal_it_leaves_no_rank_behind():
    """``test_cpu_launch.py`` kills a launcher, which cannot end its ranks itself."""
    process = lossagg("verify", "--dp", 2, *ONE)
    ranks = wait_for_ranks(process.pid)
    process.terminate()
    assert ended(process)[0] == 143
    assert not ranks_of(process.pid, known=ranks)


def wait_for_ranks(parent):
    """Return the launcher and its two ranks once they run; a busy machine takes minutes."""
    deadline = time.monotonic() + 300
    while len(ranks := ranks_of(parent)) < 3 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert len(ranks) == 3
    return ranks


def ranks_of(parent, known=()):
    """List the processes of a verification's ranks that a launcher under ``parent`` started."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = status.read_text().rsplit(")", 1)[1].split()
            command = (status.parent / "cmdline").read_bytes()
            if b"megatron_lossagg.verify\0" in command:
                found[int(status.parent.name)] = int(fields[1])
    if known:
        return {pid for pid in found if pid in known}
    under = {pid for pid, up in found.items() if up == parent}  # the launcher itself
    return {pid for pid, up in found.items() if up in under} | under


def test_the_environment_lists_what_is_installed_and_what_is_missing(tmp_path, monkeypatch):
    (tmp_path / "apex").mkdir()  # a folder of that name is not the package
    monkeypatch.syspath_prepend(tmp_path)
    facts = {fact.name: fact for fact in environment()}
    assert set(facts) == {"python", "torch", "megatron-core", "transformer-engine", "apex"}
    assert facts["torch"].state == facts["megatron-core"].state == "found"
    assert facts["megatron-core"].version[0].isdigit()
    assert facts["apex"].state == "missing"


def fake(folder, source):
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(source)


@pytest.mark.launches
@pytest.mark.parametrize(("tracked", "changed"), [(True, False), (True, True), (False, False)])
def test_the_commit_of_megatron_core_is_that_of_its_checkout(tmp_path, tracked, changed):
    """A folder inside another repository, as an environment in a checkout, has no commit."""

    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    file = tmp_path / "megatron" / "core" / "__init__.py"
    fake(file.parent, "")
    file.with_name("package_info.py").write_text("__version__ = '0.16.1'\n")
    (tmp_path / "other.py").write_text("")
    git("init", "--quiet")
    git("add", str(file) if tracked else "other.py")
    git("commit", "--quiet", "--message", "one")
    if changed:
        file.write_text("changed = True\n")
    located = environment_module._megatron_core(file)
    assert located.version == "0.16.1"
    assert located.path == str(tmp_path)
    commit = git("rev-parse", "HEAD")[:12] + (", modified" if changed else "")
    assert located.commit == (commit if tracked else "")
    assert str(located).endswith(f"{tmp_path}, commit {commit}" if tracked else str(tmp_path))


def test_nouns_agree_with_their_counts():
    counts = [number_of(1, "rank"), number_of(2, "layout"), number_of(0, "microbatch")]
    assert counts == ["1 rank", "2 layouts", "0 microbatches"]


def test_more_ranks_than_cores_or_memory_are_said_first(tmp_path, monkeypatch):
    """Of this machine, and of a container whose limits are less."""
    meminfo, limits = tmp_path / "meminfo", tmp_path / "cgroup"
    meminfo.write_text("MemTotal: 9000000 kB\nMemFree: 1 kB\nMemAvailable: 3000000 kB\n")
    limits.mkdir()
    monkeypatch.setattr(environment_module, "_MEMINFO", meminfo)
    monkeypatch.setattr(environment_module, "_CGROUP", limits)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {*range(8)}, raising=False)
    assert crowding(8) == []
    shared, needed = crowding(11)
    assert shared == "11 ranks share 8 cores: they wait for each other"
    assert needed.startswith("11 ranks need about 3.3 GB of memory, and 3.0 GB are free: ")
    (limits / "cpu.max").write_text("200000 100000\n")
    (limits / "memory.max").write_text("1500000000\n")
    shared, needed = crowding(6)
    assert shared.startswith("6 ranks share 2 cores: ")
    assert "1.8 GB of memory, and 1.5 GB are free" in needed
    (limits / "cpu.max").write_text("1600000 100000\n")  # more than there are
    assert crowding(9)[0] == "9 ranks share 8 cores: they wait for each other"
    (limits / "cpu.max").write_text("max 100000\n")
    (limits / "memory.max").write_text("max\n")
    assert crowding(8) == []
    meminfo.unlink()
    assert crowding(8) == []


def test_ranks_that_are_too_many_are_said_before_they_start_and_killed_ones_fail(
    monkeypatch, capsys
):
    """A verification that is killed early is no wrong usage."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0}, raising=False)
    said = []

    def launch(command, **options):
        said.append(capsys.readouterr().err)
        return subprocess.CompletedProcess([], -9, "", "")

    monkeypatch.setattr(job_module, "launch", launch)
    assert main(["verify", "--dp", "5", *ONE]) == 1
    assert said[0].startswith("lossagg: 5 ranks share 1 core: ")
    out, err = capsys.readouterr()
    assert out.startswith("FAIL: 0 of 2 cases pass on 1 layout of 5 ranks")
    assert out.splitlines()[1].startswith("The launcher was killed (SIGKILL) and raised no error.")
    assert "nothing was verified" not in err


ENDS = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    {end}
time.sleep(60)
"""


@pytest.mark.launches
@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "Rank 1 was killed (SIGKILL) and raised no error"),
        ("os.kill(os.getpid(), signal.SIGABRT)", "Rank 1 was ended by SIGABRT and raised no error"),
        ("sys.exit('[rank1]: no disk')", "A rank failed\n[rank1]: no disk"),
    ],
)
def test_a_rank_that_a_signal_ends_is_told_from_one_that_fails(tmp_path, end, said):
    """By torch's launcher, whose words are read."""
    (tmp_path / "rank.py").write_text(ENDS.format(end=end))
    failure = failure_of(launch([str(tmp_path / "rank.py")], processes=2, timeout=300))
    assert failure.startswith(said)
    assert ("memory" in failure.splitlines()[0]) == ("SIGKILL" in end)


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (-9, "The launcher was killed (SIGKILL) and raised no error. The kernel does it if memory"),
        (-11, "The launcher was ended by SIGSEGV and raised no error\n[rank0]: last"),
        (1, "A rank failed\n[rank0]: last"),
        (0, ""),
    ],
)
def test_a_launcher_that_a_signal_ends_is_named(status, said):
    done = subprocess.CompletedProcess([], status, "", "[rank0]: last\n")
    assert failure_of(done).startswith(said)
    assert bool(failure_of(done)) == bool(status)
