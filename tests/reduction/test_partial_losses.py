"""In one process: partial losses add up to the loss and gradient of the reference."""

import pytest
import torch
from steps import AGGREGATIONS, assign, make_sequences, sequences_of

from megatron_lossagg import Layout, plan_step
from megatron_lossagg.reduction.aggregation import Options
from megatron_lossagg.reduction.modes import CUSTOM, MODES, OWN_WEIGHTS
from megatron_lossagg.verify import reference_loss
from megatron_lossagg.verify.cases import reference_options
from megatron_lossagg.verify.step_data import zigzag


def plan_of(sequences, keys, m, aggregation):
    return plan_step(
        aggregation,
        sequences_of(sequences, microbatch=[key[1] for key in keys], num_microbatches=m),
        options=Options(rejects_tokens=True),
    )


def padded(values, multiple, fill):
    return list(values) + [fill] * (-len(values) % multiple)


def pack(sequences, indices, x, cp):
    """Pack sequences and one padding sequence; returns sequences, padded offsets, whole mask and
    whole x.
    """
    offsets, mask, losses, named_sequences = [0], [], [], []
    for index in [*indices, None]:
        if index is None:
            mask += [0] * 2 * cp
            losses.append(torch.full((2 * cp,), 3.0, dtype=torch.float64))
        else:
            sequence_mask = padded(sequences[index]["trained"], 2 * cp, 0)
            mask += sequence_mask
            tail = torch.full((len(sequence_mask) - len(x[index]),), torch.nan, dtype=torch.float64)
            losses.append(torch.cat([x[index], tail]))
        offsets.append(len(mask))
        named_sequences.append(-1 if index is None else index)
    mask = torch.tensor(mask)
    losses = torch.cat(losses).masked_fill(mask == 0, torch.inf)
    return named_sequences, offsets, mask, losses


def check_partial_losses(aggregation, sequences, keys, m, cp, generator):
    """Sum the partial losses of a step over microbatches and ranks; compare loss and gradient."""
    plan = plan_of(sequences, keys, m, aggregation)
    lengths = [len(sequence["counted"]) for sequence in sequences]
    every_x = torch.randn(sum(lengths), dtype=torch.float64, generator=generator).requires_grad_()
    x = every_x.split(lengths)
    total, weight_sum = 0 * every_x.sum(), 0
    for index in range(m):
        indices = [i for i, key in enumerate(keys) if key == (0, index)]
        named_sequences, offsets, mask, losses = pack(sequences, indices, x, cp)
        for rank in range(cp):
            layout = Layout.thd_zigzag(offsets, cp_size=cp, cp_rank=rank)
            reducer = plan.reducer(named_sequences, mask, layout)
            assert layout.positions.tolist() == zigzag(offsets, cp, rank)
            partial_loss = reducer(losses[zigzag(offsets, cp, rank)])
            assert partial_loss.requires_grad or not indices
            total = total + partial_loss
            weight_sum = weight_sum + reducer.weight_sum()
    live = [
        {**r, "x": list(v), "microbatch": k} for r, v, k in zip(sequences, x, keys, strict=True)
    ]
    options = reference_options(aggregation, [m])
    expected = 0 * every_x.sum() + reference_loss.step_loss(aggregation.mode, live, **options)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    (got,), (want,) = (torch.autograd.grad(loss, every_x) for loss in (total, expected))
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-15)
    trained = reference_loss.weight_sum(aggregation.mode, live, **options)
    assert float(weight_sum) == pytest.approx(trained, rel=1e-5, abs=1e-12)
    as_counted = [{**r, "trained": r["counted"]} for r in live]
    counted = reference_loss.weight_sum(aggregation.mode, as_counted, **options)
    assert plan.expected_weight == pytest.approx(counted, rel=1e-12)


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("m", [1, 3, 4])
@pytest.mark.parametrize("label", AGGREGATIONS)
def test_partial_losses_add_up_to_the_loss_for_any_split_of_the_tokens(label, m, cp):
    sequences = make_sequences()
    keys = assign(sequences, [m])
    check_partial_losses(AGGREGATIONS[label], sequences, keys, m, cp, torch.Generator())


def test_the_aggregations_have_every_mode():
    assert {aggregation.mode for aggregation in AGGREGATIONS.values()} == {*MODES} - {
        CUSTOM,
        OWN_WEIGHTS,
    }
