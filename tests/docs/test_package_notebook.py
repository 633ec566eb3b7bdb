"""``examples/which_mode.ipynb`` runs from top to bottom and prints what is committed."""

import ast
import base64
import contextlib
import importlib.util
import io
import json
import os
from pathlib import Path

import pytest

import megatron_lossagg

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "which_mode.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def printed(cell):
    """Return what a cell wrote to its standard output."""
    streams = [out for out in cell["outputs"] if out["output_type"] == "stream"]
    assert all(out["name"] == "stdout" for out in streams)
    return "".join("".join(out["text"]) for out in streams)


def test_its_cells_are_committed_as_a_run_from_top_to_bottom_left_them():
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    pictures = [
        output["data"]["image/png"]
        for cell in CELLS
        for output in cell["outputs"]
        if "image/png" in output.get("data", {})
    ]
    (picture,) = map(base64.b64decode, pictures)
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 150_000
    assert "/tmp" not in NOTEBOOK.read_text()


def test_it_imports_public_names_only():
    code = "\n".join("".join(cell["source"]) for cell in CELLS)
    imported = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imported if node.module.startswith("megatron_lossagg")]
    assert {node.module for node in ours} == {"megatron_lossagg"}
    assert {name.name for node in ours for name in node.names} <= set(megatron_lossagg.__all__)


@pytest.mark.launches
def test_its_code_prints_what_is_committed(monkeypatch):
    """Without Jupyter, which the one cell that shows the picture needs."""
    for name in ("matplotlib", "pandas"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    monkeypatch.chdir(NOTEBOOK.parent)
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))  # of lossagg plot
    names = {}
    for cell in CELLS:
        if "from IPython" in "".join(cell["source"]):
            assert names["PICTURE"].read_bytes().startswith(b"\x89PNG")
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(ast.parse("".join(cell["source"])), NOTEBOOK.name, "exec"), names)
        assert out.getvalue() == printed(cell)


@pytest.mark.launches
@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("nbclient", "ipykernel")),
    reason="nbclient and ipykernel are not installed: pip install '.[notebook]'",
)
def test_jupyter_runs_it():
    nbclient = importlib.import_module("nbclient")
    notebook = importlib.import_module("nbformat").read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    ).execute()
    fresh = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [printed(cell) for cell in fresh] == [printed(cell) for cell in CELLS]
