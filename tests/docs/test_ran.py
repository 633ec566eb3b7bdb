"""``docs/reference/ran.md`` is printed from the files that the runs write, and they write them."""

import subprocess
import sys

import pytest
import ran
from conftest import TESTS

sys.path.insert(0, str(TESTS.parent / "tools"))

import ran_page  # of tools/
from versions import RELEASES


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.setattr(ran, "WRITTEN", tmp_path)
    return tmp_path


def test_the_page_of_last_runs_is_what_the_files_give():
    assert ran_page.PAGE.read_text() == ran_page.page(), "run python -m tools.ran_page"


@pytest.mark.parametrize("file", sorted(ran.COMMITTED.glob("*.tsv")), ids=lambda file: file.stem)
def test_a_row_has_a_cell_for_each_column_and_is_there_once(file):
    header, *rows = ran.read(file)
    assert {len(row) for row in rows} <= {len(header)}
    assert ran_page.taken([header], rows) == [header, *rows]


def test_every_supported_release_has_a_row():
    (_, *rows) = ran.read(ran.COMMITTED / "megatron_core.tsv")
    assert {*RELEASES} <= {row[0] for row in rows}


def test_a_later_run_takes_the_place_of_the_earlier_of_the_same_and_of_no_other():
    rows = [["what", "Python", "result"], ["a", "3.10", "good"], ["b", "3.10", "good"]]
    again, newer, other = ["a", "3.10", "bad"], ["a", "3.11", "good"], ["c", "3.10", "bad"]
    assert ran_page.taken(rows, [again, newer, other]) == [rows[0], again, rows[2], newer, other]


def test_a_run_writes_what_it_knows_between_its_python_and_the_date(written):
    ran.write("newest", "primus", "624b824a8 of 2026-08-21", "9 of 9", "12 PASS")
    ((system, python, commit, names, own, date),) = ran.read(written / "newest.tsv")
    assert [system, commit, names, own] == [
        "primus",
        "624b824a8 of 2026-08-21",
        "9 of 9",
        "12 PASS",
    ]
    assert python == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert date[:2] == "20"


def test_a_file_of_tests_is_written_with_the_commits_of_the_checkouts_that_it_names(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("FRAMEWORKS_DIR", str(tmp_path))
    file = "tests/frameworks/primus/test_weigh_primus.py"
    (tmp_path / "Megatron-LM").mkdir()  # no clone: which commit it is nobody knows
    assert ran.release_of(file) == ""
    git = ["git", "-C", tmp_path / "Primus", "-c", "user.name=a", "-c", "user.email=a"]
    subprocess.run(["git", "init", "--quiet", tmp_path / "Primus"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message=a"], check=True)
    head = subprocess.check_output([*git, "rev-parse", "--short=8", "HEAD"], text=True).strip()
    assert ran.release_of(file) == f"Primus {head}"
    assert ran.release_of("tests/frameworks/several/test_page_lines.py") == ""  # needs none
    monkeypatch.delenv("FRAMEWORKS_DIR")
    assert ran.release_of(file) == ""
