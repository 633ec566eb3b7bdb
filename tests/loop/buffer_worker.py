"""A StepBuffer that plans over 2 and 3 ranks, some without data; a launched worker."""

import pytest
import torch.distributed as dist
from ranks import raised_everywhere, run_worker
from steps import TOKEN_MEAN

from benchmarks.counting import counted
from megatron_lossagg import Aggregation
from megatron_lossagg.errors import PlanError
from megatron_lossagg.loop.buffer import StepBuffer


def lengths(sequences):
    return [len(sequence) for sequence in sequences]


def check_tensor_parallel_ranks_without_data_plan_the_same_step():
    alone, _ = dist.new_subgroups(group_size=1)  # data-parallel size 1, all ranks in one TP group
    first = dist.get_rank() == 0
    buffer = StepBuffer(iter([["a", "bbb"], ["cc"]]) if first else None, 2)
    with counted() as seen:
        plan = buffer.plan(
            Aggregation("sample_mean"), lengths, group=alone, tp_group=dist.group.WORLD
        )
    assert seen.num_collectives == 1, seen
    assert plan.weights.tolist() == [1 / 3, 1 / 9, 1 / 6]
    assert [mb.sequences for mb in buffer] == [[0, 1], [2]]
    assert [mb.data for mb in buffer] == ([["a", "bbb"], ["cc"]] if first else [None, None])


def raising():
    yield ["a"]
    raise OSError("the file is gone")


BUFFERS = {
    "ended after 1 of 2 microbatches: pass whole steps": (lambda: iter([["a"]]), lengths),
    r"raised OSError\('the file is gone'\) after 1 of 2": (raising, lengths),
    "counting microbatch 1 of 2 raised ": (lambda: iter([["a"], [3]]), lengths),
    "counting microbatch 0 of 2 raised ": (lambda: iter([["a"], ["b"]]), lambda sequences: 1),
    "Sequences.active_tokens: got -1 at index 1": (
        lambda: iter([[2], [-1]]),
        lambda sequences: sequences,
    ),
}


def check_a_buffer_that_cannot_read_or_count_on_one_rank_is_reported_on_all():
    for message, (iterator, count) in BUFFERS.items():
        faulty = dist.get_rank() == 1
        buffer = StepBuffer(iterator() if faulty else iter([["a"], ["bb"]]), 2)
        raised_everywhere(
            f"rank 1 of the data-parallel group: .*{message}",
            buffer.plan,
            TOKEN_MEAN,
            count if faulty else lengths,
            group=dist.group.WORLD,
        )
        with pytest.raises(PlanError, match=r"call plan\(\)"):  # nothing to replay
            next(iter(buffer))
    whole = StepBuffer(iter([["a"], ["bb"]]), 2)
    plan = whole.plan(TOKEN_MEAN, lengths, group=dist.group.WORLD)
    assert plan.totals.active_tokens == 3 * dist.get_world_size()


def check_a_buffer_that_cannot_read_is_reported_on_tensor_parallel_ranks_without_data():
    alone, _ = dist.new_subgroups(group_size=1)
    groups = {"group": alone, "tp_group": dist.group.WORLD}
    for faulty in range(dist.get_world_size()):
        for message, (iterator, count) in BUFFERS.items():
            if faulty and "got -1" in message:
                continue  # the counts of the first rank are taken
            source = iter([["a"], ["bb"]]) if dist.get_rank() == 0 else None
            own_count = lengths
            if dist.get_rank() == faulty:
                source, own_count = iterator(), count
            if "got -1" not in message:
                message = f"tensor-parallel rank {faulty}: .*{message}"
            raised_everywhere(message, StepBuffer(source, 2).plan, TOKEN_MEAN, own_count, **groups)


def check_a_rank_without_iterator_and_counts_is_reported_on_all():
    source = None if dist.get_rank() == 1 else iter([["a"]])
    raised_everywhere(
        "rank 1 of the data-parallel group: this rank has no data iterator .* pass tp_group=",
        StepBuffer(source, 1).plan,
        TOKEN_MEAN,
        lengths,
        group=dist.group.WORLD,
    )


def main():
    run_worker(globals())


if __name__ == "__main__":
    main()
