"""What the contract refuses and tracks, on a live model; DP 2, two processes."""

import contextlib
import copy
import dataclasses
import functools
import gc
import re
import warnings
import weakref

import pytest
import tiny_gpt
import torch
import torch.distributed as dist
from check_runner import run_checks
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.rerun_state_machine import (
    RerunMode,
    RerunState,
    destroy_rerun_state_machine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)
from torch.utils.checkpoint import checkpoint

import megatron_lossagg.cpu as cpu
from megatron_lossagg import (
    Aggregation,
    Layout,
    MegatronContract,
    Sequences,
    StepTotals,
    live,
    plan_step,
)
from megatron_lossagg.errors import ContractError, ReducerError
from megatron_lossagg.verify.model import megatron_version

CONSTANT = Aggregation("constant", divisor=10)


@contextlib.contextmanager
def refused(*words):
    """Assert that the block raises a ContractError whose message has all the words."""
    with pytest.raises(ContractError) as caught:
        yield
    for word in words:
        assert re.search(word, str(caught.value)), (word, str(caught.value))


def read(model, **options):
    return MegatronContract.read(model, aggregation=CONSTANT, **options)


class AbandonedError(Exception):
    """Ends a step as an error in it would."""


@contextlib.contextmanager
def abandoned(step):
    """Enter a step that ends early by an exception, so that nothing is checked at its end."""
    with contextlib.suppress(AbandonedError), step:
        yield step
        raise AbandonedError


def a_plan(contract, active=(3, 2), **options):
    sequences = Sequences(active_tokens=list(active), **options)
    return plan_step(CONSTANT, sequences, group=contract.dp_group)


def a_reducer(contract, plan, sequences):
    offsets = torch.arange(len(sequences) + 1) * 4
    mask = torch.zeros(4 * len(sequences), dtype=torch.int64)
    for position, sequence in enumerate(sequences):
        if sequence >= 0:
            mask[4 * position : 4 * position + int(plan.active_tokens[sequence])] = 1
    return plan.reducer(sequences, mask, contract.thd(offsets))


def share_of(reducer):
    return reducer(torch.ones(reducer.layout.num_local_tokens, requires_grad=True))


def returns(step, contract, plan, sequences):
    """Return what a loss_func does, and run the backward pass of a training step."""
    reducer = a_reducer(contract, plan, sequences)
    with torch.set_grad_enabled(not step.forward_only):
        share = share_of(reducer)
        out = step.returns(share, reducer, report={"loss": share})
    if not step.forward_only:
        out[0].backward()
    return out


def check_unwrapped_chunk_is_refused(chunk, contract):
    with refused("GPTModel", "DistributedDataParallel", "after wrapping"):
        read(chunk.module)


def check_fsdp_is_refused_by_name(chunk, contract):
    class FullyShardedDataParallel(torch.nn.Module):
        pass

    with refused("FSDP"):
        live.checked_loss_scaling([FullyShardedDataParallel()])

    class Wrapped(torch.nn.Module):
        __module__ = "megatron_fsdp.wrapper"

    with refused("Wrapped: Megatron-FSDP"):
        live.checked_loss_scaling([Wrapped()])


def check_no_chunk_is_refused(chunk, contract):
    with refused("^rank 0: got no model chunk: pass the chunks that the schedule gets$"):
        read([])


def check_old_megatron_is_refused(chunk, contract):
    import megatron.core

    now = megatron.core.__version__
    megatron.core.__version__ = "0.12.3"
    try:
        with refused(r"0\.12\.3", r"megatron-core>=0\.13"):
            read(chunk)
        megatron.core.__version__ = "0.13.0"
        assert read(chunk).loss_scaling == "average"
    finally:
        megatron.core.__version__ = now


def check_loss_scaling_flipped_after_wrapping_is_refused(chunk, contract):
    chunk.config.calculate_per_token_loss = True
    try:
        with refused(
            "frozen", "--calculate-per-token-loss", "average loss scaling|per_token loss scaling"
        ):
            read(chunk)
        with refused("wrapped in the average loss scaling"):
            contract.step(a_plan(contract), num_microbatches=2)
    finally:
        chunk.config.calculate_per_token_loss = False


def check_a_bucket_scaled_differently_from_its_buffer_is_refused(chunk, contract):
    bucket = chunk.buffers[0].buckets[0]
    now, bucket.gradient_scaling_factor = bucket.gradient_scaling_factor, 0.25
    try:
        with refused(r"scales gradients by \[0\.25, 0\.5\]", "frozen"):
            read(chunk)
    finally:
        bucket.gradient_scaling_factor = now


def check_expert_buffer_scaled_for_the_other_loss_scaling_is_refused(chunk, contract):
    config = tiny_gpt.config_of(per_token=True, num_moe_experts=2, add_bias_linear=False)
    moe = tiny_gpt.wrapped(config)
    assert read(moe).loss_scaling == "per_token"
    moe.expert_parallel_buffers[0].gradient_scaling_factor = 0.5
    with refused(r"0\.5", "frozen"):
        read(moe)


def check_experts_averaged_in_their_own_collective_are_accepted(chunk, contract):
    """EP 2: Megatron scales their buffers differently from the dense ones."""
    config = tiny_gpt.config_of(num_moe_experts=2, add_bias_linear=False)
    moe = tiny_gpt.wrapped(config, average_in_collective=True)
    factors = {moe.buffers[0].gradient_scaling_factor}
    factors |= {buffer.gradient_scaling_factor for buffer in moe.expert_parallel_buffers}
    assert factors == {1.0, 0.5}
    assert read(moe).loss_scaling == "average"


def a_moe(**more):
    config = tiny_gpt.config_of(num_moe_experts=2, add_bias_linear=False, **more)
    return tiny_gpt.wrapped(config)


def check_a_step_walks_no_module(chunk, contract):
    moe = a_moe()
    its = read(moe)
    plan = a_plan(its)

    def walked(*args, **kwargs):
        raise AssertionError("the modules are walked in a step")

    for module in moe.modules():
        module.named_modules = module.modules = module.named_children = walked
    with abandoned(its.step(plan, num_microbatches=1)):
        pass


def check_what_is_flipped_after_the_read_is_refused_by_the_next_step(chunk, contract):
    moe = a_moe()
    its = read(moe)
    name, router = next(
        (name, module) for name, module in moe.named_modules() if name.endswith("router")
    )
    bucket = moe.buffers[0].buckets[0]
    flips = (
        (moe.config, "calculate_per_token_loss", True, "wrapped in the average loss scaling"),
        (router, "calculate_per_token_loss", True, f"^{name} was built with .*=True"),
        (bucket, "gradient_scaling_factor", 0.25, r"scales gradients by \[0\.25, 0\.5\]"),
        (moe.config, "context_parallel_size", 2, "eval_context_parallel_size of Megatron-Bridge"),
    )
    for owner, attribute, value, message in flips:
        before = getattr(owner, attribute)
        setattr(owner, attribute, value)
        with refused(message):
            its.step(a_plan(its), num_microbatches=1)
        setattr(owner, attribute, before)
    with abandoned(its.step(a_plan(its), num_microbatches=1)):
        pass


def check_router_built_in_the_other_loss_scaling_is_refused(chunk, contract):
    config = tiny_gpt.config_of(num_moe_experts=2, add_bias_linear=False)
    model = tiny_gpt.gpt(config, cpu.gpt_layer_spec(config))
    config.calculate_per_token_loss = True  # between building and wrapping
    moe = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=False), model
    )
    with refused("router was built with calculate_per_token_loss=False"):
        read(moe)


REFUSED = {
    "cp_partition_mode": ("contiguous", "one interval of the packed sequences", "'zigzag'"),
    "linear_cp_layout": ("contiguous", "two chunks of each sequence", "'zigzag'"),
    "attention_cp_layout": ("contiguous", "two chunks of each sequence", "'zigzag'"),
    "hybrid_context_parallel": (True, "no single layout", "--hybrid-context-parallel"),
    "dynamic_context_parallel": (True, "no single layout", "--dynamic-context-parallel"),
    "sequence_packing_scheduler": ("dp_balanced", "microbatches of its own", "data set"),
    "pad_packed_seq_alignment": ("max", "after it was read", "--pad-packed-seq-alignment"),
    "gtp_weight_remat_size": (2, "outside the data-parallel group", "set it to 1"),
    "expert_gtp_weight_remat_size": (2, "outside the data-parallel group", "set it to 1"),
    "flextron": (True, "penalty", "--flextron"),
}
"""A value of an option that is refused, and what its message says; another Megatron may lack it."""


def check_hybrid_context_parallelism_is_refused(chunk, contract):
    config = tiny_gpt.config_of()
    config.hybrid_context_parallel = True
    with refused("hybrid", "--hybrid-context-parallel"):
        live.check_config(config, 1)


def check_an_option_that_moves_tokens_or_scales_is_refused_by_name_on_every_rank(chunk, contract):
    for name, (value, *words) in REFUSED.items():
        own_chunk = tiny_gpt.wrapped(tiny_gpt.config_of())
        own_chunk.config.context_parallel_size = 1
        live.check_config(own_chunk.config, 1)
        setattr(own_chunk.config, name, value)
        own_chunk.config.context_parallel_size = 2  # it has to matter
        with refused(f"^rank 0: {name} is {value!r}, which is not supported here", *words):
            read(own_chunk)


def check_another_context_parallel_split_changes_nothing_at_cp_1(chunk, contract):
    config = tiny_gpt.config_of()
    for name in ("cp_partition_mode", "linear_cp_layout", "attention_cp_layout"):
        setattr(config, name, "contiguous")
    live.check_config(config, 1)


def check_full_iteration_graphs_are_refused(chunk, contract):
    # cuda_graph_impl came with 0.15; before it was enable_cuda_graph.
    fields = {field.name for field in dataclasses.fields(chunk.config)}
    local = {"cuda_graph_impl": "local"} if "cuda_graph_impl" in fields else {}
    config = tiny_gpt.config_of(**local, cuda_graph_scope="full_iteration")
    config.enable_cuda_graph = True
    with refused("full-iteration", "freezes K"):
        live.check_config(config, 1)
    config = tiny_gpt.config_of()
    config.cuda_graph_impl = "full_iteration"  # so named from 0.18 on
    with refused("full-iteration", "freezes K"):
        live.check_config(config, 1)
    config.cuda_graph_impl, config.cuda_graph_scope = "local", ["full_iteration_inference"]
    live.check_config(config, 1)  # trains without a graph


def check_interleaving_over_two_stages_needs_overlap(chunk, contract):
    config = tiny_gpt.config_of()
    config.pipeline_model_parallel_size = 2
    with refused("overlap_p2p_comm=True and batch_p2p_comm=False"):
        live.check_config(config, 2)
    config.overlap_p2p_comm, config.batch_p2p_comm = True, True
    with refused("overlap_p2p_comm=True and batch_p2p_comm=False"):
        live.check_config(config, 2)
    config.overlap_p2p_comm, config.batch_p2p_comm = True, False
    live.check_config(config, 2)


def check_no_finalize_is_refused_except_for_evaluation(chunk, contract):
    finalize, chunk.config.finalize_model_grads_func = chunk.config.finalize_model_grads_func, None
    try:
        with refused("finalize_model_grads_func"):
            contract.step(a_plan(contract), num_microbatches=1)
        step = contract.step(a_plan(contract), num_microbatches=1, forward_only=True)
        returns(step, contract, step.plan, [0, 1])
        step.close()
    finally:
        chunk.config.finalize_model_grads_func = finalize


def check_ranks_that_disagree_on_the_aggregation_are_refused_on_all(chunk, contract):
    own_aggregation = Aggregation("constant", divisor=10 + dist.get_rank())
    with refused("rank 0 has .*1/\\(B 10\\)", "rank 1 has .*1/\\(B 11\\)", "same flags"):
        MegatronContract.read(chunk, aggregation=own_aggregation)


def check_ranks_of_different_loss_scalings_are_refused_on_all(chunk, contract):
    own_chunk = tiny_gpt.wrapped(tiny_gpt.config_of(per_token=dist.get_rank() == 1))
    with refused("rank 0 has .*loss scaling average", "rank 1 has .*loss scaling per_token"):
        read(own_chunk)


def check_any_error_of_one_rank_reaches_all_with_its_type(chunk, contract):
    own_chunk = tiny_gpt.wrapped(tiny_gpt.config_of())
    if dist.get_rank() == 1:
        own_chunk.ddp_config = None
    with refused(r"^rank 1: AttributeError\(.*average_in_collective"):
        read(own_chunk)


def check_a_refusal_on_one_rank_reaches_all(chunk, contract):
    model = chunk.module if dist.get_rank() == 1 else chunk
    with refused("rank 1: got a GPTModel"):
        read(model)


def check_a_sequence_in_two_microbatches_is_named(chunk, contract):
    plan = a_plan(contract, active=(3, 2, 1))
    with abandoned(contract.step(plan, num_microbatches=2)) as step:
        returns(step, contract, plan, [0, 1])
        with refused("sequence 1 is in two microbatches", "trained once"):
            returns(step, contract, plan, [1, 2])


def check_sequences_in_no_microbatch_are_named(chunk, contract):
    plan = a_plan(contract, active=(3, 2, 1))
    with abandoned(contract.step(plan, num_microbatches=2)) as step:
        returns(step, contract, plan, [0, -1])
        with refused("1 of 3 sequences", r"\(1\)"):
            returns(step, contract, plan, [2])


def check_the_first_six_of_many_missing_sequences_are_listed(chunk, contract):
    for missing, listed in ((6, "1, 2, 3, 4, 5, 6"), (7, "1, 2, 3, 4, 5, 6, ...")):
        plan = a_plan(contract, active=[1] * (missing + 1))
        words = re.escape(f"{missing} of {missing + 1} sequences"), re.escape(f"({listed})")
        with abandoned(contract.step(plan, num_microbatches=1)) as step, refused(*words):
            returns(step, contract, plan, [0])


@contextlib.contextmanager
def rerunning():
    """Let Megatron's own rerun machine run a step again."""
    destroy_rerun_state_machine()
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    machine = get_rerun_state_machine()
    machine.state = RerunState.RERUNNING_IN_PLACE
    try:
        yield
    finally:
        destroy_rerun_state_machine()


def check_what_the_rerun_machine_repeats_is_not_doubled(chunk, contract):
    for calls in ([[0], [1]], [[-1], [0], [1]]):
        plan = a_plan(contract)
        with contract.step(plan, num_microbatches=len(calls)) as step:
            for sequences in calls:
                returns(step, contract, plan, sequences)
            with rerunning():
                for sequences in calls:
                    returns(step, contract, plan, sequences)


def check_a_microbatch_that_comes_again_is_refused(chunk, contract):
    plan = a_plan(contract, active=(3,))
    with abandoned(contract.step(plan, num_microbatches=2)) as step:
        returns(step, contract, plan, [0])
        returns(step, contract, plan, [-1])
        with refused("more than the 2 planned"):
            returns(step, contract, plan, [0])


def check_a_missing_microbatch_of_paddings_is_reported(chunk, contract):
    plan = a_plan(contract)
    step = contract.step(plan, num_microbatches=3)
    for sequences in ([0, 1], [-1]):
        returns(step, contract, plan, sequences)
    with refused("ran for 2 microbatches, 3 were planned"):
        step.close()


def check_sequences_missing_among_paddings_are_named(chunk, contract):
    plan = a_plan(contract)
    with abandoned(contract.step(plan, num_microbatches=3)) as step:
        for sequences in ([-1], [-1]):
            returns(step, contract, plan, sequences)
        with refused("1 of 2 sequences", r"\(1\)"):
            returns(step, contract, plan, [0])


def check_more_calls_than_planned_are_refused(chunk, contract):
    plan = a_plan(contract)
    with abandoned(contract.step(plan, num_microbatches=1)) as step:
        returns(step, contract, plan, [0, 1])
        with refused("more than the 1 planned"):
            returns(step, contract, plan, [-1])


def check_fewer_calls_than_planned_are_refused_on_close(chunk, contract):
    plan = a_plan(contract)
    step = contract.step(plan, num_microbatches=3)
    with refused("ran for 1 microbatches, 3 were planned"), step:
        returns(step, contract, plan, [0, 1])
    step = contract.step(a_plan(contract), num_microbatches=2)
    with refused("ran for 0 microbatches, 2 were planned"):
        step.close()
    step.close()  # refused once


def check_a_step_that_was_not_closed_is_refused_by_the_next(chunk, contract):
    plan = a_plan(contract)
    contract.step(plan, num_microbatches=2)  # given up before the schedule
    step = contract.step(a_plan(contract), num_microbatches=2)
    returns(step, contract, step.plan, [0, 1])
    with refused("the previous step was not closed", "with contract.step", r"step\.close\(\)"):
        contract.step(a_plan(contract), num_microbatches=2)
    with refused("ran for 1"):
        step.close()


def check_an_exception_inside_a_step_is_not_masked(chunk, contract):
    step = contract.step(a_plan(contract), num_microbatches=2)
    with pytest.raises(KeyError, match="of the framework"), step:
        raise KeyError("of the framework")
    assert step.is_closed


def check_a_fault_that_a_device_found_is_raised_when_the_step_closes(chunk, contract):
    plan = a_plan(contract)
    step = contract.step(plan, num_microbatches=1)
    returns(step, contract, plan, [0, 1])
    plan.state.faults.record([torch.tensor(torch.nan)], lambda values: "found on the device")
    with pytest.raises(ReducerError, match=r"^found on the device$"):
        step.close()
    plan = a_plan(contract)
    with contract.step(plan, num_microbatches=1) as step:
        returns(step, contract, plan, [0, 1])


def check_a_plan_trains_one_step(chunk, contract):
    plan = a_plan(contract)
    for _ in range(2):  # evaluation may use it, before and again
        with contract.step(plan, num_microbatches=1, forward_only=True) as step:
            returns(step, contract, plan, [0, 1])
    with contract.step(plan, num_microbatches=1) as step:
        returns(step, contract, plan, [0, 1])
    with refused("has already begun to train a step", "plan_step for each", "forward_only=True"):
        contract.step(plan.under("token_mean"), num_microbatches=1)
    with contract.step(plan, num_microbatches=1, forward_only=True) as step:
        returns(step, contract, plan, [0, 1])


def check_a_plan_counted_over_other_ranks_is_refused(chunk, contract):
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    plan = plan_step(CONSTANT, Sequences(active_tokens=[3, 2]), group=alone)
    rank = dist.get_rank()
    with refused(rf"counted over ranks \[{rank}\], .* is \[0, 1\]", r"group=contract\.dp_group"):
        contract.step(plan, num_microbatches=1)
    known = plan_step(CONSTANT, Sequences(active_tokens=[3, 2]), totals=StepTotals(samples=4))
    with contract.step(known, num_microbatches=1) as step:
        returns(step, contract, known, [0, 1])


def check_m_is_an_integer(chunk, contract):
    for number in ("2", 2.0, True, 0, -1, None):
        with refused(
            rf"got num_microbatches {re.escape(repr(number))}, expected an integer from 1"
        ):
            contract.step(a_plan(contract), num_microbatches=number)


def check_a_value_that_is_already_a_mean_is_reported_with_its_count(chunk, contract):
    plan = a_plan(contract)
    with abandoned(contract.step(plan, num_microbatches=2)) as step:
        reducer = a_reducer(contract, plan, [0])
        means = {
            "clipfrac": (torch.tensor(3.0, requires_grad=True), 12),
            "reward": (torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor(2)),
        }
        _, _, report = step.returns(share_of(reducer), reducer, means=means)
        with refused("the sum of kl is", "0-dim floating-point"):
            other = a_reducer(contract, plan, [1])
            step.returns(share_of(other), other, means={"kl": (torch.ones(2), 2)})
    assert report["clipfrac"].tolist() == [3, 12]
    assert not report["clipfrac"].requires_grad
    assert (report["reward"].dtype, report["reward"].tolist()) == (torch.float32, [1.5, 2])


def check_a_reducer_of_another_context_parallel_layout_is_refused(chunk, contract):
    plan = a_plan(contract, active=(4, 4))
    with abandoned(contract.step(plan, num_microbatches=1)) as step:
        for layout in (
            Layout.local([4, 4], cp_size=2, cp_rank=0),
            Layout.thd_zigzag([0, 4, 8], cp_size=2, cp_rank=1),
        ):
            mask = torch.ones(layout.num_tokens)
            reducer = plan.reducer([0, 1], mask, layout)
            with refused(r"CP rank [01] of 2, this rank is 0 of 1", r"contract\.thd"):
                step.returns(share_of(reducer), reducer)


def check_reported_names_are_the_callers_own_and_once(chunk, contract):
    plan = a_plan(contract)
    with abandoned(contract.step(plan, num_microbatches=1)) as step:
        reducer = a_reducer(contract, plan, [0, 1])
        share = share_of(reducer)
        with refused(r"\['lossagg/weight_sum'\]", "rename"):
            step.returns(share, reducer, report={"lossagg/weight_sum": share})
        with refused(r"\['kl'\]", "each once"):
            step.returns(share, reducer, report={"kl": share}, means={"kl": (share, 1)})


def check_groups_that_contradict_the_config_are_refused(chunk, contract):
    now = chunk.config.context_parallel_size
    chunk.config.context_parallel_size = 2
    try:
        with refused("context parallelism of size 2 in the config", r"over ranks \[[01]\]"):
            live.LiveGroups.of([chunk])
    finally:
        chunk.config.context_parallel_size = now


def check_chunks_with_groups_of_their_own_are_refused(chunk, contract):
    other = copy.copy(chunk)
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    other.dp_cp_group = groups[dist.get_rank()]
    with refused(r"chunk 1 has ranks \[[01]\] in its dp_cp_group, chunk 0 \[0, 1\]", "same groups"):
        live.LiveGroups.of([chunk, other])


def check_another_m_than_the_plan_is_refused(chunk, contract):
    plan = a_plan(contract, microbatch=[0, 1], num_microbatches=2)
    with refused("made for 2 microbatches", "runs 3"):
        contract.step(plan, num_microbatches=3)


def check_per_token_needs_n_and_an_int32(chunk, contract):
    config = tiny_gpt.config_of(per_token=True)
    per_token = read(tiny_gpt.wrapped(config))
    sequences = Sequences(active_tokens=[3, 2])
    unknown = plan_step(CONSTANT, sequences, totals=StepTotals(samples=4))
    with refused("active tokens", "StepTotals\\(active_tokens"):
        per_token.step(unknown, num_microbatches=1)
    huge = StepTotals(samples=4, active_tokens=2**31)
    with refused("2147483648", "int32"):
        per_token.step(plan_step(CONSTANT, sequences, totals=huge), num_microbatches=1)
    most = StepTotals(samples=4, active_tokens=2**31 - 1)
    plan = plan_step(CONSTANT, sequences, totals=most)
    with abandoned(per_token.step(plan, num_microbatches=1)) as step:
        assert step.factor == 2**31 - 1
    with abandoned(contract.step(plan_step(CONSTANT, sequences, totals=huge), num_microbatches=1)):
        pass


def check_a_share_is_a_scalar(chunk, contract):
    plan = a_plan(contract)
    with abandoned(contract.step(plan, num_microbatches=1)) as step:
        reducer = a_reducer(contract, plan, [0, 1])
        with refused("^share is", "0-dim floating-point"):
            step.returns(torch.ones(2), reducer)
        with refused("kl is", "0-dim floating-point"):
            step.returns(share_of(reducer), reducer, report={"kl": torch.ones(1)})


def check_a_reducer_of_another_step_is_refused(chunk, contract):
    with abandoned(contract.step(a_plan(contract), num_microbatches=1)) as step:
        other = a_reducer(contract, a_plan(contract, active=(1, 1, 1)), [0, 1, 2])
        share = share_of(a_reducer(contract, step.plan, [0, 1]))
        with refused(r"another plan \(3 sequences\), expected one of this plan \(2 sequences\)"):
            step.returns(share, other)


def check_a_reducer_of_another_plan_of_as_many_sequences_is_refused(chunk, contract):
    with abandoned(contract.step(a_plan(contract, active=(4, 4)), num_microbatches=1)) as step:
        stale = a_reducer(contract, a_plan(contract, active=(1, 1)), [0, 1])
        share = share_of(a_reducer(contract, step.plan, [0, 1]))
        with refused(
            r"another plan \(2 sequences\), .* \(2 sequences\)", r"plan\.reducer.* or under"
        ):
            step.returns(share, stale)


def check_the_returned_values_have_the_form_that_the_schedule_takes(chunk, contract):
    plan = a_plan(contract)
    with abandoned(contract.step(plan, num_microbatches=4)) as step:
        reducer = a_reducer(contract, plan, [0, 1])
        share = share_of(reducer)
        loss, num_tokens, report = step.returns(share, reducer, report={"loss": share})
        assert step.factor == 4 * 2
        assert not loss.is_leaf
        assert loss._base is None
        assert loss.data_ptr() != share.data_ptr()
        assert (num_tokens.dtype, num_tokens.dim(), num_tokens.item()) == (torch.int32, 0, 1)
        before = {name: value.clone() for name, value in report.items()}
        loss /= 7  # the schedule scales in place
        assert all(torch.equal(report[name], before[name]) for name in report)
        assert not any(value.requires_grad for value in report.values())
        assert set(report) == {"loss", "lossagg/weight_sum", "lossagg/weight_expected"}


def check_a_share_in_bfloat16_is_scaled_in_float32(chunk, contract):
    plan = a_plan(contract)
    with abandoned(contract.step(plan, num_microbatches=3)) as step:
        reducer = a_reducer(contract, plan, [0, 1])
        share = share_of(reducer).bfloat16()
        loss, _, report = step.returns(share, reducer, report={"x": share})
        assert (loss.dtype, loss.item()) == (torch.float32, 6 * share.item())
        assert report["x"].dtype == torch.float32
        assert report["x"].tolist() == [6 * share.item(), 1.0]


def check_the_start_line_names_mode_formula_loss_scaling_and_k(chunk, contract):
    line = contract.describe(CONSTANT)
    for word in ("constant", "1/(B 10)", "loss scaling average, K = M DP CP (DP 2, CP 1)"):
        assert word in line, (word, line)
    per_token = read(tiny_gpt.wrapped(tiny_gpt.config_of(per_token=True)))
    assert "loss scaling per_token, K = N (DP 2, CP 1)" in per_token.describe(CONSTANT)


def check_the_start_line_reports_whether_k_was_measured(chunk, contract):
    line = contract.describe(CONSTANT)
    assert "probe: K = M DP CP confirmed through DDP, schedule, finalize: measured 6 at" in line
    off = read(chunk, probe=False)
    assert off.probe is None
    assert off.describe(CONSTANT).endswith("probe: off")


def check_the_start_line_is_followed_by_what_depends_on_cp(chunk, contract):
    assert "\n" not in contract.describe(CONSTANT)
    assert read(a_moe()).note == ""  # no coefficient
    config = tiny_gpt.config_of()
    config.mtp_num_layers = 1
    note = live.note_on_side_losses(config, "average")
    assert note.startswith("side losses (MTP) are Megatron's own")
    assert "in the average loss scaling of megatron-core" in note
    is_free = live.note_on_side_losses(config, "per_token") == ""
    assert note.endswith("train with --calculate-per-token-loss") == is_free
    balanced = read(a_moe(per_token=True, moe_aux_loss_coeff=0.1))
    line, *notes = balanced.describe(CONSTANT).split("\n")
    assert line.startswith("loss aggregation constant")
    assert notes == [balanced.note] * bool(balanced.note)


def check_a_step_without_active_tokens_has_zero_gradient(chunk, contract):
    for per_token in (False, True):
        live = tiny_gpt.wrapped(tiny_gpt.config_of(per_token=per_token))
        its = MegatronContract.read(live, aggregation=Aggregation("token_mean"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sequences = Sequences(active_tokens=[0])
            plan = plan_step(Aggregation("token_mean"), sequences, group=its.dp_group)
        assert [str(w.message) for w in caught] == [
            "the step has no active tokens: its loss and gradient are zero"
        ]
        step = its.step(plan, num_microbatches=1)
        sequence = {"tokens": [1, 2, 3], "coefficient": [1.0, 1.0], "trained": [0, 0]}
        batch = tiny_gpt.microbatch([sequence], [0], 1, 0)

        def forward_step(iterator, model, batch=batch, plan=plan, its=its, step=step):
            logits = model(
                batch["tokens"], batch["positions"], None, packed_seq_params=batch["packed"]
            )

            def loss_func(logits):
                reducer = plan.reducer(batch["sequences"], batch["mask"], its.thd(batch["offsets"]))
                share = reducer(logits[0].logsumexp(-1))
                return step.returns(share, reducer, report={"loss": share})

            return logits, loss_func

        data = tiny_gpt.run_schedule(forward_step, live, [batch])
        step.close()
        assert live.buffers[0].grad_data.count_nonzero() == 0
        assert tiny_gpt.reported(data, "loss") == 0


def check_a_loss_without_a_graph_is_refused_in_a_training_step(chunk, contract):
    """Megatron-Core skips the backward pass of such a loss."""
    x = torch.ones(8, requires_grad=True)

    def detached(reducer):
        return reducer(x.detach())

    def without_grad(reducer):
        with torch.no_grad():
            return reducer(x)

    def in_inference_mode(reducer):
        with torch.inference_mode():
            return reducer(x)

    for make in (detached, without_grad, in_inference_mode):
        plan = a_plan(contract)
        with abandoned(contract.step(plan, num_microbatches=1)) as step:
            reducer = a_reducer(contract, plan, [0, 1])
            with refused("requires no gradient in a training step", "forward_only=True"):
                step.returns(make(reducer), reducer)

    def through_numpy(context):
        return lambda x: torch.tensor(float(x.detach().numpy().mean()))

    plan = a_plan(contract)
    with abandoned(contract.step(plan, num_microbatches=1)) as step:
        layout = contract.thd([0, 4, 8])
        mask = torch.tensor([1, 1, 1, 0, 1, 1, 0, 0])
        reducer = plan.reducer([0, 1], mask, layout, factory=through_numpy)
        with refused("requires no gradient", "let a custom reducer keep its graph"):
            step.returns(reducer(x), reducer)


def check_a_step_without_active_tokens_may_have_losses_without_a_graph(chunk, contract):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plans = [a_plan(contract, active=(0, 0)) for _ in range(2)]
    with contract.step(plans[0], num_microbatches=1) as step:
        reducer = a_reducer(contract, plans[0], [0, 1])
        step.returns(reducer(torch.ones(8)), reducer)
    with abandoned(contract.step(plans[1], num_microbatches=1)) as step:
        reducer = a_reducer(contract, plans[1], [0, 1])
        with refused("requires no gradient in a training step"):
            step.returns(share_of(reducer).detach(), reducer)


def check_a_forward_only_step_that_is_trained_is_refused(chunk, contract):
    plan = a_plan(contract)
    with abandoned(contract.step(plan, num_microbatches=1, forward_only=True)) as step:
        reducer = a_reducer(contract, plan, [0, 1])
        with refused("requires a gradient in a step with forward_only=True", "no_grad"):
            step.returns(share_of(reducer), reducer)


def check_a_loss_that_no_reducer_made_is_refused(chunk, contract):
    plan = a_plan(contract)
    x = torch.ones(8, requires_grad=True)
    with abandoned(contract.step(plan, num_microbatches=1)) as step:
        reducer = a_reducer(contract, plan, [0, 1])
        with refused("was not called in this microbatch"):
            step.returns(x.mean(), reducer)


def check_a_loss_that_is_not_the_called_reducers_is_refused_when_the_step_closes(chunk, contract):
    plan = a_plan(contract)
    x = torch.ones(8, requires_grad=True)
    step = contract.step(plan, num_microbatches=1)
    reducer = a_reducer(contract, plan, [0, 1])
    loss, _, _ = step.returns(x.mean(), reducer, report={"loss": reducer(x)})
    loss.backward()
    with refused("no gradient reached the main reducer's share in call 0"):
        step.close()


def check_a_share_of_a_reducer_of_another_microbatch_is_refused(chunk, contract):
    plan = a_plan(contract)
    with abandoned(contract.step(plan, num_microbatches=2)) as step:
        cached = a_reducer(contract, plan, [0])
        step.returns(share_of(cached), cached)
        own = a_reducer(contract, plan, [1])
        with refused("was not called in this microbatch", "anew for each microbatch"):
            step.returns(share_of(cached), own)
    plan = a_plan(contract)
    step = contract.step(plan, num_microbatches=2)
    cached, own = a_reducer(contract, plan, [0]), a_reducer(contract, plan, [1])
    step.returns(share_of(cached), cached)[0].backward()
    step.returns(share_of(own) + share_of(cached), own)[0].backward()
    with refused("a reducer of sequences 0 was called after loss_func had returned for them"):
        step.close()


def check_a_metric_may_be_reduced_at_any_time_of_the_step(chunk, contract):
    plan, other = a_plan(contract), a_plan(contract, active=(2, 2))
    with contract.step(plan, num_microbatches=2) as step:
        reducers = [a_reducer(contract, plan, [sequence]) for sequence in (0, 1)]
        shares = [share_of(reducer) for reducer in reducers]  # all before the first returns
        for share, reducer in zip(shares, reducers, strict=True):
            step.returns(share, reducer)[0].backward()
            share_of(reducer), reducer.under("token_mean")(torch.ones(4))
        with torch.no_grad():
            share_of(a_reducer(contract, other, [0, 1]))


def check_a_reducer_inside_an_activation_checkpoint_trains(chunk, contract):
    for is_reentrant in (False, True):
        plan = a_plan(contract)
        with contract.step(plan, num_microbatches=2) as step:
            for sequence in (0, 1):
                reducer = a_reducer(contract, plan, [sequence])
                x = torch.ones(4, requires_grad=True)
                share = checkpoint(lambda y, r=reducer: r(y * 1.0), x, use_reentrant=is_reentrant)
                step.returns(share, reducer)[0].backward()
                assert x.grad.count_nonzero() == plan.active_tokens[sequence]


def check_the_masks_of_a_step_are_not_kept_until_it_ends(chunk, contract):
    plan = a_plan(contract)
    with contract.step(plan, num_microbatches=2) as step:
        kept = []
        for sequence in (0, 1):
            reducer = a_reducer(contract, plan, [sequence])
            step.returns(share_of(reducer), reducer)[0].backward()
            kept.append(weakref.ref(reducer.microbatch))
        del reducer
        gc.collect()
        assert [one() for one in kept] == [None, None]


def check_a_main_reducer_under_another_aggregation_is_refused(chunk, contract):
    plan = a_plan(contract)
    with abandoned(contract.step(plan, num_microbatches=1)) as step:
        other = a_reducer(contract, plan.under("token_sum"), [0, 1])
        with refused("a main reducer under token_sum", "step's plan is under constant"):
            step.returns(share_of(other), other)
        with refused("was not called in this microbatch"):
            main = a_reducer(contract, plan, [0, 1])
            step.returns(share_of(main.under("token_sum")), main)
        main = a_reducer(contract, plan, [0, 1])
        share = share_of(main) + share_of(main.under("token_mean"))  # a further term
        step.returns(share, main)
    plan = a_plan(contract)
    step = contract.step(plan, num_microbatches=1)
    main = a_reducer(contract, plan, [0, 1])
    share = share_of(main).detach() + share_of(main.under("token_mean"))
    step.returns(share, main)[0].backward()
    with refused("no gradient reached the main reducer's share"):
        step.close()


def check_a_reducer_of_a_second_plan_is_refused_unless_it_is_declared(chunk, contract):
    first, second = a_plan(contract), a_plan(contract, active=(2, 2))
    with abandoned(contract.step(first, num_microbatches=1)):
        reducer = a_reducer(contract, second, [0, 1])
        with pytest.raises(ReducerError, match=r"other than the running step's: .* also="):
            share_of(reducer)
    first, second = a_plan(contract), a_plan(contract, active=(2, 2))
    with contract.step(first, num_microbatches=1, also=[second]) as step:
        main, further = (a_reducer(contract, plan, [0, 1]) for plan in (first, second))
        step.returns(share_of(main) + share_of(further), main)[0].backward()
    third = a_plan(contract)
    gc.collect()  # contracts of other tests whose steps were given up
    share_of(a_reducer(contract, third, [0, 1]))  # no step runs
    for wrong, words in {
        second: "has already begun to train",
        a_plan(contract, active=(2, 2, 2)): "a plan of 3 sequences, the step's plan has 2",
        a_plan(contract).under("token_mean"): "have not agreed on",
    }.items():
        with refused(words):
            contract.step(third, num_microbatches=1, also=[wrong])


def check_steps_of_two_contracts_may_run_at_once(chunk, contract):
    """A policy and a critic."""
    its = read(tiny_gpt.wrapped(tiny_gpt.config_of()), probe=False)
    plans = [a_plan(contract), a_plan(contract)]
    with contract.step(plans[0], num_microbatches=1) as outer:
        with its.step(plans[1], num_microbatches=1) as inner:
            returns(inner, its, plans[1], [0, 1])
        returns(outer, contract, plans[0], [0, 1])
        with pytest.raises(ReducerError, match="other than the running step's"):
            share_of(a_reducer(contract, a_plan(contract), [0, 1]))


def check_gradients_are_added_up_only_where_megatron_does_not_scale_them_again(chunk, contract):
    per_token = read(tiny_gpt.wrapped(tiny_gpt.config_of(per_token=True)))
    with refused("accumulates=True with --calculate-per-token-loss", "in one schedule call"):
        per_token.step(a_plan(per_token), num_microbatches=1, accumulates=True)
    sharded = read(tiny_gpt.wrapped(tiny_gpt.config_of(), use_distributed_optimizer=True))
    with refused("accumulates=True with the distributed optimizer"):
        sharded.step(a_plan(sharded), num_microbatches=1, accumulates=True)


def check_a_fault_of_a_declared_plan_is_raised_when_the_step_closes(chunk, contract):
    first, second = a_plan(contract), a_plan(contract)
    step = contract.step(first, num_microbatches=1, also=[second])
    returns(step, contract, first, [0, 1])
    second.state.faults.record([torch.ones(())], lambda values: "of the second")
    with pytest.raises(ReducerError, match="of the second"):
        step.close()


def check_gradients_that_are_not_zero_when_a_step_begins_are_refused(chunk, contract):
    """Two schedule calls, or a retry of a failed step, without zeroing between."""
    for value in (1.0, torch.nan):
        chunk.buffers[0].grad_data[-1:].fill_(0)
        chunk.buffers[0].grad_data.fill_(value)
        step = contract.step(a_plan(contract), num_microbatches=1)
        returns(step, contract, step.plan, [0, 1])
        with pytest.raises(ReducerError, match=r"chunk 0 were not zero .*zero_grad_buffer\(\)"):
            step.close()
        with contract.step(a_plan(contract), num_microbatches=1, accumulates=True) as step:
            returns(step, contract, step.plan, [0, 1])
        with contract.step(a_plan(contract), num_microbatches=1, forward_only=True) as step:
            returns(step, contract, step.plan, [0, 1])
    chunk.zero_grad_buffer()
    with contract.step(a_plan(contract), num_microbatches=2) as step:
        returns(step, contract, step.plan, [0])
        chunk.buffers[0].grad_data.fill_(1)  # the first microbatch's backward pass
        returns(step, contract, step.plan, [1])
    chunk.zero_grad_buffer()


def check_a_finalize_function_that_is_replaced_is_refused(chunk, contract):
    stock = chunk.config.finalize_model_grads_func

    def doubled(*args, **kwargs):
        stock(*args, **kwargs)

    try:
        chunk.config.finalize_model_grads_func = doubled
        with refused("finalize_model_grads_func is .*doubled", "when the contract was read"):
            contract.step(a_plan(contract), num_microbatches=1)
        chunk.config.finalize_model_grads_func = functools.partial(stock, a=1)
        its = read(chunk, probe=False)
        chunk.config.finalize_model_grads_func = functools.partial(stock, a=1)  # as Bridge does
        its.step(a_plan(its), num_microbatches=1)
        chunk.config.finalize_model_grads_func = functools.partial(stock, a=2)
        with refused("a=2.* it was .*a=1"):
            its.step(a_plan(its), num_microbatches=1)
        chunk.config.finalize_model_grads_func = None
        early = read(chunk, probe=False)
        for function in (stock, doubled):  # training sets the first one
            chunk.config.finalize_model_grads_func = function
            if function is stock:
                early.step(a_plan(early), num_microbatches=1)
            else:
                with refused("doubled"):
                    early.step(a_plan(early), num_microbatches=1)
    finally:
        chunk.config.finalize_model_grads_func = stock


def check_an_aggregation_that_the_ranks_did_not_agree_on_is_refused(chunk, contract):
    other = Aggregation("sample_mean")
    its = read(chunk, probe=False)
    plan = plan_step(other, Sequences(active_tokens=[3, 2]), group=its.dp_group)
    with refused("under sample_mean.*not agreed on", r"contract\.agree_on"):
        its.step(plan, num_microbatches=1)
    with refused("rank 0 has token_mean", "rank 1 has sample_mean"):
        its.agree_on(Aggregation("token_mean") if dist.get_rank() == 0 else other)
    its.agree_on(other)
    with its.step(plan, num_microbatches=1) as step:
        returns(step, its, plan, [0, 1])


def check_what_the_probe_cannot_read_on_one_rank_reaches_all(chunk, contract):
    class Unreadable(DistributedDataParallelConfig):
        def __repr__(self):
            raise RuntimeError("cannot be shown")

    own_chunk = tiny_gpt.wrapped(tiny_gpt.config_of())
    if dist.get_rank() == 1:
        own_chunk.ddp_config.__class__ = Unreadable
    with refused("^rank 1: the startup probe cannot read .*RuntimeError: cannot be shown"):
        read(own_chunk)


def check_ranks_that_disagree_on_the_probe_are_refused_and_do_not_wait(chunk, contract):
    with refused("rank 0 has .*probe True", "rank 1 has .*probe False"):
        read(chunk, probe=dist.get_rank() == 0)


def check_without_torch_distributed_no_contract_is_read(chunk, contract):
    """The last one: it ends torch.distributed."""
    dist.destroy_process_group()
    with refused("^torch.distributed is not initialized: read the contract after it is$"):
        read(chunk)


def main():
    tiny_gpt.start(ep=2)
    if dist.get_rank() == 0:
        print(f"RAN megatron-core {megatron_version()}", flush=True)
    chunk = tiny_gpt.wrapped(tiny_gpt.config_of())
    contract = MegatronContract.read([chunk], aggregation=CONSTANT)
    run_checks(globals(), chunk, contract)


if __name__ == "__main__":
    main()
