"""The startup probe on real Megatron-Core: stock passes unchanged, a patched one is caught.

``probe_worker.py`` runs every layout that its number of processes has; ``probe_worker.py
alone`` lets one rank fail while the others wait.
"""

import itertools
import os
import re
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from check_runner import run_checks
from megatron.core import pipeline_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    finalize_model_grads,
    param_and_grad_buffer,
)
from megatron.core.pipeline_parallel import schedules
from probe_cases import LAYOUTS, MEGATRON_LM_LAYOUTS, REPEATS
from probe_chunks import (
    DDP_OPTIONS,
    MEGATRON_LM_DDP_OPTIONS,
    MEGATRON_LM_DTYPES,
    facts,
    live_chunks,
    megatron_lm_chunks,
    megatrons_groups,
)
from probe_faults import FAULTS, OWN_MESSAGES
from ranks import begin, of_ranks

from megatron_lossagg import LossAggregator
from megatron_lossagg.errors import ContractError
from megatron_lossagg.loop import probe
from megatron_lossagg.loop import probe as together
from megatron_lossagg.reduction.aggregation import Options
from megatron_lossagg.verify.world import split_world

CONFIRMED = (
    r"K = (M DP CP|N) confirmed through DDP, schedule, finalize: measured \d+ at the probe's own "
    r"[MN] = \d+ \(\d\.\d+ s\)$"
)


def read(chunks, **options):
    return LossAggregator(chunks, "token_mean", options=Options(**options))


def assert_confirms_k_and_changes_nothing(chunks):
    before = facts(chunks)
    report = read(chunks).probe
    after = facts(chunks)
    changed = [key for key in before if before[key] != after[key]]
    assert not changed, changed
    assert not report.note, report
    assert abs(report.measured_k / report.scaling.k - 1) < 1e-5, report
    assert report.seconds < 10, report
    assert re.search(CONFIRMED, str(report)), report


def check_stock_passes_and_is_left_unchanged(name, layout):
    cases = [(ddp, torch.float32) for ddp in DDP_OPTIONS]
    cases += [("plain", torch.float64), ("plain", torch.bfloat16), ("distributed", torch.bfloat16)]
    for per_token, (ddp_name, dtype) in itertools.product((False, True), cases):
        ddp = DDP_OPTIONS[ddp_name]
        if per_token and ddp.get("average_in_collective"):
            continue  # Megatron-Core refuses it
        if layout.optimizer_instances > 1 and ddp_name != "distributed":
            continue  # the others Megatron-Core refuses, or they want CUDA streams
        chunks = live_chunks(layout, per_token=per_token, dtype=dtype, **ddp)
        assert_confirms_k_and_changes_nothing(chunks)


def check_the_config_of_megatron_lm_passes(name, layout):
    if name not in MEGATRON_LM_LAYOUTS:
        return
    for per_token, ddp_name, dtype in itertools.product(
        (False, True), MEGATRON_LM_DDP_OPTIONS, MEGATRON_LM_DTYPES
    ):
        # Megatron keeps the reduce-scatter that a config asked for in a global.
        reduce_scatter = param_and_grad_buffer.dist_reduce_scatter_func
        with (
            tempfile.TemporaryDirectory() as folder,
            patch.object(param_and_grad_buffer, "dist_reduce_scatter_func", reduce_scatter),
        ):
            chunks = megatron_lm_chunks(
                layout, ddp_name, per_token=per_token, dtype=dtype, folder=folder
            )
            assert_confirms_k_and_changes_nothing(chunks)
            assert not list(Path(folder).iterdir())
        assert not chunks[0].config.timers._timers


def check_patched_megatron_is_caught(name, layout):
    sharded = layout.optimizer_instances > 1
    catch_faults(
        lambda per_token: live_chunks(
            layout, per_token=per_token, use_distributed_optimizer=sharded
        ),
        layout,
    )


def check_faults_are_caught_under_the_config_of_megatron_lm(name, layout):
    if name in MEGATRON_LM_LAYOUTS:
        catch_faults(
            lambda per_token: megatron_lm_chunks(
                layout, "all overlaps", per_token=per_token, dtype=torch.bfloat16, folder=""
            ),
            layout,
        )


def catch_faults(chunks_of, layout):
    """Put each fault in ``REPEATS`` times, in both loss scalings."""
    for per_token in (False, True):
        chunks = chunks_of(per_token)
        before = facts(chunks)
        loss_scaling = "per_token" if per_token else "average"
        for fault, (put_in, changes_a_number) in FAULTS.items():
            caught = 0
            wanted = changes_a_number(per_token, layout.dp_cp, layout.cp, layout.ep)
            for _ in range(REPEATS if wanted else 1):
                with put_in(chunks):
                    message = refusal(chunks)
                if message is None:
                    continue
                caught += 1
                if fault in OWN_MESSAGES:
                    assert OWN_MESSAGES[fault] in message, message
                    continue
                found = re.match(
                    r"rank \d+: the startup probe measured K = (\S+), expected K = "
                    r"(?:M DP CP|N) = (\d+) in the (\S+) loss scaling",
                    message,
                )
                assert found, message
                assert found[1] != found[2], message
                assert found[3] == loss_scaling, message
            assert caught == (REPEATS if wanted else 0), (fault, loss_scaling, caught, message)
        assert facts(chunks) == before


def refusal(chunks):
    """Return the message of the ContractError that every rank raises, None where none does."""
    try:
        read(chunks)
    except ContractError as error:
        message = str(error)
        if "so the run ends" in message:  # the other ranks never reach the gather below
            raise
    else:
        message = None
    message_by_rank = of_ranks(message)
    assert len(set(message_by_rank)) == 1, message_by_rank
    return message


def check_what_cannot_be_measured_is_read(name, layout):
    if name != "DP2":
        return
    chunks = live_chunks(per_token=True)
    config = chunks[0].config

    def finalize_of_the_live_model(model, *more, **named):
        finalize_model_grads(chunks, *more, **named)

    def finalize_fails_late_on_one_rank(*more, **named):
        finalize_model_grads(*more, **named)
        if dist.get_rank() == 1:
            raise KeyError("no such table")

    class Wants(DistributedDataParallel):
        def __init__(self, config, ddp_config, module, *, more, **named):
            super().__init__(config, ddp_config, module, **named)

    before = facts(chunks)
    with patch.object(config, "finalize_model_grads_func", None):
        report = read(chunks).probe
    assert report.measured_k is not None, report
    assert "config.finalize_model_grads_func is None until training sets it" in str(report)
    for finalize, reason in {
        finalize_of_the_live_model: "works on the live model",
        finalize_fails_late_on_one_rank: "rank 1: KeyError: 'no such table'",
    }.items():
        with patch.object(config, "finalize_model_grads_func", finalize):
            report = read(chunks).probe
        assert report.measured_k is None, report
        assert "K was read, not measured; finalize: rank " in str(report), report
        assert reason in str(report), report
    assert facts(chunks) == before
    custom = live_chunks(per_token=True, wrapper=lambda *a: Wants(*a, more=1))
    report = read(custom).probe
    assert report.measured_k is None, report
    assert "DDP: rank 0: TypeError" in str(report), report
    with patch.object(
        pipeline_parallel, "get_forward_backward_func", lambda: lambda **named: 1 / 0
    ):
        report = read(chunks).probe
    assert report.measured_k is None, report
    assert "schedule: rank 0: ZeroDivisionError" in str(report), report


def check_gradients_reduced_twice_are_caught(name, layout):
    """The schedule and finalize both start a reduction that does not overlap.

    A second mean changes no number, a second sum over two ranks doubles on later stages.
    """
    if name != "DP2xPP2":
        return
    for per_token in (False, True):
        chunks = live_chunks(layout, per_token=per_token)
        with patch.object(chunks[0].config, "grad_sync_func", chunks[0].start_grad_sync):
            message = refusal(chunks)
        if not per_token:
            assert message is None, message
            continue
        assert "expected K = N = " in message, message
        assert "would be 2 times that of its loss" in message, message


def check_groups_other_than_the_globals_are_read(name, layout):
    if layout.optimizer_instances == 1:
        return
    groups = megatrons_groups()
    groups.dp = groups.dp_cp = groups.intra_dp_cp  # half of parallel_state's

    def wrapper(*arguments):
        return DistributedDataParallel(*arguments, pg_collection=groups)

    assert_only_read(live_chunks(per_token=True, wrapper=wrapper))
    groups = megatrons_groups()
    groups.pp = groups.inter_dist_opt  # two stages, where parallel_state has one
    assert_only_read(live_chunks(per_token=True, wrapper=wrapper))


def assert_only_read(chunks):
    report = read(chunks).probe
    assert report.measured_k is None, report
    assert "the chunks' groups are not parallel_state's" in str(report), report


def check_what_a_stage_receives_does_not_enter_the_loss(name, layout):
    """gloo may deliver any value of an output that the schedule has freed."""
    if name != "DP2":
        return
    (chunk,) = live_chunks(per_token=False)
    (built,) = probe.build([chunk], finalize_model_grads, num_stages=1)
    received = torch.full((1, 1, 1), torch.nan, requires_grad=True)
    built.module.set_input_tensor(received)
    output = built.module()
    assert output.item() == 0, output
    output.backward()
    assert received.grad.item() == 1, received.grad


def run(layouts):
    begin()
    for name, layout in layouts.items():
        with split_world(layout):
            run_checks(globals(), name, layout)
        if dist.get_rank() == 0:
            print(f"PASSED on {name}", flush=True)
    dist.destroy_process_group()


def run_alone(where):
    """Let rank 1 fail in finalize or in the schedule, before a message that the other expects."""
    begin()
    together.PATIENCE = timedelta(seconds=2)

    def fails_on_rank_1(function):
        def failing(*more, **named):
            if dist.get_rank() == 1:
                raise KeyError("no such table")
            return function(*more, **named)

        return failing

    layout = LAYOUTS["PP2" if where == "schedule" else "DP2"]
    with split_world(layout):
        chunks = live_chunks(layout, per_token=True)
        config = chunks[0].config
        if where == "finalize":
            config.finalize_model_grads_func = fails_on_rank_1(finalize_model_grads)
        else:
            schedules.forward_step = fails_on_rank_1(schedules.forward_step)
        read(chunks)


if __name__ == "__main__":
    if sys.argv[1:2] == ["alone"]:
        run_alone(*sys.argv[2:])
    else:
        size = int(os.environ["WORLD_SIZE"])
        run({name: layout for name, layout in LAYOUTS.items() if layout.world_size == size})
