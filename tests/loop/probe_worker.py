"""The startup probe on real Megatron-Core: stock passes unchanged, a patched one is caught.

``probe_worker.py`` runs every layout that its number of processes has; ``probe_worker.py
alone`` lets one rank fail while the others wait.
"""

import dataclasses
import itertools
import os
import re
import sys
import tempfile
from collections import Counter
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import tiny_gpt
import torch
import torch.distributed as dist
from check_runner import run_checks
from megatron.core import parallel_state, pipeline_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    param_and_grad_buffer,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.timers import Timers
from megatron.core.transformer.module import Float16Module
from probe_cases import LAYOUTS, MEGATRON_LM_LAYOUTS, REPEATS

import megatron_lossagg.cpu as cpu
from megatron_lossagg import LossAggregator
from megatron_lossagg.errors import ContractError
from megatron_lossagg.loop.probe import all_ranks as together
from megatron_lossagg.loop.probe import probe_model
from megatron_lossagg.reduction.options import Options
from megatron_lossagg.verify.step_data import VOCABULARY
from megatron_lossagg.verify.world import split_world

CONFIRMED = (
    r"K = (M DP CP|N) confirmed through DDP, schedule, finalize: measured \d+ at the probe's own "
    r"[MN] = \d+ \(\d\.\d+ s\)$"
)
DDP_OPTIONS = {
    "plain": {},
    "overlap": {"overlap_grad_reduce": True},
    "distributed": {"use_distributed_optimizer": True},
    "distributed, overlap": {"use_distributed_optimizer": True, "overlap_grad_reduce": True},
    "in collective": {"average_in_collective": True},
}
# What megatron.training 0.16.1 gives DistributedDataParallelConfig from its flags.
MEGATRON_LM_DDP_OPTIONS = {
    "defaults": {"grad_reduce_in_fp32": True, "check_for_nan_in_grad": True},
    "reduced in the parameters' dtype": {"check_for_nan_in_grad": True},
    "small buckets": {
        "grad_reduce_in_fp32": True,
        "check_for_nan_in_grad": True,
        "check_for_large_grads": True,
        "overlap_grad_reduce": True,
        "bucket_size": 100,
    },
    "all overlaps": {
        "grad_reduce_in_fp32": True,
        "check_for_nan_in_grad": True,
        "check_for_large_grads": True,
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "align_param_gather": True,
        "bucket_size": 100,
        "pad_buckets_for_high_nccl_busbw": True,
    },
    "fp32 accumulation": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "reduce_scatter_with_fp32_accumulation": True,
    },
}
MEGATRON_LM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Set after construction, because the model that they need is not built here.
MODULES_AND_MEMORY = {
    "enable_autocast": True,
    "autocast_dtype": torch.bfloat16,
    "sequence_parallel": True,
    "num_moe_experts": 2,
    "moe_router_enable_expert_bias": True,
    "mtp_num_layers": 1,
    "mtp_standalone": True,
    "qk_layernorm": True,
    "has_cond_embedder": True,
    "defer_embedding_wgrad_compute": True,
    "delay_wgrad_compute": True,
    "overlap_moe_expert_parallel_comm": True,
    "cuda_graph_impl": "local",
    "enable_cuda_graph": True,
    "external_cuda_graph": True,
    "recompute_granularity": "full",
    "num_microbatches_with_partial_activation_checkpoints": 1,
    "cpu_offloading": True,
    "fine_grained_activation_offloading": True,
}


def megatrons_groups():
    from megatron.core.process_groups_config import ProcessGroupCollection  # from 0.15 on

    return ProcessGroupCollection.use_mpu_process_groups()


def live_chunks(
    layout=LAYOUTS["DP2"],
    *,
    per_token,
    dtype=torch.float32,
    wrapper=None,
    options=None,
    converted=lambda config, model: model,
    **ddp,
):
    """Build a real GPT of this layout in the DDP class that a run would use.

    ``options``: set on its config. ``converted``: puts a module around it.
    """
    more, vpp = {}, layout.vpp
    if layout.moe:
        more = {"num_moe_experts": 2, "add_bias_linear": False, "moe_aux_loss_coeff": 0.01}
    torch.set_default_dtype(torch.float64 if dtype == torch.float64 else torch.float32)
    config = tiny_gpt.config_of(per_token=per_token, **more)
    config.params_dtype = config.pipeline_dtype = dtype
    with patch.object(parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", None):
        spec = cpu.gpt_layer_spec(config)  # one layer per stage, virtual or not
    if vpp > 1:
        config.num_layers = 2 * vpp
        config.virtual_pipeline_model_parallel_size = vpp
        config.microbatch_group_size_per_vp_stage = 2
        config.overlap_p2p_comm, config.batch_p2p_comm = True, False
    for name, value in (options or {}).items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    ddp.setdefault("grad_reduce_in_fp32", dtype == torch.bfloat16)
    groups = {}
    if layout.optimizer_instances > 1:
        ddp |= {"num_distributed_optimizer_instances": layout.optimizer_instances}
        groups = {"pg_collection": megatrons_groups()}
    chunks = []
    for stage in range(vpp):
        model = GPTModel(
            config,
            spec,
            vocab_size=VOCABULARY,
            max_sequence_length=64,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=True) and stage == 0,
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            and stage == vpp - 1,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            **({"vp_stage": stage} if vpp > 1 else {}),
        )
        wrapped = (wrapper or DistributedDataParallel)(
            config, DistributedDataParallelConfig(**ddp), converted(config, model), **groups
        )
        for buffer in wrapped.buffers + wrapped.expert_parallel_buffers:
            buffer.grad_data.uniform_()
        chunks.append(wrapped)
    return chunks


def megatron_lm_chunks(layout, name, *, per_token, dtype, folder):
    """Build the chunks of a run of megatron.training 0.16.1, with its config as inside train().

    From ``core_transformer_config_from_args``, ``get_model`` and ``train``, with every flag
    that sets one of their options; and, last, options that need modules or memory.
    """
    options = {
        "deallocate_pipeline_outputs": True,
        "variable_seq_lengths": False,
        "fp16": dtype == torch.float16,
        "bf16": dtype == torch.bfloat16,
    }
    if layout.vpp > 1 and name == "all overlaps":
        options["overlap_p2p_comm_warmup_flush"] = True
    chunks = live_chunks(
        layout,
        per_token=per_token,
        dtype=dtype,
        options=options,
        converted=Float16Module if dtype != torch.float32 else lambda config, module: module,
        **known_to(DistributedDataParallelConfig, MEGATRON_LM_DDP_OPTIONS[name]),
    )
    config, ddp_config = chunks[0].config, chunks[0].ddp_config
    optimizer_options = {
        "lr": 1e-3,
        "fp16": config.fp16,
        "bf16": config.bf16,
        "params_dtype": dtype,
        "loss_scale": 1024.0 if config.fp16 else None,
        "use_distributed_optimizer": ddp_config.use_distributed_optimizer,
        "overlap_param_gather": ddp_config.overlap_param_gather,
    }
    optimizer = get_megatron_optimizer(
        OptimizerConfig(**known_to(OptimizerConfig, optimizer_options)),
        chunks,
    )

    def hooks(method):
        by_chunk = [getattr(chunk, method) for chunk in chunks]
        return by_chunk if len(by_chunk) > 1 else by_chunk[0]

    config.grad_scale_func = optimizer.scale_loss
    config.timers = Timers(2, "minmax")
    if ddp_config.overlap_grad_reduce:
        config.no_sync_func = hooks("no_sync")
        config.grad_sync_func = hooks("start_grad_sync")  # --align-grad-reduce, the default
    if ddp_config.overlap_param_gather:
        config.param_sync_func = hooks("start_param_sync")
    config.finalize_model_grads_func = finalize_model_grads
    config.config_logger_dir = str(folder)
    for option, value in known_to(type(config), MODULES_AND_MEMORY).items():
        setattr(config, option, value)
    return chunks


def known_to(config_class, options):
    """Return the options that this release of Megatron-Core has."""
    names = {field.name for field in dataclasses.fields(config_class)}
    return {name: value for name, value in options.items() if name in names}


def facts(chunks):
    """List all that the probe must leave unchanged, in a form that compares."""
    buffers = [b for chunk in chunks for b in chunk.buffers + chunk.expert_parallel_buffers]
    tracker = get_cuda_rng_tracker().get_states()
    return {
        "config": [{name: id(v) for name, v in vars(c.config).items()} for c in chunks],
        "ddp config": [dict(vars(c.ddp_config)) for c in chunks],
        "chunk": [{name: id(v) for name, v in vars(c).items()} for c in chunks],
        "globals": {name: id(v) for name, v in vars(parallel_state).items() if name.isupper()},
        "default dtype": torch.get_default_dtype(),
        "random state": bits(torch.get_rng_state()),
        "tracker": {name: bits(state) for name, state in tracker.items()},
        "gradients": [bits(b.grad_data) for b in buffers],
        "parameters": [bits(p.detach()) for chunk in chunks for p in chunk.parameters()],
        "groups": {
            (name, value)
            for chunk in chunks
            for group in chunk.bucket_groups
            for name, value in vars(group).items()
            if isinstance(value, bool)
        },
    }


def bits(tensor):
    return tensor.view(torch.uint8).numpy().tobytes()


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


def drop_m():
    """Patch the schedule so that it does not divide by M."""
    original = schedules.forward_step

    def forward_step(forward_step_func, data_iterator, model, num_microbatches, *more, **named):
        return original(forward_step_func, data_iterator, model, 1, *more, **named)

    return patch.object(schedules, "forward_step", forward_step)


def times_cp():
    """Patch the schedule so that it multiplies the loss by CP."""
    original = schedules.forward_step

    def forward_step(forward_step_func, *more, **named):
        def scaled(*arguments):
            output, loss_func = forward_step_func(*arguments)

            def loss_times_cp(output):
                loss, *rest = loss_func(output)
                return loss * parallel_state.get_context_parallel_world_size(), *rest

            return output, loss_times_cp

        return original(scaled, *more, **named)

    return patch.object(schedules, "forward_step", forward_step)


def ddp_averages():
    """Patch DDP so that it averages with any scaling factor."""
    original = DistributedDataParallel.finish_grad_sync

    def finish_grad_sync(self, *more, **named):
        original(self, *more, **named)
        self.scale_gradients(1 / dist.get_world_size(self.dp_cp_group))

    return patch.object(DistributedDataParallel, "finish_grad_sync", finish_grad_sync)


def second_step_doubled():
    """Patch DDP so that it scales gradients differently from the second step on."""
    original = DistributedDataParallel.finish_grad_sync
    steps = Counter()

    def finish_grad_sync(self, *more, **named):
        original(self, *more, **named)
        steps[id(self)] += 1
        if steps[id(self)] > 1:
            self.scale_gradients(2)

    return patch.object(DistributedDataParallel, "finish_grad_sync", finish_grad_sync)


def experts_doubled():
    """Patch DDP so that it scales the gradients of experts differently."""
    original = DistributedDataParallel.finish_grad_sync

    def finish_grad_sync(self, *more, **named):
        original(self, *more, **named)
        for buffer in self.expert_parallel_buffers:
            buffer.scale_gradients(2)

    return patch.object(DistributedDataParallel, "finish_grad_sync", finish_grad_sync)


def finalize_not_called():
    """Patch the schedule so that it does not call finalize_model_grads_func."""
    original = pipeline_parallel.get_forward_backward_func

    def get_forward_backward_func(*arguments):
        schedule = original(*arguments)

        def forgetful(*, model, **named):
            model[0].config.finalize_model_grads_func = None
            return schedule(model=model, **named)

        return forgetful

    return patch.object(pipeline_parallel, "get_forward_backward_func", get_forward_backward_func)


def finalize_does_not_divide(model, num_tokens=None, **named):
    finalize_model_grads(model, None, **named)


def num_tokens_over_dp_only(model, num_tokens=None, **named):
    finalize_model_grads(model, None, **named)
    if num_tokens is None:
        return
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(num_tokens, last, group=parallel_state.get_pipeline_model_parallel_group())
    dist.all_reduce(num_tokens, group=parallel_state.get_data_parallel_group())
    if num_tokens > 0:
        for chunk in model:
            chunk.scale_gradients(1 / num_tokens)


def finalized_by(function):
    """Introduce a fault in the framework's own finalize function."""
    return lambda chunks: patch.object(chunks[0].config, "finalize_model_grads_func", function)


def flipped(chunks):
    config = chunks[0].config
    return patch.object(config, "calculate_per_token_loss", not config.calculate_per_token_loss)


# A fault, and where it changes a number: from loss scaling, DP * CP, CP and EP.
FAULTS = {
    "drop_m": (lambda chunks: drop_m(), lambda per_token, dp_cp, cp, ep: not per_token),
    "times_cp": (lambda chunks: times_cp(), lambda per_token, dp_cp, cp, ep: cp > 1),
    "ddp_averages": (lambda chunks: ddp_averages(), lambda per_token, dp_cp, cp, ep: dp_cp > 1),
    "second_step_doubled": (
        lambda chunks: second_step_doubled(),
        lambda per_token, dp_cp, cp, ep: True,
    ),
    "experts_doubled": (lambda chunks: experts_doubled(), lambda per_token, dp_cp, cp, ep: ep > 1),
    "finalize_not_called": (
        lambda chunks: finalize_not_called(),
        lambda per_token, dp_cp, cp, ep: True,
    ),
    "finalize_does_not_divide": (
        finalized_by(finalize_does_not_divide),
        lambda per_token, dp_cp, cp, ep: per_token,
    ),
    "num_tokens_over_dp_only": (
        finalized_by(num_tokens_over_dp_only),
        lambda per_token, dp_cp, cp, ep: per_token and cp > 1,
    ),
    "flipped": (flipped, lambda per_token, dp_cp, cp, ep: dp_cp > 1),
}


OWN_MESSAGES = {
    "flipped": "frozen",
    "finalize_not_called": "called config.finalize_model_grads_func 0 times, expected once",
}
"""Of faults that are named before K is measured."""


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
    message_by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(message_by_rank, message)
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
    (built,) = probe_model.build([chunk], finalize_model_grads, num_stages=1)
    received = torch.full((1, 1, 1), torch.nan, requires_grad=True)
    built.module.set_input_tensor(received)
    output = built.module()
    assert output.item() == 0, output
    output.backward()
    assert received.grad.item() == 1, received.grad


def run(layouts):
    dist.init_process_group("gloo")
    for name, layout in layouts.items():
        with split_world(layout):
            run_checks(globals(), name, layout)
        if dist.get_rank() == 0:
            print(f"PASSED on {name}", flush=True)
    dist.destroy_process_group()


def run_alone(where):
    """Let rank 1 fail in finalize or in the schedule, before a message that the other expects."""
    dist.init_process_group("gloo")
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
