"""slime's and miles' reducer and carried weights on live Megatron-Core, DP 2 x CP 2.

The framework's part is written here from its source (slime 624b824a ``get_sum_of_sample_mean``,
``loss_function``): sum of masked sums / max(d_s, 1), three outputs with num_tokens 1,
loss * M / G * (DP * CP), average loss scaling. Where there is a checkout, ``slime_worker.py`` runs
the framework's own.
"""

import importlib
import sys
from argparse import Namespace

import pytest
import tiny_gpt
import torch
import torch.distributed as dist
from framework_step import PROMPTS, assert_gradients, graded
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from step_data import make_sequences, zigzag

import megatron_lossagg.cpu as cpu
from megatron_lossagg.errors import PlanError
from megatron_lossagg.verify import reference_loss

L = 40.0
DP = 2
COUNTS = (1, 3)
"""M."""
REDUCER = "reducer"
MODES = ("token_mean", "sample_mean", "prompt_mean", "constant")
OF_MICROBATCHES = "microbatch_token_mean"


def load_function(path):
    """Load a function as the frameworks do: a path with dots only."""
    module, _, attribute = path.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def samples():
    """Return whole token lists with a prompt length and a response mask for each."""
    sequences = []
    for sequence, prompt in zip(make_sequences(), PROMPTS, strict=True):
        total = len(sequence["tokens"]) + prompt
        tokens = [5] * prompt + sequence["tokens"]
        # Masks cover the response; the last token of it is trained as well.
        mask = [*sequence["trained"], 1]
        # Larger prompts: one with fewer active tokens than rollouts is refused.
        ids = {"sample": sequence["sample"], "prompt": sequence["sample"] // 5}
        sequences.append({"tokens": tokens, "response": total - prompt, "mask": mask, **ids})
    sequences[4]["mask"] = [0] * sequences[4]["response"]
    return sequences


def reference(path):
    """Save losses and gradients by the reference, on one process from unpacked sequences."""
    tiny_gpt.start()
    model = tiny_gpt.gpt(tiny_gpt.config_of(), get_gpt_layer_local_spec())
    live = []
    for sequence in samples():
        tokens = torch.tensor(sequence["tokens"])
        logits = model(tokens[None, :-1], torch.arange(len(tokens) - 1)[None], None)[0]
        nll = -torch.log_softmax(logits, -1).gather(1, tokens[1:, None]).squeeze(1)
        x = list(nll[-sequence["response"] :])
        ids = {"sample": sequence["sample"], "prompt": sequence["prompt"]}
        live.append({"x": x, "counted": sequence["mask"], "trained": sequence["mask"], **ids})
    named = {shard.name: shard.parameter for shard in cpu.named_shards([model])}
    saved = {}
    for mode in (REDUCER, *MODES):
        # The reducer's B counts sequences: each is a rollout of its own.
        sequences = (
            [{**sequence, "sample": n} for n, sequence in enumerate(live)]
            if mode == REDUCER
            else live
        )
        divisor = L if mode in (REDUCER, "constant") else None
        loss = reference_loss.step_loss(
            "constant" if mode == REDUCER else mode, sequences, divisor=divisor
        )
        saved[mode] = graded(loss, named)
    for m in COUNTS:
        sequences = [
            {**sequence, "microbatch": (n % DP, n // DP % m)} for n, sequence in enumerate(live)
        ]
        loss = reference_loss.step_loss(OF_MICROBATCHES, sequences, microbatches=[m] * DP)
        saved[OF_MICROBATCHES, m] = graded(loss, named)
    torch.save(saved, path)


def packed(sequences, cp_size, cp_rank):
    """Pack one microbatch as the framework does: each sequence padded to 2 CP, and zigzag."""
    tokens, positions, offsets, picks, masks, numbers = [], [], [0], [], [], []
    for number, sequence in enumerate(sequences):
        total = len(sequence["tokens"])
        padded = total + -total % (2 * cp_size)
        tokens += sequence["tokens"] + [0] * (padded - total)
        positions += range(padded)
        first = total - sequence["response"] - 1
        picks += [
            sequence["tokens"][place + 1] if first <= place < total - 1 else -1
            for place in range(padded)
        ]
        masks += [0] * first + sequence["mask"] + [0] * (padded - total + 1)
        numbers += [number] * padded
        offsets.append(len(tokens))
    held = zigzag(offsets, cp_size, cp_rank)
    return {
        "tokens": torch.tensor(tokens)[held][None],
        "positions": torch.tensor(positions)[held][None],
        "target": torch.tensor(picks)[held],
        "mask_here": torch.tensor(masks)[held],
        "sequence_here": torch.tensor(numbers)[held],
        "total_lengths": [len(sequence["tokens"]) for sequence in sequences],
        "response_lengths": [sequence["response"] for sequence in sequences],
        "masks": [torch.tensor(sequence["mask"], dtype=torch.int32) for sequence in sequences],
        "packed": tiny_gpt.packed_at(offsets),
    }


def compare(path):
    tiny_gpt.start(cp=2)
    saved = torch.load(path)
    factory = load_function("megatron_lossagg.integrations.slime.constant_40")
    assert factory is load_function("megatron_lossagg.integrations.slime.constant_4e1")
    chunk = tiny_gpt.wrapped(tiny_gpt.config_of())
    rank, cp_rank = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
    )
    own_samples = samples()[rank::DP]
    for m in COUNTS:
        batches = [packed(own_samples[number::m], 2, cp_rank) for number in range(m)]

        def reduced(batch, x):
            reducer = factory(
                batch["total_lengths"], batch["response_lengths"], batch["masks"], False
            )
            return reducer(x)

        train(chunk, batches, reduced, len(samples()), saved[REDUCER])
        for mode in (*MODES, OF_MICROBATCHES):
            rollouts = len({sequence["sample"] for sequence in samples()})
            carry(mode, own_samples, batches, rollouts)
            want = saved[(mode, m) if mode == OF_MICROBATCHES else mode]
            train(chunk, batches, carried, rollouts, want)
            if dist.get_rank() == 0:
                print(f"CARRIED {mode} equals the reference at M = {m}", flush=True)
    refuse_together()
    if dist.get_rank() == 0:
        print("REDUCER equals the reference at M = 1 and 3", flush=True)


def refuse_together():
    """Every rank refuses a denominator below 1 that one rank has, in the first or last step."""
    rank = parallel_state.get_data_parallel_rank()
    for wrong in (0, 1):
        masks = torch.ones(4, 3, dtype=torch.int32)  # two steps of two sequences
        if rank == 1:  # of G = 4 samples V = 3 have tokens, one of them 1: d_s = V n_b / G
            masks[2 * wrong] = 0
            masks[2 * wrong + 1, 1:] = 0
        data = {
            "loss_masks": list(masks),
            "rollout_ids": [10 * rank + sequence for sequence in range(4)],
            "rollout_mask_sums": torch.ones(4),
            "micro_batch_indices": [[0, 1], [2, 3]],
            "num_microbatches": [1, 1],
            "global_batch_sizes": [4, 4],
        }
        args = Namespace(loss_aggregation="sample_mean", loss_aggregation_count_empty=False)
        named = (
            "rank 1 of the data-parallel group: sample_mean.*sequence 1 of this step, with 1 active"
        )
        with pytest.raises(PlanError, match=named):
            load_function("megatron_lossagg.integrations.slime.carry_weights")(args, 0, data)
        print(f"step {wrong}: refused together", flush=True)


def carry(mode, own_samples, batches, rollouts):
    """Carry the weights to the microbatches as slime does, in a rollout batch of one step."""
    m = len(batches)
    numbers = [list(range(len(own_samples)))[number::m] for number in range(m)]
    data = {
        "loss_masks": [
            torch.tensor(sequence["mask"], dtype=torch.int32) for sequence in own_samples
        ],
        "rollout_ids": [sequence["sample"] for sequence in own_samples],
        "prompt": [sequence["prompt"] for sequence in own_samples],
        "rollout_mask_sums": torch.ones(len(own_samples)),  # of the default dtype, float64
        "micro_batch_indices": numbers,
        "num_microbatches": [m],
        "global_batch_sizes": [rollouts],
    }
    divisor = L if mode == "constant" else None
    args = Namespace(loss_aggregation=mode, loss_aggregation_divisor=divisor)
    load_function("megatron_lossagg.integrations.slime.carry_weights")(args, 0, data)
    for batch, sequences in zip(batches, numbers, strict=True):
        batch["denominators"] = data["rollout_mask_sums"][sequences]


def carried(batch, x):
    """Reduce as the framework does, with the denominators that travelled with the sequences."""
    is_response = batch["target"] >= 0
    denominator = batch["denominators"].clamp(min=1)[batch["sequence_here"][is_response]]
    return (x * batch["mask_here"][is_response] / denominator).sum()


def train(chunk, batches, reduce, rollouts, want):
    """Run the schedule with the framework's scaling around ``reduce``; compare the gradients."""
    loss, grads = want
    m, dp_cp = len(batches), 4

    def forward_step(iterator, model):
        batch = next(iterator)
        logits = model(batch["tokens"], batch["positions"], None, packed_seq_params=batch["packed"])

        def loss_func(logits):
            is_response = batch["target"] >= 0
            target = batch["target"][is_response][:, None]
            x = -torch.log_softmax(logits[0][is_response], -1).gather(1, target).squeeze(1)
            scaled = reduce(batch, x) * m / rollouts * dp_cp
            report = {"loss": torch.stack([scaled.detach().clone(), torch.ones(())])}
            return scaled, torch.tensor(1, dtype=torch.int), report

        return logits, loss_func

    data = tiny_gpt.run_schedule(forward_step, chunk, batches)
    assert abs(tiny_gpt.reported(data, "loss") - loss) < 1e-12 * abs(loss)
    assert_gradients(chunk, grads)


if __name__ == "__main__":
    {"reference": reference, "compare": compare}[sys.argv[1]](sys.argv[2])
    dist.destroy_process_group()
