"""A step over simulated data-parallel and context-parallel ranks, in one process.

Ranks plan together in threads, partial losses go through ``Microbatch.outputs`` and then
through Megatron's arithmetic as written in ``docs/megatron-contract.md``.
"""

import types

import pytest
import torch
from steps import ANY_LAYOUT, a_step, in_threads, sequences_of

from megatron_lossagg import Aggregation, Layout, plan_step
from megatron_lossagg.verify import reference_loss
from megatron_lossagg.verify.step_data import zigzag

MODES = {
    aggregation.mode: {
        name: getattr(aggregation, name)
        for name in ("divisor", "exponent")
        if getattr(aggregation, name) is not None
    }
    for aggregation in ANY_LAYOUT.values()
}


def sequence(*mask, trained=None, sample=None, prompt=0, microbatch=(0, 0)):
    """Make a sequence as the reference takes it, with random losses."""
    mask = list(mask)
    x = torch.randn(len(mask), dtype=torch.float64, requires_grad=True)
    return {
        "x": x, "counted": mask, "trained": mask if trained is None else trained,
        "sample": sample, "prompt": prompt, "group": prompt, "microbatch": microbatch,
    }  # fmt: skip


def lengths(*counts, **options):
    return [sequence(*[1] * n, **options) for n in counts]


def assigned(sequences, dp=1, m=1):
    """Assign sequences in turn to ranks, then to their microbatches; fill in sample ids."""
    for i, r in enumerate(sequences):
        r["microbatch"] = (i % dp, i // dp % m)
        r["sample"] = i + 100 if r["sample"] is None else r["sample"]
    return sequences


def plans(aggregation, sequences, dp, m):
    """Plan over ``dp`` data-parallel ranks at once; returns each rank's sequences and plan."""

    def plan(rank, group):
        own_sequences = [r for r in sequences if r["microbatch"][0] == rank]
        numbers = [r["microbatch"][1] for r in own_sequences]
        fields = sequences_of(own_sequences, microbatch=numbers, num_microbatches=m)
        return own_sequences, plan_step(aggregation, fields, group=group)

    return in_threads(plan, dp)


def packed(own_sequences, indices, cp, pad=0):
    """Pack masks and losses at padded offsets, with inf wherever nothing is trained."""
    offsets, mask, x = [0], [], []
    for i in indices:
        fill = pad + -(len(own_sequences[i]["x"]) + pad) % (2 * cp)
        mask += [*own_sequences[i]["trained"], *[0] * fill]
        x += [own_sequences[i]["x"], torch.zeros(fill, dtype=torch.float64)]
        offsets.append(len(mask))
    mask = torch.tensor(mask, dtype=torch.int64)
    x = torch.cat([torch.zeros(0, dtype=torch.float64, requires_grad=True), *x])
    return offsets, mask, x.masked_fill(mask == 0, torch.inf)


def run(aggregation, sequences, *, dp=1, cp=1, m=1, loss_scaling="average", pad=0):
    """Run one step; return the loss whose gradient reaches the optimizer, and what was reported."""
    total, tokens, reports, numbers = 0, 0, [], []
    for own_sequences, plan in plans(aggregation, sequences, dp, m):
        for cp_rank in range(cp):
            step = a_step(plan, m, dp=dp, cp=cp, cp_rank=cp_rank, loss_scaling=loss_scaling)
            for index in range(m):
                indices = [i for i, r in enumerate(own_sequences) if r["microbatch"][1] == index]
                offsets, mask, x = packed(own_sequences, indices, cp, pad)
                layout = Layout.thd_zigzag(offsets, cp_size=cp, cp_rank=cp_rank)
                mb = step.microbatch(indices, mask, layout=layout)
                partial_loss = mb.reduce(x[zigzag(offsets, cp, cp_rank)])
                loss, num_tokens, report = mb.outputs(partial_loss, report={"loss": partial_loss})
                before = {name: value.clone() for name, value in report.items()}
                if loss_scaling == "average":  # the schedule scales in place
                    loss /= torch.clamp(num_tokens, min=1)
                    loss /= m
                assert all(torch.equal(report[name], before[name]) for name in report)
                total, tokens = total + loss, tokens + num_tokens
                reports.append(report)
                numbers.append(num_tokens)
    total = total / (dp * cp if loss_scaling == "average" else max(int(tokens), 1))
    return types.SimpleNamespace(loss=total, tokens=int(tokens), reports=reports, numbers=numbers)


def reported(out, name="loss"):
    value = torch.stack([report[name].double() for report in out.reports]).sum(0)
    return (value[0] / value[1]).item()


def wanted_loss(mode, sequences, **options):
    as_lists = [{**r, "x": list(r["x"])} for r in sequences]
    return reference_loss.step_loss(mode, as_lists, **options)


def gradients(loss, sequences):
    found = torch.autograd.grad(loss, [r["x"] for r in sequences], allow_unused=True)
    return [
        torch.zeros_like(r["x"]) if g is None else g for g, r in zip(found, sequences, strict=True)
    ]


def run_and_compare(mode, sequences, *, count_empty=True, reference_sequences=None, **layout):
    """Run a step, assert that value and gradient are the reference's, and return its reports."""
    options = MODES[mode]
    want = wanted_loss(mode, reference_sequences or sequences, count_empty=count_empty, **options)
    out = run(Aggregation(mode, count_empty=count_empty, **options), sequences, **layout)
    torch.testing.assert_close(out.loss, want, rtol=1e-12, atol=1e-14)
    assert reported(out) == pytest.approx(want.item(), rel=1e-12, abs=1e-14)
    # With no active tokens the reference's zero has no graph; the package's must have one.
    wanted = gradients(want + 0 * sum(r["x"].sum() for r in sequences), sequences)
    for got, expected in zip(gradients(out.loss, sequences), wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-15)
    return out
