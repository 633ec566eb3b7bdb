"""Recorded rollouts that cannot be read: an error of one line that names file and record."""

import json
import os
import re

import pytest
import torch

from megatron_lossagg.cli.main import main

pytest.importorskip("pandas", reason="pandas is not installed")

SAMPLE = {"group_index": 0, "response_length": 2, "loss_mask": None, "remove_sample": False}
"""Of a dump."""
TOOL = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]
CALLS = [{"role": "assistant", "content": "a", "tool_calls": [{"name": "f"}]}]
PARTS = [{"role": "assistant", "content": ["part"]}]
NO_JSON = "record 1 cannot be read .*, expected JSON lines"
LINES = [
    ("", "got no records"),
    ("{", NO_JSON),
    ('{"response_length": 1}\n{"response_le', "record 2 cannot be read .*, expected JSON lines"),
    ("[" * 100_000 + "]" * 100_000, NO_JSON),
    ("9" * 5_000, NO_JSON),
    (b'{"prompt_id": "\xff"}', NO_JSON),
    (b"\x00\x1b[31m", NO_JSON),
    ("\ufeff{}", NO_JSON),
    ("[1]", NO_JSON),
    ('{"prompt_id": 1}', r"record 1: got no length in \['prompt_id'\]: give 'mask'"),
    (f'{{"{"k" * 5_000}": 1}}', r"record 1: got no length in \['k+\.\.\."),
    ('{"response_length": 1}\n{"step": 0}', "record 2: got no length"),
    ('{"output": "abc"}', "record 1: got no length in .'output'.*--characters"),
    ('{"mask": [1, 2]}', r"record 1: mask is \[1, 2\], expected a list of 0 and 1"),
    ('{"mask": [[1], [0]]}', r"mask is \[\[1\], \[0\]\], expected a list of 0 and 1"),
    ('{"mask": "11"}', "mask is '11', expected a list"),
    ('{"mask": [1], "response_length": 2}', "mask has 1 value, expected response_length, 2"),
    ('{"response_length": -1}', "response_length is -1, expected an integer from 0"),
    ('{"response_length": true}', "response_length is True, expected an integer"),
    ('{"response_length": 1.5}', "response_length is 1.5, expected an integer"),
    ('{"response_length": "1"}', "response_length is '1', expected an integer"),
    ('{"response_length": 1, "step": "a"}', "step is 'a', expected an integer"),
    ('{"response_length": 1, "prompt_id": 1.5}', "prompt_id is 1.5, expected a string, an int"),
    ('{"response_length": 1, "sample_id": true}', "sample_id is True, expected a string, an i"),
    ('{"response_length": 1, "sample_id": 2.0}', r"sample_id is 2\.0, expected a string"),
    ('{"response_length": NaN}', "response_length is nan, expected an integer"),
    ('{"response_length": 1, "step": NaN}', "step is nan, expected an integer"),
    ('{"mask": [1, NaN]}', r"mask is \[1, nan\], expected a list of 0 and 1"),
    ('{"response_length": 1, "remove_sample": 1}', "remove_sample is 1, expected true or false"),
    ('{"response_length": 0}', "got 1 response and no active token"),
    (
        '{"response_length": 1, "input": 1}\n\n{"response_length": 1}',
        "record 2: got no input: give",
    ),
    ('{"response_length": 9007199254740992}\n' * 2_000, "the most that a step can count"),
]
TEXTS = [
    ('{"output": "abc", "mask": [1]}', "r.jsonl: got 'mask', and .*leave the flag out"),
    ('{"output": "a"}\n{"response_length": 3}', "got 'response_length', and .*leave the flag out"),
    ('{"output": 5}', "output is 5, expected a text"),
    (json.dumps({"completion": TOOL}), "completion is .*, expected a text, or messages without to"),
    (json.dumps({"messages": CALLS}), "messages is .*, expected a text, or messages without tools"),
    (json.dumps({"messages": PARTS}), "messages is .*, expected a text, or messages without tools"),
]


def endless():
    value = []
    value.append(value)
    return value


RECORDS = [
    ({"loss_mask": torch.zeros(2).to_sparse()}, "loss_mask is tensor.*, expected a list"),
    ({"loss_mask": torch.zeros(2, device="meta")}, "loss_mask is tensor.*, expected a list"),
    ({"group_index": torch.zeros(2, device="meta")}, "group_index is tensor.*, expected"),
    ({"group_index": [torch.zeros(2, device="meta")]}, "group_index is .*, expected"),
    ({"group_index": endless()}, "group_index is .*, expected a string"),
    ({"group_index": {1: 2, "a": 3}}, "group_index is .*, expected a string"),
    ({"response_length": torch.ones(2, 2)}, "response_length is .*, expected an integer"),
]
DUMP = "expected --save-debug-rollout-data of "
FILES = [
    ("r.csv", "no table", r"got the ending '.csv', expected .jsonl, .parquet, .pt"),
    ("r.parquet", "no table", "cannot be read .*, expected Parquet"),
    ("r.pt", "no table", f"cannot be read .*, {DUMP}"),
    ("r.pt", [1], DUMP),
    ("r.pt", {"samples": 5}, DUMP),
    ("r.pt", {"samples": [1]}, f"cannot be read .*, {DUMP}"),
    ("r.pt", {"samples": []}, "got no records"),
]
FAULTS = [
    *(("r.jsonl", line, [], message) for line, message in LINES),
    *(("r.jsonl", line, ["--characters"], message) for line, message in TEXTS),
    *(("r.pt", {"samples": [SAMPLE, {**SAMPLE, **record}]}, [], f"record 2: {message}")
      for record, message in RECORDS),
    *((name, content, [], message) for name, content, message in FILES),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Validating sparse tensor:UserWarning")  # torch 2.14's
@pytest.mark.parametrize(("name", "content", "flags", "message"), FAULTS, ids=range(len(FAULTS)))
def test_a_fault_ends_in_one_short_line_with_file_and_record(
    tmp_path, capsys, name, content, flags, message
):
    file = tmp_path / name
    if isinstance(content, str | bytes):
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    else:
        torch.save(content, file)
    pytest.importorskip("pyarrow" if name == "r.parquet" else "pandas", reason="not installed")
    assert main(["plot", str(file), "--html", os.devnull, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)
    assert name in line or "a step can count" in line
    assert len(line) < 600


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *((given, f"got '{given}', expected such as") for given in ("lengths", "lengths=", "n=a")),
        (
            "lengths=n",
            r"--column lengths=n: got \['response_length', 'prompt_id'\], expected one of these",
        ),
    ],
)
def test_a_column_that_is_none_is_wrong_usage(tmp_path, capsys, given, message):
    file = tmp_path / "r.jsonl"
    file.write_text('{"response_length": 1, "prompt_id": 2}')
    try:
        status = main(["plot", str(file), "--html", os.devnull, "--column", given])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("name", ["n" * 300 + ".jsonl", "loop.jsonl", "pipe.jsonl", "dir.jsonl"])
def test_a_path_that_leads_to_no_file_is_refused(tmp_path, capsys, name):
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    (tmp_path / "dir.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert main(["plot", str(tmp_path / name), "--html", os.devnull]) == 2
    assert "which is not a file" in capsys.readouterr().err
