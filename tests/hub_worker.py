"""The slime/miles hub on live Megatron-Core, DP 2 x CP 2: the host's own scaling around it.

The host's part is written here from its source (slime 624b824a ``loss_function``): three
outputs with num_tokens 1, loss * M / B * (DP * CP), average regime.
"""

import importlib
import sys

import tiny_gpt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from step_data import make_rows

import megatron_lossagg.cpu as cpu
from megatron_lossagg.verify import oracle

L = 40.0
PROMPTS = [3, 1, 2, 1, 4, 2, 1, 9, 3, 6, 1, 2, 1, 5]


def load_function(path):
    """Load a function as the hosts do: a path with dots only."""
    module, _, attribute = path.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def samples():
    """Return whole token lists with a prompt length and a response mask for each."""
    rows = []
    for row, prompt in zip(make_rows(), PROMPTS, strict=True):
        total = len(row["tokens"]) + prompt
        tokens = [5] * prompt + row["tokens"]
        # Masks cover the response; the last token of it is trained as well.
        mask = [*row["trained"], 1]
        rows.append({"tokens": tokens, "response": total - prompt, "mask": mask})
    rows[4]["mask"] = [0] * rows[4]["response"]
    return rows


def reference(path):
    """Save loss and gradients by the oracle, on one process from unpacked rows."""
    tiny_gpt.start()
    model = tiny_gpt.gpt(tiny_gpt.config_of(), get_gpt_layer_local_spec())
    live = []
    for number, row in enumerate(samples()):
        tokens = torch.tensor(row["tokens"])
        logits = model(tokens[None, :-1], torch.arange(len(tokens) - 1)[None], None)[0]
        nll = -torch.log_softmax(logits, -1).gather(1, tokens[1:, None]).squeeze(1)
        x = list(nll[-row["response"] :])
        live.append({"x": x, "counted": row["mask"], "trained": row["mask"], "sample": number})
    loss = oracle.step_loss("constant", live, divisor=L)
    named = {shard.name: shard.parameter for shard in cpu.named_shards([model])}
    grads = torch.autograd.grad(loss, list(named.values()))
    torch.save((loss.item(), dict(zip(named, grads, strict=True))), path)


def packed(rows, cp_size, cp_rank):
    """Pack one microbatch as the host does: whole rows padded to 2 CP, zigzag per row."""
    tokens, positions, offsets, picks = [], [], [0], []
    for row in rows:
        total = len(row["tokens"])
        padded = total + -total % (2 * cp_size)
        tokens += row["tokens"] + [0] * (padded - total)
        positions += range(padded)
        first = total - row["response"] - 1
        picks += [
            row["tokens"][place + 1] if first <= place < total - 1 else -1
            for place in range(padded)
        ]
        offsets.append(len(tokens))
    held = tiny_gpt.zigzag(offsets, cp_size, cp_rank)
    return {
        "tokens": torch.tensor(tokens)[held][None],
        "positions": torch.tensor(positions)[held][None],
        "target": torch.tensor(picks)[held],
        "total_lengths": [len(row["tokens"]) for row in rows],
        "response_lengths": [row["response"] for row in rows],
        "masks": [torch.tensor(row["mask"], dtype=torch.int32) for row in rows],
        "packed": tiny_gpt.packed_at(offsets),
    }


def compare(path):
    tiny_gpt.start(cp=2)
    loss, grads = torch.load(path)
    factory = load_function("megatron_lossagg.hosts.slime.constant_40")
    assert factory is load_function("megatron_lossagg.hosts.slime.constant_4e1")
    chunk = tiny_gpt.wrapped(tiny_gpt.config_of())
    rank, cp_rank = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
    )
    own_samples = samples()[rank::2]
    b, dp_cp = len(samples()), 4
    for m in (1, 3):
        batches = [packed(own_samples[number::m], 2, cp_rank) for number in range(m)]

        def forward_step(iterator, model, m=m):
            batch = next(iterator)
            logits = model(
                batch["tokens"], batch["positions"], None, packed_seq_params=batch["packed"]
            )

            def loss_func(logits):
                is_response = batch["target"] >= 0
                target = batch["target"][is_response][:, None]
                x = -torch.log_softmax(logits[0][is_response], -1).gather(1, target).squeeze(1)
                reducer = factory(
                    batch["total_lengths"], batch["response_lengths"], batch["masks"], False
                )
                share = reducer(x)
                scaled = share * m / b * dp_cp
                report = {"loss": torch.stack([scaled.detach().clone(), torch.ones(())])}
                return scaled, torch.tensor(1, dtype=torch.int), report

            return logits, loss_func

        data = tiny_gpt.run_schedule(forward_step, chunk, batches)
        assert abs(tiny_gpt.reported(data, "loss") - loss) < 1e-12 * abs(loss)
        for shard in cpu.named_shards([chunk]):
            got, want = shard.parameter.main_grad, grads[shard.name]
            assert want.norm() > 1e-6, shard.name
            assert (got - want).norm() < 1e-12 * want.norm(), (m, shard.name)
    if dist.get_rank() == 0:
        print("HUB equals the oracle at M = 1 and 3", flush=True)


if __name__ == "__main__":
    {"reference": reference, "compare": compare}[sys.argv[1]](sys.argv[2])
    dist.destroy_process_group()
