"""Megatron-LM's own ``train_rl.py``: its forward_step and its loss under the hook; DP 2.

Its inference engine, which makes rollouts, needs a GPU: the rollouts are drawn here, one per entry
of the batch and packed into bins.
"""

import argparse
import contextlib
import types

import torch
import torch.distributed as dist

from megatron_lossagg.cpu import training as cpu_training

cpu_training.install_training()
cpu_training._triton_while_importing()  # its imports ask for it again

import schedule_worker as worker  # noqa: E402
import tiny_gpt  # noqa: E402
import train_rl  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.rl import rl_utils  # noqa: E402
from megatron.training import global_vars  # noqa: E402
from step_data import VOCABULARY  # noqa: E402

from megatron_lossagg.hosts.megatron_lm import RLAdapter  # noqa: E402
from megatron_lossagg.schedule import ScheduleHook  # noqa: E402

EPSILON, BETA, ENTROPY, LENGTH = 0.2, 0.1, 0.01, 12
ROWS = {0: [5, 7, 3, 9], 1: [12, 4, 6, 2]}
"""Tokens of each rank's rollouts, in two microbatches of two."""


def a_rollout(seed, length):
    draw = torch.Generator().manual_seed(seed)
    mask = (torch.rand(length, generator=draw) < 0.7).float()
    mask[0] = 0  # a prompt's token
    if seed % 7 == 3:
        mask[:] = 0
    return {
        "tokens": torch.randint(VOCABULARY, (length,), generator=draw),
        "mask": mask,
        "old": -2 - torch.rand(length - 1, generator=draw),
        "ref": -2 - torch.rand(length - 1, generator=draw),
        "advantage": torch.randn((), generator=draw),
    }


def rollouts(rank):
    return [a_rollout(10 * rank + i, length) for i, length in enumerate(ROWS[rank])]


def padded(values, size):
    return torch.nn.functional.pad(values, (0, size - len(values)))


def one_per_entry(rank):
    """Make what ``prepare_data_for_update``'s loader yields without packing."""
    for row in rollouts(rank):
        old, ref = padded(row["old"], LENGTH - 1), padded(row["ref"], LENGTH - 1)
        fields = [padded(row["tokens"], LENGTH), row["advantage"], old, padded(row["mask"], LENGTH)]
        fields += [torch.arange(LENGTH), ref, torch.zeros_like(old)]
        yield tuple(field[None] for field in fields)


def pack(rank):
    """Put the rank's rollouts into two bins, and let train_rl find them; yield bin indices."""
    size = 16
    bins = {name: [] for name in ("tokens", "mask", "old", "ref", "positions")}
    info = types.SimpleNamespace(seq_starts=[], bin_seq_indices=[], seq_lengths=ROWS[rank])
    advantages, packed = [], []
    for indices in ([0, 1], [2, 3]):
        rows = [rollouts(rank)[i] for i in indices]
        starts = [0, len(rows[0]["tokens"])]
        end = starts[1] + len(rows[1]["tokens"])
        if end > size:
            indices, rows, starts, end = indices[:1], rows[:1], starts[:1], starts[1]
        info.seq_starts.append(starts)
        info.bin_seq_indices.append(indices)
        advantages.append(torch.stack([row["advantage"] for row in rows]))
        for name in ("tokens", "mask"):
            bins[name].append(padded(torch.cat([row[name] for row in rows]), size))
        for name in ("old", "ref"):  # one shorter than a row: the next row begins one later
            gap = [torch.cat([row[name], torch.zeros(1)]) for row in rows]
            bins[name].append(padded(torch.cat(gap), size)[: size - 1])
        positions = torch.cat([torch.arange(len(row["tokens"])) for row in rows])
        bins["positions"].append(padded(positions, size))
        packed.append(tiny_gpt.packed_at(sorted({*starts, end, size})))
    tensors = {name: torch.stack(values) for name, values in bins.items()}
    rl_utils.get_rl_runtime_state().packing_context = types.SimpleNamespace(
        packed_trajs=tensors["tokens"],
        packed_loss_mask=tensors["mask"],
        packed_position_ids=tensors["positions"],
        old_logprobs=tensors["old"],
        ref_logprobs=tensors["ref"],
        bin_advantages=advantages,
        packing_info=info,
        cached_packed_seq_params=packed,
    )
    for index in range(2):
        yield (torch.tensor([index]),)


def kept(rank, packs):
    """Return the rollouts that are trained: a bin that overflows keeps its first."""
    rows = rollouts(rank)
    if not packs:
        return rows
    pairs = (rows[:2], rows[2:])
    return [
        row
        for pair in pairs
        for row in (pair if sum(len(r["mask"]) for r in pair) <= 16 else pair[:1])
    ]


def by_hand(model, packs):
    """Return the mean over rollouts of their mean GRPO loss, by loops, and its gradient."""
    means, count = [], 0
    for rank in (0, 1):
        for row in kept(rank, packs):
            count += 1
            tokens = row["tokens"]
            logits = model(tokens[None], torch.arange(len(tokens))[None], None)[0]
            losses = []
            for t in range(len(tokens) - 1):
                if row["mask"][t + 1] == 0:
                    continue
                log_p = logits[t].log_softmax(-1)[tokens[t + 1]]
                ratio, a = (log_p - row["old"][t]).exp(), row["advantage"]
                clipped = min(max(ratio, torch.tensor(1 - EPSILON)), torch.tensor(1 + EPSILON))
                kl = (row["ref"][t] - log_p).exp() - (row["ref"][t] - log_p) - 1
                entropy = -log_p.exp() * log_p
                losses.append(-min(ratio * a, clipped * a) + BETA * kl - ENTROPY * entropy)
            if losses:
                means.append(sum(losses) / len(losses))
    loss = sum(means) / count
    return loss.item(), torch.autograd.grad(loss, list(model.parameters()))


def main():
    tiny_gpt.start(dtype=torch.float32)
    chunk = tiny_gpt.wrapped(tiny_gpt.config_of())
    forward = chunk.module.forward

    def with_the_keyword_of_float16_module(*args, fp32_output=True, **kwargs):
        return forward(*args, **kwargs)

    chunk.module.forward = with_the_keyword_of_float16_module
    args = argparse.Namespace(
        context_parallel_size=1,
        rl_use_sequence_packing=False,
        rl_inference_logprobs_is_correction=False,
        rl_sequence_packing_max_sequences_per_bin=4,
        rl_importance_sampling_truncation_coef=None,
        grpo_clamp_eps_lower=EPSILON,
        grpo_clamp_eps_upper=EPSILON,
        grpo_kl_beta=BETA,
        grpo_entropy_term_weight=ENTROPY,
        check_for_nan_in_loss_and_grad=True,
        check_for_spiky_loss=False,
        timing_log_level=0,
        timing_log_option="minmax",
        fp16=False,
        bf16=False,
    )
    rl_utils.get_nvtx_range = lambda: lambda *a, **k: contextlib.nullcontext()  # a CUDA build's
    global_vars.set_args(args)
    global_vars._set_timers(args)
    rank = dist.get_rank()
    for packs in (False, True):
        args.rl_use_sequence_packing = packs
        data = list(pack(rank) if packs else one_per_entry(rank))
        hook = ScheduleHook(worker.SAMPLE_MEAN, RLAdapter())
        reports = worker.run(
            hook.aggregated(get_forward_backward_func()),
            chunk,
            iter(data),
            forward_step_func=train_rl.forward_step,
            num_microbatches=len(data),
            micro_batch_size=1,
            seq_length=16 if packs else LENGTH,
        )
        loss, gradients = by_hand(chunk.module, packs)
        reported = tiny_gpt.reported(reports, "lm loss")
        assert abs(reported - loss) < 1e-5 * abs(loss), (packs, reported, loss)
        assert {"host lm loss", "rl/kl_term", "rl/entropy_term"} < set(reports[0])
        for parameter, wanted in zip(chunk.module.parameters(), gradients, strict=True):
            assert (parameter.main_grad - wanted).norm() < 1e-4 * wanted.norm() + 1e-7
        if rank == 0:
            print(f"TRAIN_RL equals the loops, {'packed' if packs else 'unpacked'}", flush=True)
    args.context_parallel_size = 2
    with worker.refused(worker.PlanError, "with context parallelism", "not known here"):
        worker.run(hook.aggregated(get_forward_backward_func()), chunk, iter(data))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
