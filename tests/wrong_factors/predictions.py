"""The faults of this folder as causes of ``lossagg verify``: what each would train.

``run.apply`` puts this file into the faulty copy of the package, so that the copy's verification
can name its own fault. A fault leaves its arithmetic in the gradient: a factor, a different
denominator, a token with the weight of another. Each prediction is made of the weight of every
token, from the reference's weights and the factors of ``scaling.py``.

Shape suffix: Y = all sequences' tokens and padding, as ``reference_gradient.py`` has them.
"""

from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import pairwise

import torch

from megatron_lossagg.reduction.aggregation import Aggregation
from megatron_lossagg.verify import reference_loss
from megatron_lossagg.verify.cases import BETA, as_reference, reference_options
from megatron_lossagg.verify.causes import Cause
from megatron_lossagg.verify.step_data import padding_sequence, zigzag


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
        changed, key = change(index, sequences[index]), facts.assignment.keys[index]
        sequence = as_reference(changed, key, aggregation)
        step.append({**sequence, "left_out": changed.left_out, "x": x})
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
    return [
        max(w / v if v else 0.0 for w, v in zip(weight_Y[start:].tolist(), factors, strict=False))
        for (start, sequence) in starts
        for factors in [factors_of(sequence, aggregation)]
    ]


def factors_of(sequence, aggregation):
    """Return v_t of each token: 1 unless the aggregation counts weights."""
    return sequence.weight if aggregation.count == "weights" else [1.0] * len(sequence)


def sequence_factors(facts, case):
    """Return what multiplies each token's weight, ``[Y]``: the weight of its sequence, if any."""
    factor_Y = torch.ones_like(facts.reference.losses_Y)
    if case.weighs_sequences:
        for index, sequence in enumerate(facts.reference.sequences):
            start, end = facts.reference.starts[index : index + 2]
            factor_Y[start:end] = sequence.sequence_weight
    return factor_Y


def predicted(facts, case, first, second):
    """Predict slope and loss of a case from its terms' token weights (gradient, report)."""
    y_Y, coefficient_Y = facts.reference.losses_Y, torch.ones_like(facts.reference.losses_Y)
    for start, sequence in zip(facts.reference.starts, facts.reference.sequences, strict=False):
        coefficients = torch.tensor(sequence.coefficient, dtype=y_Y.dtype)
        coefficient_Y[start : start + len(sequence)] = coefficients
    coefficient_Y[facts.reference.starts[-1] :] = padding_sequence(1).coefficient[0]
    slope_Y, loss = first[0] * coefficient_Y, (first[1] * coefficient_Y * y_Y).sum()
    if case.second is not None:
        slope_Y = slope_Y + 2 * BETA * second[0] * y_Y
        loss = loss + BETA * (second[1] * y_Y * y_Y).sum()
    return slope_Y, loss.item()


def weighted(weights):
    """Predict from ``weights``: every token's in the gradient and in the report, ``[Y]`` each."""

    def predict(facts, case, wanted):
        facts = facts if case.leaves_out else without_any_left_out(facts)
        factor_Y = sequence_factors(facts, case)
        first = [weight_Y * factor_Y for weight_Y in weights(facts, case.aggregation)]
        second = weights(facts, case.second) if case.second else None
        return predicted(facts, case, first, second)

    return predict


def without_any_left_out(facts):
    sequences = [replace(sequence, left_out=False) for sequence in facts.reference.sequences]
    return replace(facts, reference=replace(facts.reference, sequences=sequences))


def kept(facts):
    """Return the sequences that are not left out of the counts."""
    return [sequence for sequence in facts.reference.sequences if not sequence.left_out]


def twice(weight_Y):
    return weight_Y, weight_Y


def multiple(gradient, report=lambda facts: 1):
    """Predict multiples of the right gradient and of the right reported loss."""

    def predict(facts, case, wanted):
        return float(gradient(facts)) * wanted.slope_Y, float(report(facts)) * wanted.loss

    return predict


def scaled_as(**sizes):
    """Predict K and reports of a step with other sizes, each computed from the facts."""

    def wrong(facts):
        changed = {name: size(facts) for name, size in sizes.items()}
        return replace(facts.scaling, **changed)

    return multiple(
        lambda facts: Fraction(wrong(facts).k, facts.scaling.k),
        lambda facts: Fraction(wrong(facts).m_dp_cp, facts.scaling.m_dp_cp),
    )


def only_per_token(factor):
    """Predict a factor of the gradient that only the per-token loss scaling has."""
    return multiple(lambda facts: factor(facts) if facts.loss_scaling == "per_token" else 1)


def num_counted(facts):
    return [sum(sequence.counted) for sequence in facts.reference.sequences]


def num_trained(facts):
    """Count the tokens that the loss masks after rejection keep."""
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
    if aggregation.mode == "token_mean" and aggregation.count == "mask":
        right_Y = right_Y / grown
    return right_Y * (grown if facts.loss_scaling == "per_token" else 1.0), right_Y


def tokens_of_sequences(facts, aggregation):
    """Count n_s of each sequence, as the aggregation counts."""
    return [
        sum(m * v for m, v in zip(sequence.counted, factors_of(sequence, aggregation), strict=True))
        for sequence in facts.reference.sequences
    ]


def tokens_of_samples(facts, aggregation):
    """Count n_b of each sample likewise."""
    tokens = {}
    counted = tokens_of_sequences(facts, aggregation)
    for sequence, n in zip(facts.reference.sequences, counted, strict=True):
        if not sequence.left_out:
            tokens[sequence.sample] = tokens.get(sequence.sample, 0) + n
    return tokens


def samples(facts, aggregation):
    """Return B, or V with ``count_empty=False``."""
    return sum(
        aggregation.count_empty or n > 0 for n in tokens_of_samples(facts, aggregation).values()
    )


def without_batch(facts, aggregation):
    factor = samples(facts, aggregation) if aggregation.mode == "constant" else 1
    return twice(factor * token_weights(facts, aggregation))


OF_ALL = ("balanced", "row_mean", "own_weights")


def empty_leave(facts, aggregation):
    if aggregation.mode not in OF_ALL:
        return twice(token_weights(facts, replace(aggregation, count_empty=False)))
    # B or P only: R_b, k_c and k_p stay.
    kind = "prompt" if aggregation.mode == "own_weights" else "sample"
    every = {getattr(one, kind) for one in kept(facts)}
    active = {getattr(one, kind) for one in kept(facts) if any(one.counted)}
    factor = len(every) / len(active) if aggregation.count_empty else 1
    return twice(factor * token_weights(facts, aggregation))


def times(mode, number_of):
    def weights(facts, aggregation):
        weight_Y = token_weights(facts, aggregation)
        if aggregation.mode == mode:
            for index, start in enumerate(facts.reference.starts[:-1]):
                sequence = facts.reference.sequences[index]
                weight_Y[start : start + len(sequence)] *= number_of(facts, aggregation, sequence)
        return twice(weight_Y)

    return weights


def counted_with(facts, aggregation, sequence, kind):
    every = kept(facts)
    counted = [one for one in every if aggregation.count_empty or any(one.counted)]
    return [one for one in counted if getattr(one, kind) == getattr(sequence, kind)]


def over_group_samples(*of):
    return 1 / max(1, len({one.sample for one in counted_with(*of, "group")}))


def of_the_first_rank(facts, aggregation):
    if aggregation.mode not in OF_ALL:
        return twice(token_weights(facts, aggregation))
    weight_Y, weight_S = token_weights(facts, aggregation) * 0, sequence_weights(facts, aggregation)
    ranks = [facts.assignment.of_rank(rank) for rank in range(facts.parallelism.dp)]
    of_all = [weight_S[index] for rank in ranks for index in rank]
    for rank in ranks:
        for index, weight in zip(rank, of_all, strict=False):
            sequence, start = facts.reference.sequences[index], facts.reference.starts[index]
            trained = torch.tensor(sequence.trained, dtype=weight_Y.dtype)
            weight_Y[start : start + len(sequence)] = weight * trained
    return twice(weight_Y)


def sequence_means(facts, aggregation):
    exponent = {"sample_mean": 1, "length_power": aggregation.exponent}.get(aggregation.mode, 0)
    n_b, weight_Y = tokens_of_samples(facts, aggregation), token_weights(facts, aggregation)
    for index, n_s in enumerate(tokens_of_sequences(facts, aggregation)):
        if n_s and not facts.reference.sequences[index].left_out:
            sequence, start = facts.reference.sequences[index], facts.reference.starts[index]
            weight_Y[start : start + len(sequence)] *= (n_b[sequence.sample] / n_s) ** exponent
    return twice(weight_Y)


def power_sum(lengths, aggregation):
    """Return Z of these lengths."""
    return sum(n ** (1 - aggregation.exponent) for n in lengths if n)


def power_sum_of_sequences(facts, aggregation):
    weight_Y = token_weights(facts, aggregation)
    if aggregation.mode == "length_power":
        weight_Y *= power_sum(tokens_of_samples(facts, aggregation).values(), aggregation)
        weight_Y /= power_sum(tokens_of_sequences(facts, aggregation), aggregation)
    return twice(weight_Y)


def without_length(facts, aggregation):
    if aggregation.mode != "length_power":
        return twice(token_weights(facts, aggregation))
    z = power_sum(tokens_of_samples(facts, aggregation).values(), aggregation)
    return twice(facts.n / z * token_weights(facts, Aggregation("token_mean")))


def of_the_sequence_before(facts, aggregation, *, is_weighted):
    weight_Y = torch.zeros_like(facts.reference.losses_Y)
    before = {}  # by microbatch; the last segment is padding, of weight 0
    weight_S = sequence_weights(facts, aggregation)
    for index, sequence in enumerate(facts.reference.sequences):
        key, start = facts.assignment.keys[index], facts.reference.starts[index]
        trained = torch.tensor(sequence.trained, dtype=weight_Y.dtype)
        trained *= torch.tensor(factors_of(sequence, aggregation), dtype=weight_Y.dtype)
        weight_Y[start : start + len(sequence)] = before.get(key, 0.0) * trained
        before[key] = weight_S[index] * (sequence.sequence_weight if is_weighted else 1)
    return twice(weight_Y)


def without_sequence_weights(facts, case, wanted):
    weights = weighted(lambda facts, term: twice(token_weights(facts, term)))
    return weights(facts, replace(case, weighs_sequences=False), wanted)


def of_neighbours(facts, case, wanted):
    """Predict with the weight of the sequence before, its own ``sequence_weight`` included."""
    weights = weighted(partial(of_the_sequence_before, is_weighted=case.weighs_sequences))
    return weights(facts, replace(case, weighs_sequences=False), wanted)


def mask_held(taken, *, partition):
    """Predict what is trained if a rank slices its mask at other positions than its tokens.

    ``taken``: those positions, as ``Parallelism.held`` has the right ones. ``partition``: of the
    layouts that the fault changes. A mask that comes from another sequence brings its weight.
    """

    def weights(case, facts, aggregation):
        split = facts.parallelism
        right_Y = token_weights(facts, aggregation) * sequence_factors(facts, case)
        if split.cp == 1 or split.packing == "local" or split.cp_partition != partition:
            return twice(right_Y)
        weight_Y = torch.zeros_like(right_Y)
        for key in set(facts.assignment.keys):
            packed = [i for i, other in enumerate(facts.assignment.keys) if other == key]
            offsets, place = [0], []  # of the microbatch; where each of its tokens is in Y
            for index in [*packed, len(facts.reference.sequences)]:  # the padding sequence last
                length = len(facts.reference.sequences[index]) if index in packed else 1
                start = facts.reference.starts[index]
                place += range(start, start + split.padded(length))
                offsets.append(len(place))
            place_P = torch.tensor(place)
            for rank in range(split.cp):
                at_Y = place_P[split.held(offsets, rank)]
                from_Y = place_P[taken(offsets, split.cp, rank)]
                weight_Y.index_add_(0, at_Y, right_Y[from_Y])
        return twice(weight_Y)

    return lambda facts, case, wanted: weighted(partial(weights, case))(
        facts, replace(case, weighs_sequences=False), wanted
    )


def chunks(order):
    """Take two chunks of each sequence, in an order."""

    def positions(offsets, cp, rank):
        found = []
        for begin, end in pairwise(offsets):
            size = (end - begin) // (2 * cp)
            for chunk in order(cp, rank):
                found += range(begin + chunk * size, begin + (chunk + 1) * size)
        return found

    return positions


def left_out_counted(facts, case, wanted):
    every = {sequence.sample for sequence in facts.reference.sequences}
    factor = 1.0
    if case.leaves_out and case.aggregation.mode == "sample_mean":
        factor = len({sequence.sample for sequence in kept(facts)}) / len(every)
    return factor * wanted.slope_Y, factor * wanted.loss


def without_weights(facts, aggregation):
    if aggregation.count != "weights":
        return twice(token_weights(facts, aggregation))
    weight_Y = token_weights(facts, replace(aggregation, count="mask"))
    for start, sequence in zip(facts.reference.starts, facts.reference.sequences, strict=False):
        weight_Y[start : start + len(sequence)] *= torch.tensor(
            sequence.weight, dtype=weight_Y.dtype
        )
    return twice(weight_Y)


def swapped(cp, rank):
    chunks = [rank, 2 * cp - 1 - rank]
    return chunks[::-1] if rank == 1 else chunks


def neighbours(cp, rank):
    return [2 * rank, 2 * rank + 1]


PREDICTIONS = {
    "times_cp": multiple(lambda facts: facts.parallelism.cp),
    "over_m": scaled_as(num_microbatches=lambda facts: 1),
    "without_cp": scaled_as(dp_cp_size=lambda facts: facts.parallelism.dp),
    "without_instances": scaled_as(
        dp_cp_size=lambda facts: facts.parallelism.dp_cp // facts.parallelism.optimizer_instances
    ),
    "times_dp": only_per_token(lambda facts: facts.parallelism.dp),
    "num_tokens_on_every_cp_rank": only_per_token(lambda facts: Fraction(1, facts.parallelism.cp)),
    "num_tokens_of_the_training_mask": only_per_token(
        lambda facts: Fraction(facts.n, num_trained(facts))
    ),
    "report_without_m": multiple(lambda facts: 1, lambda facts: Fraction(1, facts.m)),
    "rank_local_counts": weighted(rank_local),
    "phantom_token": weighted(phantom_tokens),
    "weights_left_out_of_denominators": weighted(without_weights),
    "constant_without_batch": weighted(without_batch),
    "empty_samples_leave": weighted(empty_leave),
    "mean_of_sequence_means": weighted(sequence_means),
    "weights_of_neighbours": of_neighbours,
    "chunks_swapped": mask_held(chunks(swapped), partition="zigzag"),
    "contiguous_chunks": mask_held(chunks(neighbours), partition="zigzag"),
    "zigzag_on_contiguous": mask_held(zigzag, partition="contiguous"),
    "gathered_on_every_rank": multiple(
        lambda facts: facts.parallelism.cp, lambda facts: facts.parallelism.cp
    ),
    "sequence_weights_left_out": without_sequence_weights,
    "left_out_counted": left_out_counted,
    "weights_of_the_first_rank": weighted(of_the_first_rank),
    "groups_without_their_samples": weighted(times("balanced", over_group_samples)),
    "rows_left_out": weighted(times("row_mean", lambda *of: len(counted_with(*of, "sample")))),
    "length_power_without_length": weighted(without_length),
    "length_power_sum_of_sequences": weighted(power_sum_of_sequences),
}
"""By the name of the fault's file; its first line says what the fault is."""

CAUSES = tuple(
    Cause(name=name, what=f"the fault {name}", predict=predict)
    for name, predict in PREDICTIONS.items()
)
