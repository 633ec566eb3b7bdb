"""``lossagg verify`` on a launcher's ranks: one device for all, groups over hosts, bfloat16."""

import json
import subprocess
import sys

import pytest
from conftest import early
from launching import TIMEOUT, environment, free_ports, report_of

from megatron_lossagg.verify.cases import CASES

pytestmark = pytest.mark.launches

BF16 = ("--tp", "2", "--distributed-optimizer", "--bf16", "--loss-scaling", "average")
JOINS = """
from megatron_lossagg.cpu import install
install()
from megatron_lossagg.verify import world
world.join_world()
"""
SHAPES = """
import torch.distributed as dist
from megatron_lossagg.cpu import install
install()
from megatron_lossagg.verify import world
from megatron_lossagg.verify.parallelism import Parallelism
world.join_world()
with world.split_world(Parallelism(tp=2, cp=2, distributed_optimizer=True)):
    groups = world.groups_over_hosts(["a", "a", "b", "b"])
if dist.get_rank() == 0:
    print(groups)
"""


def ranks_of(arguments, folder, *variables):
    """Run one process per given variables, as a launcher's ranks without its agent."""
    (port,) = free_ports(1)
    ours = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(variables))}
    ranks = [
        subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment(**ours, RANK=str(rank), LOCAL_RANK=str(rank), **more),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, more in enumerate(variables)
    ]
    try:
        printed = [rank.communicate(timeout=TIMEOUT)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, text) for rank, text in zip(ranks, printed, strict=True)]


def test_where_one_rank_lacks_the_device_all_end_with_its_name(tmp_path):
    (script := tmp_path / "joins.py").write_text(JOINS)
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    ended = ranks_of([script], tmp_path, hidden, {**hidden, "LOSSAGG_DEVICE": "cuda"})
    for status, printed in ended:
        assert status == 1, printed
        assert "ProofError: DEVICE: got cuda, and rank 1 on " in printed
        assert "sees 0 CUDA devices" in printed


def test_the_groups_that_span_hosts_are_counted_by_kind(tmp_path):
    (script := tmp_path / "shapes.py").write_text(SHAPES)
    (_, printed), *_ = ranks_of([script], tmp_path, *[{"CUDA_VISIBLE_DEVICES": ""}] * 4)
    counted = {
        "DP x CP": {"groups": 2, "ranks": 2, "over_hosts": 2},
        "CP": {"groups": 2, "ranks": 2, "over_hosts": 2},
        "TP": {"groups": 2, "ranks": 2, "over_hosts": 0},
    }
    assert str(counted) in printed


@early
def right_in_bf16():
    return json.loads(report_of(None, *BF16, processes=4).read_text())


@early
def wrong_in_bf16():
    options = [*BF16, "--loss-aggregation", "sample_mean"]
    return json.loads(report_of("over_m", *options, processes=4).read_text())


def test_in_bf16_every_gradient_is_the_configured_one_within_its_rounding(right_in_bf16):
    verdicts = right_in_bf16["verdicts"]
    assert [verdict["case"] for verdict in verdicts] == [str(case) for case in CASES]
    for verdict in verdicts:
        assert verdict["passed"], verdict["explanation"]
        assert 1e-4 < verdict["gradient_error"] < 0.1  # not computed in a wider dtype
        assert verdict["loss_error"] < 0.02
        assert verdict["measured_factor"] == pytest.approx(1, abs=0.02)
        assert verdict["layout"] == "DP 2 x TP 2, M 3, bf16, distributed optimizer"


def test_in_bf16_a_wrong_factor_is_noticed_and_named(wrong_in_bf16):
    (verdict,) = wrong_in_bf16["verdicts"]
    assert not verdict["passed"]
    assert verdict["causes"] == ["over_m"]
