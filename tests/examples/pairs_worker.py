"""examples/pairs.py on Megatron-Core's schedule and DDP, next to loops; ``pairs_worker.py CP``.

The log-ratio of token t is parameter t, so a gradient is compared token by token.
"""

import sys
from itertools import accumulate
from pathlib import Path

import tiny_gpt
import token_model
import torch
from check_runner import run_checks
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_lossagg import Aggregation, LossAggregator

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import pairs

CP = int(sys.argv[1])
DP = 2 // CP
BETA, CLIP = 0.7, 0.2
LENGTHS = [[(9, 4)], [(3, 17), (12, 1), (5, 5)], [(8, 2), (1, 30)], [(6, 7)]]
"""Of the chosen and the rejected response of each pair, by microbatch of the step."""
MASKED = (1, 3)
"""A response of this microbatch and place has no active token, in GSPO."""
PROMPT = 2
"""Tokens before each response, whose loss is not trained."""


class Pack:
    """The responses of one microbatch, padded; tokens are numbers of parameters."""

    def __init__(self, number, first_token, first_pair):
        lengths = [n for pair in LENGTHS[number] for n in pair]
        padded = [-(-(PROMPT + n + 1) // 4) * 4 for n in lengths]
        self.offsets = [0, *accumulate(padded)]
        self.mask = torch.zeros(self.offsets[-1], dtype=torch.int)
        for begin, n in zip(self.offsets, lengths, strict=False):
            self.mask[begin + PROMPT : begin + PROMPT + n] = 1
        self.token = torch.arange(self.offsets[-1]) + first_token
        self.pairs = [first_pair + place for place in range(len(LENGTHS[number]))]
        self.sequences = [s for pair in self.pairs for s in (2 * pair, 2 * pair + 1)]
        self.advantage = torch.randn(len(lengths))

    def without(self, place):
        begin, end = self.offsets[place : place + 2]
        self.mask[begin:end] = 0

    def responses(self):
        """Yield the numbers of each response's active tokens, and its advantage."""
        for place, (begin, end) in enumerate(zip(self.offsets, self.offsets[1:], strict=False)):
            yield self.token[begin:end][self.mask[begin:end] == 1].tolist(), self.advantage[place]


def active_tokens(own):
    return {"active_tokens": [len(tokens) for pack in own for tokens, _ in pack.responses()]}


def packs():
    torch.manual_seed(5)
    made, pairs_of_rank = [], [0] * DP
    for number, of_microbatch in enumerate(LENGTHS):
        first_token = made[-1].token[-1] + 1 if made else 0
        made.append(Pack(number, first_token, pairs_of_rank[number % DP]))
        pairs_of_rank[number % DP] += len(of_microbatch)
    return made


def drawn_weights(num_tokens):
    return 0.3 * torch.randn(num_tokens, generator=torch.Generator().manual_seed(6))


def gradient_of_step(every, mode, counts, loss_func, *, per_token):
    """Run Megatron's schedule over this rank's packs; return the reduced gradient and the loss.

    ``counts``: a function from the packs to what ``aggregator.step`` is given of them.
    """
    num_tokens = int(every[-1].token[-1]) + 1
    chunk = token_model.wrapped(tiny_gpt.config_of(per_token=per_token), num_tokens)
    chunk.module.weight.data.copy_(drawn_weights(num_tokens))
    aggregator = LossAggregator([chunk], mode)
    own = every[parallel_state.get_data_parallel_rank() :: DP]
    cp_group = parallel_state.get_context_parallel_group()

    def forward_step(iterator, model):
        pack = next(iterator)
        layout = aggregator.thd(pack.offsets)
        here = layout.positions
        log_ratio = model(pack.token[here]) * pack.mask[here]
        return log_ratio, lambda x: loss_func(step, pack, x, layout, cp_group)

    chunk.zero_grad_buffer()
    with aggregator.step(**counts(own), num_microbatches=len(own)) as step:
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(own),
            model=[chunk],
            num_microbatches=len(own),
            seq_length=64,
            micro_batch_size=1,
            forward_only=False,
        )
    return chunk.module.weight.main_grad.clone(), tiny_gpt.reported(reports, "loss")


def is_by_hand(every, loss_of, found):
    x = drawn_weights(int(every[-1].token[-1]) + 1).requires_grad_()
    loss = loss_of(x)
    (wanted,) = torch.autograd.grad(loss, x)
    gradient, reported = found
    assert wanted.norm() > 0
    assert (gradient - wanted).norm() <= 1e-13 * wanted.norm()
    assert abs(reported - loss.item()) <= 1e-13 * abs(loss.item())


def pairs_by_hand(every, loss, x):
    losses = []
    for pack in every:
        of_responses = [sum(x[t] for t in tokens) for tokens, _ in pack.responses()]
        for chosen, rejected in zip(of_responses[0::2], of_responses[1::2], strict=True):
            losses.append(loss(chosen - rejected))
    return sum(losses) / len(losses)


def trains_pairs(losses, by_hand):
    every = packs()

    def loss_func(step, pack, x, layout, cp_group):
        return pairs.pair_loss(
            step, pack.pairs, x, layout, cp_group, lambda difference: losses(difference, BETA)
        )

    for per_token in (False, True):
        found = gradient_of_step(
            every,
            "sample_mean",
            lambda own: {"active_tokens": [1] * sum(len(pack.pairs) for pack in own)},
            loss_func,
            per_token=per_token,
        )
        is_by_hand(every, lambda x: pairs_by_hand(every, by_hand, x), found)


def gspo_by_hand(every, mode, x):
    """Loop over responses: a mean over them, over their tokens, or over a constant."""
    responses = [response for pack in every for response in pack.responses()]
    num_tokens, total = sum(len(tokens) for tokens, _ in responses), 0.0
    for tokens, advantage in responses:
        if not tokens:
            continue
        ratio = torch.exp(sum(x[t] for t in tokens) / len(tokens))
        clipped = max(min(ratio, torch.tensor(1 + CLIP)), torch.tensor(1 - CLIP))
        loss = -min(ratio * advantage, clipped * advantage)
        total = (
            total
            + {
                "sample_mean": loss / len(responses),
                "token_mean": loss * len(tokens) / num_tokens,
                "constant": loss * len(tokens) / len(responses) / 40,
            }[mode]
        )
    return total


def gspo_of_step(mode, *, per_token):
    every = packs()
    number, place = MASKED
    every[number].without(place)

    def loss_func(step, pack, x, layout, cp_group):
        return pairs.gspo(
            step, pack.sequences, pack.mask, x, pack.advantage, layout, cp_group, CLIP
        )

    found = gradient_of_step(
        every,
        Aggregation(mode, divisor=40 if mode == "constant" else None),
        active_tokens,
        loss_func,
        per_token=per_token,
    )
    is_by_hand(every, lambda x: gspo_by_hand(every, mode, x), found)


def check_dpo_is_the_mean_over_all_pairs():
    trains_pairs(pairs.dpo, lambda d: -torch.log(1 / (1 + torch.exp(-BETA * d))))


def check_ipo_is_the_mean_over_all_pairs():
    trains_pairs(pairs.ipo, lambda d: (d - 1 / (2 * BETA)) ** 2)


def check_gspo_under_sample_mean():
    for per_token in (False, True):
        gspo_of_step("sample_mean", per_token=per_token)


def check_gspo_under_token_mean_and_a_constant():
    for per_token in (False, True):
        gspo_of_step("token_mean", per_token=per_token)
        gspo_of_step("constant", per_token=per_token)


if __name__ == "__main__":
    tiny_gpt.start(cp=CP)
    run_checks(globals())
