"""What the recorders share: one process, each sequence's sum by the framework's reducer, a file."""

import contextlib
import json
import os
from pathlib import Path

import megatron_framework
import pytest
import torch
import torch.distributed as dist

FOLDER = Path(__file__).parent / "recorded"
CP_SIZES = (1, 2, 4)


@contextlib.contextmanager
def one_process():
    """Let this process be the only rank, and end its groups."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"}
    os.environ.update(alone)
    with pytest.MonkeyPatch.context() as monkey:
        yield monkey
    dist.destroy_process_group()


def loss_of_one(args, batch, logits, sum_of_sample_mean):
    """Return 1 as a custom loss: what comes out is the framework's factor."""
    one = logits.new_ones(())
    return one, {"loss": one}


def of_sequences(data, at, held, reducer):
    """Return the data's integers, a loss per token, and each sequence's sum on every rank.

    ``at``: sets the context-parallel size and rank. ``held``: slices a response. ``reducer``:
    the framework's, of one sequence with one denominator.
    """
    samples = megatron_framework.make_samples()
    own = [samples[number] for number in data["partition"]]
    x = [(one["advantage"] * 8).round() / 8 for one in own]  # exact in float32 and in JSON
    sums = {}
    for size in CP_SIZES:
        sums[size] = []
        for rank in range(size):
            at(size, rank)
            of_rank = []
            for sequence, total in enumerate(data["total_lengths"]):
                n, mask = data["response_lengths"][sequence], data["loss_masks"][sequence]
                reduce = reducer([total], [n], [mask], torch.ones(1))
                of_rank.append(float(reduce(held(x[sequence], total, n))))
            sums[size].append(of_rank)
    at(1, 0)
    first = (data["total_lengths"][:1], data["response_lengths"][:1], data["loss_masks"][:1])
    below = reducer(*first, torch.full((1,), 0.5))(x[0])
    return {
        "loss_masks": [mask.tolist() for mask in data["loss_masks"]],
        "rollout_ids": [int(rollout) for rollout in data["rollout_ids"]],
        "rollout_mask_sums": [float(count) for count in data["rollout_mask_sums"]],
        "total_lengths": list(data["total_lengths"]),
        "response_lengths": list(data["response_lengths"]),
        "prompts": [one["prompt"] for one in own],
        "x": [sequence.tolist() for sequence in x],
        "held": {
            str(size): [
                [held_at(at, held, size, rank, sequence, x, data) for sequence in range(len(x))]
                for rank in range(size)
            ]
            for size in CP_SIZES
        },
        "sums": {str(size): of_ranks for size, of_ranks in sums.items()},
        "first sequence with a denominator of 0.5": float(below),
    }


def held_at(at, held, size, rank, sequence, x, data):
    """Return the losses of a sequence that a rank holds."""
    at(size, rank)
    return held(
        x[sequence], data["total_lengths"][sequence], data["response_lengths"][sequence]
    ).tolist()


def save(framework, commit, recorded):
    """Write a framework's file."""
    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / f"{framework}.json"
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in recorded.items()]
    file.write_text("{\n" + ",\n".join([f'"commit": "{commit}"', *lines]) + "\n}\n")
    print(file.name, file.stat().st_size, "bytes")
