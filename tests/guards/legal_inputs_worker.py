"""What loops may pass: the gradient is the plain program's; DP 2 and CP 2, both loss scalings."""

import itertools
import warnings

import torch
from audit_cases import own
from legal_losses import VARIED
from legal_worker import main, same, trained_as_by_hand
from training_steps import changing, microbatch, right

from megatron_lossagg import Aggregation


def check_inputs_of_other_kinds(make):
    training = make()
    expected = training.plain(own)
    for name, (loss_func, tolerance) in VARIED.items():
        if training.layout.cp > 1 and "CP 1" in name:
            continue
        try:
            same(training.step(loss_func), expected, tolerance)
        except Exception as error:
            error.add_note(name)
            raise


def check_counts_of_other_kinds(make):
    training = make()
    expected, counts = training.plain(own), training.counts
    for kind in (torch.tensor, lambda numbers: [torch.tensor(one) for one in numbers]):
        training.counts = kind(counts)
        same(training.step(right), expected)


def trained_weights(training, counts, mask, offsets):
    """Return the weights with which this rank's tokens are trained in one microbatch."""
    with training.aggregator.step(counts, num_microbatches=1) as step:
        mb = step.microbatch(range(len(counts)), mask, cu_seqlens=offsets)
        x = torch.ones(mb.layout.num_local_tokens, dtype=torch.float64, requires_grad=True)
        (mb.outputs(mb.reduce(x))[0] * step.scaling.schedule_factor).backward()
    return x.grad / (step.k * step.scaling.schedule_factor)


def check_a_mask_that_is_expanded_from_one_element(make):
    training = make()
    found = trained_weights(training, [8], torch.ones(1).expand(8), [0, 8])
    same(found, torch.full_like(found, 1 / (8 * training.layout.dp)))


def check_a_counted_sequence_of_no_tokens(make):
    training = make()
    found = trained_weights(training, [8, 0, 8], torch.ones(16), [0, 8, 8, 16])
    same(found, torch.full_like(found, 1 / (8 * 3 * training.layout.dp)))


def check_a_mask_that_differs_where_a_context_parallel_rank_holds_nothing(make):
    """The number of each sequence's tokens is the same."""
    training = make()
    changed = []

    def loss_func(step, batch, x):
        mask, offsets = batch.mask.clone(), batch.offsets.tolist()
        held = training.layout.held(offsets, training.aggregator.cp_rank)
        if training.aggregator.cp_rank == 1:
            for start, end in itertools.pairwise(offsets):
                elsewhere = [index for index in range(start, end) if index not in held]
                mask[elsewhere] = batch.mask[elsewhere].flip(0)
        changed.append(not mask.equal(batch.mask))
        mb = step.microbatch(batch.sequences, mask, cu_seqlens=batch.offsets)
        return mb.outputs(mb.reduce(x))

    trained_as_by_hand(training, loss_func)
    assert any(changed) == (training.aggregator.cp_rank == 1)


def check_outputs_without_num_tokens(make):
    """As long as Megatron neither divides by them nor, without them, multiplies by CP."""
    training = make()
    if not training.per_token and training.layout.cp == 1:
        trained_as_by_hand(training, changing(lambda loss, num_tokens, report: (loss, report)))


def check_token_weights_counted_in_a_second_term(make):
    weighing = Aggregation("sample_mean", count="weights")
    aggregator = make().aggregator
    weights = torch.full((8,), 0.5)
    with aggregator.step([8], num_microbatches=1, token_weight_sums=[4.0]) as step:
        mb = step.microbatch([0], torch.ones(8), cu_seqlens=[0, 8], token_weights=weights)
        x = torch.ones(mb.layout.num_local_tokens, requires_grad=True)
        loss = mb.outputs(mb.reduce(x) + mb.reduce(x, weighing))[0]
        (loss * step.scaling.schedule_factor).backward()
    assert x.grad.count_nonzero() == x.numel()


def empty(loss):
    def loss_func(step, batch, x):
        mb = microbatch(step, batch)
        is_empty = not batch.mask.any()
        return mb.outputs(loss(mb, x)) if is_empty else mb.outputs(mb.reduce(x))

    return loss_func


EMPTY = {
    "its losses reduced": lambda mb, x: mb.reduce(x),
    "zero times its losses": lambda mb, x: x.sum() * 0,
    "a constant": lambda mb, x: torch.zeros(()),
    "constants reduced": lambda mb, x: mb.reduce(torch.zeros_like(x)),
}
"""Losses of a microbatch without tokens."""


def check_an_empty_microbatch(make):
    training = make(microbatches=2, of_last=0)
    expected = training.plain(own)
    for loss in EMPTY.values():
        same(training.step(empty(loss)), expected)


def check_a_step_without_tokens_has_losses_without_a_graph(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = make().aggregator.step([0, 0], num_microbatches=1)
    with step:
        mb = step.microbatch([0, 1], torch.zeros(8), cu_seqlens=[0, 4, 8])
        mb.outputs(mb.reduce(torch.ones(mb.layout.num_local_tokens)))


if __name__ == "__main__":
    main(globals())
