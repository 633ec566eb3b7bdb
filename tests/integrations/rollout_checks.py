"""What released verl and TRL write of their rollouts, by their own code, is what we read."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def tree_of(package, *parts):
    """Parse a file of a package without importing it: it needs ray and more."""
    folder = Path(importlib.util.find_spec(package).origin).parent
    return ast.parse(folder.joinpath(*parts).read_text())


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
    out = subprocess.check_output(command, text=True, cwd=Path(__file__).parents[2])
    assert out.split("\n")[:2] == ["[3, 2, 0]", "[0, 0, 1]"]


def test_what_trl_dumps_has_the_names_that_are_read_and_no_length():
    """Its table is Parquet, which tests/cli/test_rollouts.py reads where pyarrow is installed."""
    (table,) = [
        node.value
        for node in ast.walk(tree_of("trl", "trainer", "grpo_trainer.py"))
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "table"
        and isinstance(node.value, ast.Dict)
    ]
    names = [key.value for key in table.keys if key is not None]
    assert names == ["step", "prompt", "completion", "advantage"]
