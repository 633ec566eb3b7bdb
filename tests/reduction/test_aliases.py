"""Losses of other systems as their code computes them, and the mode that stands for each.

Read at the commits of docs/reference/names.md. Microbatches have equally many sequences, several
of them fully masked.
"""

import pytest
import torch
from drawn_step import Step, aliases

from megatron_lossagg import Aggregation

LONGEST = 20.0


@pytest.fixture
def step():
    return Step()


def by_token(x, mask):
    return (x * mask).sum(), mask.sum()


def by_sequence(x, mask, *, divided_by=None, rows=None):
    n = mask.sum(-1).clamp(min=1) if divided_by is None else divided_by
    return ((x * mask).sum(-1) / n).sum(), rows or (mask.sum(-1) > 0).sum()


TUNIX = {
    "token-mean": by_token,
    "sequence-mean-token-mean": by_sequence,
    "sequence-mean-token-scale": lambda x, m: by_sequence(x, m, divided_by=LONGEST),
    "seq-mean-token-sum": lambda x, m: by_sequence(x, m, divided_by=1),
    "sequence-mean-token-sum-norm": lambda x, m: by_sequence(x, m, divided_by=1),
}
"""``aggregate_loss``: a sum and its denominator, both summed over the step's microbatches."""


def mean_of_means(terms):
    return sum(value / over for value, over in terms) / len(terms)


def of_the_step(terms):
    return sum(value for value, _ in terms) / sum(over for _, over in terms)


def test_of_each_system_every_name_is_tried():
    tried = {"tunix": TUNIX, "torchrl": TORCHRL, "rlinf": RLINF, "unsloth": UNSLOTH}
    for system, names in tried.items():
        assert names.keys() == aliases(system, divisor=LONGEST).keys()


def terms_of(step, term):
    return [term(x, mb.mask) for x, mb in zip(step.leaves, step.microbatches, strict=True)]


def is_ours(step, theirs, alias):
    ours = step.wanted(alias, step.leaves)
    assert theirs.item() == pytest.approx(ours.item(), rel=1e-12)
    pairs = zip(
        torch.autograd.grad(theirs, step.leaves),
        torch.autograd.grad(ours, step.leaves),
        strict=True,
    )
    assert all(torch.allclose(a, b, rtol=1e-12, atol=0) for a, b in pairs)


@pytest.mark.parametrize("name", TUNIX)
def test_tunix_divides_the_steps_sum_and_counts_no_empty_row(step, name):
    is_ours(step, of_the_step(terms_of(step, TUNIX[name])), aliases("tunix", divisor=LONGEST)[name])


TORCHRL = {
    "token_mean": by_token,
    "prompt_mean": lambda x, m: by_sequence(x, m, rows=len(x)),
}
"""``GRPOLoss._aggregate_loss_value``, of one batch; its recipes average microbatches."""


def test_torchrls_prompt_mean_is_a_mean_over_samples(step):
    theirs = mean_of_means(terms_of(step, TORCHRL["prompt_mean"]))
    is_ours(step, theirs, Aggregation("torchrl:prompt_mean"))
    with pytest.raises(AssertionError):
        is_ours(step, theirs, Aggregation("scalerl:prompt-average"))


def test_torchrls_token_mean_is_the_steps_if_microbatches_have_equally_many_tokens(step):
    is_ours(step, of_the_step(terms_of(step, by_token)), Aggregation("torchrl:token_mean"))
    old = Aggregation("microbatch_token_mean")
    is_ours(step, mean_of_means(terms_of(step, by_token)), old)


RLINF = {
    "token-mean": by_token,
    "seq-mean-token-mean": lambda x, m: by_sequence(x, m, rows=len(x)),
    "seq-mean-token-sum": lambda x, m: by_sequence(x, m, divided_by=1, rows=len(x)),
}
"""``rlinf/utils/utils.py``; an empty row is 0/0 there in ``seq-mean-token-mean``."""


@pytest.mark.parametrize("name", ["seq-mean-token-mean", "seq-mean-token-sum"])
def test_rlinf_averages_microbatches_of_equally_many_samples(step, name):
    is_ours(step, mean_of_means(terms_of(step, RLINF[name])), Aggregation(f"rlinf:{name}"))


def test_rlinfs_token_mean_is_the_steps_with_its_valid_token_scale(step):
    """``loss_scale`` of its Megatron actor: the microbatch's tokens / the step's * DP * M."""
    scale = len(step.microbatches) / sum(step.lengths)
    scaled = [(value * n * scale, n) for value, n in terms_of(step, by_token)]
    is_ours(step, mean_of_means(scaled), Aggregation("rlinf:token-mean"))
    unscaled = mean_of_means(terms_of(step, by_token))
    is_ours(step, unscaled, Aggregation("microbatch_token_mean"))


def rows_of(x, mask, divisor):
    return by_sequence(x, mask, divided_by=divisor, rows=len(x))


UNSLOTH = {
    **dict.fromkeys(("grpo", "sapo"), RLINF["seq-mean-token-mean"]),
    "bnpo": by_token,
    "dr_grpo": lambda x, m: rows_of(x, m, LONGEST),
    "luspo": lambda x, m: rows_of(x, m, 1),
    **dict.fromkeys(("cispo", "dapo", "vespo"), by_token),
}
"""``grpo_compute_loss`` of unsloth-zoo 2026.10.9, without ``sample_weight``."""


@pytest.mark.parametrize("name", UNSLOTH)
def test_unsloth_averages_microbatches_or_divides_by_the_steps_tokens(step, name):
    reduced = of_the_step if name in ("cispo", "dapo", "vespo") else mean_of_means
    theirs = reduced(terms_of(step, UNSLOTH[name]))
    is_ours(step, theirs, aliases("unsloth", divisor=LONGEST)[name])


def test_agent_lightning_divides_by_rows_where_ours_divides_by_rollouts(step):
    """``normalize_advantages_by_rollout``: 1 / (the rollout's tokens * the batch's rows)."""
    step.samples = [number // 2 for number in step.samples]  # two rows each
    tokens = {
        of: sum(n for n, b in zip(step.lengths, step.samples, strict=True) if b == of)
        for of in step.samples
    }
    rows = len(step.samples)
    weights = [1 / max(tokens[of] * rows, 1) for of in step.samples]
    theirs = sum(
        (x[row] * mb.mask[row]).sum() * weights[number]
        for x, mb in zip(step.leaves, step.microbatches, strict=True)
        for row, number in enumerate(mb.sequences)
    )
    of_rollouts = theirs * rows / len(tokens)
    is_ours(step, of_rollouts, Aggregation("agent-lightning:per_rollout_mean"))
