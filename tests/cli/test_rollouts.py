"""Reading recorded rollouts: what every known file has, or an error that names file and place."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from recorded import columns, json_lines, read

from megatron_lossagg.cli.files import MissingPackageError
from megatron_lossagg.cli.rollouts import (
    COLUMNS,
    RolloutsError,
)

pytest.importorskip("pandas", reason="pandas is not installed")

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "examples" / "drgrpo" / "data" / "rollouts.jsonl"
CHARACTERS = ["--characters"]


@pytest.mark.parametrize(
    ("record", "flags", "lengths", "source"),
    [
        ({"response": "abc", "prompt": "q"}, CHARACTERS, 3, "text from response, prompt"),
        ({"completion_ids": [5, 6, 7]}, (), 3, "lengths from completion_ids"),
        ({"completion_ids": [5, 6, 7], "completion_mask": [1, 0, 1]}, (), 2, "completion_mask"),
        ({"response_ids": [5], "response_mask": [1]}, (), 1, "mask from response_mask"),
        ({"messages": [{"role": "assistant", "content": "ab"}]}, CHARACTERS, 2, "messages"),
        ({"response": "abc", "response_length": 9}, (), 9, "lengths from response_length"),
    ],
)
def test_the_usual_names_of_a_response_are_read(tmp_path, record, flags, lengths, source):
    rollouts = read(json_lines(tmp_path / "a.jsonl", [record, record]), flags=flags)
    assert [step["active_tokens"].tolist() for step in rollouts.steps] == [[lengths] * 2]
    assert source in rollouts.notes[0]
    if "prompt" in record:
        assert rollouts.steps[0]["prompt"].tolist() == [0, 0]


def test_a_mask_is_as_long_as_its_token_ids(tmp_path):
    file = json_lines(tmp_path / "a.jsonl", [{"completion_ids": [5, 6], "completion_mask": [1]}])
    with pytest.raises(RolloutsError, match="completion_mask has 1 value, expected completion_ids"):
        read(file)


CHAT = [
    {"role": "system", "content": "sys"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "abc"},
    {"role": "user", "content": "more?"},
    {"role": "assistant", "content": "de"},
]
TRL = {"step": [4, 4], "completion": ["abcd", "e"], "reward": [0.0, 1.0]}
SAID = [[{"role": "assistant", "content": "abcd"}], [{"role": "assistant", "content": "e"}]]

READ = {
    "own": (
        [{"prompt_id": "a", "mask": [1, 0, 1]}, {"prompt_id": "b", "mask": [1]}],
        [],
        ([2, 1], [0, 1], None),
        "mask, prompt from prompt_id",
    ),
    "a mask before the length": (
        [
            {"prompt_id": "a", "response_length": 3, "mask": [1, 0, 1]},
            {"prompt_id": "b", "response_length": 5},
            {"prompt_id": "a", "response_length": 0},
        ],
        [],
        ([2, 5, 0], [0, 1, 0], None),
        "mask, lengths from response_length, prompt from prompt_id",
    ),
    "SFT": ([{"messages": CHAT}], CHARACTERS, ([5], None, None), "text from messages"),
    "other names": (
        [{"n": 3, "uid": 7, "response_length": 9}, {"n": 4, "uid": "7", "response_length": 9}],
        ["--column", "lengths=n", "--column", "prompt=uid"],
        ([3, 4], [0, 1], None),
        "lengths from n, prompt from uid",
    ),
    "other texts": (
        [{"question": "q", "conversation": CHAT}],
        ["--column", "text=conversation", "--column", "prompt=question", *CHARACTERS],
        ([5], [0], None),
        "text from conversation, prompt from question",
    ),
    "a sample without an id": (
        [{"sample_id": one, "response_length": 1} for one in (5, None, 5, None)],
        [],
        ([1, 1, 1, 1], None, [0, 1, 0, 2]),
        "lengths from response_length, sample from sample_id",
    ),
    "large ids with a gap": (
        [{"sample_id": 2**53 + n, "response_length": 1} for n in (1, 0, 1)]
        + [{"response_length": 1}],
        [],
        ([1, 1, 1, 1], None, [0, 1, 0, 2]),
        "lengths from response_length, sample from sample_id",
    ),
}


@pytest.mark.parametrize(("records", "flags", "numbers", "source"), READ.values(), ids=READ)
def test_every_known_file_has_its_lengths_prompts_and_samples(
    tmp_path, records, flags, numbers, source
):
    rollouts = read(json_lines(tmp_path / "r.jsonl", records), flags=flags)
    assert columns(rollouts.steps[0]) == [*numbers]
    assert rollouts.notes[0] == f"Read from r.jsonl: {source}."
    assert rollouts.unit == ("character" if flags[-1:] == CHARACTERS else "token")
    assert any("Lengths are char" in note for note in rollouts.notes) == (flags[-1:] == CHARACTERS)


@pytest.mark.parametrize("table", [
    {**TRL, "prompt": ["q", "q"]},
    {**TRL, "prompt": [[{"role": "user", "content": "q"}]] * 2, "completion": SAID},
], ids=["texts", "messages"])  # fmt: skip
def test_a_trl_table_is_read_with_texts_or_messages(tmp_path, table):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    file = tmp_path / "completions_00004.parquet"
    parquet.write_table(pyarrow.table(table), file)
    rollouts = read(file, flags=CHARACTERS)
    assert columns(rollouts.steps[0]) == [[4, 1], [0, 0], None]
    assert rollouts.notes[0].endswith("text from completion, prompt, step.")


def test_large_ids_of_a_table_with_gaps_are_not_rounded(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    ids = [2**53, 2**53 + 1, 2**53, None]
    table = pyarrow.table({"sample_id": ids, "response_length": [1, 1, 1, 1]})
    parquet.write_table(table, tmp_path / "r.parquet")
    assert columns(read(tmp_path / "r.parquet").steps[0])[2] == [0, 1, 0, 2]


def test_the_recorded_rollouts_have_their_own_steps_prompts_and_masks():
    rollouts = read(RECORDED)
    records = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    assert len(rollouts.steps) == len({record["step"] for record in records}) == 20
    for number, step in enumerate(rollouts.steps, 1):
        of_step = [record for record in records if record["step"] == number]
        assert step.active_tokens.tolist() == [sum(record["mask"]) for record in of_step]
        prompt = step["prompt"].to_numpy()
        ids = np.array([record["prompt_id"] for record in of_step])
        assert ((prompt[:, None] == prompt) == (ids[:, None] == ids)).all()


def test_a_file_without_steps_is_one_step_and_several_files_are_several(tmp_path):
    files = [
        json_lines(tmp_path / f"{n}.jsonl", [{"prompt_id": 0, "response_length": n}])
        for n in (3, 4)
    ]
    rollouts = read(*files, files[0])
    assert [columns(step)[0] for step in rollouts.steps] == [[3], [4], [3]]
    assert rollouts.notes[0].startswith("Read from 3.jsonl and 2 more files: lengths from")


def test_a_step_with_no_active_token_is_left_out_and_counted(tmp_path):
    records = [{"response_length": 0, "step": 1}, {"response_length": 2, "step": 2}]
    rollouts = read(json_lines(tmp_path / "r.jsonl", records))
    assert columns(rollouts.steps[0]) == [[2], None, None]
    assert len(rollouts.steps) == 1
    assert "1 step with no active token: left out." in rollouts.notes


def saved_tokenizer(folder):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_a_tokenizer_encodes_texts_again(tmp_path):
    flags = ["--tokenizer", str(saved_tokenizer(tmp_path))]
    file = json_lines(tmp_path / "7.jsonl", [{"input": "q", "output": "a b a long word"}])
    rollouts = read(file, flags=flags)
    assert columns(rollouts.steps[0])[0] == [5]
    assert rollouts.unit == "token"
    assert "Lengths are those of texts encoded again" in rollouts.notes[1]
    with pytest.raises(RolloutsError, match="cannot be read"):
        read(file, flags=["--tokenizer", str(file)])


@pytest.mark.parametrize(
    ("package", "file", "flags"),
    [
        ("pandas", "c.jsonl", []),
        ("pyarrow.parquet", "c.parquet", []),
        ("tokenizers", "c.jsonl", ["--tokenizer", "t.json"]),
    ],
)
def test_a_package_that_is_absent_is_named(tmp_path, monkeypatch, package, file, flags):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / file).write_text('{"response_length": 1}')
    package = package.partition(".")[0]
    extra = {"pandas": "plot", "pyarrow": "parquet"}.get(package, package)
    message = rf"needs {package}, which.*pip install 'megatron-lossagg\[{extra}\]'"
    with pytest.raises(MissingPackageError, match=message):
        read(tmp_path / file, flags=flags)


def test_the_usual_names_are_those_of_the_page():
    page = (ROOT / "docs" / "plot.md").read_text()
    lines = {line.split("|")[1].strip(" `"): line for line in page.splitlines() if "|" in line}
    for column, (usual, _, _) in COLUMNS.items():
        assert re.findall(r"`(\w+)`", lines[column].split("|")[2]) == [*usual]
