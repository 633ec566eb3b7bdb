"""The faults of this folder as causes of ``lossagg verify``: what each would train.

``run.apply`` puts this file into the faulty copy of the package, so that the copy's verification
can name its own fault. A fault leaves its arithmetic in the gradient: a factor, a different
denominator, a token with the weight of another. Each prediction is made of the weight of every
token, from the reference's weights and the factors of ``scaling.py``.

Shape suffix: Y = all sequences' tokens and padding, as ``reference_gradient.py`` has them.
"""

from dataclasses import replace
from fractions import Fraction

import torch

from megatron_lossagg.verify import reference_loss
from megatron_lossagg.verify.cases import BETA, as_reference, reference_options
from megatron_lossagg.verify.causes import Cause, multiple
from megatron_lossagg.verify.sequences import zigzag


def token_weights(facts, aggregation, *, only=None, change=lambda index, sequence: sequence):
    """Compute every token's weight with the reference: float64 ``[Y]``.

    ``only``: take these sequences for the whole step. ``change``: replace each sequence.
    """
    sequences, x_Y = facts.reference.sequences, torch.zeros_like(facts.reference.losses_Y)
    x_Y.requires_grad_()
    step = []
    for index in range(len(sequences)) if only is None else only:
        start = facts.reference.starts[index]
        x = list(x_Y[start : start + len(sequences[index])])
        sequence = as_reference(change(index, sequences[index]), facts.assignment.keys[index])
        step.append({**sequence, "x": x})
    options = reference_options(aggregation, facts.assignment.microbatches)
    loss = reference_loss.step_loss(aggregation.mode, step, **options)
    if not loss.requires_grad:  # nothing is trained
        return torch.zeros_like(x_Y)
    (weight_Y,) = torch.autograd.grad(loss, x_Y)
    return weight_Y


def sequence_weights(facts, aggregation):
    """Return w_s of each sequence; 0 if it has no counted tokens."""
    weight_Y = token_weights(
        facts, aggregation, change=lambda _, sequence: replace(sequence, trained=sequence.counted)
    )
    starts = zip(facts.reference.starts, facts.reference.sequences, strict=False)
    return [weight_Y[start : start + len(sequence)].max().item() for start, sequence in starts]


def predicted(facts, case, first, second):
    """Predict slope and loss of a case from its terms' token weights (gradient, report)."""
    y_Y, coefficient_Y = facts.reference.losses_Y, torch.ones_like(facts.reference.losses_Y)
    for start, sequence in zip(facts.reference.starts, facts.reference.sequences, strict=False):
        coefficients = torch.tensor(sequence.coefficient, dtype=y_Y.dtype)
        coefficient_Y[start : start + len(sequence)] = coefficients
    slope_Y, loss = first[0] * coefficient_Y, (first[1] * coefficient_Y * y_Y).sum()
    if case.second is not None:
        slope_Y = slope_Y + 2 * BETA * second[0] * y_Y
        loss = loss + BETA * (second[1] * y_Y * y_Y).sum()
    return slope_Y, loss.item()


def weighted(weights):
    """Predict from ``weights``: every token's in the gradient and in the report, ``[Y]`` each."""

    def predict(facts, case, wanted):
        first = weights(facts, case.aggregation)
        second = weights(facts, case.second) if case.second else None
        return predicted(facts, case, first, second)

    return predict


def twice(weight_Y):
    return weight_Y, weight_Y


def scaled_as(**sizes):
    """Predict K and report factor of a step with other sizes, each computed from the facts."""

    def wrong(facts):
        changed = {name: size(facts) for name, size in sizes.items()}
        return replace(facts.scaling, **changed)

    return multiple(
        lambda facts: Fraction(wrong(facts).k, facts.scaling.k),
        lambda facts: Fraction(wrong(facts).report_factor, facts.scaling.report_factor),
    )


def only_per_token(factor):
    """Predict a factor of the gradient that only the per-token loss scaling has."""
    return multiple(lambda facts: factor(facts) if facts.loss_scaling == "per_token" else 1)


def num_counted(facts):
    return [sum(sequence.counted) for sequence in facts.reference.sequences]


def ones_of_the_training_masks(facts):
    return sum(sum(sequence.trained) for sequence in facts.reference.sequences)


def rank_local(facts, aggregation):
    gradient_Y = torch.zeros_like(facts.reference.losses_Y)
    reported_Y = torch.zeros_like(facts.reference.losses_Y)
    for rank in range(facts.parallelism.dp):
        sequences = facts.assignment.of_rank(rank)
        n = sum(num_counted(facts)[index] for index in sequences)
        if not n:
            continue
        local_Y = token_weights(facts, aggregation, only=sequences)
        if aggregation.mode == "microbatch_token_mean":
            local_Y = local_Y * facts.parallelism.dp  # one rank is DP = 1
        reported_Y += local_Y
        gradient_Y += local_Y * (n / facts.n if facts.loss_scaling == "per_token" else 1.0)
    return gradient_Y, reported_Y


def phantom_tokens(facts, aggregation):
    grown = (facts.n + num_counted(facts).count(0)) / facts.n
    right_Y = token_weights(facts, aggregation)
    if aggregation.mode == "token_mean":
        right_Y = right_Y / grown
    return right_Y * (grown if facts.loss_scaling == "per_token" else 1.0), right_Y


def samples(facts, aggregation):
    """Return B, or V with ``count_empty=False``."""
    tokens = {}
    for sequence, n in zip(facts.reference.sequences, num_counted(facts), strict=True):
        tokens[sequence.sample] = tokens.get(sequence.sample, 0) + n
    return sum(aggregation.count_empty or n > 0 for n in tokens.values())


def without_batch(facts, aggregation):
    factor = samples(facts, aggregation) if aggregation.mode == "constant" else 1
    return twice(factor * token_weights(facts, aggregation))


def empty_leave(facts, aggregation):
    return twice(token_weights(facts, replace(aggregation, count_empty=False)))


def sequence_means(facts, aggregation):
    if aggregation.mode != "sample_mean":
        return twice(token_weights(facts, aggregation))
    by_sequence_Y = token_weights(
        facts,
        replace(aggregation, count_empty=True),
        change=lambda index, sequence: replace(sequence, sample=index),
    )
    return twice(by_sequence_Y * (len(facts.reference.sequences) / samples(facts, aggregation)))


def of_the_sequence_before(facts, aggregation):
    weight_Y = torch.zeros_like(facts.reference.losses_Y)
    before = {}  # by microbatch; the last segment is padding, of weight 0
    weight_S = sequence_weights(facts, aggregation)
    for index, sequence in enumerate(facts.reference.sequences):
        key, start = facts.assignment.keys[index], facts.reference.starts[index]
        trained = torch.tensor(sequence.trained, dtype=weight_Y.dtype)
        weight_Y[start : start + len(sequence)] = before.get(key, 0.0) * trained
        before[key] = weight_S[index]
    return twice(weight_Y)


def mask_held(order):
    """Give the weights if a rank slices its mask by other chunks than its tokens."""

    def weights(facts, aggregation):
        cp = facts.parallelism.cp
        if cp == 1 or facts.parallelism.packing == "local":
            return twice(token_weights(facts, aggregation))
        weight_Y = torch.zeros_like(facts.reference.losses_Y)
        for sequence, start, weight in zip(
            facts.reference.sequences,
            facts.reference.starts,
            sequence_weights(facts, aggregation),
            strict=False,
        ):
            length = facts.parallelism.padded(len(sequence))
            mask = sequence.trained + [0] * (length - len(sequence))
            size = length // (2 * cp)
            for rank in range(cp):
                taken = [mask[c * size + i] for c in order(cp, rank) for i in range(size)]
                for at, kept in zip(zigzag([0, length], cp, rank), taken, strict=True):
                    weight_Y[start + at] += weight * kept
        return twice(weight_Y)

    return weights


def swapped(cp, rank):
    chunks = [rank, 2 * cp - 1 - rank]
    return chunks[::-1] if rank == 1 else chunks


def neighbours(cp, rank):
    return [2 * rank, 2 * rank + 1]


PREDICTIONS = {
    "times_cp": multiple(lambda facts: facts.parallelism.cp),
    "over_m": scaled_as(num_microbatches=lambda facts: 1),
    "without_cp": scaled_as(dp_cp_size=lambda facts: facts.parallelism.dp),
    "times_dp": only_per_token(lambda facts: facts.parallelism.dp),
    "num_tokens_on_every_cp_rank": only_per_token(lambda facts: Fraction(1, facts.parallelism.cp)),
    "num_tokens_of_the_training_mask": only_per_token(
        lambda facts: Fraction(facts.n, ones_of_the_training_masks(facts))
    ),
    "report_without_m": multiple(lambda facts: 1, lambda facts: Fraction(1, facts.m)),
    "rank_local_counts": weighted(rank_local),
    "phantom_token": weighted(phantom_tokens),
    "constant_without_batch": weighted(without_batch),
    "empty_samples_leave": weighted(empty_leave),
    "mean_of_sequence_means": weighted(sequence_means),
    "weights_of_neighbours": weighted(of_the_sequence_before),
    "chunks_swapped": weighted(mask_held(swapped)),
    "contiguous_chunks": weighted(mask_held(neighbours)),
}
"""By the name of the fault's file; its first line says what the fault is."""

CAUSES = tuple(
    Cause(name=name, what=f"the fault {name}", predict=predict)
    for name, predict in PREDICTIONS.items()
)
