"""What a rank that runs out of time says of itself."""

import time

from megatron_lossagg.verify.__main__ import _stack_at_deadline
from megatron_lossagg.verify.job import _last_did


def compute_until(end):
    while time.time() < end:
        sum(range(100))


def test_a_rank_that_computes_at_its_deadline_goes_on_and_says_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("LOSSAGG_DEADLINE", str(time.time() + 0.4))
    (tmp_path / "0.progress").write_text("joined the others, 1 s after it began\n")
    with _stack_at_deadline(tmp_path / "0.stack"):
        compute_until(time.time() + 0.6)
    said = _last_did(tmp_path / "events.jsonl", 0)
    assert said.startswith("joined the others, 1 s after it began")
    assert "compute_until" in said


def test_a_rank_that_ends_in_time_writes_no_stack(tmp_path, monkeypatch):
    monkeypatch.setenv("LOSSAGG_DEADLINE", str(time.time() + 0.4))
    with _stack_at_deadline(tmp_path / "0.stack"):
        pass
    time.sleep(0.5)
    assert not (tmp_path / "0.stack").exists()
