"""The file of a record: opened, continued, cut and given up; what is gathered is one step."""

import math
import struct
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from step_record import a_step
from steps import groups_of

from megatron_lossagg import Aggregation
from megatron_lossagg.contract.scaling import Scaling
from megatron_lossagg.integrations.megatron_lm import PretrainIntegration
from megatron_lossagg.record.step_record import RecordError, hash_weights, read_record
from megatron_lossagg.record.writer import RecordFile, StepRecorder, _gathered
from megatron_lossagg.reduction.exchange import Exchange
from megatron_lossagg.reduction.plan import Sequences, plan_step


def test_steps_are_numbered_from_1_after_the_last_line_or_as_given(tmp_path):
    path = tmp_path / "a.jsonl"
    file = RecordFile(str(path))
    assert path.read_text() == ""
    assert [file.number(None), file.number(None), file.number(7), file.number(None)] == [1, 2, 7, 8]
    for number in (1, 2, 5, 3):  # 3 was trained again
        file.append(a_step(number))
    assert RecordFile(str(path)).number(None) == 4
    assert list(read_record(path)) == [1, 2, 5, 3]


def test_numbers_of_numpy_are_written_as_numbers():
    step = replace(a_step(np.int64(3)), num_microbatches=np.int32(4), k=np.int64(8))
    assert step.line() == a_step(3).line()


def test_a_record_of_an_older_version_that_lacks_counts_is_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(a_step(1).line().replace(', "counted": {}', ""))
    assert "counted" not in path.read_text()
    assert read_record(path) == {1: a_step(1)}


def test_a_line_that_was_cut_off_is_removed_before_the_file_is_continued(tmp_path):
    path = tmp_path / "a.jsonl"
    for kept in (1, 5, 40):
        path.write_text(a_step(1).line() + a_step(2).line()[:kept])
        RecordFile(str(path)).append(a_step(2))
        assert read_record(path) == {1: a_step(1), 2: a_step(2)}


@pytest.mark.parametrize("content", ["no record", "no record\n", '{"lr": 1}\n', "{}"])
def test_a_file_that_is_no_record_is_refused_and_left_as_it_is(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(RecordError):
        RecordFile(str(path))
    assert path.read_text() == content


def test_a_write_that_fails_warns_once_and_stops_the_record(tmp_path):
    path = tmp_path / "a.jsonl"
    file = RecordFile(str(path))
    file.append(a_step(1))
    path.rename(tmp_path / "kept")
    path.mkdir()
    with pytest.warns(RuntimeWarning, match="step 2 and those after it are not recorded"):
        file.append(a_step(2))
    file.append(a_step(3))  # warnings are errors here
    assert read_record(tmp_path / "kept") == {1: a_step(1)}


def test_a_second_run_that_writes_to_the_same_file_ends_the_first_ones_record(tmp_path):
    path = str(tmp_path / "a.jsonl")
    first, second = RecordFile(path), RecordFile(path)
    first.append(a_step(1))
    with pytest.warns(RuntimeWarning, match="another run has written to it"):
        second.append(a_step(1))
    first.append(a_step(2))
    second.append(a_step(2))
    assert list(read_record(tmp_path / "a.jsonl")) == [1, 2]


@pytest.mark.parametrize("number", ["1", [1], None, 1.0, True])
def test_a_line_whose_step_is_no_integer_is_no_record(tmp_path, number):
    path = tmp_path / "a.jsonl"
    path.write_text(a_step(1).line() + a_step(number).line())
    with pytest.raises(RecordError, match="line 2: expected one line of JSON for each step"):
        read_record(path)


def test_hashes_add_up_modulo_2_to_64_and_sums_are_rounded_once():
    class Ranks(Exchange):
        def integers(self, own):
            other = [2**64 - 5, *struct.unpack("<Q", struct.pack("<d", 1e-17))]
            return np.stack([own, np.array(other, dtype=np.uint64).view(np.int64)])

    digits, weight_sum = _gathered(Ranks(None), 9, [0.1] * 10)
    assert digits == f"{4:016x}"
    assert weight_sum == math.fsum([math.fsum([0.1] * 10), 1e-17])


def test_token_weights_are_part_of_the_loss_where_every_sequence_has_one_weight(tmp_path):
    aggregation = Aggregation("constant", divisor=40, count="weights")
    scaling = Scaling(loss_scaling="average", num_microbatches=1, dp_cp_size=1)
    file = RecordFile(str(tmp_path / "a.jsonl"))
    for sums in ([3.0, 2.0], [2.0, 3.0], [4.0, 1.0]):
        plan = plan_step(aggregation, Sequences(active_tokens=[4, 4], token_weight_sums=sums))
        assert plan.weights.tolist() == [1 / 80, 1 / 80]
        recorder = StepRecorder(Exchange(None), file, None)
        recorder.finish([plan], scaling, groups_of(), {})
    first, moved, other = (step.weights for step in read_record(tmp_path / "a.jsonl").values())
    assert first == moved  # the same sequences in another order
    assert first != other


def test_the_hash_of_a_step_that_counts_its_mask_is_of_tokens_and_weights(tmp_path):
    file = RecordFile(str(tmp_path / "a.jsonl"))
    plan = plan_step(Aggregation("sample_mean"), Sequences(active_tokens=[4, 2]))
    scaling = Scaling(loss_scaling="average", num_microbatches=1, dp_cp_size=1)
    StepRecorder(Exchange(None), file, None).finish([plan], scaling, groups_of(), {})
    (step,) = read_record(tmp_path / "a.jsonl").values()
    assert step.weights == f"{hash_weights(np.array([4, 2]), np.array([1 / 8, 1 / 4])):016x}"


def test_a_loop_of_megatron_lms_that_numbers_no_step_leaves_it_to_the_record(monkeypatch):
    """As a script that calls ``train_step`` itself: ``train()`` sets the number."""
    args = SimpleNamespace()
    training = ModuleType("megatron.training")
    training.get_args = lambda: args
    monkeypatch.setitem(sys.modules, training.__name__, training)
    assert PretrainIntegration().iteration() is None
    args.curr_iteration = 3
    assert PretrainIntegration().iteration() == 4
