"""Each wrong factor applies to the source as it is; ``make wrong-factors`` sees it caught."""

import shutil

import pytest
from wrong_factors import run


@pytest.mark.parametrize("file", sorted(run.HERE.glob("*.txt")), ids=lambda file: file.stem)
def test_its_lines_occur_once_in_the_source(file, tmp_path):
    shutil.copytree(run.ROOT / "megatron_lossagg", tmp_path / "megatron_lossagg")
    before = {path: path.read_text() for path in tmp_path.rglob("*.py")}
    run.apply(file, tmp_path)  # which adds the faults to verify/causes.py, too
    changed = [path for path, text in before.items() if path.read_text() != text]
    assert len([path for path in changed if path.name != "causes.py"]) == 1
    assert "predictions" in (tmp_path / "megatron_lossagg/verify/causes.py").read_text()


def test_lines_that_do_not_occur_are_an_error(tmp_path):
    (tmp_path / "a.py").write_text("one\n")
    patch = tmp_path / "patch.txt"
    patch.write_text("A fault\n\na.py\n<<<<<<<\ntwo\n=======\nthree\n>>>>>>>\n")
    with pytest.raises(SystemExit, match=r"occur 0 times in a\.py, expected 1"):
        run.apply(patch, tmp_path)
