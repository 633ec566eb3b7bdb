"""Losses of a step under sample_mean, and what the audit by gradient says of each."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.utils.checkpoint import checkpoint

from megatron_lossagg.verify.parallelism import Parallelism

LAYOUTS = {
    "DP 2": Parallelism(dp=2, microbatches=2),
    "CP 2": Parallelism(cp=2, microbatches=2),
    "PP 2": Parallelism(pp=2, microbatches=2),
    "PP 2 x VPP 2": Parallelism(pp=2, vpp=2, microbatches=4),
    "recompute": Parallelism(cp=2, microbatches=2, recompute=True),
    "bf16": Parallelism(dp=2, microbatches=2, bf16=True),
}
"""Of two ranks."""

Term = Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A loss_func's loss, made of a microbatch and its per-token losses."""

    loss: Term
    """``loss(mb, losses)``."""
    plain: Term | None = None
    """The same by hand, if it is right: of losses and the weights of sample_mean and token_mean."""
    declared: dict = field(default_factory=dict)
    """What ``mb.outputs`` gets too."""
    refused: str = ""
    warned: str = ""
    tolerance: float = 1e-10
    is_in_time: bool = True
    """Whether it is found when the step finishes; else loss_func raises, and an earlier pipeline
    stage would wait for it."""


def own(x, w, t):
    """Sum the losses as configured."""
    return (w * x).sum()


def coefficient(c):
    return rf"backward pass with the coefficient {c}, expected"


def in_place(mb, x):
    loss = mb.reduce(x)
    loss /= 2
    return loss


def metric_first(mb, x):
    mb.reduce(x.exp())
    return mb.reduce(x)


def of_a_leaf(mb, x):
    mb.reduce(x)
    return mb.reduce(x.detach().requires_grad_()) + 0 * x.sum()


def reduced_for_the_log(mb, x):
    mb.reduce(x)
    return x.mean()


def through_autograd_grad(mb, x):
    loss = mb.reduce(x)
    (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert gradient.shape == x.shape
    return loss


def in_a_checkpoint(is_reentrant):
    return lambda mb, x: checkpoint(lambda y: mb.reduce(y * 1.0), x, use_reentrant=is_reentrant)


def terms_in_checkpoints(mb, x):
    parts = [lambda y: mb.reduce(y * 1.0), lambda y: mb.reduce(y * y)]
    first, second = (checkpoint(part, x, use_reentrant=False) for part in parts)
    return 0.1 * second + first


TWICE = "were trained twice in call 0 of loss_func"
NONE = "no gradient reached the step's own partial loss in call 0 of loss_func"
GRAPHLESS = "got a loss that requires no gradient in a training step"
UNREDUCED = "mb.reduce was not called under the step's aggregation"
CASES = {
    "the partial loss": Case(loss=lambda mb, x: mb.reduce(x), plain=own),
    "losses of a leaf": Case(
        loss=of_a_leaf,
        plain=lambda x, w, t: 0 * x.sum(),
        warned="gradient of the model that was looked at is 0",
    ),
    "losses times 2": Case(
        loss=lambda mb, x: mb.reduce(2 * x), plain=lambda x, w, t: 2 * (w * x).sum()
    ),
    "losses divided by their microbatch's tokens": Case(
        loss=lambda mb, x: mb.reduce(0.5 * (x / mb.keep.sum().clamp(min=1)).view(-1)),
        plain=lambda x, w, t: 0.5 * (w * x).sum() / (t > 0).sum().clamp(min=1),
        warned=r"losses were divided by \d+, the active tokens of their microbatch",
    ),
    "losses divided by a temperature": Case(
        loss=lambda mb, x: mb.reduce(x / 0.7), plain=lambda x, w, t: (w * x / 0.7).sum()
    ),
    "policy + 0.01 entropy": Case(
        loss=lambda mb, x: mb.reduce(x) + 0.01 * mb.reduce(x * x),
        plain=lambda x, w, t: (w * (x + 0.01 * x * x)).sum(),
    ),
    "0.01 entropy + policy": Case(
        loss=lambda mb, x: 0.01 * mb.reduce(x * x) + mb.reduce(x),
        plain=lambda x, w, t: (w * (x + 0.01 * x * x)).sum(),
    ),
    "policy + 0.1 kl under token_mean": Case(
        loss=lambda mb, x: mb.reduce(x) + 0.1 * mb.reduce(x * x, "token_mean"),
        plain=lambda x, w, t: (w * x + 0.1 * t * x * x).sum(),
    ),
    "a second term of zero": Case(
        loss=lambda mb, x: mb.reduce(x) + 0 * mb.reduce(x * x), plain=own
    ),
    "a second term of zero under token_mean": Case(
        loss=lambda mb, x: mb.reduce(x) + 0 * mb.reduce(x, "token_mean"), plain=own
    ),
    "one tensor under two aggregations": Case(
        loss=lambda mb, x: mb.reduce(x) + 0.1 * mb.reduce(x, "token_mean"),
        plain=lambda x, w, t: (w * x + 0.1 * t * x).sum(),
    ),
    "a metric with a graph reduced first": Case(loss=metric_first, plain=own),
    "0.5 of a value loss, declared": Case(
        loss=lambda mb, x: 0.5 * mb.reduce(x),
        plain=lambda x, w, t: 0.5 * (w * x).sum(),
        declared={"coefficient": 0.5},
    ),
    "a microbatch that is skipped": Case(
        loss=lambda mb, x: 0 * mb.reduce(x),
        plain=lambda x, w, t: 0 * x.sum(),
        warned="every gradient of the model that was looked at is 0",
    ),
    "nan_to_num of the partial loss": Case(loss=lambda mb, x: mb.reduce(x).nan_to_num(), plain=own),
    "a partial loss in bfloat16": Case(
        loss=lambda mb, x: mb.reduce(x).bfloat16(), plain=own, tolerance=1e-2
    ),
    "losses in bfloat16": Case(
        loss=lambda mb, x: mb.reduce(x.bfloat16()), plain=own, tolerance=1e-2
    ),
    "half a partial loss in bfloat16": Case(
        loss=lambda mb, x: 0.5 * mb.reduce(x).bfloat16(), refused=coefficient(r"0\.5")
    ),
    "reduce in a checkpoint": Case(loss=in_a_checkpoint(False), plain=own),
    "reduce in a reentrant checkpoint": Case(loss=in_a_checkpoint(True), plain=own),
    "terms in checkpoints of their own": Case(
        loss=terms_in_checkpoints, plain=lambda x, w, t: (w * (x + 0.1 * x * x)).sum()
    ),
    "autograd.grad through the partial loss": Case(
        loss=through_autograd_grad,
        plain=own,
        warned="was reached by more than one backward pass",
    ),
    "a mean of losses + the partial loss": Case(
        loss=lambda mb, x: x.mean() + mb.reduce(x),
        plain=lambda x, w, t: x.mean() + (w * x).sum(),
        warned=r"which differs by 0\.\d+ of it from the sum of its partial losses",
    ),
    "divided by M": Case(loss=lambda mb, x: mb.reduce(x) / 2, refused=coefficient(r"0\.5")),
    "divided by M in place": Case(loss=in_place, refused=coefficient(r"0\.5")),
    "times CP": Case(loss=lambda mb, x: mb.reduce(x) * 2, refused=coefficient(2)),
    "times num_tokens": Case(loss=lambda mb, x: mb.reduce(x) * 17, refused=coefficient(17)),
    "times -1": Case(loss=lambda mb, x: -mb.reduce(x), refused=coefficient(-1)),
    "1 where 0.5 is declared": Case(
        loss=lambda mb, x: mb.reduce(x),
        declared={"coefficient": 0.5},
        refused=coefficient("1") + r" 0\.5",
    ),
    "divided by 2, and a term of 3": Case(
        loss=lambda mb, x: mb.reduce(x) / 2 + 3 * mb.reduce(x * x),
        refused=coefficient(r"0\.5 and 3"),
    ),
    "one tensor twice": Case(loss=lambda mb, x: mb.reduce(x) + mb.reduce(x), refused=TWICE),
    "one tensor twice, with other coefficients": Case(
        loss=lambda mb, x: mb.reduce(x) + 0.1 * mb.reduce(x), refused=TWICE
    ),
    "one partial loss twice": Case(
        loss=lambda mb, x: sum([mb.reduce(x)] * 2), refused=coefficient(2)
    ),
    "another tensor + 0 times the partial loss": Case(
        loss=lambda mb, x: x.mean() + 0 * mb.reduce(x),
        refused="arrived in the backward pass with the coefficient 0: pass mb.outputs what",
    ),
    "reduced for the log only": Case(loss=reduced_for_the_log, refused=NONE),
    "detached, with another term": Case(
        loss=lambda mb, x: mb.reduce(x).detach() + x.mean(), refused=NONE
    ),
    "detached": Case(loss=lambda mb, x: mb.reduce(x).detach(), refused=GRAPHLESS, is_in_time=False),
    "losses detached": Case(
        loss=lambda mb, x: mb.reduce(x.detach()), refused=GRAPHLESS, is_in_time=False
    ),
    "made elsewhere": Case(loss=lambda mb, x: x.mean(), refused=UNREDUCED, is_in_time=False),
    "reduced under another aggregation": Case(
        loss=lambda mb, x: mb.reduce(x, "token_mean"), refused=UNREDUCED, is_in_time=False
    ),
    "detached, with a term under another aggregation": Case(
        loss=lambda mb, x: mb.reduce(x).detach() + mb.reduce(x, "token_mean"), refused=NONE
    ),
}


SOME = (
    "the partial loss",
    "0.01 entropy + policy",
    "policy + 0.1 kl under token_mean",
    "reduce in a reentrant checkpoint",
    "divided by M",
    "one tensor twice",
    "detached, with another term",
)


def cases_of(layout):
    """Return the cases of a layout; some of them if it costs much."""
    names = SOME if layout.vpp > 1 or layout.recompute or layout.bf16 else CASES
    return {name: CASES[name] for name in names if CASES[name].is_in_time or layout.pp == 1}
