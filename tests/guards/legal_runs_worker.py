"""What runs may be: ids, modes, sizes, options and wrappers; the gradient is the plain program's.

On DP 2, CP 2 and PP 2, in both loss scalings.
"""

import functools
import tempfile
import uuid
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from audit_cases import LAYOUTS
from check_runner import run_checks
from megatron.core import parallel_state
from ranks import begin
from torch._dynamo.testing import CompileCounterWithBackend
from training_steps import ACTIVE, SEQUENCES, Training, microbatch, right

from megatron_lossagg import Aggregation, LossAggregator
from megatron_lossagg.reduction.aggregation import Options
from megatron_lossagg.verify import small_gpt
from megatron_lossagg.verify.world import split_world

ALL = range(len(SEQUENCES))
PAIRS = [index // 2 for index in ALL]
"""Ids of which two data-parallel ranks have one sequence each."""
THREES = [index // 3 for index in ALL]


def weights_by_hand(mode, *, ids=ALL, counts=ACTIVE, number=None):
    """Return w_s of each sequence of the step; ``ids``: of samples, or of the mode's prompts."""
    tokens_of = Counter()
    for key, count in zip(ids, counts, strict=True):
        tokens_of[key] += count
    num_groups, lengths = len(tokens_of), [tokens_of[key] for key in ids]
    if mode == "token_mean":
        return [1 / sum(counts) for _ in ids]
    if mode in ("sample_mean", "prompt_mean"):
        return [1 / (num_groups * n) if n else 0.0 for n in lengths]
    if mode == "constant":
        return [1 / (num_groups * number) for _ in ids]
    total = sum(n ** (1 - number) for n in tokens_of.values())
    return [1 / (n**number * total) for n in lengths]


class Run(Training):
    """A model, its aggregator, and this rank's microbatches of any sequences."""

    def __init__(self, layout, *, per_token, mode="sample_mean", sequences=SEQUENCES, own=None):
        """Build them. ``own``: which of the step's sequences this rank has."""
        super().__init__(layout, per_token=per_token, mode=mode)
        rank = parallel_state.get_data_parallel_rank()
        self.own = range(rank, len(sequences), layout.dp) if own is None else own
        self.counts = [sum(sequences[index].counted) for index in self.own]
        self.total = sum(sum(one.counted) for one in sequences)
        mine = [sequences[index] for index in self.own]
        self.batches = [
            small_gpt.pack(mine, range(number, len(mine), self.m), layout)
            for number in range(self.m)
        ]

    def train(self, loss_func=right, **options):
        """Train a step; ids are of the whole step. Return each parameter's main_grad."""
        for kind in ("sample", "prompt"):
            if kind in options:
                options[kind] = [options[kind][index] for index in self.own]
        self.step(loss_func, **options)
        return self.main_grads()

    def by_hand(self, weights, *, weighs_tokens=False):
        """Train a step without the package, with w_s by hand; return each main_grad."""
        cp_rank = parallel_state.get_context_parallel_rank()

        def loss_func(batch, losses):
            here = self.layout.held(batch.offsets.tolist(), cp_rank)
            of_segment = [weights[self.own[one]] if one >= 0 else 0.0 for one in batch.sequences]
            of_token = torch.tensor(of_segment).repeat_interleave(batch.offsets.diff())
            of_token *= batch.weights if weighs_tokens else batch.mask
            num_tokens = batch.mask[here].sum().int() if self.per_token else torch.ones(()).int()
            factor = self.total if self.per_token else self.m * self.layout.dp_cp
            return (of_token[here] * losses).sum() * factor, num_tokens, {}

        self.run(loss_func)
        return self.main_grads()

    def main_grads(self):
        """Return every parameter's main_grad, in the model's order, in float64."""
        parameters = [one for chunk in self.chunks for one in chunk.parameters()]
        return torch.cat([one.main_grad.flatten().double() for one in parameters])


def same(found, expected, tolerance=1e-10):
    assert expected.norm() > 0
    error = (found - expected).norm() / expected.norm()
    assert error <= tolerance, error.item()


SAMPLE_MEAN = weights_by_hand("sample_mean")


def aggregate_anew(run, mode="sample_mean", **options):
    run.aggregator = LossAggregator(run.chunks, mode, options=Options(probe=False, **options))


def check_a_whole_loss_func_is_compiled(make):
    torch._dynamo.reset()
    graphs, means = CompileCounterWithBackend("aot_eager"), {"ones": (torch.ones(()), 2)}

    def loss_func(step, batch, x):
        mb = microbatch(step, batch)
        return mb.outputs(mb.reduce(x.square() / x), means=means)

    compiled, seen = torch.compile(loss_func, backend=graphs), []

    def trained(*given):
        seen.append(compiled(*given))
        return seen[-1]

    run = make()
    for mode in ("sample_mean", "token_mean"):  # one function, other weights
        expected = run.by_hand(weights_by_hand(mode))
        aggregate_anew(run, mode)
        for _ in range(2):
            same(run.train(trained), expected)
    assert all(report["ones"].tolist() == [1, 2] for *_, report in seen)
    assert 1 <= graphs.frame_count <= 2  # the division, for one size and for any


def check_ids_of_every_kind(make):
    run = make(mode="prompt_mean")
    expected = run.by_hand(weights_by_hand("prompt_mean", ids=THREES))
    for named in (
        lambda one: f"prompt {one}" if one else "",
        lambda one: str(uuid.uuid5(uuid.NAMESPACE_OID, str(one))),
        lambda one: (2**62, -(2**62), 0, 2**62 - 1)[one],
    ):
        same(run.train(prompt=[named(one) for one in THREES]), expected)


def check_samples_and_prompts_are_split_over_data_parallel_ranks(make):
    run = make()
    expected = run.by_hand(weights_by_hand("sample_mean", ids=PAIRS))
    same(run.train(sample=PAIRS), expected)
    aggregate_anew(run, "prompt_mean")
    expected = run.by_hand(weights_by_hand("prompt_mean", ids=PAIRS))
    same(run.train(prompt=PAIRS, samples_per_prompt=2), expected)


def check_token_weights_of_zero(make):
    """One sequence weighs nothing, and so do tokens of others."""
    sums = [sum(one.weight) for one in SEQUENCES]
    assert 0 in sums
    run = make(mode=Aggregation("sample_mean", count="weights"))
    expected = run.by_hand(weights_by_hand("sample_mean", counts=sums), weighs_tokens=True)

    def loss_func(step, batch, x):
        given = {"cu_seqlens": batch.offsets, "token_weights": batch.weights}
        mb = step.microbatch(batch.sequences, batch.mask, **given)
        return mb.outputs(mb.reduce(x))

    found = run.train(loss_func, token_weight_sums=[sums[index] for index in run.own])
    same(found, expected)
    run.batches = [replace(batch, weights=batch.weights * 0) for batch in run.batches]
    assert not run.train(loss_func, token_weight_sums=[0.0] * len(run.own)).any()


def check_modes_with_a_number(make):
    run = make()
    for name, numbers in (
        ("length_power", (-100.0, -1.0, 0.0, 0.5, 1.0, 2.0, 100.0)),
        ("constant", (1e-30, 7.0, 1e30)),
    ):
        field = "divisor" if name == "constant" else "exponent"
        for number in numbers:
            aggregate_anew(run, Aggregation(name, **{field: number}))
            for ids in (ALL, PAIRS) if number == 0.5 else (PAIRS,):
                expected = run.by_hand(weights_by_hand(name, ids=ids, number=number))
                same(run.train(sample=list(ids)), expected)


def check_a_shadow_of_the_trained_mode(make):
    run = make()
    expected = run.by_hand(SAMPLE_MEAN)
    aggregate_anew(run, shadow=("sample_mean", "constant:4096"))
    same(run.train(), expected)


def check_a_record_on_a_full_disk(make):
    run = make()
    expected = run.by_hand(SAMPLE_MEAN)
    aggregate_anew(run, record="/dev/full")
    for _ in range(2):
        same(run.train(), expected)


def check_a_record_that_is_moved_or_overwritten_between_steps(make):
    run = make()
    expected = run.by_hand(SAMPLE_MEAN)
    with tempfile.TemporaryDirectory() as folder:
        of_first = [folder]
        dist.broadcast_object_list(of_first)
        record = Path(of_first[0], "steps.jsonl")
        aggregate_anew(run, record=str(record))
        same(run.train(), expected)
        for change in (
            lambda: record.rename(record.with_suffix(".old")),
            lambda: record.write_text("no JSON\n"),
        ):
            if dist.get_rank() == 0:
                change()
            same(run.train(), expected)
        dist.barrier()


def check_chunks_that_are_wrapped_anew(make):
    """The aggregator is of the old chunks, which have trained nothing."""
    run = make()
    run.chunks = small_gpt.wrapped_chunks(run.layout, run.config)
    expected = run.by_hand(SAMPLE_MEAN)
    for _ in range(2):
        same(run.train(), expected)


def check_chunks_that_are_wrapped_anew_after_they_have_trained(make):
    """Their gradients are in new buffers, and the old ones keep what they held."""
    run = make()
    same(run.train(), run.by_hand(SAMPLE_MEAN))
    old = run.chunks
    run.chunks = [type(one)(run.config, one.ddp_config, one.module) for one in old]
    expected = run.by_hand(SAMPLE_MEAN)
    assert all(one.buffers[0].grad_data.any() for one in old)
    for _ in range(2):
        same(run.train(), expected)


DDP = (
    {"use_distributed_optimizer": True},
    {"use_distributed_optimizer": True, "overlap_grad_reduce": True},
    {"bucket_size": 16, "overlap_grad_reduce": True},
    {"grad_reduce_in_fp32": True},
)
"""Options of DistributedDataParallel."""


def check_ddp_of_any_options(make):
    expected = make().by_hand(SAMPLE_MEAN)
    stock = small_gpt.DistributedDataParallelConfig
    for options in DDP:

        def config_of(options=options, **given):
            return stock(**{**given, **options})

        with patch.object(small_gpt, "DistributedDataParallelConfig", config_of):
            run = make()
        (chunk,) = run.chunks
        if options.get("overlap_grad_reduce"):
            run.config.no_sync_func = chunk.no_sync
        if "bucket_size" in options:
            assert len(chunk.buffers[0].buckets) > 1
        run.train()
        if "use_distributed_optimizer" in options:
            small_gpt.gather_gradients(run.chunks)
        same(run.main_grads(), expected, 1e-5 if "grad_reduce_in_fp32" in options else 1e-10)


def check_data_parallel_ranks_with_other_numbers_of_microbatches(make):
    for microbatches in ((2, 3), (1, 4)):
        run = make(microbatches=microbatches)
        for mode in ("sample_mean", "token_mean"):
            aggregate_anew(run, mode)
            expected = run.by_hand(weights_by_hand(mode))
            same(run.train(), expected)


def check_a_data_parallel_rank_without_sequences(make):
    """Its microbatch is a padding sequence, or holds nothing."""

    def nothing(step, batch, x):
        if any(one >= 0 for one in batch.sequences):
            return right(step, batch, x)
        mb = step.microbatch([], batch.mask[:0], cu_seqlens=[0])
        return mb.outputs(mb.reduce(x[:0]))

    whole = make().by_hand(SAMPLE_MEAN)
    run = make(own=list(ALL) if dist.get_rank() == 0 else [])
    same(run.by_hand(SAMPLE_MEAN), whole)
    for loss_func in (right, nothing):
        same(run.train(loss_func), whole)


def check_losses_are_gathered_over_context_parallel_ranks(make):
    expected = make().by_hand(SAMPLE_MEAN)
    run = make(packing="gathered")

    def loss_func(step, batch, x):
        layout = run.aggregator.thd(batch.offsets).gathered()
        mb = step.microbatch(batch.sequences, batch.mask, layout=layout)
        return mb.outputs(mb.reduce(x))

    same(run.train(loss_func), expected)


def check_a_context_parallel_rank_with_only_prompt_tokens(make):
    """Rank 1 holds the second and third quarter of each sequence."""

    def of_response(one):
        quarter = -(-len(one) // 4)
        mask = [int(index < quarter or index >= 3 * quarter) for index in range(len(one))]
        return replace(one, counted=mask, trained=mask)

    sequences = [of_response(one) for one in SEQUENCES]
    counts = [sum(one.counted) for one in sequences]
    run = make(sequences=sequences)
    if dist.get_rank() == 1:
        for batch in run.batches:
            assert not batch.mask_here.any()
    for mode in ("sample_mean", "token_mean"):
        aggregate_anew(run, mode)
        expected = run.by_hand(weights_by_hand(mode, counts=counts))
        same(run.train(), expected)


def check_pipeline_stages_with_and_without_counts(make):
    for mode in ("token_mean", "sample_mean"):
        run = make(mode=mode)
        expected = run.by_hand(weights_by_hand(mode))
        same(run.train(), expected)  # counts on every stage
        if not parallel_state.is_pipeline_last_stage():
            run.counts = None
        same(run.train(), expected)


OF_DATA_PARALLELISM = (
    check_data_parallel_ranks_with_other_numbers_of_microbatches,
    check_a_data_parallel_rank_without_sequences,
)
OF_CONTEXT_PARALLELISM = (
    check_losses_are_gathered_over_context_parallel_ranks,
    check_a_context_parallel_rank_with_only_prompt_tokens,
    # They take ten seconds each; at CP 2 they index what at CP 1 they slice.
    check_a_whole_loss_func_is_compiled,
)
OF_ANY = (
    check_ids_of_every_kind,
    check_samples_and_prompts_are_split_over_data_parallel_ranks,
    check_token_weights_of_zero,
    check_modes_with_a_number,
    check_a_shadow_of_the_trained_mode,
    check_a_record_on_a_full_disk,
    check_a_record_that_is_moved_or_overwritten_between_steps,
    check_chunks_that_are_wrapped_anew,
    check_chunks_that_are_wrapped_anew_after_they_have_trained,
    check_ddp_of_any_options,
)
RUNS = {
    "DP 2": (*OF_ANY, *OF_DATA_PARALLELISM),
    "CP 2": (*OF_ANY, *OF_CONTEXT_PARALLELISM),
    "PP 2": (check_pipeline_stages_with_and_without_counts,),
}
"""The checks of each layout."""


def made(layout, *, per_token, mode="sample_mean", sequences=SEQUENCES, own=None, **sizes):
    """Make a model, its aggregator and its microbatches."""
    more = {"mode": mode, "sequences": sequences, "own": own}
    return Run(replace(layout, **sizes), per_token=per_token, **more)


def main():
    begin()
    for name, checks in RUNS.items():
        layout = LAYOUTS[name]
        with split_world(layout):
            for per_token in (False, True):
                named = {one.__name__: one for one in checks}
                run_checks(named, functools.partial(made, layout, per_token=per_token))


if __name__ == "__main__":
    main()
