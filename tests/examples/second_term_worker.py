"""Two terms of one step, each over its own tokens, next to loops; ``second_term_worker.py CP``.

A policy loss over all tokens, and a negative log-likelihood over those of correct responses, which
``count="weights"`` counts: their token weights are 1, all others 0.
"""

import tiny_gpt
import torch
from check_runner import run_checks
from pairs_worker import CP, active_tokens, gradient_of_step, is_by_hand, packs

from megatron_lossagg import Aggregation

COEFFICIENT = 0.4


def is_correct(advantage):
    return advantage > 0.2


def token_weights(pack):
    """Return 1 at the active tokens of correct responses, 0 elsewhere, ``[P]``."""
    correct = torch.tensor([float(is_correct(a)) for a in pack.advantage])
    return correct.repeat_interleave(torch.tensor(pack.offsets).diff()) * pack.mask


def counts(own):
    sums = [
        float(len(tokens) * is_correct(advantage))
        for pack in own
        for tokens, advantage in pack.responses()
    ]
    return {**active_tokens(own), "token_weight_sums": sums}


def loss_func_with(second):
    def loss_func(step, pack, x, layout, cp_group):
        mb = step.microbatch(
            pack.sequences, pack.mask, layout=layout, token_weights=token_weights(pack)
        )
        loss = mb.reduce(x.exp()) + COEFFICIENT * mb.reduce(x.square() + x, second)
        return mb.outputs(loss, report={"loss": loss})

    return loss_func


def mean(values):
    return sum(values) / len(values)


def by_hand(every, x, *, nll_of):
    responses = [response for pack in every for response in pack.responses()]
    policy = mean([x[t].exp() for tokens, _ in responses for t in tokens])
    correct = [tokens for tokens, advantage in responses if is_correct(advantage)]
    assert 0 < len(correct) < len(responses)
    losses = [[x[t] ** 2 + x[t] for t in tokens] for tokens in correct]
    return policy + COEFFICIENT * nll_of(losses)


def trains(second, nll_of):
    every = packs()
    for per_token in (False, True):
        found = gradient_of_step(
            every, "token_mean", counts, loss_func_with(second), per_token=per_token
        )
        is_by_hand(every, lambda x: by_hand(every, x, nll_of=nll_of), found)


def check_a_mean_over_the_tokens_of_correct_responses():
    """VAPO's (NVIDIA-NeMo/RL#3791)."""
    trains(
        Aggregation("token_mean", count="weights"),
        lambda losses: mean([x for of_one in losses for x in of_one]),
    )


def check_a_mean_over_correct_responses():
    """As where groups without signal count nowhere (huggingface/trl#6367)."""
    trains(
        Aggregation("sample_mean", count="weights", count_empty=False),
        lambda losses: mean([mean(of_one) for of_one in losses]),
    )


if __name__ == "__main__":
    tiny_gpt.start(cp=CP)
    run_checks(globals())
