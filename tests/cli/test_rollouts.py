"""Reading recorded rollouts: what every known file has, or an error that names file and place."""

import argparse
import json
import os
import pickle
import re
import struct
import subprocess
import sys
from pathlib import Path

import forked_command
import numpy as np
import pytest
import torch
from frameworks import checkout_of, needs

from megatron_lossagg.cli.extras import MissingPackageError
from megatron_lossagg.cli.main import main
from megatron_lossagg.cli.rollouts import RolloutsError, add_reading_arguments, read_rollouts

RECORDED = Path(__file__).parents[2] / "examples" / "drgrpo" / "data" / "rollouts.jsonl"


def options(*flags):
    parser = argparse.ArgumentParser()
    add_reading_arguments(parser)
    return parser.parse_args(flags)


def read(*paths, flags=()):
    return read_rollouts(paths, options(*flags))


def json_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def sample(**fields):
    """Return what slime's and miles' ``Sample.to_dict`` has of a sample."""
    defaults = {
        "group_index": 0, "index": 0, "rollout_id": None, "prompt": "q", "tokens": [1, 2],
        "response": "a", "response_length": 2, "reward": 1.0, "loss_mask": None,
        "remove_sample": False, "status": "completed", "metadata": {},
    }  # fmt: skip
    return {**defaults, **fields}


def columns(step):
    """Return the numbers of a step; ids count from the first one of the step."""
    ids = [step[name].tolist() if name in step else None for name in ("prompt", "sample")]
    return step["active_tokens"].tolist(), *ids


def test_the_recorded_rollouts_have_their_own_steps_prompts_and_masks():
    rollouts = read(RECORDED)
    records = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    assert len(rollouts.steps) == len({record["step"] for record in records}) == 20
    for number, step in enumerate(rollouts.steps, 1):
        of_step = [record for record in records if record["step"] == number]
        assert step.active_tokens.tolist() == [sum(record["mask"]) for record in of_step]
        prompt = step["prompt"].to_numpy()
        same = prompt[:, None] == prompt
        ids = np.array([record["prompt_id"] for record in of_step])
        assert (same == (ids[:, None] == ids)).all()
    assert rollouts.source == "rollouts.jsonl: lengths from mask, prompts from prompt_id"


def test_a_mask_counts_before_the_response_length(tmp_path):
    file = json_lines(
        tmp_path / "r.jsonl",
        [
            {"prompt_id": "a", "response_length": 3, "mask": [1, 0, 1]},
            {"prompt_id": "b", "response_length": 5},
            {"prompt_id": "a", "response_length": 0},
        ],
    )
    rollouts = read(file)
    assert columns(rollouts.steps[0]) == ([2, 5, 0], [0, 1, 0], None)
    assert rollouts.source.endswith("lengths from mask and response_length, prompts from prompt_id")


def test_a_file_without_steps_is_one_step_and_several_files_are_several(tmp_path):
    files = [
        json_lines(tmp_path / f"{n}.jsonl", [{"prompt_id": 0, "response_length": n}])
        for n in (3, 4)
    ]
    assert [columns(step)[0] for step in read(*files).steps] == [[3], [4]]


def test_a_step_with_no_active_token_is_left_out_and_counted(tmp_path):
    records = [{"response_length": 0, "step": 1}, {"response_length": 2, "step": 2}]
    rollouts = read(json_lines(tmp_path / "r.jsonl", records))
    assert columns(rollouts.steps[0]) == ([2], None, None)
    assert (len(rollouts.steps), rollouts.masked_steps) == (1, 1)


@pytest.mark.parametrize("made", [torch.tensor, np.array], ids=["tensors", "arrays"])
def test_a_slime_dump_is_read_with_removed_samples_and_split_rollouts(tmp_path, made):
    samples = [
        sample(loss_mask=[1, 0]),
        sample(group_index=1, remove_sample=True),
        sample(group_index=1, rollout_id=7, rollout_routed_experts=made([[0, 1]])),
        sample(group_index=1, rollout_id=7, response_length=5, reward=made(1.0)),
        sample(group_index=1, loss_mask=made([1, 1])),
    ]
    file = tmp_path / "3.pt"
    torch.save({"rollout_id": 3, "samples": samples}, file)
    (step,) = read(file, flags=["--trust-pickle"] if made is np.array else []).steps
    assert columns(step) == ([1, 0, 2, 5, 2], [0, 1, 1, 1, 1], [0, 1, 2, 2, 3])


@pytest.mark.parametrize("made", [torch.tensor, np.array])
@pytest.mark.parametrize("ids", [[4, 4, 5], [[1, 2], [1, 2], [1, 3]]], ids=["numbers", "tokens"])
def test_ids_that_are_tensors_or_arrays_are_told_apart_by_value(tmp_path, made, ids):
    names = ("group_index", "rollout_id")
    for wrapped in (made, lambda part: [made(part)]):
        samples = [sample(**{name: wrapped(value) for name in names}) for value in ids]
        torch.save({"samples": samples}, tmp_path / "3.pt")
        flags = ["--trust-pickle"] if made is np.array else []
        found = read(tmp_path / "3.pt", flags=flags)
        assert columns(found.steps[0]) == ([2, 2, 2], [0, 0, 1], [0, 0, 1])


def test_long_ids_differ_where_one_value_does(tmp_path):
    """Printed, both tensors are [0, 0, 0, ..., 0, 0, 0]."""
    ids = [torch.zeros(5000, dtype=torch.int64) for _ in range(2)]
    ids[1][2500] = 1
    torch.save({"samples": [sample(group_index=[i]) for i in ids]}, tmp_path / "3.pt")
    assert columns(read(tmp_path / "3.pt").steps[0])[1] == [0, 1]


class Called:
    """What a pickle calls when it is loaded."""

    def __init__(self, called, given, state):
        self.made = called, given, state

    def __reduce__(self):
        return self.made


def forged_mask():
    """Make a mask that is an address, which NumPy takes for an object once it is loaded: the flags
    of its dtype, the last number, deny that it holds one.
    """
    fields = {"f": (np.dtype("O"), 0)}
    objects = Called(np.dtype, ("V8", False, True), (3, "|", None, ("f",), fields, 8, 1, 0))
    address = struct.pack("<Q", 0x4141414141414141)
    reconstruct = np._core.multiarray._reconstruct
    return Called(reconstruct, (np.ndarray, (0,), b"b"), (1, (1,), objects, False, address))


@pytest.mark.launches
def test_a_dump_that_forges_an_object_is_refused_before_numpy_sees_it(tmp_path):
    """In another process: reading the address would end it by a signal."""
    file = tmp_path / "forged.pt"
    torch.save({"samples": [sample(loss_mask=forged_mask())]}, file)
    done = forked_command.lossagg("explain", "token_mean", "--lengths-file", file)
    assert done.returncode == 2, done
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"lossagg: {file}: got numpy.")
    assert "--trust-pickle" in line
    assert '{"prompt_id": 7, "response_length": 512}' in line
    assert not done.stdout


@pytest.mark.parametrize("value", [np.zeros(2), np.float64(1), np.dtype("i4")], ids=type)
def test_a_dump_with_numpy_is_loaded_only_when_trusted(tmp_path, value):
    """Whatever torch's own ``weights_only`` refuses."""
    file = tmp_path / "3.pt"
    torch.save({"samples": [sample(metadata={"own": value})]}, file)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(file, weights_only=True)
    with pytest.raises(RolloutsError, match=r"got numpy\S*, expected .*--trust-pickle"):
        read(file)
    assert columns(read(file, flags=["--trust-pickle"]).steps[0])[0] == [2]


class Own:
    """Something that a dump may hold and torch does not load by itself."""


def test_a_pickle_that_may_run_code_is_loaded_only_when_trusted(tmp_path):
    file = tmp_path / "3.pt"
    torch.save({"samples": [sample(metadata={"own": Own()})]}, file)
    with pytest.raises(RolloutsError, match=r"got test_rollouts.Own, expected tensors.*--trust-p"):
        read(file)
    assert columns(read(file, flags=["--trust-pickle"]).steps[0])[0] == [2]


VERL = [
    {"input": "q1", "output": "abc", "gts": None, "score": 0.0, "step": 7, "acc": 1},
    {"input": "q1", "output": "de", "gts": None, "score": 1.0, "step": 7, "acc": 2},
    {"input": "q2", "output": "", "gts": None, "score": 0.0, "step": 7, "acc": 3},
]
"""As verl 0.9.1 writes it; tests/integrations/rollout_checks.py runs its own code."""


def test_texts_without_lengths_are_refused_unless_a_measure_is_given(tmp_path):
    file = json_lines(tmp_path / "7.jsonl", VERL)
    with pytest.raises(RolloutsError, match=r"line 1: got a text \('output'\).*--characters"):
        read(file)
    rollouts = read(file, flags=["--characters"])
    assert columns(rollouts.steps[0]) == ([3, 2, 0], [0, 0, 1], None)
    assert rollouts.unit == "character"
    assert rollouts.caveat.startswith("Lengths are characters, not tokens")
    assert rollouts.source == "7.jsonl: lengths from the text of 'output', prompts from input"


@pytest.mark.parametrize("length", [{"response_length": 3}, {"mask": [1, 1]}])
@pytest.mark.parametrize("flags", [["--characters"], ["--tokenizer", "tokenizer.json"]])
def test_a_measure_of_texts_is_refused_where_a_record_has_a_length(tmp_path, length, flags):
    """Token counts would be called characters, or be mixed with them."""
    if "--tokenizer" in flags:
        flags = ["--tokenizer", str(saved_tokenizer(tmp_path))]
    for records in ([{**VERL[0], **length}], [VERL[0], {**VERL[1], **length}]):
        file = json_lines(tmp_path / "r.jsonl", records)
        with pytest.raises(RolloutsError, match=rf"line {len(records)}: got a length \('") as error:
            read(file, flags=flags)
        assert f"({next(iter(length))!r}) and {flags[0]}" in str(error.value)


def saved_tokenizer(folder):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_a_tokenizer_encodes_texts_again(tmp_path):
    tokenizer = saved_tokenizer(tmp_path)
    file = json_lines(tmp_path / "7.jsonl", [{"input": "q", "output": "a b a long word"}])
    rollouts = read(file, flags=["--tokenizer", str(tokenizer)])
    assert columns(rollouts.steps[0])[0] == [5]
    assert rollouts.unit == "token"
    assert rollouts.caveat.startswith("Lengths are those of texts encoded again")
    with pytest.raises(RolloutsError, match="cannot be read"):
        read(file, flags=["--tokenizer", str(file)])


def test_a_trl_table_is_read_with_texts_or_messages(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    said = [[{"role": "assistant", "content": "abcd"}], [{"role": "assistant", "content": "e"}]]
    asked = [[{"role": "user", "content": "q"}]] * 2
    for completion, prompt in ((["abcd", "e"], ["q", "q"]), (said, asked)):
        table = {"step": [4, 4], "prompt": prompt, "completion": completion, "r": [0.0, 1.0]}
        file = tmp_path / "completions_00004.parquet"
        parquet.write_table(pyarrow.table(table), file)
        rollouts = read(file, flags=["--characters"])
        assert columns(rollouts.steps[0]) == ([4, 1], [0, 0], None)
        assert rollouts.source.endswith("the text of 'completion', prompts from prompt")


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
    (tmp_path / file).write_text("")
    name = package.partition(".")[0]
    extra = {"pandas": "plot", "pyarrow": "parquet"}.get(name, name)
    message = rf"needs {name}, which.*pip install 'megatron-lossagg\[{extra}\]'"
    with pytest.raises(MissingPackageError, match=message):
        read(tmp_path / file, flags=flags)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got no records"),
        ("{", r"line 1: got '\{', expected one JSON object"),
        ("[1]", r"line 1: got \[1\], expected an object"),
        ('{"prompt_id": 1}', "got 'prompt_id', expected a length: give 'mask'"),
        ('{"mask": [1, 2]}', r"mask is \[1, 2\], expected a list of 0 and 1"),
        ('{"mask": "11"}', "mask is '11', expected a list"),
        ('{"mask": [1], "response_length": 2}', "mask has 1 value, expected response_length"),
        ('{"response_length": -1}', "response_length is -1, expected an integer from 0"),
        ('{"response_length": true}', "response_length is True, expected an integer"),
        ('{"response_length": 1.5}', "response_length is 1.5, expected an integer"),
        ('{"response_length": 1, "step": "a"}', "step is 'a', expected an integer"),
        ('{"response_length": 1, "prompt_id": 1.5}', "prompt_id is 1.5, expected a string, an int"),
        ('{"response_length": 1, "sample_id": true}', "sample_id is True, expected a string, an i"),
        ('{"response_length": 0}', "got 1 response and no active token"),
        (
            '{"response_length": 1, "prompt_id": 1}\n\n{"response_length": 1}',
            "line 3: got its prompt from nothing, expected prompt_id",
        ),
    ],
)
def test_a_fault_is_named_by_file_and_line(tmp_path, text, message):
    file = tmp_path / "r.jsonl"
    file.write_text(text)
    with pytest.raises(RolloutsError, match=message) as error:
        read(file)
    assert "r.jsonl" in str(error.value)


DEEP, LONG = "[" * 100_000 + "]" * 100_000, "9" * 5_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (DEEP, r"line 1: got '\[+\.\.\., expected one JSON object \(maximum recursion"),
        (LONG, r"line 1: got '9+\.\.\., expected one JSON object .Exceeds the limit"),
        (f'{{"response_length": 1, "prompt_id": {"[" * 500}{"]" * 500}}}', None),
        (b'{"prompt_id": "\xff"}', "is not UTF-8 text"),
        (b"\x00\x1b[31m", r"line 1: got '\\x00\\x1b\[31m', expected one JSON object"),
        ("\ufeff{}", "line 1: got .* expected one JSON object"),
        (f'{{"{"k" * 5_000}": 1}}', r"line 1: got 'k+\.\.\., expected a length"),
    ],
    ids=["deep", "long", "fairly deep", "Latin-1", "controls", "BOM", "long name"],
)  # fmt: skip
def test_a_hostile_line_ends_in_one_short_line(tmp_path, capsys, content, message):
    file = tmp_path / "r.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    status = main(["explain", "token_mean", "--lengths-file", str(file)])
    err = capsys.readouterr().err
    if message is None:
        assert (status, err) == (0, "")
        return
    assert status == 2
    (line,) = err.splitlines()
    assert re.search(message, line)
    assert line.startswith(f"lossagg: {file}")
    assert len(line) < 600


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def endless():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_mask": torch.tensor([1 + 0j])}, "loss_mask is .*, expected a list of 0 and 1"),
        ({"loss_mask": torch.zeros(2).to_sparse()}, "loss_mask is tensor.*, expected a list"),
        ({"loss_mask": torch.zeros(2, device="meta")}, "loss_mask is tensor.*, expected a list"),
        ({"group_index": torch.zeros(2, device="meta")}, "group_index is tensor.*, expected"),
        ({"group_index": [torch.zeros(2, device="meta")]}, "group_index is .*, expected"),
        ({"group_index": nested(3_000)}, "group_index is a list, expected a string"),
        ({"group_index": endless()}, "group_index is .*, expected a string"),
        ({"group_index": {1: 2, "a": 3}}, "group_index is .*, expected a string"),
        ({"response_length": torch.ones(2, 2)}, "response_length is .*, expected an integer"),
    ],
    ids=["complex", "sparse", "meta", "meta id", "list with meta id", "deep id", "endless id",
         "id with mixed keys", "square length"],
)  # fmt: skip
def test_a_hostile_record_of_a_dump_is_named_in_one_line(tmp_path, capsys, fields, message):
    file = tmp_path / "3.pt"
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)  # another program's
    torch.save({"samples": [sample(), sample(**fields)]}, file)
    sys.setrecursionlimit(limit)
    assert main(["explain", "token_mean", "--lengths-file", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(f"{file}, record 1: {message}", line)
    assert len(line) < 600


def test_a_text_that_no_tokenizer_takes_is_named(tmp_path):
    tokenizer = saved_tokenizer(tmp_path)
    file = json_lines(tmp_path / "7.jsonl", [{"input": "q", "output": "a \ud800"}])
    with pytest.raises(RolloutsError, match=r"line 1: output is 'a .*, expected a text that"):
        read(file, flags=["--tokenizer", str(tokenizer)])


@pytest.mark.parametrize("name", ["n" * 300 + ".jsonl", "loop.jsonl", "pipe.jsonl"])
def test_a_path_that_leads_to_no_file_is_refused(tmp_path, name):
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(RolloutsError, match="which is not a file"):
        read(tmp_path / name)


def test_more_tokens_than_an_integer_holds_are_refused(tmp_path, capsys):
    file = json_lines(tmp_path / "r.jsonl", [{"response_length": 2**53}] * 2_000)
    assert main(["explain", "token_mean", "--lengths-file", str(file)]) == 2
    assert main(["plot", str(file), "--html", str(tmp_path / "p.html")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_completion_of_several_messages_is_refused(tmp_path):
    turns = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]
    file = json_lines(tmp_path / "r.jsonl", [{"prompt": "q", "completion": turns}])
    with pytest.raises(RolloutsError, match="of several messages only the training run knows"):
        read(file, flags=["--characters"])


def test_files_that_are_not_rollouts_are_refused(tmp_path):
    with pytest.raises(RolloutsError, match="which is not a file"):
        read(tmp_path)
    (tmp_path / "r.csv").write_text("")
    with pytest.raises(RolloutsError, match=r"got the ending '.csv', expected .jsonl, .pt, .parq"):
        read(tmp_path / "r.csv")
    (tmp_path / "r.pt").write_text("no pickle")
    with pytest.raises(RolloutsError, match=r"r.pt"):
        read(tmp_path / "r.pt")
    torch.save([1], tmp_path / "r.pt")
    with pytest.raises(RolloutsError, match="got list without 'samples'"):
        read(tmp_path / "r.pt")


DUMP = """
import subprocess
import sys
from types import SimpleNamespace
import numpy as np, torch
framework, checkout, template = sys.argv[1:]
sys.path.insert(0, checkout)
if framework == "slime":
    from slime.observability.rollout_data_utils import save_debug_rollout_data
    from slime.utils.types import Sample
    save = lambda samples: save_debug_rollout_data(
        template, samples, rollout_id=3, evaluation=False)
else:
    from miles.ray.rollout.debug_data import save_debug_rollout_data
    from miles.utils.types import Sample
    args = SimpleNamespace(save_debug_rollout_data=template, save_debug_trajectory_data=None)
    save = lambda samples: save_debug_rollout_data(args, samples, 3, evaluation=False)
samples = [Sample(group_index=g, index=g, tokens=[0] * 9, response_length=n, reward=np.float64(1))
           for g, n in ((0, 3), (0, 4), (1, 5), (1, 6))]
samples[1].loss_mask = [1, 1, 0, 0]
samples[2].remove_sample = True
samples[3].rollout_routed_experts = np.zeros((8, 2, 2), dtype=np.int32)
samples[3].metadata = {"t": torch.zeros(2)}
save(samples)
"""


@pytest.mark.launches
@pytest.mark.parametrize(
    "framework", [pytest.param(name, marks=needs(name, "httpx")) for name in ("slime", "miles")]
)
def test_what_a_framework_dumps_by_its_own_code_is_read(tmp_path, framework):
    command = [sys.executable, "-c", DUMP, framework, str(checkout_of(framework))]
    subprocess.run([*command, str(tmp_path / "{rollout_id}.pt")], check=True)
    with pytest.raises(RolloutsError, match=r"got numpy\S*, expected .*--trust-pickle"):
        read(tmp_path / "3.pt")
    rollouts = read(tmp_path / "3.pt", flags=["--trust-pickle"])
    assert columns(rollouts.steps[0]) == ([3, 2, 0, 6], [0, 0, 1, 1], None)
