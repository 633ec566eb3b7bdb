"""The drawn step of ``lossagg verify --framework`` on a live model, and its loss by the reference.

``framework_step.py DTYPE FILE LAYERS [signed]`` saves the masked sum of each sequence and its
gradient, term by term: what any aggregation trains is a weighted sum of them.
"""

import math
import sys

import tiny_gpt
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from ranks import leave

import megatron_lossagg.cpu as cpu
from megatron_lossagg import Aggregation
from megatron_lossagg.verify import reference_loss
from megatron_lossagg.verify.cases import reference_options
from megatron_lossagg.verify.drivers.driver import draw, kl_losses, ppo_losses

L = 40.0
KL, ENTROPY, CLIP, DUAL_CLIP = 0.3, 0.05, 0.2, 3.0
COEFFICIENTS = {"nll": 1.0, "pg": 1.0, "kl": KL, "entropy": -ENTROPY}
CASES = {
    "token_mean": Aggregation("token_mean"),
    "sample_mean": Aggregation("sample_mean"),
    "constant": Aggregation("constant", divisor=L),
    "sample_sum": Aggregation("sample_sum"),
    "prompt_mean": Aggregation("prompt_mean"),
    "length_power": Aggregation("length_power", exponent=0.5),
    "prompt_mean without empty": Aggregation("prompt_mean", count_empty=False),
    "sample_mean without empty": Aggregation("sample_mean", count_empty=False),
}


SIGNS = None
"""The sign of each rollout's advantages; None: each token has one of its own."""
SIGNED = (1, 1, -1, 0, 1, 1, -1, 1)
"""Rollouts 0 and 1 are one group of ``balanced``, 6 and 7 two."""
WEIGHTS = (1.0, 0.25, 2.0, 0.5)
"""``loss_weight`` of the sequences, over and over."""


def samples():
    """Return the drawn sequences: tokens, the response's length and mask, ids, values per token.

    A sample is a ``rollout``, or each sequence (``number``). Values are float64.
    """
    step = drawn_samples()
    for one in step if SIGNS else ():
        sign = SIGNS[one["rollout"]]
        one["advantage"] = sign * one["advantage"].abs()
        one["group"] = one["uid"], sign if any(one["mask"]) else 0
    return step


def drawn_samples():
    """Return them with an advantage of its own for each token."""
    return [
        {
            "tokens": one.tokens.tolist(),
            "response": len(one.mask),
            "mask": one.mask,
            "number": number,
            "rollout": one.sample,
            "uid": f"prompt {one.prompt}",
            "advantage": one.advantages,
            "old": one.old_log_probs,
            "ref": one.ref_log_probs,
            "group": None,
            "loss_weight": WEIGHTS[number % len(WEIGHTS)],
        }
        for number, one in enumerate(draw())
    ]


def policy_loss(log_prob, sequence):
    """Compute PPO's clipped loss per token, with a dual clip."""
    old, advantage = sequence["old"], sequence["advantage"]
    return ppo_losses(log_prob, old, advantage, clip=CLIP, dual_clip=DUAL_CLIP)


def reference(path, num_layers):
    """Save, per sequence and term, its masked sum and that sum's gradient, in float64."""
    model = tiny_gpt.gpt(tiny_gpt.config_of(num_layers=num_layers), get_gpt_layer_local_spec())
    named = {shard.name: shard.parameter for shard in cpu.named_shards([model])}
    saved = []
    for sequence in samples():
        tokens, n = torch.tensor(sequence["tokens"]), sequence["response"]
        logits = model(tokens[None], torch.arange(len(tokens))[None], None)[0, -n - 1 : -1]
        log_p = torch.log_softmax(logits.double(), -1)
        log_prob = log_p.gather(1, tokens[-n:, None])[:, 0]
        losses = {
            "nll": -log_prob,
            "pg": policy_loss(log_prob, sequence),
            "kl": kl_losses(log_prob, sequence["ref"]),
            "entropy": -(log_p.exp() * log_p).sum(-1),
        }
        terms = {}
        for term, x in losses.items():
            masked = x[torch.tensor(sequence["mask"]) == 1].sum() * COEFFICIENTS[term]
            grads = torch.autograd.grad(masked, list(named.values()), retain_graph=True)
            terms[term] = masked.item(), dict(zip(named, grads, strict=True))
        saved.append(terms)
    torch.save(saved, path)


def expected(
    saved, aggregations, *, by, members=None, places=None, microbatches=(), weighted=False
):
    """Weigh what was saved by the reference; returns the loss, and gradients by parameter name.

    ``aggregations``: of each term that is trained. ``by``: the id of a sample, ``number`` or
    ``rollout``. ``members``: sequences of the step. ``places``: (data-parallel rank, microbatch)
    of each. ``microbatches``: M of each rank. ``weighted``: by ``loss_weight``.
    """
    loss, grads = 0.0, {}
    for term, aggregation in aggregations.items():
        found = weights(
            aggregation,
            by=by,
            members=members,
            places=places,
            microbatches=microbatches,
            weighted=weighted,
        )
        for number, weight in found.items():
            value, of_sequence = saved[number][term]
            loss += weight * value
            for name, grad in of_sequence.items():
                grads[name] = grads.get(name, 0) + weight * grad.double()
    return loss, grads


def weights(aggregation, *, by, members=None, places=None, microbatches=(), weighted=False):
    """Return the weight of a token of each sequence that is not fully masked, by the reference."""
    step = samples()
    members = range(len(step)) if members is None else members
    leaves = [torch.zeros((), dtype=torch.float64, requires_grad=True) for _ in members]
    sequences = [
        {
            "x": [leaf] * step[number]["response"],
            "counted": step[number]["mask"],
            "trained": step[number]["mask"],
            "sample": step[number][by],
            "prompt": step[number]["uid"],
            "group": step[number]["group"],
            "sequence_weight": step[number]["loss_weight"] if weighted else 1,
            "microbatch": places and places[number],
        }
        for number, leaf in zip(members, leaves, strict=True)
    ]
    options = reference_options(aggregation, microbatches)
    reference_loss.step_loss(aggregation.mode, sequences, **options).backward()
    return {
        number: leaf.grad.item() / sum(step[number]["mask"])
        for number, leaf in zip(members, leaves, strict=True)
        if leaf.grad is not None
    }


def assert_weighed(step, wanted, *, tolerance=1e-10):
    """Compare a weighed step with the tokens, and a token's weight, of each sequence."""
    found = sorted((one.tokens, one.weight_sum / one.tokens) for one in step.sequences)
    assert [n for n, _ in found] == [n for n, _ in sorted(wanted)]
    for (_, got), (n, want) in zip(found, sorted(wanted), strict=True):
        assert abs(got / want - 1) < tolerance, (n, got, want)
    assert step.inside < 1 + tolerance


def assert_named(step, aggregation, *, is_ours, factor=1.0):
    """The mode is named, and first if it is ours; what is not counted stands beside its name.

    No token of the mask is said to be missed.
    """
    assert not step.missed, step.verdict
    if factor != 1:
        return
    if is_ours:
        assert str(step.trains).split(" ")[0] == aggregation.mode, str(step)
        assert (" without its " in step.trains) == (not aggregation.count_empty), str(step)
    else:
        assert step.fits_mode(aggregation.mode) or aggregation.divisor, str(step)


def tokens_and_weights(aggregation, *, factor=1.0):
    """Return them of each sequence that is not fully masked; a sequence is a sample."""
    step = samples()
    return [
        (sum(step[number]["mask"]), factor * weight)
        for number, weight in weights(aggregation, by="number").items()
    ]


def expected_cases(path):
    """Return the loss and the gradients of each case and sum of terms; a sequence is a sample."""
    saved = torch.load(path)
    return {
        (case, terms): expected(saved, dict.fromkeys(terms.split(), aggregation), by="number")
        for case, aggregation in CASES.items()
        for terms in ("nll", "pg", "pg kl", "pg kl entropy")
    }


def worst_error(chunk, grads, factor=1.0):
    """Return the largest relative error of this rank's gradients against the reference's."""
    worst = 0.0
    for shard in cpu.named_shards([chunk]):
        want = shard.cut(grads[shard.name]) * factor
        assert want.norm() > 1e-7, shard.name
        error = ((shard.parameter.main_grad - want).norm() / want.norm()).item()
        assert math.isfinite(error), shard.name  # max drops NaN
        worst = max(worst, error)
    return worst


if __name__ == "__main__":
    tiny_gpt.start(dtype=getattr(torch, sys.argv[1]))
    SIGNS = SIGNED if "signed" in sys.argv[4:] else None
    reference(sys.argv[2], int(sys.argv[3]))
    leave()
