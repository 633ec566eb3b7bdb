"""Megatron-LM's own ``train_rl.py`` from rollouts to gradient under the hook; two ranks.

``train_rl_worker.py CP``. At CP 1 they are DP 2. At CP 2, after 0.19, both gather all
log-probabilities: torch's gather has no backward pass on gloo for groups that begin past rank 0.

Its inference engine, which makes rollouts, needs a GPU: the rollouts are drawn here. Preparing
them (splitting over ranks, packing, old and reference log-probabilities), ``forward_step`` and
``loss_func`` are Megatron-LM's.
"""

import argparse
import inspect
import sys
import types

import pytest
import torch
import torch.distributed as dist
from ranks import leave

from megatron_lossagg import cpu
from megatron_lossagg.cpu import training as cpu_training

cpu_training.install_training()
cpu_training._triton_while_importing()  # its imports ask for it again

import hooked_loop  # noqa: E402
import tiny_gpt  # noqa: E402
import train_rl  # noqa: E402
from megatron.core import num_microbatches_calculator as microbatches  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.rl import rl_utils  # noqa: E402

try:
    from megatron.rl.agent.api import TokenRollout
except ImportError:  # after 0.19
    from megatron.rl.types.rollout import TokenRollout
from megatron.training import global_vars  # noqa: E402

from megatron_lossagg import Aggregation  # noqa: E402
from megatron_lossagg.errors import PlanError  # noqa: E402
from megatron_lossagg.integrations import megatron_rl  # noqa: E402
from megatron_lossagg.integrations.megatron_rl import RLIntegration  # noqa: E402
from megatron_lossagg.loop.schedule_hook import ScheduleHook  # noqa: E402
from megatron_lossagg.reduction import faults  # noqa: E402
from megatron_lossagg.verify.drivers.megatron_rl import made  # noqa: E402
from megatron_lossagg.verify.step_data import VOCABULARY  # noqa: E402

CP = int(sys.argv[1])
DP = 2 // CP
NAMES = set(inspect.signature(rl_utils.prepare_trajectories).parameters)
IN_ROWS = "rows" in NAMES
"""Whether a rollout whose turns continue each other is one sequence, as after 0.19."""
LEDGER = (
    {"request_ledger": {}}
    if "request_ledger" in inspect.signature(rl_utils.prepare_data_for_update).parameters
    else {}
)
SEQUENCES = -(-(10 - IN_ROWS) // DP)
"""Of a rank: ten turns, two of which are one row where turns that continue each other are."""
EPSILON, BETA, ENTROPY, LENGTH = 0.2, 0.1, 0.01, 16
PAD, EOD = VOCABULARY - 1, VOCABULARY - 2
GROUPS = [[[5], [7]], [[3], [9, 12]], [[12], [4]], [[7], [3, 5]]]
"""Tokens of each turn of each rollout of each group: two groups, of five turns, per rank.

The turn of four is fully masked, and lies behind another in its bin: packing inference's
log-probabilities raises in 0.16 and 0.19 where such a turn is first."""
CHAIN = [3, 5]
"""Of the rollout whose second turn continues its first one, in releases where that is one row; an
empty row then keeps the ranks alike."""


class Tokenizer:
    pad, eod, bos, vocab_size, library = PAD, EOD, None, VOCABULARY, "null-text"

    def detokenize(self, tokens):
        return " ".join(map(str, tokens))


def draw_groups():
    draw = torch.Generator().manual_seed(0)

    def rollout(lengths, reward):
        turns, masks = [], []
        for length in lengths:
            tokens = torch.randint(VOCABULARY - 2, (length - 1,), generator=draw).tolist()
            mask = (torch.rand(length, generator=draw) < 0.7).tolist()
            mask[0] = False  # a prompt's token
            if length == 4:
                mask = [False] * length
            turns.append([*tokens, EOD])
            masks.append(mask)
        if IN_ROWS and lengths == CHAIN:
            turns[1][:3], masks[1][:3] = turns[0], [False] * 3
        logprobs = [None if "rollouts" in NAMES else [0.0] * sum(mask) for mask in masks]
        # Log-probabilities of inference correct nothing here.
        return made(TokenRollout, turns, masks, logprobs, reward)

    return [
        [rollout(lengths, float(torch.rand((), generator=draw))) for lengths in group]
        for group in GROUPS
    ]


def sequences_of(rollout):
    """Return tokens and mask of each turn, or of the whole chain that a row is."""
    turns = list(zip(rollout.trajectory, rollout.generation_mask, strict=True))
    if not IN_ROWS or [len(sequence) for sequence, _ in turns] != CHAIN:
        return turns
    (_, first), (tokens, second) = turns
    return [(tokens, [*first, *second[3:]])]


def models_of(dtype, states=None):
    """Return the models of the current, the old and the reference weights."""
    torch.set_default_dtype(dtype)
    config = tiny_gpt.config_of()
    models = [tiny_gpt.gpt(config, cpu.gpt_layer_spec(config)) for _ in range(3)]
    for model, state in zip(models, states or [], strict=states is not None):
        model.load_state_dict(state)
    torch.set_default_dtype(torch.float32)
    return models


def by_hand(models, groups, mode):
    """Return the GRPO loss, by loops over rollouts in float64, and its gradient.

    ``models``: those of the current, the old and the reference weights.
    """
    model, old_model, ref_model = models
    samples, prompts = [], []
    for group in groups:
        rewards = torch.tensor([rollout.reward for rollout in group], dtype=torch.float64)
        spread = ((rewards - rewards.mean()) ** 2).mean().sqrt()
        of_group = []
        for rollout, reward in zip(group, rewards, strict=True):
            losses = []
            advantage = (reward - rewards.mean()) / (1e-4 + spread)
            for sequence, mask in sequences_of(rollout):
                tokens, positions = torch.tensor(sequence)[None], torch.arange(len(sequence))[None]
                log_p = model(tokens, positions, None)[0].log_softmax(-1)
                with torch.no_grad():
                    old_p = old_model(tokens, positions, None)[0].log_softmax(-1)
                    ref_p = ref_model(tokens, positions, None)[0].log_softmax(-1)
                for t, (token, trained) in enumerate(zip(sequence[1:], mask[1:], strict=True)):
                    if not trained:
                        continue
                    now, old, ref = log_p[t, token], old_p[t, token], ref_p[t, token]
                    ratio = (now - old).exp()
                    clipped = min(max(ratio, torch.tensor(1 - EPSILON)), torch.tensor(1 + EPSILON))
                    kl = (ref - now).exp() - (ref - now) - 1
                    policy = -min(ratio * advantage, clipped * advantage)
                    losses.append(policy + BETA * kl + ENTROPY * now.exp() * now)
            of_group.append(losses)
        samples += of_group
        prompts.append([loss for losses in of_group for loss in losses])
    means = samples if mode == "sample_mean" else prompts
    loss = sum(sum(losses) / len(losses) for losses in means if losses)
    loss = loss / len(means)
    return loss.item(), torch.autograd.grad(loss, list(model.parameters()))


def settings():
    return argparse.Namespace(
        context_parallel_size=CP,
        rl_use_sequence_packing=False,
        rl_inference_logprobs_is_correction=False,
        rl_sequence_packing_max_sequences_per_bin=4,
        rl_sequence_packing_algo="fifo",
        rl_importance_sampling_truncation_coef=None,
        rl_skip_bos_token=False,
        rl_training_cuda_graphs=False,
        grpo_prompts_per_step=len(GROUPS),
        grpo_group_size=2,
        grpo_clamp_eps_lower=EPSILON,
        grpo_clamp_eps_upper=EPSILON,
        grpo_kl_beta=BETA,
        grpo_entropy_term_weight=ENTROPY,
        global_batch_size=2 * len(GROUPS),
        micro_batch_size=1,
        rampup_batch_size=None,
        decrease_batch_size_if_needed=False,
        data_parallel_size=DP,
        seq_length=LENGTH,
        decoder_seq_length=None,
        reset_position_ids=False,
        reset_attention_mask=False,
        curr_iteration=0,
        consumed_train_bins=0,
        cuda_graph_impl="none",
        check_for_nan_in_loss_and_grad=True,
        check_for_spiky_loss=False,
        timing_log_level=0,
        timing_log_option="minmax",
        fp16=False,
        bf16=False,
    )


def split(cp):
    """Split the ranks over ``cp`` context-parallel ones, and give train_rl.py their indices."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=cp)
    model_parallel_cuda_manual_seed(1)
    rl_utils.HAVE_TEX = True
    rl_utils.tex = types.SimpleNamespace(thd_get_partitioned_indices=cpu_training._indices)


def main():
    tiny_gpt.start(dtype=torch.float32)
    new, old, ref = models_of(torch.float32)
    draw = torch.Generator().manual_seed(1)
    for model in (ref, new):
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=draw)
    groups = draw_groups()
    exact = models_of(torch.float64, [model.state_dict() for model in (new, old, ref)])
    wanted = {mode: by_hand(exact, groups, mode) for mode in ("sample_mean", "prompt_mean")}
    if CP > 1:
        split(CP)
    chunk = tiny_gpt.wrapped(tiny_gpt.config_of())
    forward = chunk.module.forward

    def with_the_keywords_of_float16_module(*args, fp32_output=True, **kwargs):
        return forward(*args, **kwargs)

    args = settings()
    for name in ("range_push", "range_pop"):  # a CUDA build's
        setattr(torch.cuda.nvtx, name, lambda *given: None)
    global_vars.set_args(args)
    global_vars._set_timers(args)
    global_vars._GLOBAL_TOKENIZER = Tokenizer()
    microbatches.init_num_microbatches_calculator(0, None, 2 * len(GROUPS), 1, DP, False)
    chunk.module.forward = with_the_keywords_of_float16_module
    for packs in (False, True):
        for mode in ("sample_mean", "prompt_mean"):
            args.rl_use_sequence_packing = packs
            hook = ScheduleHook(Aggregation(mode), RLIntegration())
            data, reports = trained(hook, chunk, new, old, ref, packs)
            compare(chunk, reports, wanted[mode], packs, mode)
    check_what_is_refused(hook, chunk, data, args)
    leave()


def trained(hook, chunk, new, old, ref, packs):
    """Train a step by Megatron-LM's own functions; returns its data and what it reports."""
    chunk.load_state_dict(old.state_dict())
    data = rl_utils.prepare_data_for_update(
        model=[chunk],
        ref_state_dict=ref.state_dict(),
        rollouts=draw_groups(),  # it pads their masks in place
        tokenizer=Tokenizer(),
        sequence_packing=packs,
        is_correction=False,
        **LEDGER,
    )
    data = data[0] if isinstance(data, tuple) else data  # a tuple from 0.17 on
    chunk.load_state_dict(new.state_dict())
    reports = hooked_loop.run(
        hook.wrap(get_forward_backward_func()),
        chunk,
        data,
        forward_step_func=train_rl.forward_step,
        # Unpacked, its own number counts rollouts, and leaves turns for the next step.
        num_microbatches=microbatches.get_num_microbatches() if packs else SEQUENCES,
        micro_batch_size=1,
        seq_length=LENGTH,
    )
    return data, reports


def compare(chunk, reports, wanted, packs, mode):
    """Assert that loss and gradients are those of the loops."""
    loss, gradients = wanted
    reported = tiny_gpt.reported(reports, "lm loss")
    assert abs(reported - loss) < 1e-5 * abs(loss), (packs, mode, reported, loss)
    assert {"stock/lm_loss", "rl/kl_term", "rl/entropy_term"} < set(reports[0])
    errors = [
        ((parameter.main_grad - gradient).norm() / (gradient.norm() + 1e-3)).item()
        for parameter, gradient in zip(chunk.module.parameters(), gradients, strict=True)
    ]
    assert max(errors) < 1e-4, (packs, mode, errors)
    if dist.get_rank() == 0:
        kind = "packed" if packs else "unpacked"
        found = f"{reported:.7g}, gradient off by {max(errors):.1e}"
        print(f"TRAIN_RL equals the loops, {kind}, {mode}: {found}", flush=True)


def check_what_is_refused(hook, chunk, data, args):
    """Steps of a part of a collection warn; an unknown batch and an early release are refused."""
    assert "a collection over several steps" not in faults._warned
    args.global_batch_size = len(GROUPS)
    with pytest.warns(RuntimeWarning, match="of 8 rollouts is trained in steps of 4"):
        hook.integration._ids([megatron_rl._NO_TURN])
    with hooked_loop.refused(PlanError, "got a list", "a batch of prepare_data_for_update's"):
        args.rl_use_sequence_packing = False
        hooked_loop.run(
            hook.wrap(get_forward_backward_func()),
            chunk,
            iter([[torch.zeros(1, LENGTH)] * 7] * 2),
        )
    if not IN_ROWS:
        args.context_parallel_size = 2
        with hooked_loop.refused(PlanError, "with context parallelism", "up to core_v0.19 give"):
            hooked_loop.run(hook.wrap(get_forward_backward_func()), chunk, data)


if __name__ == "__main__":
    main()
