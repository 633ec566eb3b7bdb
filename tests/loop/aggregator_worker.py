"""What a LossAggregator reads of a live model, reports and refuses; DP 2, two processes."""

import argparse
import contextlib
import copy
import dataclasses
from unittest.mock import patch

import pytest
import tiny_gpt
import torch
import torch.distributed as dist
from live_steps import (
    CONSTANT,
    a_chunk,
    a_microbatch,
    a_moe,
    a_plan,
    abandoned,
    backward,
    made,
    partial_loss_of,
    refused,
    run_worker,
)
from megatron.core import pipeline_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from option_releases import missing_or_early

import megatron_lossagg.cpu as cpu
from megatron_lossagg import (
    Aggregation,
    LossAggregator,
    add_loss_aggregation_args,
)
from megatron_lossagg.contract import megatron_options
from megatron_lossagg.contract.megatron_options import megatron_version
from megatron_lossagg.contract.model import LiveGroups, checked_loss_scaling
from megatron_lossagg.contract.side_losses import note_on_side_losses
from megatron_lossagg.errors import PlanError
from megatron_lossagg.reduction.aggregation import Options


def check_unwrapped_chunk_is_refused(chunk, aggregator):
    with refused("GPTModel", "DistributedDataParallel", "after wrapping"):
        made(chunk.module)


def check_torchs_fsdp2_is_refused_by_name(chunk, aggregator):
    class FullyShardedDataParallel(torch.nn.Module):
        pass

    class FSDPDistributedDataParallel(DistributedDataParallel):  # as fully_shard names it
        pass

    with refused("got a FullyShardedDataParallel", "FSDP2 is not supported"):
        checked_loss_scaling([FullyShardedDataParallel()])
    sharded = FSDPDistributedDataParallel.__new__(FSDPDistributedDataParallel)
    with refused("got a FSDPDistributedDataParallel", "FSDP2 is not supported"):
        checked_loss_scaling([sharded])


def check_no_chunk_is_refused(chunk, aggregator):
    with refused("^rank 0: got no model chunk: pass the chunks that the schedule gets$"):
        made([])


def check_old_megatron_is_refused(chunk, aggregator):
    import megatron.core

    with (
        patch.object(megatron.core, "__version__", "0.12.3"),
        refused(r"0\.12\.3", r"megatron-core>=0\.13"),
    ):
        made(chunk)
    with patch.object(megatron.core, "__version__", "0.13.0"):
        assert made(chunk).loss_scaling == "average"


def check_loss_scaling_flipped_after_wrapping_is_refused(chunk, aggregator):
    with (
        patch.object(chunk.config, "calculate_per_token_loss", True),
        refused("frozen", "--calculate-per-token-loss", "(average|per_token) loss scaling"),
    ):
        made(chunk)


def check_a_bucket_scaled_differently_from_its_buffer_is_refused(chunk, aggregator):
    bucket = chunk.buffers[0].buckets[0]
    with (
        patch.object(bucket, "gradient_scaling_factor", 0.25),
        refused(r"scales gradients by \[0\.25, 0\.5\]", "frozen"),
    ):
        made(chunk)


def check_expert_buffer_scaled_for_the_other_loss_scaling_is_refused(chunk, aggregator):
    moe = a_moe(per_token=True)
    assert made(moe).loss_scaling == "per_token"
    moe.expert_parallel_buffers[0].gradient_scaling_factor = 0.5
    with refused(r"0\.5", "frozen"):
        made(moe)


def check_experts_averaged_in_their_own_collective_are_accepted(chunk, aggregator):
    """EP 2: Megatron scales their buffers differently from the dense ones."""
    config = tiny_gpt.config_of(num_moe_experts=2, add_bias_linear=False)
    moe = tiny_gpt.wrapped(config, average_in_collective=True)
    factors = {moe.buffers[0].gradient_scaling_factor}
    factors |= {buffer.gradient_scaling_factor for buffer in moe.expert_parallel_buffers}
    assert factors == {1.0, 0.5}
    assert made(moe).loss_scaling == "average"


def check_a_step_walks_no_module(chunk, aggregator):
    moe = a_moe()
    its = made(moe)
    plan = a_plan(its)

    def walked(*args, **kwargs):
        raise AssertionError("the modules are walked in a step")

    for module in moe.modules():
        module.named_modules = module.modules = module.named_children = walked
    with abandoned(its.begin(plan, num_microbatches=1)):
        pass


def check_router_built_in_the_other_loss_scaling_is_refused(chunk, aggregator):
    config = tiny_gpt.config_of(num_moe_experts=2, add_bias_linear=False)
    model = tiny_gpt.gpt(config, cpu.gpt_layer_spec(config))
    config.calculate_per_token_loss = True  # between building and wrapping
    moe = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=False), model
    )
    with refused("router was built with calculate_per_token_loss=False"):
        made(moe)


def check_the_config_class_has_the_options_that_the_table_says(chunk, aggregator):
    fields = {field.name for field in dataclasses.fields(type(chunk.config))}
    release = ".".join(megatron_version().split(".")[:2])
    assert not missing_or_early(fields, release)


REFUSED = {
    "cp_partition_mode": ("striped", "neither `zigzag` nor `contiguous`", "'zigzag'"),
    "linear_cp_layout": ("contiguous", "two chunks of each sequence", "'zigzag'"),
    "attention_cp_layout": ("contiguous", "two chunks of each sequence", "'zigzag'"),
    "hybrid_context_parallel": (True, "no single layout", "--hybrid-context-parallel"),
    "dynamic_context_parallel": (True, "no single layout", "--dynamic-context-parallel"),
    "sequence_packing_scheduler": ("default_dynamic_cp", "`dp_balanced`", "data set"),
    "gtp_weight_remat_size": (2, "outside the data-parallel group", "set it to 1"),
    "expert_gtp_weight_remat_size": (2, "outside the data-parallel group", "set it to 1"),
    "flextron": (True, "penalty", "--flextron"),
}
"""A value of an option that is refused, and what its message says; another Megatron may lack it."""


def check_an_option_that_moves_tokens_or_scales_is_refused_by_name_on_every_rank(chunk, aggregator):
    for name, (value, *words) in REFUSED.items():
        own_chunk = a_chunk()
        own_chunk.config.context_parallel_size = 1
        megatron_options.check_options("model config", own_chunk.config, cp_size=1)
        setattr(own_chunk.config, name, value)
        own_chunk.config.context_parallel_size = 2  # it has to matter
        with refused(f"^rank 0: {name} is {value!r}, which is not supported here", *words):
            made(own_chunk)


GRAPHED = {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}
CONTIGUOUS = ("cp_partition_mode", "linear_cp_layout", "attention_cp_layout")
CONFIGS = [
    ({"hybrid_context_parallel": True}, 1, ["hybrid", "--hybrid-context-parallel"]),
    (dict.fromkeys(CONTIGUOUS, "contiguous"), 1, []),  # at CP 1
    # cuda_graph_impl came with 0.15; before it was enable_cuda_graph.
    ({"enable_cuda_graph": True, **GRAPHED}, 1, ["full-iteration", "freezes K"]),
    ({"cuda_graph_impl": "full_iteration"}, 1, ["full-iteration", "freezes K"]),  # from 0.18 on
    ({**GRAPHED, "cuda_graph_scope": ["full_iteration_inference"]}, 1, []),  # trains without
    ({}, 2, ["overlap_p2p_comm=True and batch_p2p_comm=False"]),
    ({"overlap_p2p_comm": True, "batch_p2p_comm": True}, 2, ["and batch_p2p_comm=False"]),
    ({"overlap_p2p_comm": True, "batch_p2p_comm": False}, 2, []),
]
"""Options of a config, how many chunks a stage has, and what a refusal says; none is refused."""


def check_options_are_refused_by_what_they_are_set_with(chunk, aggregator):
    for options, num_chunks, words in CONFIGS:
        config = tiny_gpt.config_of()
        config.pipeline_model_parallel_size = num_chunks
        vars(config).update(options)
        with refused(*words) if words else contextlib.nullcontext():
            megatron_options.check_options("model config", config, cp_size=1, num_chunks=num_chunks)


def check_ranks_that_disagree_on_the_aggregation_are_refused_on_all(chunk, aggregator):
    own_aggregation = Aggregation("constant", divisor=10 + dist.get_rank())
    with refused("rank 0 has .*1/\\(B 10\\)", "rank 1 has .*1/\\(B 11\\)", "same flags"):
        made(chunk, own_aggregation)


def check_ranks_of_different_loss_scalings_are_refused_on_all(chunk, aggregator):
    own_chunk = a_chunk(per_token=dist.get_rank() == 1)
    with refused("rank 0 has .*loss scaling average", "rank 1 has .*loss scaling per_token"):
        made(own_chunk)


def check_any_error_of_one_rank_reaches_all_with_its_type(chunk, aggregator):
    own_chunk = a_chunk()
    if dist.get_rank() == 1:
        own_chunk.ddp_config = None
    with refused(r"^rank 1: AttributeError\(.*average_in_collective"):
        made(own_chunk)


def check_a_refusal_on_one_rank_reaches_all(chunk, aggregator):
    model = chunk.module if dist.get_rank() == 1 else chunk
    with refused("rank 1: got a GPTModel"):
        made(model)


def check_groups_that_contradict_the_config_are_refused(chunk, aggregator):
    with (
        patch.object(chunk.config, "context_parallel_size", 2),
        refused("context parallelism of size 2 in the config", r"over ranks \[[01]\]"),
    ):
        LiveGroups.of([chunk])


def check_chunks_with_groups_of_their_own_are_refused(chunk, aggregator):
    other = copy.copy(chunk)
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    other.dp_cp_group = groups[dist.get_rank()]
    with refused(r"chunk 1 has ranks \[[01]\] in its dp_cp_group, chunk 0 \[0, 1\]", "same groups"):
        LiveGroups.of([chunk, other])


def check_parts_of_sequences_are_counted_over_all_ranks(chunk, aggregator):
    with patch.object(chunk.config, "dynamic_context_parallel", True, create=True):
        groups = LiveGroups.of([chunk])
    assert groups.dp_group is groups.dp_cp_group is chunk.dp_cp_group
    assert groups.dp_size == groups.dp_cp_size == dist.get_world_size()
    assert (groups.cp_group, groups.cp_size, groups.cp_rank) == (None, 1, 0)
    assert groups.is_dynamic
    assert not LiveGroups.of([chunk]).is_dynamic


def check_what_needs_whole_sequences_is_refused_if_ranks_count_parts(chunk, aggregator):
    words = "got {} with dynamic_context_parallel, expected a mode whose weights do not depend"
    modes = [
        Aggregation("row_mean"),
        Aggregation("microbatch_token_mean"),
        Aggregation(weights=len),
    ]
    options = Options(probe=False)
    with patch.object(chunk.config, "dynamic_context_parallel", True, create=True):
        its = LossAggregator(chunk, CONSTANT, options=options, counts_parts=True)
        for mode in modes:
            with refused("^rank 0: " + words.format(mode.mode)):
                LossAggregator(chunk, mode, options=options, counts_parts=True)
            with refused("^rank 0: " + words.format(mode.mode)):
                its.agree_on(mode)
        assert "(DP 2, CP dynamic)" in its.describe()
        with refused("got a record with dynamic_context_parallel"):
            recorded = Options(probe=False, record="never")
            LossAggregator(chunk, CONSTANT, options=recorded, counts_parts=True)
        shadowed = Options(probe=False, shadow=("row_mean",))
        with refused("^rank 0: " + words.format("row_mean")):
            LossAggregator(chunk, CONSTANT, options=shadowed, counts_parts=True)
        plan = a_plan(its, microbatch=[0, 0])
        with abandoned(its.begin(plan, num_microbatches=1)) as step:
            mb = a_microbatch(step, [0, 1])
            partial_loss_of(mb, "sample_mean")
            with refused("^" + words.format("microbatch_token_mean")):
                partial_loss_of(mb, "microbatch_token_mean")


def check_the_start_line_names_mode_formula_loss_scaling_and_k(chunk, aggregator):
    line = aggregator.describe()
    for word in ("constant", "1/(B 10)", "loss scaling average, K = M DP CP (DP 2, CP 1)"):
        assert word in line, (word, line)
    per_token = made(a_chunk(per_token=True))
    assert "loss scaling per_token, K = N (DP 2, CP 1)" in per_token.describe()


def check_the_start_line_reports_whether_k_was_measured(chunk, aggregator):
    line = aggregator.describe()
    assert "probe: K = M DP CP confirmed through DDP, schedule, finalize: measured 6 at" in line
    off = made(chunk, probe=False)
    assert off.probe is None
    assert off.describe().endswith("probe: off")


def check_the_start_line_is_followed_by_what_depends_on_cp(chunk, aggregator):
    assert "\n" not in aggregator.describe()
    assert made(a_moe()).note == ""  # no coefficient
    config = tiny_gpt.config_of()
    config.mtp_num_layers = 1
    note = note_on_side_losses(config, "average")
    assert note.startswith("side losses (MTP) are Megatron's own")
    assert "in the average loss scaling of megatron-core" in note
    is_free = note_on_side_losses(config, "per_token") == ""
    assert note.endswith("train with --calculate-per-token-loss") == is_free
    config = tiny_gpt.config_of(num_moe_experts=2, add_bias_linear=False)
    notes = {}
    for coefficients in (0.1, [0.0, 0.1], [0.0, 0.0]):  # a list for several kinds of balancing
        config.moe_aux_loss_coeff = coefficients
        notes[str(coefficients)] = note_on_side_losses(config, "per_token")
    assert notes["0.1"] == notes["[0.0, 0.1]"]
    assert notes["[0.0, 0.0]"] == ""
    config.mtp_num_layers, config.moe_aux_loss_coeff = 1, 0.1
    both = note_on_side_losses(config, "average")
    assert "train with --calculate-per-token-loss" not in both  # the experts' would depend on CP
    balanced = made(a_moe(per_token=True, moe_aux_loss_coeff=0.1))
    assert balanced.note == notes["0.1"]  # empty from 0.19 on
    line, *notes = balanced.describe().split("\n")
    assert line.startswith("loss aggregation constant")
    assert notes == [balanced.note] * bool(balanced.note)


def check_what_the_probe_cannot_read_on_one_rank_is_an_error_on_all(chunk, aggregator):
    def unreadable():
        raise RuntimeError("no schedule")

    own_chunk = a_chunk()
    stock = pipeline_parallel.get_forward_backward_func
    on_rank_1 = unreadable if dist.get_rank() == 1 else stock
    with (
        patch.object(pipeline_parallel, "get_forward_backward_func", on_rank_1),
        refused("^rank 1: the startup probe failed in the live model, RuntimeError: no sched"),
    ):
        made(own_chunk)


def check_options_and_aggregation_are_given_once(chunk, aggregator):
    strict = LossAggregator(
        chunk, "trl:dr_grpo", divisor=10, options=Options(empty_step="error", probe=False)
    )
    assert strict.aggregation == CONSTANT
    with pytest.raises(PlanError, match="no active tokens"):
        strict.step(active_tokens=[0], num_microbatches=1)
    with pytest.warns(RuntimeWarning, match="no active tokens"):
        strict.step(active_tokens=[0], num_microbatches=1, forward_only=True)
    rejecting = made(chunk, probe=False, rejects_tokens=True)
    with rejecting.step(active_tokens=[3, 3], num_microbatches=1) as step:
        mb = step.microbatch([0, 1], torch.tensor([1, 1, 0, 0, 1, 1]), cu_seqlens=[0, 3, 6])
        backward(step, mb.outputs(partial_loss_of(mb)))
    with refused("an Aggregation and divisor"):
        LossAggregator(chunk, CONSTANT, divisor=10)


def check_the_flags_make_it_and_none_makes_none(chunk, aggregator):
    parser = add_loss_aggregation_args(argparse.ArgumentParser())
    assert LossAggregator.from_args(chunk, parser.parse_args([])) is None
    flags = ["--loss-aggregation", "constant", "--loss-aggregation-divisor", "10"]
    on_one_rank = parser.parse_args(flags if dist.get_rank() == 0 else [])
    with refused("rank 0 has .* constant", "rank 1 has no --loss-aggregation"):
        LossAggregator.from_args(chunk, on_one_rank)
    its = LossAggregator.from_args(
        [chunk], parser.parse_args([*flags, "--no-loss-aggregation-probe"])
    )
    assert (its.aggregation, its.options) == (CONSTANT, Options(probe=False))
    assert its.probe is None


def check_ranks_that_disagree_on_the_probe_are_refused_and_do_not_wait(chunk, aggregator):
    with refused("rank 0 has .*probe=True", "rank 1 has .*probe=False"):
        made(chunk, probe=dist.get_rank() == 0)


def check_without_torch_distributed_no_aggregator_is_made(chunk, aggregator):
    """The last one: it ends torch.distributed."""
    dist.destroy_process_group()
    with refused("^torch.distributed is not initialized: make the LossAggregator after it is$"):
        made(chunk)


def main():
    run_worker(globals())


if __name__ == "__main__":
    main()
