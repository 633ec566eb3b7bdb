"""From the weights of all ranks' tokens to sequences, modes, a verdict and its cause.

NumPy only; knows no groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_lossagg.reduction.modes import MODES
from megatron_lossagg.weigh.measured import Added, measure
from megatron_lossagg.weigh.ratios import constant, counted_empty, equal_products, is_near, spread

COMPARED = ("token_mean", "sample_mean", "sample_sum", "token_sum", "microbatch_token_mean")
"""The modes that need nothing but the tokens of sequences and microbatches."""
_NOT_FINALIZED = (
    "it was not finalized: config.finalize_model_grads_func was not called while it ran, or "
    "a deferred step holds it"
)
_OVER_SAMPLES = ("sample_mean", "sample_sum")
"""Those of them that divide by B, which may count sequences without a token."""
TOLERANCE = 1e-4
"""Relative, of float32 losses: a few roundings of the script's own."""
_FINEST = 1e-6
"""Relative: how well a weight in float32 is known at best."""


@dataclass(frozen=True, kw_only=True)
class WeighedSequence:
    """One sequence, whole over its context-parallel ranks; weights are a_t."""

    dp_rank: int
    """With dynamic context parallelism: the first rank of its microbatch's group."""
    microbatch: int
    sequence: int
    """Its segment in the microbatch."""
    name: str = ""
    """What a framework calls it, if it has a name for it."""
    tokens: int
    weight_sum: float
    weight_min: float
    weight_max: float


@dataclass(frozen=True, kw_only=True)
class Part(WeighedSequence):
    """What one rank holds of one sequence of a microbatch; weights are g_t, 0 of no token."""

    cp_rank: int


@dataclass(frozen=True, kw_only=True)
class RankWeights:
    """What one rank has heard; ``sizes``: M, DP, CP, TP and PP."""

    sizes: Mapping[str, int]
    parts: Sequence[Part]
    num_tokens: float | None
    """What this rank passed to Megatron's finalize function."""
    is_divided: bool
    """Whether finalize divides by the sum of num_tokens."""
    is_finalized: bool
    counts: bool
    """Whether this rank's tokens count: last pipeline stage, first tensor-parallel rank."""
    tolerance: float
    """Relative: how far apart weights may be that are one."""
    factor: float = 1.0
    """What f should be but for the division by num_tokens."""
    added: Sequence[Added] = ()
    """The gradients of some parameters, at which f is measured."""


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """A weighed step."""

    sizes: Mapping[str, int]
    sequences: Sequence[WeighedSequence]
    """Those with a trained token."""
    num_empty: int
    """How many sequences, or segments of padding, have none."""
    counted_empty: int
    """How many of them the trained mode counts."""
    weight_sum: float
    modes: Mapping[str, tuple[float, float]]
    """Smallest and largest a_t / w_s of each mode. If a mean or a sum over samples is off by what
    some of ``num_empty`` explain, also of ``sample_mean with 3 empty``, whose B counts these.
    """
    trains: str | None
    """The mode that is trained, if a_t / w_s is 1; the first of ``fits``."""
    fits: Sequence[str]
    """All modes of which a_t / w_s is 1: in a step of equally long sequences, several."""
    unknown: str
    """Why the gradients are not those of these weights, in short, a colon, and in full; then
    ``fits`` is empty.
    """
    is_measured: bool
    """Whether f was measured; if not, it is what Megatron's or torch's own code does."""
    nearest: str
    """The mode whose ratios are closest to one another, without empty sequences."""
    factors: Mapping[str, float]
    """a_t / w_s of each mode for which it is the same for all tokens."""
    relative: Sequence[float]
    """Each sequence's mean weight of a token over that of ``nearest``."""
    inside: float
    """The largest weight over the smallest in one sequence."""
    causes: Sequence[str] = field(default_factory=tuple)
    """What explains the numbers, by name."""

    def __str__(self) -> str:
        """Return the report that ``lossagg weigh`` prints."""
        from megatron_lossagg.weigh.report import text

        return text(self)

    def fits_mode(self, mode: str) -> bool:
        """Whether it is one of ``fits``, with empty sequences or without."""
        return any(name == mode or name.startswith(f"{mode} with ") for name in self.fits)

    @property
    def factor(self) -> float | None:
        """a_t over the weight of ``nearest`` if it is the same for all tokens, else None."""
        return self.factors.get(self.nearest)

    @property
    def verdict(self) -> str:
        """Say in a line what is trained."""
        if all(one.weight_min == one.weight_max == 0 for one in self.sequences):
            return "trains nothing: no token has a weight"
        if self.unknown:
            return f"not known, for {self.unknown.split(':')[0]}"
        if self.trains is not None:
            others = f", and so {' and '.join(self.fits[1:])}: this step cannot tell them apart"
            factor = f", {self.factor:.6g} times {self.nearest} without" if self.factor else ""
            factor *= self.counted_empty > 0
            return f"trains {self.trains}{factor}{others * (len(self.fits) > 1)}"
        if self.factor is not None:
            return f"trains {self.factor:.6g} times {self.nearest}"
        low, high = self.modes[self.nearest]
        at = f"{low:.4g} to {high:.4g} times its weights"
        return f"trains no mode; nearest is {self.nearest}, {at}"

    @property
    def tokens(self) -> int:
        """N: the tokens of all sequences."""
        return sum(sequence.tokens for sequence in self.sequences)


def compare(ranks: Sequence[RankWeights]) -> Weighed:
    """Compare the weights of a step with every mode; ``ranks``: of the whole world."""
    num_empty = sum(not any(one.tokens for one in its) for its in _parts(ranks).values())
    ranks = [replace(rank, parts=[part for part in rank.parts if part.tokens]) for rank in ranks]
    counted = [rank for rank in ranks if rank.counts]
    f = _F.of(ranks)
    sequences = whole(ranks, f.value)
    sizes = {**counted[0].sizes, "M": max(rank.sizes["M"] for rank in counted)}
    tolerance = max(rank.tolerance for rank in counted)
    weights = _weights(sequences, sizes)
    lowest_S = np.array([sequence.weight_min for sequence in sequences])
    highest_S = np.array([sequence.weight_max for sequence in sequences])
    modes = {
        name: (float((lowest_S / weight_S).min()), float((highest_S / weight_S).max()))
        for name, weight_S in weights.items()
        if len(sequences)
    }
    found = {name: constant(low, high, tolerance) for name, (low, high) in modes.items()}
    nearest = min(modes, key=lambda name: spread(*modes[name]), default="token_mean")
    empty: dict[str | None, int] = {}
    hints = []
    for name in _OVER_SAMPLES:
        at, apart = found.get(name), tolerance
        if tolerance == TOLERANCE:  # of float32, whose weights are known better
            apart = max(spread(*modes.get(name, (1.0, 1.0))) - 1, _FINEST)
        k = counted_empty(at, len(sequences), num_empty, apart)
        if at and k and equal_products(at, sizes, {}, tolerance=tolerance):
            hints.append(f"or {name}, if B counts {k} of {num_empty} empty sequences")
        elif at and k:
            of_k, more = f"{name} with {k} empty", 1 + k / len(sequences)
            modes[of_k] = modes[name][0] * more, modes[name][1] * more
            found[of_k], empty[of_k] = at * more, k
    fits = [
        name for name, at in found.items() if at and not f.unknown and is_near(at, 1, tolerance)
    ]
    trains = fits[0] if fits else None
    nearest = trains.split(" with ")[0] if trains else nearest
    relative = [
        sequence.weight_sum / sequence.tokens / weight
        for sequence, weight in zip(sequences, weights.get(nearest, ()), strict=True)
    ]
    inside = max(map(spread, lowest_S.tolist(), highest_S.tolist()), default=1.0)
    step = Weighed(
        sizes=sizes,
        sequences=sequences,
        num_empty=num_empty,
        counted_empty=empty.get(trains, 0),
        weight_sum=sum(sequence.weight_sum for sequence in sequences),
        modes=modes,
        trains=trains,
        fits=fits,
        unknown=f.unknown,
        is_measured=f.is_measured,
        nearest=nearest,
        factors={name: at for name, at in found.items() if at is not None},
        relative=relative,
        inside=inside,
    )
    causes = f.difference(tolerance) if sequences else []
    causes += _causes(step, counted, f, tolerance=tolerance) + ([] if f.unknown else hints)
    return Weighed(**{**vars(step), "causes": tuple(causes)})


@dataclass(frozen=True, kw_only=True)
class _F:
    """f of a step."""

    value: float
    read: float
    is_measured: bool
    num_tokens: float
    """What finalize divides by, of all ranks; 0 if it should not divide, or by nothing."""
    unknown: str = ""
    """Why it is not one number."""

    @staticmethod
    def of(ranks: Sequence[RankWeights]) -> _F:
        """Measure f, and compare it with what it should be."""
        counted = [rank for rank in ranks if rank.counts]
        is_divided = any(rank.is_divided for rank in ranks)
        num_tokens = max(sum(rank.num_tokens or 0.0 for rank in counted), 0.0) * is_divided
        read = counted[0].factor / (num_tokens or 1.0)
        others = [rank for rank in ranks if not rank.counts]
        found = measure(one for rank in (*counted, *others) for one in rank.added)
        f = _F(value=read, read=read, is_measured=found is not None, num_tokens=num_tokens)
        if not any(rank.is_finalized for rank in ranks):
            return replace(f, unknown=_NOT_FINALIZED)
        if found is None or found.agrees(read):
            return f
        return replace(f, unknown=found.fault) if found.fault else replace(f, value=found.value)

    def difference(self, tolerance: float) -> list[str]:
        """Say why f is not what it should be, if it is not."""
        if self.value == self.read:
            return []
        times, n = self.value / self.read, self.num_tokens
        if n and is_near(times, n, tolerance):
            return [f"finalize was called with num_tokens {n:g} and did not divide"]
        names = equal_products(times, {}, {"num_tokens": n} if n else {}, tolerance=tolerance)
        equal = f" = {names[0]}" if names else ""
        return [
            f"gradients were multiplied by {self.value:.6g} after the losses, as measured, "
            f"{times:.6g}{equal} times what Megatron's or torch's own code does"
        ]


def _parts(ranks: Sequence[RankWeights]) -> dict[tuple[int, int, int], list[Part]]:
    """Return what ranks hold of each sequence: its rank, microbatch and number."""
    parts: dict[tuple[int, int, int], list[Part]] = {}
    for rank in (rank for rank in ranks if rank.counts):
        for part in rank.parts:
            key = (part.dp_rank, part.microbatch, part.sequence)
            parts.setdefault(key, []).append(part)
    return parts


def whole(ranks: Sequence[RankWeights], f: float | None = None) -> list[WeighedSequence]:
    """Put the parts of sequences together over context-parallel ranks; ``ranks``: of the world.

    ``f``: what their weights are multiplied by, else it is measured. Sequences without a trained
    token are left out.
    """
    f = _F.of(ranks).value if f is None else f
    trained = {key: [part for part in its if part.tokens] for key, its in _parts(ranks).items()}
    return [
        WeighedSequence(
            dp_rank=dp_rank,
            microbatch=microbatch,
            sequence=sequence,
            name=its[0].name,
            tokens=sum(part.tokens for part in its),
            weight_sum=f * sum(part.weight_sum for part in its),
            # A NaN of one part stays one, wherever it stands.
            weight_min=f * float(np.min([part.weight_min for part in its])),
            weight_max=f * float(np.max([part.weight_max for part in its])),
        )
        for (dp_rank, microbatch, sequence), its in sorted(trained.items())
        if its
    ]


def _weights(
    sequences: Sequence[WeighedSequence], sizes: Mapping[str, int]
) -> dict[str, np.ndarray[Any, Any]]:
    """Return w_s of each sequence under each mode, by the formulas of ``MODES``."""
    n_S = np.array([sequence.tokens for sequence in sequences], dtype=np.float64)
    of_microbatch: dict[tuple[int, int], float] = {}
    for sequence, n in zip(sequences, n_S.tolist(), strict=True):
        key = (sequence.dp_rank, sequence.microbatch)
        of_microbatch[key] = of_microbatch.get(key, 0.0) + n
    counts = SimpleNamespace(
        active_tokens=n_S.sum(),
        sample_tokens=n_S,
        samples=len(n_S),
        divisor=1.0,
        num_microbatches=sizes["M"],
        data_parallel_size=sizes["DP"],
        microbatch_tokens=np.array([of_microbatch[s.dp_rank, s.microbatch] for s in sequences]),
    )
    denominators = {name: MODES[name].denominator for name in COMPARED}
    return {
        name: np.ones(len(n_S)) / np.asarray(denominator(counts))
        for name, denominator in denominators.items()
        if denominator is not None and len(n_S)
    }


def _causes(
    step: Weighed,
    ranks: Sequence[RankWeights],
    f: _F,
    *,
    tolerance: float,
) -> list[str]:
    if step.unknown:
        return [step.unknown]
    if not step.sequences:
        return []
    if not math.isfinite(step.weight_sum):
        wrong = [s for s in step.sequences if not math.isfinite(s.weight_sum)]
        return [f"weights of {len(wrong)} sequences are not finite: 0 / 0 in the script's loss?"]
    is_divided = any(rank.is_divided for rank in ranks)
    if is_divided and not f.num_tokens and step.trains in (None, "token_sum"):
        return ["num_tokens is 0: finalize divides by nothing"]
    if step.trains not in (None, "microbatch_token_mean"):
        return []
    if step.factor is not None and step.trains is None:
        others = {"N": step.tokens, "B": len(step.sequences)}
        names = equal_products(step.factor, step.sizes, others, tolerance=tolerance)
        equal = f" = {' = '.join(names)}" if names else ""
        return [f"a constant factor on {step.nearest}: {step.factor:.6g}{equal}"]
    m, dp, cp = (step.sizes[name] for name in ("M", "DP", "CP"))
    for where, num_means, place_of in (
        ("microbatch", m * dp, _microbatch),
        ("microbatch and context-parallel rank", m * dp * cp, _microbatch_here),
        ("microbatch of all ranks", m, _microbatch_of_all),
        ("data-parallel rank", dp, _data_parallel_rank),
    ):
        for of in ("token", "sample"):
            counts = _counts_of_means(ranks, place_of, of)
            is_mean = all(
                is_near(f.value * weight * counts[place, sequence] * num_means, 1, tolerance)
                for place, sequence, part in _placed(ranks, place_of)
                for weight in (part.weight_min, part.weight_max)
            )
            if is_mean:
                found = len({place for place, _ in counts})
                empty = f"; {num_means - found} of {num_means} have no token"
                return [f"a mean of one {of} mean per {where}{empty * (found < num_means)}"]
    return []


_Place = tuple[int, ...]


def _microbatch(part: Part) -> _Place:
    return part.dp_rank, part.microbatch


def _microbatch_here(part: Part) -> _Place:
    return part.dp_rank, part.microbatch, part.cp_rank


def _microbatch_of_all(part: Part) -> _Place:
    return (part.microbatch,)


def _data_parallel_rank(part: Part) -> _Place:
    return (part.dp_rank,)


def _placed(
    ranks: Sequence[RankWeights], place_of: Callable[[Part], _Place]
) -> Iterator[tuple[_Place, _Place, Part]]:
    """List each part with the place of its mean, and its sequence."""
    for rank in ranks:
        for part in rank.parts:
            yield place_of(part), (part.dp_rank, part.microbatch, part.sequence), part


def _counts_of_means(
    ranks: Sequence[RankWeights], place_of: Callable[[Part], _Place], of: str
) -> dict[tuple[_Place, _Place], int]:
    """Count, for each sequence in each place, what one mean there divides its token by.

    ``of``: ``token``, the tokens of the place; ``sample``, its sequences times the tokens that the
    sequence has there.
    """
    tokens: dict[tuple[_Place, _Place], int] = {}
    for place, sequence, part in _placed(ranks, place_of):
        tokens[place, sequence] = tokens.get((place, sequence), 0) + part.tokens
    sums: dict[_Place, int] = {}
    for (place, _), number in tokens.items():
        sums[place] = sums.get(place, 0) + (number if of == "token" else 1)
    return {
        (place, sequence): sums[place] * (number if of == "sample" else 1)
        for (place, sequence), number in tokens.items()
    }
