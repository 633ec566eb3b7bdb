"""Files of the command: what is read is never written over, and what is written is whole."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import forked_command
import pytest
from conftest import fork_server
from fork_server import WITHOUT_MEGATRON

from megatron_lossagg.cli.files import OutputError, check_outputs, printable, write_whole
from megatron_lossagg.cli.main import _COMMANDS, main

RECORDS = "".join(f'{{"prompt_id": {n % 2}, "response_length": {n + 3}}}\n' for n in range(6))
HOSTILE = "\x1b[31mred\x1b]0;owned\x07\u202e\n.jsonl"
UNDECODABLE = os.fsdecode(b"bad\xff.jsonl")


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Return recorded rollouts in the current folder."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "rollouts.jsonl"
    file.write_text(RECORDS)
    return file


def lossagg(*arguments, **options):
    """Run the command in a process of its own."""
    program = [sys.executable, "-m", "megatron_lossagg", *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(program, text=True, errors="surrogateescape", **options)


def spelled(kind, file):
    """Return another spelling of a file."""
    other = file.with_name("other.jsonl")
    if kind == "symbolic link":
        other.symlink_to(file.name)
    elif kind == "hard link":
        other.hardlink_to(file)
    elif kind == "linked folder":
        folder = file.parent / "folder"
        folder.symlink_to(".")
        return folder / file.name
    elif kind == "relative":
        return f"../{file.parent.name}/{file.name}"
    return other if other.exists() else file


READS_AND_WRITES = {
    "plot --html": lambda read, write: ["plot", read, "--html", write],
    "plot --png": lambda read, write: ["plot", read, "--png", write],
}
WRITES = {
    **READS_AND_WRITES,
    "explain --json": lambda _, write: ["explain", "token_mean", "--json", write],
}


@pytest.mark.parametrize(
    "kind", ["itself", "relative", "symbolic link", "hard link", "linked folder"]
)
@pytest.mark.parametrize("write", READS_AND_WRITES)
def test_an_output_that_is_an_input_is_refused_by_any_spelling(recorded, capsys, write, kind):
    output = spelled(kind, recorded)
    assert main(list(map(str, WRITES[write](recorded, output)))) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert f"{write.split()[1]} {output} is {recorded}, which is read: name another file" in line
    assert not out
    assert recorded.read_text() == RECORDS


def test_an_output_that_is_the_tokenizer_is_refused(recorded, capsys):
    tokenizer = recorded.with_name("tokenizer.json")
    tokenizer.write_text("{}")
    arguments = ["--tokenizer", str(tokenizer), "--html", str(tokenizer)]
    assert main(["plot", str(recorded), *arguments]) == 2
    assert f"{tokenizer}, which is read" in capsys.readouterr().err
    assert tokenizer.read_text() == "{}"


@pytest.mark.parametrize("exists", [True, False])
def test_one_file_for_two_outputs_is_refused(recorded, capsys, exists):
    output = recorded.with_name("page.html")
    if exists:
        output.write_text("older")
    assert main(["plot", str(recorded), "--html", "page.html", "--png", str(output)]) == 2
    err = capsys.readouterr().err
    assert f"--png {output} and --html page.html are the same file: name another file" in err
    assert output.exists() == exists


def test_the_outputs_of_verify_are_checked_before_its_run(recorded, capsys):
    assert main(["verify", "--json", str(recorded), "--markdown", str(recorded)]) == 2
    out, err = capsys.readouterr()
    assert "are the same file: name another file" in err
    assert not out
    assert recorded.read_text() == RECORDS


def test_a_default_picture_replaces_no_file(recorded, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    picture = recorded.with_name("rollouts.png")
    target = recorded.with_name("absent.png")
    for make in (lambda: picture.write_text("mine"), lambda: picture.symlink_to(target)):
        make()
        before = picture.is_symlink() or picture.read_text()
        assert main(["plot", str(recorded)]) == 2
        out, err = capsys.readouterr()
        assert "got rollouts.png, which exists, and no --png: give --png rollouts.png" in err
        assert not out
        assert (picture.is_symlink() or picture.read_text()) == before
        assert not target.exists()
        picture.unlink()
    picture.write_text("mine")
    assert main(["plot", str(recorded), "--png", "rollouts.png"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_existing_output_is_replaced_whole_and_keeps_its_link_and_its_mode(recorded):
    real, link = recorded.with_name("real.json"), recorded.with_name("link.json")
    real.write_text("older")
    real.chmod(0o640)
    link.symlink_to("real.json")
    with real.open() as opened:
        assert main(["explain", "token_mean", "--json", "link.json"]) == 0
        assert opened.read() == "older"  # whoever reads the older one reads it to its end
    assert json.loads(real.read_text())["mode"] == "token_mean"
    assert link.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert sorted(file.name for file in recorded.parent.iterdir()) == [
        "link.json", "real.json", "rollouts.jsonl",
    ]  # fmt: skip


def test_a_new_output_has_the_permissions_of_any_new_file(recorded):
    recorded.with_name("any").touch()
    write_whole("--json", recorded.with_name("new.json"), "text")
    modes = {recorded.with_name(name).stat().st_mode for name in ("any", "new.json")}
    assert len(modes) == 1


# Runs commands where no file may grow beyond 100 bytes; prints of each its status and what it said.
NO_SPACE = """
import contextlib, importlib, io, json, resource, sys
from megatron_lossagg.cli.main import main
for name in ("pandas", "matplotlib.font_manager"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)  # before there is no space for what they keep
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
ended = []
for command in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        status = main(command)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    ended.append([status, err.getvalue()])
print(json.dumps(ended))
"""


@pytest.fixture(scope="module")
def without_space(launches, tmp_path_factory):
    """Run each command; return its folder, its status and what it said.

    In a process of their own: early launches write files from this one.
    """
    folders = {write: tmp_path_factory.mktemp("without_space") for write in WRITES}
    script = tmp_path_factory.mktemp("script") / "script.py"
    script.write_text(NO_SPACE)
    commands = []
    for write, folder in folders.items():
        (folder / "rollouts.jsonl").write_text(RECORDS)
        (folder / "older").write_text("older")
        commands.append(list(map(str, WRITES[write](folder / "rollouts.jsonl", folder / "older"))))
    command = [str(script), json.dumps(commands)]
    done = fork_server(WITHOUT_MEGATRON).launch(command, processes=1, timeout=300)
    assert done.returncode == 0, done.stderr
    ended = json.loads(done.stdout.splitlines()[-1])
    return {
        write: (folder, *how) for (write, folder), how in zip(folders.items(), ended, strict=True)
    }


@pytest.mark.parametrize("write", WRITES)
def test_an_output_that_cannot_be_finished_leaves_the_older_one(without_space, write):
    if "plot" in write:
        pytest.importorskip("pandas", reason="pandas is not installed")
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    folder, status, said = without_space[write]
    older = folder / "older"
    assert status == 2
    (line,) = said.splitlines()
    assert f"{write.split()[1]} {older} cannot be written (File too large)" in line
    assert older.read_text() == "older"
    assert sorted(file.name for file in folder.iterdir()) == ["older", "rollouts.jsonl"]


def test_an_output_may_be_a_pipe(recorded):
    pipe = recorded.with_name("pipe")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole("--json", pipe, "text")
    assert os.read(reader, 10) == b"text"
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)


@pytest.mark.parametrize("path", ["absent/file", ".", "rollouts.jsonl/file"])
def test_an_output_that_cannot_be_written_is_refused_before_the_work(recorded, path):
    with pytest.raises(OutputError, match=r"--json .* cannot be written: name a file in a folder"):
        check_outputs({"--json": recorded.parent / path})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ünï.jsonl", "plain ünï.jsonl"),
        ("\x1b[31m\a\n\t\x7f\x9b", r"\x1b[31m\x07\n\t\x7f\x9b"),
        (UNDECODABLE, r"bad\udcff.jsonl"),
        ("\u202e", r"\u202e"),
        (r"back\slash", r"back\slash"),
    ],
)
def test_what_a_terminal_would_act_on_is_printed_as_an_escape(text, shown):
    assert printable(text) == shown


def test_a_hostile_file_name_is_printed_with_escapes_and_works(tmp_path, monkeypatch, capsys):
    pytest.importorskip("pandas", reason="pandas is not installed")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.chdir(tmp_path)
    name = HOSTILE + UNDECODABLE
    file, page = tmp_path / name, tmp_path / f"{name}.html"
    file.write_text(RECORDS)
    assert main(["plot", str(file), "--html", str(page)]) == 0
    plotted = capsys.readouterr().out
    assert "</html>" in page.read_text()
    file.write_text("{")
    assert main(["plot", str(file), "--html", str(page)]) == 2
    refused = capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["explain", "token_mean", name])
    for text in (plotted, refused, capsys.readouterr().err):
        assert printable(name) in text
        assert text.replace("\n", "").isprintable()
    assert len(refused.splitlines()) == 1


@pytest.mark.launches
def test_a_full_output_ends_in_one_line():
    """What argparse printed too, at the end of the interpreter."""
    with Path("/dev/full").open("w") as full:
        done = lossagg("--version", stdout=full)
    message = "lossagg: the output cannot be written (No space left on device)\n"
    assert (done.returncode, done.stderr) == (1, message)


def test_a_full_device_named_as_an_output_ends_in_one_line(recorded, capsys):
    assert main(["explain", "token_mean", "--json", "/dev/full"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--json /dev/full cannot be written (No space left on device)" in line


@pytest.mark.launches
def test_a_reader_that_ended_ends_a_command_without_a_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    done = lossagg("verify", "--help", stdout=writer)
    os.close(writer)
    assert done.returncode in (1, -signal.SIGPIPE)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert len(done.stderr.splitlines()) <= 1


def test_an_interrupt_ends_a_command_that_is_still_being_imported(tmp_path, monkeypatch):
    """Importing torch takes most of the time of ``explain``."""
    tmp_path.joinpath("slow_command.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(_COMMANDS, "explain", ("slow_command", "", ""))
    assert main(["explain", "token_mean"]) == 128 + signal.SIGINT


@pytest.mark.launches
def test_a_closed_output_ends_without_a_traceback():
    done = forked_command.lossagg("explain", "token_mean", output="closed")
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 1
